"""Tiny models on disk, and exports run in this process or in one of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from exporter.contract.errors import WeightlessError
from exporter.contract.events import EventLog
from exporter.contract.manifest import Manifest, parse_manifest
from exporter.contract.spec import ExportSpec

EXPORT_ID = "exp_01J0000000000000000000000A"


def make_spec(
    recipe: str, source: object, backend: str, store: str, *, roots: tuple[object, ...] = (), **request: Any
) -> ExportSpec:
    """A spec whose source may be anywhere below `roots` (by default: the source itself)."""
    return ExportSpec.model_validate(
        {
            "id": EXPORT_ID,
            "attempt": 1,
            "createdAt": "2026-11-30T15:00:00Z",
            "request": {"recipe": recipe, "source": str(source), "target": {"backend": backend}, **request},
            "store": {"uri": store},
            "sources": {"roots": [str(root) for root in roots or (source,)]},
        }
    )


@dataclass
class Outcome:
    """How an export ended: its events, what stopped it, the store that it wrote to."""

    events: list[dict[str, Any]]
    error: WeightlessError | None
    store: Any

    @property
    def keys(self) -> list[str]:
        """Everything that is in the store."""
        return [item.key for item in self.store.list("")]

    @property
    def manifest(self) -> Manifest:
        """The committed manifest."""
        key = f"exports/{EXPORT_ID}/manifest.json"
        return parse_manifest(self.store.read(key, 0, self.store.head(key).size))


@dataclass
class CalmInterruption:
    """Never stops anything; keeps what was asked for."""

    asked: list[WeightlessError] = field(default_factory=list)

    def request(self, error: WeightlessError) -> None:
        self.asked.append(error)

    def check(self) -> None: ...

    def end(self) -> None: ...

    @contextmanager
    def shield(self) -> Iterator[None]:
        yield


@pytest.fixture
def export_here(tmp_path: Path) -> Callable[..., Outcome]:
    """Run an export in this process, with the parts that the program would build, on a `memory://` store."""

    def run(
        recipe: str,
        source: object,
        backend: str,
        *,
        change_store: Callable[[Any], Any] = lambda store: store,
        faults: dict[int, Any] | None = None,
        **request: Any,
    ) -> Outcome:
        from exporter.attempt import Rollback
        from exporter.check.smoke import SmokeCheck
        from exporter.failures import classify
        from exporter.lowering.portable import portable_lowering
        from exporter.lowering.xnnpack import xnnpack_lowering
        from exporter.meter import Meter
        from exporter.pipeline import Parts, export
        from exporter.recipes.registry import find_recipe, parse_options
        from exporter.reporting import Stages
        from exporter.source.resolve import resolve
        from exporter.store.memory import MemoryStore
        from exporter.toolchain import toolchain

        spec = make_spec(recipe, source, backend, f"memory://{uuid.uuid4().hex}", **request)
        lines: list[bytes] = []
        events, interruption = EventLog(lines.append), CalmInterruption()
        meter = Meter(events, spec.request.budgets, tmp_path, interruption.request)
        stages = Stages(events, meter, interruption)
        store = change_store(MemoryStore(spec.store.uri, faults=faults))
        lowerings = {"xnnpack": xnnpack_lowering, "portable": portable_lowering}
        error: WeightlessError | None = None
        try:
            found = find_recipe(recipe)
            options = parse_options(found, spec.request.options)
            export(
                spec,
                Parts(
                    store=store,
                    resolve=partial(resolve, policy=spec.sources, objects=_no_buckets),
                    capture=partial(found.capture, options=options, target=spec.request.target),
                    lowering=lowerings[backend](),
                    check=SmokeCheck(store, tmp_path) if spec.request.verify_ else None,
                    events=events,
                    stages=stages,
                    meter=meter,
                    interruption=interruption,
                    rollback=Rollback(store),
                    toolchain=toolchain(),
                ),
            )
        except BaseException as failure:
            error = classify(failure, stages.current)
        return Outcome([json.loads(line) for line in lines], error, store)

    return run


def _no_buckets(name: str) -> Any:
    raise AssertionError(f"the test reads no bucket, yet {name} was opened")


@dataclass
class Process:
    """An exporter process and what it wrote."""

    child: subprocess.Popen[bytes]
    log: Path

    def events(self) -> Iterator[dict[str, Any]]:
        """Its event lines, as they come."""
        assert self.child.stdout is not None
        for line in self.child.stdout:
            yield json.loads(line)


@pytest.fixture
def export_process(tmp_path: Path) -> Iterator[Callable[[ExportSpec], Process]]:
    """Start `python -m exporter run`; killed at the end of the test if it still runs."""
    started: list[Process] = []

    def start(spec: ExportSpec, *arguments: str, environment: Mapping[str, str] | None = None) -> Process:
        log = tmp_path / "log.txt"
        scratch = tmp_path / "scratch"
        scratch.mkdir(exist_ok=True)
        variables = {
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "TMPDIR": str(scratch),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            **(environment or {}),
        }
        with log.open("wb") as errors:
            child = subprocess.Popen(
                [sys.executable, "-m", "exporter", "run", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=variables,
            )
        assert child.stdin is not None
        child.stdin.write(spec.model_dump_json(by_alias=True, exclude_unset=True).encode())
        child.stdin.close()
        started.append(Process(child, log))
        return started[-1]

    yield start
    for process in started:
        process.child.kill()
        process.child.wait()
        assert process.child.stdout is not None
        process.child.stdout.close()


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of two layers as a folder that `transformers` would save."""
    import torch
    import transformers
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("tiny-bert")
    torch.manual_seed(5)
    config = transformers.BertConfig(
        vocab_size=120,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=40,
        architectures=["BertModel"],
    )
    model = transformers.BertModel(config)
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(config.to_json_string())
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


def save_program(module: Any, inputs: tuple[Any, ...], path: Path, **settings: Any) -> Path:
    """`torch.export.save` of a module."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(module.eval(), inputs, strict=False, **settings), path)
    return path


@pytest.fixture(scope="session")
def conv_pt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A convolutional network with batch norms to fold."""
    import torch
    from torch import nn

    torch.manual_seed(6)
    norms = [nn.BatchNorm2d(16), nn.BatchNorm2d(32)]
    for norm in norms:
        nn.init.normal_(norm.running_mean)
        nn.init.uniform_(norm.running_var, 0.5, 2)
    network = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        norms[0],
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, groups=2, stride=2),
        norms[1],
        nn.Hardswish(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    return save_program(network, (torch.randn(2, 3, 32, 32),), tmp_path_factory.mktemp("pt2") / "conv.pt2")


@pytest.fixture(scope="session")
def transformer_pt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformer with tied embeddings and a dynamic batch."""
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(100, 64)
            layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
            self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(64, 100, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.layers(self.embed(ids)))

    torch.manual_seed(7)
    batch = torch.export.Dim("batch", min=1, max=4)
    ids = torch.randint(0, 100, (2, 16))
    path = tmp_path_factory.mktemp("pt2") / "transformer.pt2"
    return save_program(Model(), (ids,), path, dynamic_shapes=({0: batch},))
