"""Reads a stored artifact back by range and compares every byte with what its descriptors say.

A data file that is absent, empty, cut, zeroed, changed or replaced gives six different messages and `details["kind"]`s:
ExecuTorch 1.5.1 itself crashes on the first and runs the last three with wrong numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from exporter.check.ports import Reads, StoredArtifact
from exporter.contract.errors import NotFound, VerificationFailed
from exporter.contract.manifest import Data, Program

CHUNK = 8 * 2**20
"""Bytes of one ranged read; two of them are held at once."""
ZERO_RUN = 64
"""Zero bytes in a row that tell a zeroed segment from a changed one; weights hardly have 16 zeros in a row."""


def read_back(reads: Reads, artifact: StoredArtifact, folder: Path) -> tuple[Path, tuple[Path, ...]]:
    """Copy program and data files into `folder`, checked on the way; their paths. `VerificationFailed` otherwise."""
    program = folder / artifact.program.name
    _read_program(reads, artifact.program_key, artifact.program, program)
    paths = []
    for key, data in artifact.data:
        paths.append(folder / data.name)
        read_data(reads, key, data, paths[-1])
    return program, tuple(paths)


def _read_program(reads: Reads, key: str, program: Program, path: Path) -> None:
    _check_size(reads, key, program.name, program.size)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for chunk in _chunks(reads, key, program.name, program.size):
            digest.update(chunk)
            file.write(chunk)
    if f"sha256:{digest.hexdigest()}" != program.digest:
        raise _failed("changed", program.name, f"{program.name} differs from what was sent: its SHA-256 is another one")


def read_data(reads: Reads, key: str, data: Data, path: Path) -> None:
    """Copy one data file to `path`, every region compared with its digest. `VerificationFailed` names what differs."""
    _check_size(reads, key, data.name, data.size)
    regions = list(_regions(data))
    with path.open("w+b") as file:
        _copy(_chunks(reads, key, data.name, data.size), regions, file)
        wrong = [region for region in regions if region.differs()]
        if wrong:
            raise _diagnosis(data, wrong, regions, file)


def _check_size(reads: Reads, key: str, name: str, size: int) -> None:
    stored = reads.head(key)
    if stored is None:
        raise _failed("absent", name, f"{name} is not in the store")
    if stored.size == 0 and size:
        raise _failed("empty", name, f"{name} is empty in the store, {size} bytes were sent")
    if stored.size < size:
        raise _failed("truncated", name, f"{name} is cut short in the store: {stored.size} of {size} bytes")
    if stored.size > size:
        raise _failed("longer", name, f"{name} is longer in the store: {stored.size} bytes, {size} were sent")


def _chunks(reads: Reads, key: str, name: str, size: int) -> Iterator[bytes]:
    for offset in range(0, size, CHUNK):
        try:
            yield reads.read(key, offset, min(CHUNK, size - offset))
        except NotFound as error:
            raise _failed("absent", name, f"{name} is not in the store") from error


@dataclass(slots=True)
class _Region:
    """A run of a data file: its header, a segment (`index`), or zeros between them."""

    start: int
    end: int
    digest: str | None = None
    index: int | None = None
    _hash: hashlib._Hash = field(default_factory=hashlib.sha256)
    _nonzero: bool = False

    def update(self, piece: memoryview) -> None:
        if self.digest is not None:
            self._hash.update(piece)
        elif not self._nonzero:
            self._nonzero = bytes(len(piece)) != piece

    def differs(self) -> bool:
        return self._nonzero if self.digest is None else f"sha256:{self._hash.hexdigest()}" != self.digest


def _regions(data: Data) -> Iterator[_Region]:
    at = 0
    if data.header_size:
        yield _Region(0, data.header_size, data.header_digest)
        at = data.header_size
    elif data.segments:
        at = data.segment_base_offset  # a manifest without the header's size: what the header covers is not checked
    for index, segment in enumerate(data.segments):
        start = data.segment_base_offset + segment.offset
        if start > at:
            yield _Region(at, start)
        yield _Region(start, start + segment.size, segment.digest, index)
        at = start + segment.size
    if at < data.size:
        yield _Region(at, data.size)


def _copy(chunks: Iterator[bytes], regions: list[_Region], file: BinaryIO) -> None:
    waiting = iter(regions)
    region = next(waiting, None)
    offset = 0
    for chunk in chunks:
        file.write(chunk)
        view = memoryview(chunk)
        while region is not None and region.start < offset + len(chunk):
            region.update(view[max(0, region.start - offset) : region.end - offset])
            if region.end > offset + len(chunk):
                break
            region = next(waiting, None)
        offset += len(chunk)


def _diagnosis(data: Data, wrong: list[_Region], regions: list[_Region], file: BinaryIO) -> VerificationFailed:
    segments = [region for region in wrong if region.index is not None]
    names = [_name(data, region) for region in segments]
    zeroed = [_name(data, region) for region in segments if _has_zero_run(file, region)]
    total = sum(region.end - region.start for region in regions if region.index is not None)
    changed = sum(region.end - region.start for region in segments)
    header = any(region.digest is not None and region.index is None for region in wrong)
    if zeroed:
        text = f"{data.name} is zeroed in part: {_listed(zeroed)} read back as zeros that were not sent"
        return _failed("zeroed", data.name, text, zeroed)
    if segments and (header or (len(segments) > 1 and 2 * changed > total)):
        text = (
            f"{data.name} holds other weights than were sent: {len(segments)} of {len(data.segments)} segments differ"
        )
        return _failed("replaced", data.name, text, names)
    if segments:
        return _failed("changed", data.name, f"{data.name} was changed in the store: {_listed(names)} differ", names)
    where = "its header differs" if header else "the padding between its segments is not zero"
    return _failed("header", data.name, f"{data.name} was changed in the store: {where}")


def _name(data: Data, region: _Region) -> str:
    assert region.index is not None
    return data.segments[region.index].names[0].key


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more segments" if len(names) > 3 else "")


def _has_zero_run(file: BinaryIO, region: _Region) -> bool:
    run = bytes(min(ZERO_RUN, region.end - region.start))
    tail = b""
    file.seek(region.start)
    left = region.end - region.start
    while left > 0 and (chunk := file.read(min(CHUNK, left))):
        if run in tail + chunk:
            return True
        tail = chunk[-ZERO_RUN:]
        left -= len(chunk)
    return False


def _failed(kind: str, name: str, message: str, segments: list[str] | None = None) -> VerificationFailed:
    return VerificationFailed(message, kind=kind, file=name, segments=(segments or [])[:50])
