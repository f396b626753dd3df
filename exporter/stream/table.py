"""`SegmentTable`: which segments a `.ptd` holds, where, under which keys; equal content is there once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from exporter.contract.errors import InternalError
from exporter.contract.manifest import SegmentInfo, SegmentKey, canonical_json
from exporter.contract.segments import Segment, SegmentName
from exporter.stream.layout import segment_alignment


@dataclass(slots=True)
class Placed:
    """A run of bytes of the file (offset relative to the base), and every segment that shares it."""

    offset: int
    size: int
    sha256: str
    members: list[Segment] = field(default_factory=list)


class SegmentTable:
    """Filled in file order. `planned` are the source's segments, in first-use order, known before any byte."""

    def __init__(self, planned: Sequence[Segment]) -> None:
        self._planned = tuple(planned)
        self._planned_keys = {segment.names[0].key for segment in planned}
        self._by_content: dict[tuple[int, str], int] = {}
        self._by_key: dict[str, int] = {}
        self.placed: list[Placed] = []
        self.duplicate_bytes = 0

    def merge(self, segment: Segment, sha256: str) -> bool:
        """Give `segment`'s names to an earlier one of equal content, where that is aligned enough."""
        index = self._by_content.get((segment.size, sha256))
        if index is None or self.placed[index].offset % segment_alignment(segment.alignment):
            return False
        self._claim(segment, index)
        self.placed[index].members.append(segment)
        return True

    def record(self, segment: Segment, offset: int, sha256: str) -> None:
        """`segment` was stored at `offset`. Equal content that is already there counts as duplicate bytes."""
        index = len(self.placed)
        self._claim(segment, index)
        if self._by_content.setdefault((segment.size, sha256), index) != index:
            self.duplicate_bytes += segment.size
        self.placed.append(Placed(offset, segment.size, sha256, [segment]))

    def _claim(self, segment: Segment, index: int) -> None:
        for name in segment.names:
            if self._by_key.setdefault(name.key, index) != index:
                raise InternalError(f"two different segments have the key {name.key!r}")

    def names(self, used: Mapping[str, Sequence[str]] | None) -> tuple[list[tuple[SegmentName, int]], int]:
        """Every key of the file with its segment's index, and the bytes that no method asks for.

        `used` maps a planned segment's first key to the keys that the program asks for; None: all as planned.
        """
        names: dict[str, tuple[SegmentName, int]] = {}
        unused = 0
        for index, placed in enumerate(self.placed):
            kept = [name for member in placed.members for name in self._wanted(member, used)]
            if not kept:
                unused += placed.size
                kept = [
                    replace(member.names[0], key=f"unused:{member.names[0].fqn or member.names[0].key}")
                    for member in placed.members
                ]
            for name in kept:
                if names.setdefault(name.key, (name, index))[1] != index:
                    raise InternalError(f"two different segments have the key {name.key!r}")
        return list(names.values()), unused

    def _wanted(self, segment: Segment, used: Mapping[str, Sequence[str]] | None) -> Iterator[SegmentName]:
        first = segment.names[0]
        if used is None or first.key not in self._planned_keys:
            yield from segment.names
            return
        by_key = {name.key: name for name in segment.names}
        for key in used.get(first.key, ()):
            yield by_key.get(key) or replace(first, key=key)

    def ranges(self) -> list[tuple[int, int]]:
        """Offset and size of each segment, in file order."""
        return [(placed.offset, placed.size) for placed in self.placed]

    def describe(self, names: Sequence[tuple[SegmentName, int]]) -> tuple[SegmentInfo, ...]:
        """The segments as a manifest lists them."""
        keys: list[list[SegmentKey]] = [[] for _ in self.placed]
        for name, index in names:
            keys[index].append(_manifest_key(name))
        return tuple(
            SegmentInfo(offset=p.offset, size=p.size, digest=f"sha256:{p.sha256}", names=tuple(keys[index]))
            for index, p in enumerate(self.placed)
        )

    def weight_set(self) -> str:
        """The weight-set digest: over ``[[key, size, sha256], …]`` of the planned segments, in planned order.

        Where nothing was planned (back ends that pack weights themselves), of all segments in file order.
        """
        sha256 = {name.key: p.sha256 for p in self.placed for member in p.members for name in member.names}
        source = self._planned or [member for placed in self.placed for member in placed.members]
        rows = [[name.key, s.size, sha256[name.key]] for s in source for name in s.names if name.key in sha256]
        return _digest(rows)


def layout_digest(segments: Sequence[Segment]) -> str:
    """The layout digest: over ``[[key, size], …]``, known before a byte is read."""
    return _digest([[name.key, segment.size] for segment in segments for name in segment.names])


def _digest(rows: list[list[str | int]] | list[list[object]]) -> str:
    return "sha256:" + hashlib.sha256(canonical_json(rows)).hexdigest()


def _manifest_key(name: SegmentName) -> SegmentKey:
    if name.fqn is None:
        return SegmentKey(key=name.key)
    return SegmentKey(
        key=name.key,
        fqn=name.fqn,
        dtype=name.dtype,
        shape=name.shape,
        strides=name.strides,
        storage_offset=name.storage_offset,
    )
