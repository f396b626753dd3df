"""The XNNPACK back end with all constants in one data file."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any

import torch

from exporter.contract.segments import MAX_CHUNK
from exporter.lowering.ports import Lowered
from exporter.lowering.xnnpack import xnnpack_lowering
from tests.unit.lowering.conftest import ConvNet, Tied, capture

Lower = Callable[..., Lowered]
Execute = Callable[..., list[torch.Tensor]]


def test_convolutions_with_a_folded_norm_leave_nothing_in_the_program(lower: Lower, execute: Execute) -> None:
    module, image = ConvNet(), torch.randn(2, 3, 12, 12)
    lowered = lower(xnnpack_lowering(), capture(module, image))
    assert lowered.needs_data
    assert lowered.methods[0].delegates == ("XnnpackBackend",)
    program = b"".join(lowered.program())
    for segment in lowered.appended:
        content = b"".join(segment.read())
        assert len(content) == segment.size
        if segment.size >= 64:
            assert content not in program
    (output,) = execute(lowered, "flat-tensor/content", image)
    torch.testing.assert_close(output, module(image), rtol=1e-4, atol=1e-6)


def test_delegate_keys_are_hashes_of_their_bytes(lower: Lower) -> None:
    lowered = lower(xnnpack_lowering(), capture(ConvNet(), torch.randn(1, 3, 12, 12)))
    hashed = [segment for segment in lowered.appended if segment.names[0].fqn is None]
    assert len(hashed) >= 6
    for segment in hashed:
        assert segment.names[0].key == sha256(b"".join(segment.read())).hexdigest()


def test_a_tie_is_stored_once_with_both_keys(lower: Lower, execute: Execute) -> None:
    module, ids = Tied(), torch.tensor([[1, 5, 9]])
    lowered = lower(xnnpack_lowering(), capture(module, ids))
    weight = module.embed.weight.numpy().tobytes()
    matching = [segment for segment in lowered.appended if b"".join(segment.read()) == weight]
    assert len(matching) == 1
    assert len(matching[0].names) == 2
    assert matching[0].names[1].key == sha256(weight).hexdigest()
    (output,) = execute(lowered, "flat-tensor/content", ids)
    torch.testing.assert_close(output, module(ids), rtol=1e-4, atol=1e-6)


def test_a_dynamic_batch_runs_at_other_sizes(lower: Lower, execute: Execute) -> None:
    module = ConvNet()
    shapes: Any = ({0: torch.export.Dim("batch", min=1, max=4)},)
    lowered = lower(xnnpack_lowering(), capture(module, torch.randn(2, 3, 12, 12), dynamic_shapes=shapes))
    assert lowered.methods[0].inputs[0].shape == (-1, 3, 12, 12)  # type: ignore[union-attr]
    for batch in (1, 4):
        image = torch.randn(batch, 3, 12, 12)
        (output,) = execute(lowered, "flat-tensor/content", image)
        torch.testing.assert_close(output, module(image), rtol=1e-4, atol=1e-6)


def test_chunks_are_bounded(lower: Lower) -> None:
    module = torch.nn.Linear(1500, 1500, bias=False)
    lowered = lower(xnnpack_lowering(), capture(module, torch.randn(1, 1500)))
    (segment,) = lowered.appended
    sizes = [len(chunk) for chunk in segment.read()]
    assert max(sizes) <= MAX_CHUNK
    assert sum(sizes) == segment.size == 1500 * 1500 * 4
    assert len(sizes) > 1


def test_the_alignment_of_packed_weights_is_kept(lower: Lower) -> None:
    lowered = lower(xnnpack_lowering(), capture(ConvNet(), torch.randn(1, 3, 12, 12)))
    assert all(segment.alignment % 16 == 0 for segment in lowered.appended if segment.names[0].fqn is None)
