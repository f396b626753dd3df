"""Models that break back ends: each gives what eager gives, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from exporter.check.eager import eager_cases
from exporter.check.runtime import compare
from exporter.contract.errors import UnsupportedModel
from exporter.contract.manifest import TensorSpec
from exporter.lowering.portable import portable_lowering
from exporter.lowering.ports import Lowered
from exporter.lowering.xnnpack import xnnpack_lowering
from tests.unit.lowering.conftest import Steps, capture

LOWERINGS = {"xnnpack": xnnpack_lowering, "portable": portable_lowering}


class Stateful(nn.Module):
    """Starts from a state that is not zero, and writes it and its input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.full((4,), 2.0))
        self.register_buffer("cache", torch.zeros(8, 4))

    def forward(self, value: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)  # type: ignore[operator]
        self.cache.index_copy_(0, position, value)  # type: ignore[operator]
        value.mul_(2)
        return value + self.count + self.cache.sum(0)


class Odd(nn.Module):
    """Weights in odd storages, odd inputs, odd outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.expanded = nn.Parameter(torch.randn(1, 6).expand(4, 6))
        self.strided = nn.Parameter(torch.randn(12, 6)[::2])
        self.transposed = nn.Parameter(torch.randn(6, 6).t())
        self.register_buffer("scalar", torch.tensor(2.0))
        self.register_buffer("empty", torch.zeros(0, 6))
        self.constant = torch.randn(6)

    def forward(self, value: torch.Tensor, *, scale: int, nothing: None) -> dict[str, Any]:
        hidden = (value + self.expanded) @ self.strided @ self.transposed * self.scalar * scale + self.constant
        return {"out": torch.cat([hidden, self.empty]), "more": (value, 3, None)}


class Returned(nn.Module):
    """Gives its weights back as they are, one of them twice, beside what it computes with them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("table", torch.randn(6, 4).t())

    def forward(self, value: torch.Tensor) -> Any:
        return value, self.weight, value @ self.weight, self.table, self.weight, None, 3


MODELS: dict[str, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = {
    "stateful": (Stateful(), (torch.randn(2, 4), torch.tensor([1, 5])), {}),
    "odd": (Odd(), (torch.randn(4, 6),), {"scale": 3, "nothing": None}),
    "channels last": (
        nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last),
        (torch.randn(1, 4, 8, 8).to(memory_format=torch.channels_last),),
        {},
    ),
    "a reshaped weight": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.PReLU(8)), (torch.randn(1, 3, 8, 8),), {}),
    "returned weights": (Returned(), (torch.randn(4, 4),), {}),
    "half": (nn.Linear(16, 16).half(), (torch.randn(2, 16).half(),), {}),
}


@pytest.mark.parametrize("backend", LOWERINGS)
@pytest.mark.parametrize("name", MODELS)
def test_the_outputs_are_those_of_eager(
    lower: Callable[..., Lowered], execute: Callable[..., list[Any]], name: str, backend: str
) -> None:
    module, args, kwargs = MODELS[name]
    captured = capture(module, *args, sample=kwargs)
    (case,) = eager_cases(captured)
    lowered = lower(LOWERINGS[backend](), captured)
    compare("forward", execute(lowered, "flat-tensor/content", *case.inputs), case.outputs)


def test_a_written_input_is_listed_among_the_outputs(lower: Callable[..., Lowered]) -> None:
    lowered = lower(portable_lowering(), capture(*MODELS["stateful"][:1], *MODELS["stateful"][1]))
    shape = TensorSpec(dtype="float32", shape=(2, 4))
    assert lowered.methods[0].outputs == (shape, shape)


def test_eager_leaves_the_captured_state_as_it_was() -> None:
    captured = capture(Stateful(), torch.randn(2, 4), torch.tensor([1, 5]))
    before = captured.programs["forward"].state_dict["count"].clone()
    first, second = eager_cases(captured), eager_cases(captured)
    assert torch.equal(captured.programs["forward"].state_dict["count"], before)
    compare("forward", first[0].outputs, second[0].outputs)


@pytest.mark.parametrize(
    ("module", "value", "operator"),
    [
        (nn.Conv3d(2, 4, 3), torch.randn(1, 2, 6, 6, 6), "aten::conv3d.default"),
        (nn.ConvTranspose3d(2, 4, 3), torch.randn(1, 2, 6, 6, 6), "aten::conv_transpose3d.input"),
    ],
)
def test_convolutions_over_volumes_are_refused_at_once(module: nn.Module, value: torch.Tensor, operator: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        portable_lowering().preflight(capture(module, value))
    assert caught.value.details["operators"] == [operator]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.uint64])
def test_dtypes_that_no_kernel_computes_with_are_refused_at_once(dtype: torch.dtype) -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(4).to(dtype))

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return value * self.scale.float()

    with pytest.raises(UnsupportedModel) as caught:
        portable_lowering().preflight(capture(Cast(), torch.randn(4)))
    assert "aten::to.dtype" in caught.value.details["operators"]
    assert str(dtype).removeprefix("torch.") in caught.value.message


class Branches(nn.Module):
    """A linear layer in a branch, which XNNPACK's partitioner neither takes nor lets be decomposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.cond(value.sum() > 0, lambda x: self.first(x), lambda x: self.second(x), (value,))  # type: ignore[no-any-return]


def test_a_branch_that_xnnpack_leaves_is_named() -> None:
    with pytest.raises(UnsupportedModel) as caught:
        xnnpack_lowering().lower(capture(Branches(), torch.randn(2, 4)), Steps())
    assert caught.value.details["operators"] == ["aten::linear.default"]


@pytest.mark.parametrize(
    ("module", "random"),
    [
        (nn.Dropout(0.5), False),
        (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), False),
        (nn.RReLU(), False),
    ],
)
def test_evaluation_mode_draws_no_random_numbers(module: nn.Module, random: bool) -> None:
    (case,) = eager_cases(capture(module, torch.randn(1, 4, 8)))
    assert case.random is random


def test_a_model_that_draws_is_known() -> None:
    class Noise(nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return value + torch.rand(3)

    (case,) = eager_cases(capture(Noise(), torch.randn(3)))
    assert case.random
