"""A tensor's bytes in the order of its dense copy, read in bounded pieces from wherever its storage is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from exporter.contract.errors import SourceUnsafe
from exporter.contract.segments import MAX_CHUNK, Chunk

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.uint16,
        torch.int16,
        torch.uint32,
        torch.int32,
        torch.uint64,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex32,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    )
}
"""torch's dtypes by name, as `TensorInfo.dtype` spells them."""


def dense_order(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    """Dimensions outer to inner of `torch.empty_like` under preserve_format, for a tensor of this shape and strides."""
    like = torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device="meta")
    dense = torch.empty_like(like).stride()
    return tuple(sorted(range(len(shape)), key=lambda dim: (-dense[dim], dim)))


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one touched; 0 for an empty tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill their extent without gap or overlap, in whatever order of dimensions."""
    return (
        extent(shape, strides) == math.prod(shape)
        and all(size <= 1 or stride > 0 for size, stride in zip(shape, strides, strict=True))
        and _nested(shape, strides)
    )


def _nested(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for stride, size in sorted((t, s) for s, t in zip(shape, strides, strict=True) if s > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def gather(
    read: Callable[[int, int], bytes], dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], offset: int
) -> Iterator[Chunk]:
    """The bytes of a strided tensor in dense order; `offset` in elements, `read(byte offset, length)` of its storage.

    Holds one range of the storage and one piece of output, at most `MAX_CHUNK` bytes each. Where consecutive elements
    lie far apart this costs one read for every few elements.
    """
    order = dense_order(shape, strides, dtype)
    sizes = [shape[dim] for dim in order]
    steps = [strides[dim] for dim in order]
    if any(step < 0 for step in steps):
        raise SourceUnsafe("A tensor has a negative stride.")
    yield from _pieces(read, dtype, sizes, steps, offset)


def _pieces(
    read: Callable[[int, int], bytes], dtype: torch.dtype, shape: list[int], strides: list[int], offset: int
) -> Iterator[Chunk]:
    span, total, item = extent(shape, strides), math.prod(shape), dtype.itemsize
    if not total:
        return
    if max(span, total) * item <= MAX_CHUNK or total == 1:
        data = bytearray(read(offset * item, span * item))
        flat = torch.frombuffer(data, dtype=torch.uint8).view(dtype)
        dense = flat.as_strided(shape, strides).contiguous()
        yield bytes(dense.reshape(-1).view(torch.uint8).numpy().data)
        return
    first = next(dim for dim, size in enumerate(shape) if size > 1)
    half = shape[first] // 2
    for start, size in ((0, half), (half, shape[first] - half)):
        part = [*shape[:first], size, *shape[first + 1 :]]
        yield from _pieces(read, dtype, part, strides, offset + start * strides[first])
