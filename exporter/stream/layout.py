"""Where the bytes of a streamed `.ptd` go: alignment of segments and the part plan. Pure arithmetic, no I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import lcm

from exporter.contract.errors import StoreRejected
from exporter.contract.objects import Capabilities, MiB

SEGMENT_ALIGNMENT = 128
"""Bytes; what ExecuTorch's FlatTensorSerializer aligns segments to by default."""
SMALLEST_PART = 16 * MiB
"""Bytes; where the search for a part size starts."""
RESERVED_BUFFERS = 2
"""Part buffers that are not in flight: the one being filled, and one for a small segment hashed before it is placed."""


def aligned(offset: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is not below `offset`."""
    return -(-offset // alignment) * alignment


def segment_alignment(alignment: int) -> int:
    """Alignment of a segment's offset: the least common multiple of 128 and the entry's own (0 counts as 1)."""
    return lcm(SEGMENT_ALIGNMENT, max(1, alignment))


def data_size(segments: Iterable[tuple[int, int]]) -> int:
    """Bytes from the base offset to the end of the last segment, for `(size, alignment)` pairs placed in order."""
    end = 0
    for size, alignment in segments:
        end = aligned(end, segment_alignment(alignment)) + size
    return end


@dataclass(frozen=True, slots=True)
class PartPlan:
    """How a file is cut: part 1 is the header's, the others hold data, each `part_size` bytes but the last."""

    part_size: int
    in_flight: int
    parts: int


def plan_parts(
    data: int, header: int, capabilities: Capabilities, max_buffer: int, part_size: int | None = None
) -> PartPlan:
    """The part plan for `data` bytes of segments and a header of at most `header` bytes.

    Without `part_size`: the smallest power of two from 16 MiB up that keeps the count within the store's limit and
    holds the header. Buffers: one part being filled, one for a segment that is hashed first, the rest in flight, so
    `max_buffer` must hold a part three times. `StoreRejected`, before any byte was sent, where no plan fits.
    """
    given = part_size is not None
    size = part_size if part_size is not None else max(SMALLEST_PART, _power_of_two(capabilities.min_part))
    while not given and (header > size or _parts(data, size) > capabilities.max_parts):
        size *= 2
    if size % SEGMENT_ALIGNMENT:
        raise StoreRejected(
            f"a part size of {size} bytes is not a multiple of {SEGMENT_ALIGNMENT}",
            hint="Set WEIGHTLESS_PART_SIZE to a multiple of 1 MiB, or leave it out.",
        )
    if not capabilities.min_part <= size <= capabilities.max_part:
        raise StoreRejected(
            f"a part size of {size} bytes is outside the store's {capabilities.min_part} to {capabilities.max_part}",
            hint="Set WEIGHTLESS_PART_SIZE within the store's limits, or leave it out.",
        )
    if header > size:
        raise StoreRejected(
            f"the file's header needs up to {header} bytes, more than a part of {size}",
            hint="Raise WEIGHTLESS_PART_SIZE, or leave it out.",
        )
    if _parts(data, size) > capabilities.max_parts:
        raise StoreRejected(
            f"{data} bytes in parts of {size} are {_parts(data, size)} parts; the store takes {capabilities.max_parts}",
            hint="Raise WEIGHTLESS_PART_SIZE, or leave it out.",
        )
    if size * (RESERVED_BUFFERS + 1) > max_buffer:
        raise StoreRejected(
            f"parts of {size} bytes do not fit three times into a buffer of {max_buffer}",
            hint="Raise WEIGHTLESS_MAX_BUFFER, or lower WEIGHTLESS_PART_SIZE.",
        )
    return PartPlan(size, max(1, max_buffer // size - RESERVED_BUFFERS), _parts(data, size))


def _parts(data: int, part_size: int) -> int:
    return 1 + -(-data // part_size)


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()
