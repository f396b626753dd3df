"""The header of a `.ptd` (FlatTensor) file: writer and bounds-checked reader, without ExecuTorch.

Format, from ExecuTorch 1.5.1 (`flat_tensor.fbs`, `flat_tensor_header.h`): a flatbuffer with file identifier ``FT01``
in whose byte 8 an extended header of 40 bytes (padded to 48) was inserted: ``FH01``, its length (u32), then flatbuffer
offset, flatbuffer size, segment base offset and segment data size (u64, little endian). Segment offsets are relative
to the base offset.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import flatbuffers

from exporter.contract.errors import VerificationFailed
from exporter.contract.segments import SegmentName, TensorLayout
from exporter.stream.layout import SEGMENT_ALIGNMENT, aligned

FILE_IDENTIFIER = b"FT01"
HEADER_MAGIC = b"FH01"
HEADER_OFFSET = 8
_HEADER = struct.Struct("<4sIQQQQ")
PADDED_HEADER = aligned(_HEADER.size, 16)
HEAD_BYTES = HEADER_OFFSET + PADDED_HEADER
"""Bytes that `read_header` reads first."""
SCHEMA_VERSION = 0
"""Newest FlatTensor schema version that this reader knows."""
MAX_FLATBUFFER = 256 * 2**20
"""Largest flatbuffer that a reader accepts, in bytes (about a million segments)."""
MAX_DIMENSIONS = 64
"""Most dimensions of a tensor that a reader accepts (the runtime's own limit is 16)."""


@dataclass(frozen=True, slots=True)
class PtdSegment:
    """A segment: offset relative to the base offset, and size, in bytes."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class PtdName:
    """One key of the named data, and the index of its segment."""

    key: str
    segment: int
    layout: TensorLayout | None = None


@dataclass(frozen=True, slots=True)
class PtdHeader:
    """What the header says. `header_size`: bytes from 0 to the end of the flatbuffer (what `headerDigest` covers)."""

    segment_base_offset: int
    segment_data_size: int
    header_size: int
    segments: tuple[PtdSegment, ...]
    names: tuple[PtdName, ...]


def build_header(
    segments: Sequence[tuple[int, int]], names: Sequence[tuple[SegmentName, int]], base_offset: int | None = None
) -> bytes:
    """The bytes from 0 to the end of the flatbuffer.

    `segments` are `(offset, size)` in file order, `names` keys with their segment's index. Without `base_offset` the
    segments follow in the natural place: the next multiple of 128 after the header.
    """
    body = _flatbuffer(segments, names)
    size = len(body) + PADDED_HEADER
    base = aligned(size, SEGMENT_ALIGNMENT) if base_offset is None else base_offset
    data = max((offset + length for offset, length in segments), default=0)
    header = _HEADER.pack(HEADER_MAGIC, _HEADER.size, PADDED_HEADER, len(body), base, data)
    root = struct.unpack_from("<I", body)[0] + PADDED_HEADER
    return b"".join((struct.pack("<I", root), body[4:8], header.ljust(PADDED_HEADER, b"\0"), body[8:]))


def with_base(header: bytes, base_offset: int) -> bytes:
    """The same header with the segments at `base_offset`."""
    at = HEADER_OFFSET + _HEADER.size - 16
    return b"".join((header[:at], struct.pack("<Q", base_offset), header[at + 8 :]))


def _flatbuffer(segments: Sequence[tuple[int, int]], names: Sequence[tuple[SegmentName, int]]) -> bytes:
    builder = flatbuffers.Builder(1024 + 160 * (len(segments) + len(names)))
    named = [_named_data(builder, name, index) for name, index in names]
    named_vector = _offsets(builder, named)
    placed = []
    for offset, size in segments:
        builder.StartObject(2)
        builder.PrependUint64Slot(0, offset, 0)
        builder.PrependUint64Slot(1, size, 0)
        placed.append(builder.EndObject())
    segment_vector = _offsets(builder, placed)
    builder.StartObject(3)
    builder.PrependUint32Slot(0, SCHEMA_VERSION, 0)
    builder.PrependUOffsetTRelativeSlot(1, segment_vector, 0)
    builder.PrependUOffsetTRelativeSlot(2, named_vector, 0)
    builder.Finish(builder.EndObject(), file_identifier=FILE_IDENTIFIER)
    return bytes(builder.Output())


def _named_data(builder: flatbuffers.Builder, name: SegmentName, index: int) -> int:
    layout = 0
    if name.layout is not None:
        # The vectors are written even when empty: the runtime follows them without a null check.
        builder.StartVector(4, len(name.layout.sizes), 4)
        for size in reversed(name.layout.sizes):
            builder.PrependInt32(size)
        sizes = builder.EndVector()
        builder.StartVector(1, len(name.layout.dim_order), 1)
        for dim in reversed(name.layout.dim_order):
            builder.PrependUint8(dim)
        order = builder.EndVector()
        builder.StartObject(3)
        builder.PrependInt8Slot(0, name.layout.scalar_type, 0)
        builder.PrependUOffsetTRelativeSlot(1, sizes, 0)
        builder.PrependUOffsetTRelativeSlot(2, order, 0)
        layout = builder.EndObject()
    key = builder.CreateString(name.key)
    builder.StartObject(3)
    builder.PrependUOffsetTRelativeSlot(0, key, 0)
    builder.PrependUint32Slot(1, index, 0)
    if layout:
        builder.PrependUOffsetTRelativeSlot(2, layout, 0)
    return int(builder.EndObject())


def _offsets(builder: flatbuffers.Builder, items: Sequence[int]) -> int:
    builder.StartVector(4, len(items), 4)
    for item in reversed(items):
        builder.PrependUOffsetTRelative(item)
    return int(builder.EndVector())


def read_header(read: Callable[[int, int], bytes], size: int) -> PtdHeader:
    """The header of a `.ptd` of `size` bytes, through `read(offset, length)`; reads nothing past the flatbuffer.

    Every offset and count is checked against the file before it is used. `VerificationFailed` for anything that is
    no `.ptd`, lies about its size, or has an unknown schema version.
    """
    if size < HEAD_BYTES:
        raise VerificationFailed(f"a .ptd has at least {HEAD_BYTES} bytes, this one {size}")
    head = read(0, HEAD_BYTES)
    if len(head) != HEAD_BYTES or head[4:8] != FILE_IDENTIFIER:
        raise VerificationFailed("the file is not a .ptd: it lacks the identifier FT01")
    magic, length, start, body, base, data = _HEADER.unpack_from(head, HEADER_OFFSET)
    if magic != HEADER_MAGIC or length < _HEADER.size:
        raise VerificationFailed("the .ptd has no extended header")
    if start < _HEADER.size or start + body > min(size, MAX_FLATBUFFER):
        raise VerificationFailed("the .ptd's flatbuffer lies outside of the file")
    end = start + body
    if base + data > size or (data and base < end):
        raise VerificationFailed("the .ptd's segments lie outside of the file or over its header")
    buffer = read(0, end)
    if len(buffer) != end:
        raise VerificationFailed("the .ptd ends inside its header")
    segments, names = _parse(buffer, data)
    return PtdHeader(base, data, end, segments, names)


def _parse(buffer: bytes, data: int) -> tuple[tuple[PtdSegment, ...], tuple[PtdName, ...]]:
    try:
        root = _Table(buffer, _u32(buffer, 0))
        if root.scalar(0, "<I") > SCHEMA_VERSION:
            raise VerificationFailed("the .ptd has a newer schema version", hint="Install a newer weightless.")
        segments = tuple(PtdSegment(t.scalar(0, "<Q"), t.scalar(1, "<Q")) for t in root.tables(1))
        names = []
        room = len(buffer)
        for table in root.tables(2):
            key = table.vector(0, 1)
            room -= len(key)
            if room < 0:
                raise VerificationFailed("the .ptd's keys are longer than its header")
            names.append(PtdName(key.decode("utf-8"), table.scalar(1, "<I"), _layout(table.table(2))))
    except (struct.error, UnicodeDecodeError, IndexError) as error:
        raise VerificationFailed("the .ptd's flatbuffer is damaged") from error
    for segment in segments:
        if segment.offset + segment.size > data:
            raise VerificationFailed(f"a segment at {segment.offset} of {segment.size} bytes lies outside of the .ptd")
    seen: set[str] = set()
    for name in names:
        if name.segment >= len(segments):
            raise VerificationFailed(f"the key {name.key!r} names a segment that the .ptd does not have")
        if name.key in seen:
            raise VerificationFailed(f"the key {name.key!r} stands twice in the .ptd")
        seen.add(name.key)
    return segments, tuple(names)


def _layout(table: _Table | None) -> TensorLayout | None:
    if table is None:
        return None
    raw, order = table.vector(1, 4), table.vector(2, 1)
    if len(raw) > 4 * MAX_DIMENSIONS or len(order) > MAX_DIMENSIONS:
        raise VerificationFailed(f"a tensor of the .ptd has more than {MAX_DIMENSIONS} dimensions")
    sizes = struct.unpack(f"<{len(raw) // 4}i", raw)
    return TensorLayout(table.scalar(0, "<b"), sizes, tuple(order))


def _u32(buffer: bytes, at: int) -> int:
    if at < 0:  # struct would count from the end
        raise IndexError(at)
    return int(struct.unpack_from("<I", buffer, at)[0])


class _Table:
    """A flatbuffers table whose every access is checked: the `flatbuffers` package has no verifier in Python."""

    __slots__ = ("_at", "_buffer", "_slots")

    def __init__(self, buffer: bytes, at: int) -> None:
        if not 0 <= at <= len(buffer) - 4:
            raise IndexError(at)
        vtable = at - struct.unpack_from("<i", buffer, at)[0]
        if not 0 <= vtable <= len(buffer) - 4:
            raise IndexError(vtable)
        size = struct.unpack_from("<H", buffer, vtable)[0]
        if size < 4 or size % 2 or vtable + size > len(buffer):
            raise IndexError(vtable)
        self._buffer = buffer
        self._at = at
        # No table of the schema has more than three fields; a longer vtable is a newer writer's.
        self._slots = struct.unpack_from(f"<{min(size // 2 - 2, 3)}H", buffer, vtable + 4)

    def _field(self, slot: int) -> int | None:
        offset = self._slots[slot] if slot < len(self._slots) else 0
        return self._at + offset if offset else None

    def scalar(self, slot: int, form: str) -> int:
        """The number in `slot`; 0, the schema's default, where it is absent."""
        at = self._field(slot)
        return 0 if at is None else int(struct.unpack_from(form, self._buffer, at)[0])

    def _target(self, at: int) -> int:
        return at + _u32(self._buffer, at)

    def table(self, slot: int) -> _Table | None:
        at = self._field(slot)
        return None if at is None else _Table(self._buffer, self._target(at))

    def vector(self, slot: int, width: int) -> bytes:
        """The bytes of a vector or string of items of `width` bytes."""
        at = self._field(slot)
        if at is None:
            return b""
        start = self._target(at)
        end = start + 4 + _u32(self._buffer, start) * width
        if end > len(self._buffer):
            raise IndexError(end)
        return self._buffer[start + 4 : end]

    def tables(self, slot: int) -> list[_Table]:
        at = self._field(slot)
        if at is None:
            return []
        start = self._target(at)
        count = _u32(self._buffer, start)
        if start + 4 + count * 4 > len(self._buffer):
            raise IndexError(count)
        return [_Table(self._buffer, self._target(start + 4 + 4 * index)) for index in range(count)]
