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

SCALAR_TYPES = {
    0: "uint8",
    1: "int8",
    2: "int16",
    3: "int32",
    4: "int64",
    5: "float16",
    6: "float32",
    7: "float64",
    8: "complex32",
    9: "complex64",
    10: "complex128",
    11: "bool",
    12: "qint8",
    13: "quint8",
    14: "qint32",
    15: "bfloat16",
    16: "quint4x2",
    17: "quint2x4",
    22: "bits16",
    23: "float8_e5m2",
    24: "float8_e4m3fn",
    25: "float8_e5m2fnuz",
    26: "float8_e4m3fnuz",
    27: "uint16",
    28: "uint32",
    29: "uint64",
}
"""ExecuTorch's ScalarType codes (scalar_type.fbs) as torch's dtype names."""


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
