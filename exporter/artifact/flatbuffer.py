"""Reads flatbuffers that nobody vouches for: the `flatbuffers` package follows offsets in Python without a check."""

from __future__ import annotations

import struct

from flatbuffers.number_types import SOffsetTFlags, UOffsetTFlags, VOffsetTFlags

_U32 = struct.Struct("<I")
_I32 = struct.Struct("<i")
_WORD = UOffsetTFlags.bytewidth
MAX_FIELDS = 32
"""Fields of one table that are read; no table here has more."""


class Budget:
    """How many tables and vector bytes one file may make a reader visit; offsets that point at the same place over and
    over would otherwise turn a small file into endless work. `IndexError` when it is spent."""

    def __init__(self, tables: int, size: int) -> None:
        self._tables = tables
        self._size = size

    def spend(self, tables: int = 0, size: int = 0) -> None:
        """Take from what is left."""
        self._tables -= tables
        self._size -= size
        if self._tables < 0 or self._size < 0:
            raise IndexError("budget")


class Table:
    """A table; each access is checked against the buffer and raises `IndexError` or `struct.error` outside of it."""

    __slots__ = ("_at", "_budget", "_buffer", "_slots")

    def __init__(self, buffer: bytes, at: int, budget: Budget) -> None:
        budget.spend(tables=1)
        if not 0 <= at <= len(buffer) - SOffsetTFlags.bytewidth:
            raise IndexError(at)
        vtable = at - _I32.unpack_from(buffer, at)[0]
        if not 0 <= vtable <= len(buffer) - 2 * VOffsetTFlags.bytewidth:
            raise IndexError(vtable)
        size = int.from_bytes(buffer[vtable : vtable + 2], "little")
        if size < 4 or size % 2 or vtable + size > len(buffer):
            raise IndexError(vtable)
        self._buffer = buffer
        self._at = at
        self._budget = budget
        self._slots = struct.unpack_from(f"<{min(size // 2 - 2, MAX_FIELDS)}H", buffer, vtable + 4)

    @classmethod
    def root(cls, buffer: bytes, budget: Budget) -> Table:
        """The root table of a buffer."""
        return cls(buffer, _U32.unpack_from(buffer, 0)[0], budget)

    def _field(self, slot: int) -> int | None:
        offset = self._slots[slot] if slot < len(self._slots) else 0
        return self._at + offset if offset else None

    def scalar(self, slot: int, form: str) -> int:
        """The number in `slot`, in `struct` notation; 0, the default of all fields here, where it is absent."""
        at = self._field(slot)
        return 0 if at is None else int(struct.unpack_from(form, self._buffer, at)[0])

    def _target(self, at: int) -> int:
        return at + int(_U32.unpack_from(self._buffer, at)[0])

    def table(self, slot: int) -> Table | None:
        """The table that `slot` points at."""
        at = self._field(slot)
        return None if at is None else Table(self._buffer, self._target(at), self._budget)

    def vector(self, slot: int, width: int) -> bytes:
        """The bytes of a vector or string of items of `width` bytes."""
        at = self._field(slot)
        if at is None:
            return b""
        start, count = self._vector(at, width)
        self._budget.spend(size=count * width)
        return self._buffer[start : start + count * width]

    def tables(self, slot: int) -> list[Table]:
        """The tables that a vector of offsets points at."""
        at = self._field(slot)
        if at is None:
            return []
        start, count = self._vector(at, _WORD)
        self._budget.spend(size=count * _WORD)
        return [Table(self._buffer, self._target(start + _WORD * i), self._budget) for i in range(count)]

    def _vector(self, at: int, width: int) -> tuple[int, int]:
        start = self._target(at)
        count = int(_U32.unpack_from(self._buffer, start)[0])
        if start + _WORD + count * width > len(self._buffer):
            raise IndexError(count)
        return start + _WORD, count
