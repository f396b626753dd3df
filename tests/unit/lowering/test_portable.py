"""The portable back end, and what both CPU back ends refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from exporter.contract.errors import UnsupportedModel
from exporter.contract.segments import TensorLayout
from exporter.lowering.cpu import CpuLowering
from exporter.lowering.portable import portable_lowering
from exporter.lowering.ports import Lowered
from exporter.lowering.xnnpack import xnnpack_lowering
from tests.unit.lowering.conftest import ConvNet, Steps, Tied, capture

Lower = Callable[..., Lowered]
Execute = Callable[..., list[torch.Tensor]]


def test_keys_are_fqns_with_layouts(lower: Lower, execute: Execute) -> None:
    module, image = ConvNet(), torch.randn(2, 3, 12, 12)
    lowered = lower(portable_lowering(), capture(module, image))
    names = {name.key: name for segment in lowered.appended for name in segment.names}
    assert set(module.state_dict()) == set(names)
    weight = names["conv.weight"]
    assert weight.layout == TensorLayout(6, (8, 3, 3, 3), (0, 1, 2, 3))
    assert (weight.fqn, weight.dtype, weight.shape, weight.strides) == (
        "conv.weight",
        "float32",
        (8, 3, 3, 3),
        (27, 9, 3, 1),
    )
    (output,) = execute(lowered, "flat-tensor/fqn", image)
    torch.testing.assert_close(output, module(image), rtol=1e-4, atol=1e-6)


def test_a_slice_is_stored_dense_and_a_tie_once(lower: Lower, execute: Execute) -> None:
    module, ids = Tied(), torch.tensor([[1, 5, 9]])
    lowered = lower(portable_lowering(), capture(module, ids))
    sizes = {name.key: segment.size for segment in lowered.appended for name in segment.names}
    assert sizes["scale"] == 64
    assert sum(segment.size for segment in lowered.appended) == 24 * 16 * 4 + 64
    (output,) = execute(lowered, "flat-tensor/fqn", ids)
    torch.testing.assert_close(output, module(ids), rtol=1e-4, atol=1e-6)


def test_a_program_without_weights_needs_no_data(lower: Lower) -> None:
    class Double(torch.nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return value + value

    lowered = lower(portable_lowering(), capture(Double(), torch.randn(3)))
    assert not lowered.needs_data
    assert lowered.appended == []


class _Unsupported(torch.nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.special.erfcx(value) + torch.linalg.eigvalsh(value)


@pytest.mark.parametrize("lowering", [portable_lowering(), xnnpack_lowering()], ids=["portable", "xnnpack"])
def test_operators_without_a_kernel_are_named(lowering: CpuLowering) -> None:
    captured = capture(_Unsupported(), torch.randn(4, 4))
    with pytest.raises(UnsupportedModel) as caught:
        lowering.lower(captured, Steps())
    assert caught.value.details["method"] == "forward"
    operators = caught.value.details["operators"]
    assert isinstance(operators, list)
    assert "aten::special_erfcx.out" in operators
    assert len(operators) == 2


@pytest.fixture
def custom_operator() -> Iterator[torch.library.Library]:
    library = torch.library.Library("unit_lowering", "FRAGMENT")
    library.define("mystery(Tensor x) -> Tensor")
    library.impl("mystery", lambda x: x * 2, "CompositeExplicitAutograd")
    library._register_fake("mystery", lambda x: torch.empty_like(x))
    yield library
    library._destroy()


@pytest.mark.usefixtures("custom_operator")
def test_a_custom_operator_is_refused_before_the_compile() -> None:
    class Custom(torch.nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return torch.ops.unit_lowering.mystery(value)  # type: ignore[no-any-return]

    captured = capture(Custom(), torch.randn(3))
    with pytest.raises(UnsupportedModel) as caught:
        portable_lowering().preflight(captured)
    assert caught.value.details == {"method": "forward", "operators": ["unit_lowering::mystery"]}
