"""An export to `s3://`: part 1 sent last, equal parts, and what plain boto3 reads back runs on ExecuTorch's runtime."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
from botocore.config import Config

from exporter.contract.objects import MiB
from exporter.contract.spec import ExportSpec
from tests.integration.conftest import EXPORT_ID, make_spec, save_program
from tests.stores.stub.server import BUCKET, serving, write_certificate

RUN = """
import json, sys
from pathlib import Path
import torch
from executorch.runtime import Runtime
folder = Path(sys.argv[1])
case = torch.load(folder / "case.pt", weights_only=True)
method = Runtime.get().load_program(folder / "model.pte", data_path=folder / "model.ptd").load_method("forward")
print(json.dumps(float((method.execute([case["sample"]])[0] - case["expected"]).abs().max())))
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A `.pt2` with 24 MiB of weights, and what eager makes of a sample."""
    torch.manual_seed(3)
    module = torch.nn.Sequential(torch.nn.Linear(1024, 3072), torch.nn.ReLU(), torch.nn.Linear(3072, 1024)).eval()
    sample = torch.randn(1, 1024)
    torch.save({"sample": sample, "expected": module(sample).detach()}, tmp_path / "case.pt")
    return save_program(module, (sample,), tmp_path / "model.pt2")


@contextmanager
def scripted(tmp_path: Path) -> Iterator[tuple[str, str, dict[str, str], Any]]:
    server, trust = write_certificate(tmp_path)
    with serving(server) as stub:
        yield stub.endpoint, str(trust), {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"}, stub


@contextmanager
def gateway(tmp_path: Path) -> Iterator[tuple[str, str, dict[str, str], Any]]:
    if not os.environ.get("S3_ENDPOINT_TLS"):
        pytest.skip("no Ceph RADOS gateway: S3_ENDPOINT_TLS is not set")
    keys = {name: os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    yield os.environ["S3_ENDPOINT_TLS"], os.environ["S3_CA_BUNDLE"], keys, None


def plain_client(endpoint: str, trust: str, keys: dict[str, str]) -> Any:
    """boto3 as anybody would use it: path style, nothing of ours."""
    return boto3.Session(
        aws_access_key_id=keys["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=keys["AWS_SECRET_ACCESS_KEY"],
        region_name="us-east-1",
    ).client("s3", endpoint_url=endpoint, verify=trust, config=Config(s3={"addressing_style": "path"}))


@pytest.mark.parametrize("backend", ["xnnpack", "portable"])
@pytest.mark.parametrize("server", [scripted, pytest.param(gateway, marks=pytest.mark.rgw)])
def test_parts_order_and_a_plain_read_back(
    server: Callable[[Path], Any],
    backend: str,
    model: Path,
    tmp_path: Path,
    export_process: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with server(tmp_path) as (endpoint, trust, keys, stub):
        client = plain_client(endpoint, trust, keys)
        if stub is None and BUCKET not in [item["Name"] for item in client.list_buckets()["Buckets"]]:
            client.create_bucket(Bucket=BUCKET)
        prefix = uuid.uuid4().hex
        spec = make_spec("exported-program", model, backend, f"s3://{BUCKET}/{prefix}")
        settings = {"endpoint": endpoint, "caBundle": trust, "partSize": 5 * MiB, "maxBuffer": 64 * MiB}
        data = spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
        data["store"].update(settings)
        process = export_process(ExportSpec.model_validate(data), environment=keys)
        events = list(process.events())
        assert process.child.wait(60) == 0, json.dumps(events[-1])
        assert [event["type"] for event in events][-1] == "finished"

        manifest = json.loads(read(client, f"{prefix}/exports/{EXPORT_ID}/manifest.json"))
        (described,) = manifest["data"]
        assert described["segmentBaseOffset"] == 5 * MiB
        assert described["urls"] == [f"s3://{BUCKET}/{prefix}/weights/{EXPORT_ID}-1/model.ptd"]
        (tmp_path / "model.ptd").write_bytes(read(client, f"{prefix}/weights/{EXPORT_ID}-1/model.ptd"))
        (tmp_path / "model.pte").write_bytes(read(client, f"{prefix}/exports/{EXPORT_ID}/1/model.pte"))
        assert (tmp_path / "model.ptd").stat().st_size == described["size"] > 24 * MiB
        if stub is None:
            assert client.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix).get("Uploads", []) == []
        else:
            check_parts(stub)
        client.close()
    done = subprocess.run([sys.executable, "-c", RUN, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) < 1e-4


def read(client: Any, key: str) -> bytes:
    body = client.get_object(Bucket=BUCKET, Key=key)["Body"]
    with body:
        return bytes(body.read())


def check_parts(stub: Any) -> None:
    """Part 1 came last, every part but the last is as long as the first, and nothing stayed open."""
    numbers = [
        int(number)
        for operation, path in zip(stub.log, stub.paths, strict=True)
        if operation == "UploadPart"
        for number in re.findall(r"partNumber=([0-9]+)", path)
    ]
    assert sorted(numbers) == list(range(1, len(numbers) + 1))
    assert len(numbers) >= 5
    assert numbers[-1] == 1
    assert not stub.state.uploads
