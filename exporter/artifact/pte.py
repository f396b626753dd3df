"""The head of a `.pte` (an ExecuTorch program), read without ExecuTorch and without its segments.

Format, from ExecuTorch 1.5.1 (`schema/program.fbs`, `schema/extended_header.h`): a flatbuffer with file identifier
``ET12``; at byte 8 an extended header ``eh00``: its length (u32), size of the flatbuffer, segment base offset and, from
length 32 on, segment data size (u64, little endian). A file without it is all flatbuffer. Slots are the order of
fields in the schema. Every offset and count is checked before it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from exporter.artifact.flatbuffer import Budget, Table
from exporter.contract.errors import VerificationFailed
from exporter.contract.segments import SCALAR_TYPES

FILE_IDENTIFIERS = (b"ET12", b"ET13")
HEAD_BYTES = 64
MAX_FLATBUFFER = 256 * 2**20
"""Largest flatbuffer that is read, in bytes."""
MAX_TABLES = 4_000_000
"""Tables that are visited at most."""
_HEADER = struct.Struct("<4sIQQ")
_TENSOR, _EXTERNAL = 5, 1
_VALUES = {
    1: "none",
    2: "int",
    3: "bool",
    4: "float",
    6: "string",
    7: "int[]",
    8: "float[]",
    9: "bool[]",
    10: "tensor[]",
    11: "tensor?[]",
}


@dataclass(frozen=True, slots=True)
class PteTensor:
    """A tensor in or out of a method: torch's dtype name, and its upper-bound shape."""

    dtype: str
    shape: tuple[int, ...]
    dynamic: bool = False

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]{' (dynamic)' if self.dynamic else ''}"


@dataclass(frozen=True, slots=True)
class PteMethod:
    """A method: what goes in and out, its delegates and operators, its planned memory, its external tensors."""

    name: str
    inputs: tuple[PteTensor | str, ...]
    outputs: tuple[PteTensor | str, ...]
    delegates: tuple[str, ...]
    operators: tuple[str, ...]
    planned_memory: tuple[int, ...]
    external: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PteHeader:
    """What a program's head says; `segments` are `(offset, size)` from the file's start."""

    version: int
    program_size: int
    segment_base_offset: int
    methods: tuple[PteMethod, ...]
    segments: tuple[tuple[int, int], ...]
    named_data: tuple[str, ...]


def read_pte(read: Callable[[int, int], bytes], size: int) -> PteHeader:
    """The head of a `.pte` of `size` bytes, through `read(offset, length)`. `VerificationFailed` where it is none."""
    if size < HEAD_BYTES:
        raise VerificationFailed(f"a .pte has at least {HEAD_BYTES} bytes, this one {size}")
    head = read(0, HEAD_BYTES)
    if head[4:8] not in FILE_IDENTIFIERS:
        raise VerificationFailed("the file is not a .pte: it lacks the identifier ET12")
    magic, length, program, base = _HEADER.unpack_from(head, 8)
    if magic != b"eh00" or length < _HEADER.size:
        program, base = size, 0
    if not 0 < program <= size or base > size:
        raise VerificationFailed("the .pte's header points outside of the file")
    if program > MAX_FLATBUFFER:
        raise VerificationFailed(f"the .pte's flatbuffer has {program} bytes, more than {MAX_FLATBUFFER}")
    buffer = read(0, program)
    try:
        root = Table.root(buffer, Budget(MAX_TABLES, 2 * len(buffer) + 2**20))
        return _program(root, program, base, size)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise VerificationFailed("the .pte's flatbuffer is damaged") from error


def _program(root: Table, program: int, base: int, size: int) -> PteHeader:
    segments = []
    for segment in root.tables(4):
        start, length = base + segment.scalar(0, "<Q"), segment.scalar(1, "<Q")
        if start + length > size:
            raise VerificationFailed(f"the .pte is cut short: a segment ends at {start + length} of {size} bytes")
        segments.append((start, length))
    return PteHeader(
        version=root.scalar(0, "<I"),
        program_size=program,
        segment_base_offset=base,
        methods=tuple(_method(plan) for plan in root.tables(1)),
        segments=tuple(segments),
        named_data=tuple(_text(entry, 0) for entry in root.tables(7)),
    )


def _method(plan: Table) -> PteMethod:
    values = plan.tables(2)
    return PteMethod(
        name=_text(plan, 0),
        inputs=tuple(_value(values[index]) for index in _ints(plan, 3)),
        outputs=tuple(_value(values[index]) for index in _ints(plan, 4)),
        delegates=tuple(sorted({_text(delegate, 0) for delegate in plan.tables(7)})),
        operators=tuple(sorted({".".join(filter(None, (_text(op, 0), _text(op, 1)))) for op in plan.tables(6)})),
        planned_memory=_longs(plan, 8)[1:],
        external=tuple(sorted({name for value in values if (name := _external(value)) is not None})),
    )


def _tensor(value: Table) -> Table | None:
    return value.table(1) if value.scalar(0, "<B") == _TENSOR else None


def _value(value: Table) -> PteTensor | str:
    tensor = _tensor(value)
    if tensor is None:
        return _VALUES.get(value.scalar(0, "<B"), "unknown")
    code = tensor.scalar(0, "<b")
    return PteTensor(SCALAR_TYPES.get(code, f"type {code}"), _ints(tensor, 2), bool(tensor.scalar(8, "<b")))


def _external(value: Table) -> str | None:
    tensor = _tensor(value)
    extra = tensor.table(9) if tensor is not None else None
    return _text(extra, 1) if extra is not None and extra.scalar(2, "<b") == _EXTERNAL else None


def _text(table: Table, slot: int) -> str:
    return table.vector(slot, 1).decode("utf-8")


def _ints(table: Table, slot: int) -> tuple[int, ...]:
    raw = table.vector(slot, 4)
    found = struct.unpack(f"<{len(raw) // 4}i", raw)
    return tuple(found)


def _longs(table: Table, slot: int) -> tuple[int, ...]:
    raw = table.vector(slot, 8)
    found = struct.unpack(f"<{len(raw) // 8}q", raw)
    return tuple(found)
