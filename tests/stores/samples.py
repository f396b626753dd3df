"""Segments and listeners for tests of streams."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from exporter.contract.objects import Upload
from exporter.contract.segments import Chunk, Segment, SegmentName, TensorLayout
from exporter.stream.layout import aligned, segment_alignment

PLACES: set[tuple[str, str, str, int]] = set()
"""Where the fault suite let something go wrong: (upload or pull, store, fault, number of the request)."""


def content(seed: str, size: int) -> bytes:
    """`size` bytes that depend on `seed`."""
    return hashlib.shake_256(seed.encode()).digest(size) if size else b""


def segment(key: str, data: bytes, *, alignment: int = 1, chunk: int = 1 << 20, zeros: bool = False) -> Segment:
    """A segment of these bytes, a float32 vector as far as its name says."""

    def read() -> Iterator[Chunk]:
        for start in range(0, len(data), chunk):
            yield memoryview(data)[start : start + chunk]

    layout = TensorLayout(0, (len(data),), (0,))
    name = SegmentName(key, layout, fqn=key, dtype="uint8", shape=(len(data),), strides=(1,))
    return Segment((name,), len(data), read, alignment, zeros)


def reference(header: bytes, base: int, parts: Sequence[tuple[bytes, int]]) -> bytes:
    """The whole file by the simplest writer: header, zeros up to `base`, each content at its alignment."""
    out = bytearray(header.ljust(base, b"\0"))
    for data, alignment in parts:
        out += bytes(base + aligned(len(out) - base, segment_alignment(alignment)) - len(out))
        out += data
    return bytes(out)


@dataclass
class Listener:
    """Keeps what a stream tells."""

    events: list[str] = field(default_factory=list)
    uploads: list[Upload] = field(default_factory=list)
    progress: list[tuple[int, int]] = field(default_factory=list)

    def opened(self, upload: Upload, uri: str, part_size: int) -> None:
        self.events.append("opened")
        self.uploads.append(upload)

    def completed(self, upload: Upload, uri: str, part_size: int) -> None:
        self.events.append("completed")

    def aborted(self, upload: Upload, uri: str, part_size: int) -> None:
        self.events.append("aborted")

    def sent(self, done: int, total: int) -> None:
        self.progress.append((done, total))
