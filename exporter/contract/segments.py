"""Weight segments on their way from a back end to a stored `.ptd`: what a lowering gives, what the stream reads.

A segment's bytes are never held here: `read` opens an iterator of chunks, at most `MAX_CHUNK` bytes each, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

Chunk = bytes | bytearray | memoryview
"""A run of a segment's bytes. A `memoryview` may be overwritten by its reader once the next chunk is asked for."""

MAX_CHUNK = 8 * 2**20
"""Largest chunk that a reader may yield, in bytes; it adds to the stream's own buffer bound."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The `TensorLayout` table of ExecuTorch's flat_tensor.fbs: scalar type code, sizes, dimensions outer to inner."""

    scalar_type: int
    sizes: tuple[int, ...]
    dim_order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SegmentName:
    """One key of a segment in the `.ptd`'s named data.

    `fqn` and what follows describe the tensor for a manifest's reader; `fqn` is None where keys are content hashes.
    Shape and strides are in elements; `dtype` is torch's name without ``torch.``.
    """

    key: str
    layout: TensorLayout | None = None
    fqn: str | None = None
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    storage_offset: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment: its names (equal content is stored once), size in bytes, alignment, and a reader.

    `read` may be called more than once (hash first, send later) and yields exactly `size` bytes each time.
    `zeros` says that every byte is zero, so that the stream may write it without reading; `read` is still valid.
    """

    names: tuple[SegmentName, ...]
    size: int
    read: Callable[[], Iterator[Chunk]]
    alignment: int = 1
    zeros: bool = False
