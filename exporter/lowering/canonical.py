"""The canonical form of a weight: what ``tensor.to(device)`` would produce, and its bytes in pieces.

`Tensor.to` copies under preserve_format: a tensor that is dense and without overlap keeps its strides, any other
becomes dense in the same order of dimensions; the storage is exactly as large as the tensor, the offset is 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from exporter.contract.segments import MAX_CHUNK, Chunk

_ZEROS = bytes(MAX_CHUNK)


@dataclass(frozen=True, slots=True)
class Layout:
    """dtype, shape and strides (elements) of a tensor at offset 0 of a storage of `nbytes` bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    nbytes: int

    @property
    def dtype_name(self) -> str:
        """torch's name without ``torch.``."""
        return str(self.dtype).removeprefix("torch.")


def canonical_layout(tensor: torch.Tensor) -> Layout:
    """The layout of ``tensor.to(another device)``."""
    moved = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format)
    strides = tuple(moved.stride())
    return Layout(tensor.dtype, tuple(tensor.shape), strides, moved.numel() * moved.element_size())


def strided_layout(tensor: torch.Tensor) -> Layout:
    """The layout of a tensor that keeps its strides, in the smallest storage that holds it (upstream's KV caches)."""
    elements = 0
    if tensor.numel():
        elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    nbytes = elements * tensor.element_size()
    return Layout(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), nbytes)


def zero_chunks(nbytes: int) -> Iterator[Chunk]:
    """`nbytes` zeros from one shared buffer."""
    whole, rest = divmod(nbytes, MAX_CHUNK)
    for _ in range(whole):
        yield _ZEROS
    if rest:
        yield memoryview(_ZEROS)[:rest]


def canonical_chunks(tensor: torch.Tensor) -> Iterator[Chunk]:
    """The bytes of the canonical form of `tensor`, at most `MAX_CHUNK` a piece; no more than that is ever copied."""
    if tensor.numel() == 0:
        return
    strides = canonical_layout(tensor).strides
    # Sorting is stable and sizes of 1 have arbitrary strides: they do not change the order of bytes.
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    yield from _row_major(tensor.detach().permute(order))


def _row_major(tensor: torch.Tensor) -> Iterator[Chunk]:
    size = tensor.numel() * tensor.element_size()
    if size <= MAX_CHUNK:
        yield _bytes_of(tensor)
        return
    if tensor.is_contiguous():
        flat = tensor.reshape(-1)
        step = MAX_CHUNK // tensor.element_size()
        for start in range(0, flat.numel(), step):
            yield _bytes_of(flat[start : start + step])
        return
    step = max(1, MAX_CHUNK * tensor.shape[0] // size)
    for start in range(0, tensor.shape[0], step):
        yield from _row_major(tensor[start : start + step] if step > 1 else tensor[start])


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    dense = tensor.contiguous()
    if dense.is_conj() or dense.is_neg():
        dense = dense.resolve_conj().resolve_neg()
    if dense.device.type != "cpu":
        dense = dense.cpu()
    return memoryview(dense.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def is_zero(tensor: torch.Tensor) -> bool:
    """Whether every byte of `tensor` is zero, looked at in pieces. The bits count: -0.0 is not zero here."""
    return all(not any_nonzero(chunk) for chunk in canonical_chunks(tensor))


def any_nonzero(chunk: Chunk) -> bool:
    """Whether any byte of a piece (at most `MAX_CHUNK`) differs from zero."""
    view = memoryview(chunk)
    return view != memoryview(_ZEROS)[: view.nbytes]
