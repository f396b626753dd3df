"""Small models, and what a lowering gave run on ExecuTorch's runtime through a stored data file."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from exporter.lowering.ports import Lowered, Lowering
from exporter.source.captured import Captured
from exporter.source.module import ModuleWeights
from exporter.store.memory import MemoryStore
from exporter.stream.multipart import WeightStream


class Steps:
    """Keeps what a lowering reports."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, int, int]] = []

    def step(self, stage: str, method: str, done: int, total: int) -> None:
        self.seen.append((stage, method, done, total))


class Silent:
    """A stream listener that does nothing."""

    def opened(self, *_: object) -> None: ...
    def completed(self, *_: object) -> None: ...
    def aborted(self, *_: object) -> None: ...
    def sent(self, *_: object) -> None: ...


class ConvNet(torch.nn.Module):
    """Convolutions with a batch norm to fold, depthwise and transposed ones, a linear layer, unused state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = torch.nn.Conv2d(3, 8, 3)
        self.norm = torch.nn.BatchNorm2d(8)
        self.norm.running_mean.normal_()  # type: ignore[union-attr, operator]
        self.depthwise = torch.nn.Conv2d(8, 8, 3, groups=8)
        self.up = torch.nn.ConvTranspose2d(8, 4, 2)
        self.head = torch.nn.Linear(4, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        hidden = self.up(self.depthwise(torch.relu(self.norm(self.conv(image)))))
        return self.head(hidden.mean((2, 3)))


class Tied(torch.nn.Module):
    """An embedding whose weight is the head's too, and a buffer that is a slice of a larger storage."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = torch.nn.Embedding(24, 16)
        self.head = torch.nn.Linear(16, 24, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.randn(4096)[64:80])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids) * self.scale)


def capture(
    module: torch.nn.Module, *inputs: torch.Tensor, sample: dict[str, Any] | None = None, **settings: Any
) -> Captured:
    """`module` as the method forward; `sample` are keyword arguments of the model."""
    module.eval().requires_grad_(False)
    program = torch.export.export(module, inputs, sample or {}, strict=False, **settings)
    weights = ModuleWeights(dict(program.state_dict))
    return Captured({"forward": program}, weights, {"forward": (inputs, sample or {})})


@pytest.fixture
def lower() -> Callable[[Lowering, Captured], Lowered]:
    def run(lowering: Lowering, captured: Captured) -> Lowered:
        lowering.preflight(captured)
        assert lowering.plan(captured).segments == ()
        steps = Steps()
        lowered = lowering.lower(captured, steps)
        assert steps.seen == [("compiling", "forward", 0, 1), ("compiling", "forward", 1, 1)]
        return lowered

    return run


@pytest.fixture
def execute(tmp_path: Path) -> Callable[..., list[torch.Tensor]]:
    """Stores the segments as `WeightStream` does, writes program and data to disk, runs `forward`."""

    def run(lowered: Lowered, layout: str, *inputs: torch.Tensor) -> list[torch.Tensor]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from executorch.runtime import Runtime

        store = MemoryStore(f"memory://{tmp_path.name}")
        stream = WeightStream(store, "model.ptd", part_size=None, max_buffer=192 * 2**20, listener=Silent())
        stream.open(lowered.appended)
        stream.send(lowered.appended)
        data = stream.finish(name="model.ptd", layout=layout, used=lowered.used)
        program = b"".join(lowered.program())
        assert len(program) == lowered.program_size
        (tmp_path / "model.pte").write_bytes(program)
        (tmp_path / "model.ptd").write_bytes(store.read("model.ptd", 0, data.size))
        loaded = Runtime.get().load_program(tmp_path / "model.pte", data_path=tmp_path / "model.ptd")
        method = loaded.load_method("forward")
        assert method is not None
        return list(method.execute(inputs))

    return run
