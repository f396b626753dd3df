"""ExecuTorch's runtime loads streamed `.ptd` files: base offset of one part, and the natural place of a small file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from exporter.contract.objects import MiB
from exporter.contract.segments import Chunk, Segment, SegmentName
from exporter.contract.spec import StoreSpec
from exporter.store.keys import split_s3_uri
from exporter.store.open import open_store
from exporter.stream.multipart import WeightStream
from exporter.stream.ptd import read_header
from tests.stores.samples import Listener

pytestmark = pytest.mark.slow

EXPORT = """
import sys, warnings; warnings.simplefilter("ignore")
from pathlib import Path
import torch
from executorch.exir import ExecutorchBackendConfig, to_edge
out = Path(sys.argv[1])
torch.manual_seed(0)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(64, 20_000), torch.nn.Linear(20_000, 8)
    def forward(self, x):
        return self.b(torch.relu(self.a(x)))
model, sample = Model().eval(), (torch.randn(2, 64),)
program = to_edge(torch.export.export(model, sample)).to_executorch(ExecutorchBackendConfig(external_constants=True))
(out / "model.pte").write_bytes(program.buffer)
[data] = program._tensor_data.values()
(out / "upstream.ptd").write_bytes(bytes(data))
torch.save({"sample": sample[0], "expected": model(*sample).detach()}, out / "case.pt")
"""
RUN = """
import json, sys
from pathlib import Path
import torch
from executorch.runtime import Runtime
folder, data = Path(sys.argv[1]), Path(sys.argv[2])
case = torch.load(folder / "case.pt", weights_only=True)
method = Runtime.get().load_program(folder / "model.pte", data_path=data).load_method("forward")
print(json.dumps(float((method.execute([case["sample"]])[0] - case["expected"]).abs().max())))
"""


def child(code: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a program, its upstream `.ptd`, and one case."""
    pytest.importorskip("executorch")
    folder = tmp_path_factory.mktemp("program")
    child(EXPORT, folder)
    return folder


def segments(path: Path) -> list[Segment]:
    """The segments of a `.ptd`, in order."""

    def read(offset: int, length: int) -> bytes:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(length)

    header = read_header(read, path.stat().st_size)

    def make(index: int) -> Segment:
        place = header.segments[index]
        names = [SegmentName(name.key, name.layout) for name in header.names if name.segment == index]

        def chunks() -> Iterator[Chunk]:
            yield read(header.segment_base_offset + place.offset, place.size)

        return Segment(tuple(names), place.size, chunks)

    return [make(index) for index in range(len(header.segments))]


def send(store: Any, path: Path, part_size: int | None) -> Any:
    with WeightStream(store, "w/model.ptd", part_size=part_size, max_buffer=64 * MiB, listener=Listener()) as weights:
        weights.open(segments(path))
        weights.send(segments(path))
        return weights.finish(name="model.ptd", layout="flat-tensor/fqn", used=None)


@pytest.mark.parametrize(("part_size", "base"), [(5 * MiB, 5 * MiB), (None, None)])
def test_the_runtime_computes_the_same_from_a_streamed_file(
    program: Path, tmp_path: Path, part_size: int | None, base: int | None
) -> None:
    store = open_store(StoreSpec(uri=f"file://{tmp_path}"))
    data = send(store, program / "upstream.ptd", part_size)
    assert data.size > 5 * MiB
    assert base is None or data.segment_base_offset == base
    assert float(json.loads(child(RUN, program, tmp_path / "w/model.ptd"))) < 1e-4


@pytest.mark.rgw
def test_an_object_read_back_with_plain_boto3_loads(program: Path, tmp_path: Path, rgw_spec: StoreSpec) -> None:
    store = open_store(rgw_spec)
    data = send(store, program / "upstream.ptd", 5 * MiB)
    bucket, prefix = split_s3_uri(rgw_spec.uri)
    client = boto3.Session().client(
        "s3", endpoint_url=rgw_spec.endpoint, region_name="us-east-1", verify=rgw_spec.ca_bundle
    )
    client.download_file(bucket, f"{prefix}/w/model.ptd", str(tmp_path / "model.ptd"))
    client.close()
    assert (tmp_path / "model.ptd").stat().st_size == data.size
    assert float(json.loads(child(RUN, program, tmp_path / "model.ptd"))) < 1e-4
