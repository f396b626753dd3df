"""A strict reader of the zip archives that `torch.export.save` and `torch.save` write: stored members, read by range.

Only the members' places are read from the archive's directory; no member is ever unpacked. Format: PKWARE APPNOTE
6.3.10, sections 4.3.7 (local header), 4.3.12 (central directory), 4.3.14 to 4.3.16 (end records, with zip64).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from exporter.contract.errors import SourceNotFound, SourceUnsafe
from exporter.source.ports import RangeReader

MAX_DIRECTORY = 64 * 2**20
"""Largest central directory that is read, in bytes: some 500,000 members."""

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")


@dataclass(frozen=True, slots=True)
class Member:
    """One stored member: where its local header begins, the bytes of its data, and where the next thing begins."""

    name: str
    header: int
    size: int
    limit: int


class Archive:
    """The members of one archive by name, without the archive's own root folder.

    `SourceUnsafe` for anything that a plain writer of stored members does not write: compression, encryption, comments,
    two members of one name, members that overlap or leave the file, sizes that disagree.
    """

    def __init__(self, reader: RangeReader, name: str) -> None:
        self.reader = reader
        self.name = name
        self._offsets: dict[str, int] = {}
        start, length, count = self._end()
        if length > MAX_DIRECTORY or start + length > reader.size:
            raise self._unsafe(f"says that its directory has {length} bytes at {start}", start)
        members = list(self._entries(reader.read(start, length), start, count))
        self._check_apart(members, start)
        self._members = self._without_root(members)

    def members(self) -> Mapping[str, Member]:
        """Members by name."""
        return self._members

    def __contains__(self, name: object) -> bool:
        return name in self._members

    def offset(self, name: str) -> int:
        """Where in the file the member's data begins. Reads its local header once and compares it."""
        if name not in self._offsets:
            member = self._members[name]
            head = self.reader.read(member.header, _LOCAL.size)
            magic, _, _, method, _, _, _, _, _, name_length, extra = _LOCAL.unpack(head)
            data = member.header + _LOCAL.size + name_length + extra
            if magic != b"PK\x03\x04" or method != 0 or data + member.size > member.limit:
                raise self._unsafe(f"has a local header for {name!r} that its directory contradicts", member.header)
            local = self.reader.read(member.header + _LOCAL.size, name_length)
            if local != member.name.encode():
                raise self._unsafe(f"calls one member {name!r} and {local[:200]!r}", member.header)
            self._offsets[name] = data
        return self._offsets[name]

    def size(self, name: str) -> int:
        """Bytes of a member's data; `SourceNotFound` if there is no such member."""
        if name not in self._members:
            raise SourceNotFound(f"{self.name} has no member {name}.", file=self.name)
        return self._members[name].size

    def read(self, name: str, limit: int) -> bytes:
        """All data of a member of at most `limit` bytes."""
        size = self.size(name)
        if size > limit:
            raise self._unsafe(f"has {size} bytes in {name}, more than the {limit} that are read", None)
        return self.reader.read(self.offset(name), size)

    def _unsafe(self, problem: str, offset: int | None) -> SourceUnsafe:
        return SourceUnsafe(f"{self.name} {problem}.", file=self.name, offset=offset)

    def _end(self) -> tuple[int, int, int]:
        """Start, length and entry count of the central directory, which must reach to the end records."""
        size = self.reader.size
        if size < _END.size:
            raise self._unsafe(f"has {size} bytes: it is not an archive", 0)
        fields = _END.unpack(self.reader.read(size - _END.size, _END.size))
        magic, disk, first_disk, here, count, length, start, comment = fields
        if magic != b"PK\x05\x06" or comment:
            raise self._unsafe("is not an archive, or was cut short, or has a comment after it", size - _END.size)
        end = size - _END.size
        wide = self._end64(end)
        if wide is not None:
            end, start, length, count, here = wide
            disk = first_disk = 0
        if disk or first_disk or here != count or start + length != end:
            raise self._unsafe("has end records that do not fit its directory", end)
        return start, length, count

    def _end64(self, end: int) -> tuple[int, int, int, int, int] | None:
        """The same from the zip64 records, which PyTorch writes whether they are needed or not; None without them."""
        place = end - _LOCATOR.size - _END64.size
        if place < 0:
            return None
        magic, disk, offset, disks = _LOCATOR.unpack(self.reader.read(end - _LOCATOR.size, _LOCATOR.size))
        if magic != b"PK\x06\x07":
            return None
        if disk or disks > 1 or offset != place:
            raise self._unsafe("has a zip64 locator that does not fit", end)
        fields = _END64.unpack(self.reader.read(place, _END64.size))
        magic, record, _, _, this, first, here, count, length, start = fields
        if magic != b"PK\x06\x06" or record != _END64.size - 12 or this or first:
            raise self._unsafe("has a zip64 record that does not fit", place)
        return place, start, length, count, here

    def _entries(self, data: bytes, start: int, count: int) -> Iterator[Member]:
        position, found = 0, 0
        while position < len(data):
            if position + _CENTRAL.size > len(data):
                raise self._unsafe("has a directory that ends within an entry", start + position)
            fields = _CENTRAL.unpack_from(data, position)
            magic, flags, method, packed, size = fields[0], fields[3], fields[4], fields[8], fields[9]
            name_length, extra, comment, header = fields[10], fields[11], fields[12], fields[16]
            after = position + _CENTRAL.size + name_length + extra + comment
            if magic != b"PK\x01\x02" or after > len(data):
                raise self._unsafe("has a directory entry that does not fit", start + position)
            named = position + _CENTRAL.size + name_length
            name = self._name(data[position + _CENTRAL.size : named], start + position)
            more = data[named : named + extra]
            size, packed, header = self._wide(more, size, packed, header, start + position)
            if flags & 0x41 or method or size != packed:
                raise self._unsafe(f"has {name!r} compressed or encrypted; members must be stored", header)
            yield Member(name, header, size, 0)
            position, found = after, found + 1
        if found != count:
            raise self._unsafe(f"says that it has {count} members and lists {found}", start)

    def _name(self, raw: bytes, offset: int) -> str:
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._unsafe("has a member whose name is not UTF-8", offset) from error
        if not name.isprintable() or "\\" in name or any(part in ("", ".", "..") for part in name.split("/")):
            raise self._unsafe(f"has a member called {name[:200]!r}", offset)
        return name

    def _wide(self, extra: bytes, size: int, packed: int, header: int, offset: int) -> tuple[int, int, int]:
        """The 64-bit values of the zip64 extra field, for those that did not fit 32 bits."""
        values = [size, packed, header]
        if 0xFFFFFFFF not in values:
            return size, packed, header
        position = 0
        while position + 4 <= len(extra):
            kind, length = struct.unpack_from("<2H", extra, position)
            body = extra[position + 4 :][:length]
            if kind == 1:
                for index, value in enumerate(values):
                    if value == 0xFFFFFFFF and len(body) >= 8:
                        values[index] = int.from_bytes(body[:8], "little")
                        body = body[8:]
                return values[0], values[1], values[2]
            position += 4 + length
        raise self._unsafe("has an entry without the zip64 field that it needs", offset)

    def _check_apart(self, members: list[Member], directory: int) -> None:
        """No two members share a byte, and all end before the directory. Sets each member's `limit`."""
        order = sorted(range(len(members)), key=lambda index: members[index].header)
        for place, index in enumerate(order):
            member = members[index]
            limit = members[order[place + 1]].header if place + 1 < len(order) else directory
            if member.header + _LOCAL.size + len(member.name.encode()) + member.size > limit:
                raise self._unsafe(f"has {member.name!r} over the bytes of something else", member.header)
            members[index] = Member(member.name, member.header, member.size, limit)

    def _without_root(self, members: list[Member]) -> dict[str, Member]:
        found: dict[str, Member] = {}
        roots = {member.name.partition("/")[0] for member in members}
        if len(roots) != 1:
            raise self._unsafe("has no one root folder, as PyTorch's archives have", None)
        for member in members:
            name = member.name.partition("/")[2]
            if not name or name in found:
                raise self._unsafe(f"has two members called {member.name!r}, or one without a name", member.header)
            found[name] = member
        return found
