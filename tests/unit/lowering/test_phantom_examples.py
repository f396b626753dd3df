"""Upstream's own tiny models: what the phantom move records is what upstream's move would have put on the device.

The kernels need a GPU; here the compile is left out. Each delegated method's program is moved once by upstream's
function to the device `cpu` and copied as `Tensor.to` copies, and once by ours.
"""

from __future__ import annotations

import hashlib
import importlib
from typing import Any

import pytest
import torch

from exporter.contract.spec import Target
from exporter.lowering.canonical import canonical_layout
from exporter.lowering.cuda_target import compile_specs
from exporter.lowering.phantom import Phantoms, phantom_weights
from exporter.lowering.weights import PHANTOM_BYTES, collect_weights
from exporter.source.captured import Captured
from tests.gpu import models
from tests.gpu.parity import TensorSource

pytest.importorskip("triton", reason="the CUDA back end imports triton")
pytest.importorskip("torchao", reason="the examples quantise with torchao")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

Moved = dict[str, tuple[int, str]]


class _Stop(Exception):
    """The programs were moved; nothing is compiled."""


def moved_by_upstream(tensor: torch.Tensor) -> tuple[int, str]:
    """Size and SHA-256 of the storage that ``tensor.to(device)`` would make."""
    copied = torch.empty_like(tensor)
    copied.copy_(tensor)
    storage = copied.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))  # type: ignore[call-overload]
    return storage.nbytes(), hashlib.sha256(flat.numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("case", ["two-methods", "int8", "muse-glimmer", "gemma4"])
def test_segments_are_what_upstream_moves(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("executorch.backends.cuda.quantize_op_dispatch")
    from executorch.backends.cuda.cuda_backend import CudaBackend
    from executorch.backends.cuda.cuda_partitioner import CudaPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    torch.manual_seed(0)
    programs, samples = {**models.SOURCED, **models.HELD}[case]()
    weights = collect_weights(Captured(programs, TensorSource({}), samples))
    planned = {name.key for segment in weights.segments(lambda fqn: fqn) for name in segment.names}
    wanted: Moved = {}
    found: Moved = {}
    small: set[str] = set()

    def take(edge_programs: dict[str, list[Any]], specs: Any) -> None:
        phantoms = Phantoms(weights)
        with phantom_weights(phantoms):
            for program in (item for items in edge_programs.values() for item in items):
                state = {**program.state_dict, **program.constants}
                tensors = {fqn: value for fqn, value in state.items() if isinstance(value, torch.Tensor)}
                wanted.update({fqn: moved_by_upstream(value) for fqn, value in tensors.items() if value.numel()})
                importlib.import_module("executorch.backends.cuda.cuda_backend")._move_to_device_resize_kv(
                    program, "cpu"
                )
                for fqn, before in tensors.items():
                    table = program.state_dict if fqn in program.state_dict else program.constants
                    after = table[fqn]
                    if before.numel() * before.element_size() < PHANTOM_BYTES:
                        small.add(fqn)
                        assert torch.equal(after, before)
                        continue
                    weight = phantoms._by_storage[after.untyped_storage()._cdata]
                    layout = canonical_layout(before)
                    assert (tuple(after.shape), tuple(after.stride())) == (layout.shape, layout.strides)
                    body = b"".join(bytes(chunk) for chunk in weight.read())
                    found[fqn] = (len(body), hashlib.sha256(body).hexdigest())
        raise _Stop

    monkeypatch.setattr(CudaBackend, "preprocess_multimethod", take)
    target = Target(backend="cuda", max_autotune=True)
    with pytest.raises(_Stop):
        to_edge_transform_and_lower(
            programs,
            partitioner={name: [CudaPartitioner(compile_specs(target, name))] for name in programs},
            compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
        )
    assert found == {fqn: value for fqn, value in wanted.items() if fqn not in small}
    assert set(found) <= planned | {fqn for fqn in found if "tensor_constant" in fqn or "lifted_tensor" in fqn}
    assert found
