"""Fetch an export's files: in parallel, each byte checked as it lands, resumed after a kill, in place only when whole.

The order of things: names and sizes are checked first, against what the store says, then space is taken, then bytes
are fetched. A file is renamed into place after all files are whole and synced, so a folder never holds half an export.
Memory: the bound of `transfer.Limits`, and the manifest.
"""

from __future__ import annotations

import os
import threading
import unicodedata
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from exporter.artifact.cache import WeightCache, copy_bytes
from exporter.artifact.folder import WORK, Folder, local_errors
from exporter.artifact.headers import check_header, regions_of
from exporter.artifact.journal import Journal
from exporter.artifact.local import local_blob, write_all
from exporter.artifact.ports import Blob, Origin
from exporter.artifact.regions import Region
from exporter.artifact.transfer import CheckedPass, Limits, Outcome
from exporter.artifact.verify import crc_problem, describe, size_problem
from exporter.contract.errors import InvalidRequest, VerificationFailed
from exporter.contract.manifest import Data, File, Manifest, digest

Progress = Callable[[str, int, int], None]
"""Called from several threads with a file's name, the bytes of it that are done, and its size."""

Entry = File | Data
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class PulledFile:
    """One file of a pull. `fetched` bytes came over the network; `reused` were there from an earlier run."""

    name: str
    path: str
    size: int
    fetched: int
    reused: int
    published: bool = False


@dataclass(frozen=True, slots=True)
class PullReport:
    """The outcome of a pull."""

    files: tuple[PulledFile, ...]
    bytes_fetched: int
    bytes_reused: int


@dataclass(slots=True)
class _Counter:
    fetched: int = 0
    reused: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def select(manifest: Manifest, only: Collection[str] = ()) -> list[Entry]:
    """The manifest's files that `only` names: ``program``, ``data``, ``files``, or a file's name. Data comes first.

    `InvalidRequest` for a word that matches nothing.
    """
    groups: dict[str, Sequence[Entry]] = {"data": manifest.data, "files": manifest.files, "program": [manifest.program]}
    everything = [entry for entries in groups.values() for entry in entries]
    _check_names([entry.name for entry in everything])
    if not only:
        return everything
    chosen: list[Entry] = []
    for word in only:
        found = list(groups[word]) if word in groups else [entry for entry in everything if entry.name == word]
        if not found and word not in groups:
            raise InvalidRequest(
                f"the manifest has no file {word!r}",
                hint=f"It has: {', '.join(entry.name for entry in everything)}; or say program, data or files.",
            )
        chosen += found
    return [entry for entry in everything if entry in chosen]


def _check_names(names: Sequence[str]) -> None:
    seen = set()
    for name in names:
        plain = unicodedata.normalize("NFKC", name).casefold()
        if plain in seen:
            raise VerificationFailed(f"two files of the manifest would have the same name on some systems: {name!r}")
        if plain == WORK:
            raise VerificationFailed(f"a file of the manifest may not be called {WORK}")
        seen.add(plain)


def pull(
    manifest: Manifest,
    origin: Origin,
    out: Path,
    *,
    only: Collection[str] = (),
    limits: Limits | None = None,
    cache: WeightCache | None = None,
    progress: Progress | None = None,
    save: bytes | None = None,
) -> PullReport:
    """Fetch the chosen files into `out`; weights that `cache` holds are not fetched.

    `save`: the manifest's bytes, to be kept as `manifest.json` beside the files, for `verify` to find.

    Raises `VerificationFailed`, `Forbidden`, or an error of store or disk.
    """
    limits = limits or Limits()
    entries = select(manifest, only)
    if save is not None and any(entry.name.casefold() == MANIFEST for entry in entries):
        raise InvalidRequest(
            f"a file of the export is called {MANIFEST} itself", hint="Pull it without --save-manifest."
        )
    blobs = [_agreed(entry, origin) for entry in entries]
    pulled: list[PulledFile] = []
    with Folder(out) as folder:
        for entry, blob in zip(entries, blobs, strict=True):
            pulled.append(_Fetch(entry, blob, folder, limits, cache, progress).run())
        for file in pulled:
            if not file.published:
                folder.publish(file.name)
        if save is not None:
            folder.write_small(MANIFEST, save)
        folder.finish()
    return PullReport(tuple(pulled), sum(file.fetched for file in pulled), sum(file.reused for file in pulled))


def _agreed(entry: Entry, origin: Origin) -> Blob:
    blob = origin.locate(entry.name, entry.urls)
    if problem := size_problem(entry, blob):
        raise VerificationFailed(problem, file=entry.name)
    return blob


class _Fetch:
    """One file on its way into a folder."""

    def __init__(
        self,
        entry: Entry,
        blob: Blob,
        folder: Folder,
        limits: Limits,
        cache: WeightCache | None,
        progress: Progress | None,
    ) -> None:
        self._entry = entry
        self._blob = blob
        self._folder = folder
        self._limits = limits
        self._cache = cache if isinstance(entry, Data) else None
        self._progress = progress
        self._path = folder.path / entry.name
        self._regions = regions_of(entry, blob)
        self._done = 0
        self._count = _Counter()

    def run(self) -> PulledFile:
        """Leave the whole file as a synced part, unless it is in its place already."""
        if self._in_place():
            self._report(self._blob.size)
            return PulledFile(self._entry.name, str(self._path), self._blob.size, 0, self._blob.size, published=True)
        part = self._folder.open_part(self._entry.name)
        try:
            with local_errors(str(self._path)):
                if not self._from_cache(part):
                    self._reserve(part)
                    self._land(part)
                    if isinstance(self._entry, Data):
                        check_header(self._entry, local_blob(part, self._path))
                        if self._cache is not None:
                            self._cache.keep(self._entry, part)
                os.fsync(part)
        finally:
            os.close(part)
        return PulledFile(self._entry.name, str(self._path), self._blob.size, self._count.fetched, self._count.reused)

    def _in_place(self) -> bool:
        descriptor = self._folder.open_finished(self._entry.name)
        if descriptor is None:
            return False
        try:
            blob = local_blob(descriptor, self._path)
            return blob.size == self._blob.size and not CheckedPass(blob, self._regions, self._limits).run().bad
        finally:
            os.close(descriptor)

    def _from_cache(self, part: int) -> bool:
        if self._cache is None or not isinstance(self._entry, Data):
            return False
        kept = self._cache.open(self._entry)
        if kept is None:
            return False
        try:
            copy_bytes(kept, part, self._blob.size)
            # What is checked is the copy, so that nothing can change in between.
            if CheckedPass(local_blob(part, self._path), self._regions, self._limits).run().bad:
                self._cache.discard(self._entry)
                os.ftruncate(part, 0)
                return False
        finally:
            os.close(kept)
        self._cache.touch(self._entry)
        self._count.reused = self._blob.size
        self._report(self._blob.size)
        return True

    def _reserve(self, part: int) -> None:
        size = os.fstat(part).st_size
        if size > self._blob.size:
            os.ftruncate(part, 0)
        if self._blob.size:
            os.posix_fallocate(part, 0, self._blob.size)

    def _land(self, part: int) -> None:
        identity = digest(self._entry.model_dump_json(exclude={"urls"}).encode())
        journal = Journal(self._folder.open_journal(self._entry.name), identity, self._limits.block)
        try:
            outcome = self._pass(part, journal)
            if outcome.bad and self._count.reused:
                self._distrust(journal, outcome.bad)
                outcome = self._pass(part, journal)
            if outcome.bad:
                raise VerificationFailed(describe(self._entry, self._blob, self._regions, outcome.bad)[0])
            if problem := crc_problem(self._entry, self._blob, outcome.crc64nvme):
                raise VerificationFailed(problem, file=self._entry.name)
        finally:
            journal.close()

    def _pass(self, part: int, journal: Journal) -> Outcome:
        resumed = len(journal) > 0
        self._done = 0
        self._count = _Counter()
        return CheckedPass(
            self._blob,
            self._regions,
            self._limits,
            sink=_PartSink(part, journal, self._count),
            local=_Left(part, journal, self._limits.block, self._count) if resumed else None,
            progress=self._landed,
            stop_early=not resumed,
        ).run()

    def _distrust(self, journal: Journal, bad: Sequence[Region]) -> None:
        block = self._limits.block
        for region in bad:
            for index in range(region.offset // block, -(-region.end // block)):
                journal.distrust(index)

    def _landed(self, size: int) -> None:
        with self._count.lock:
            self._done += size
            done = self._done
        self._report(done)

    def _report(self, done: int) -> None:
        if self._progress is not None:
            self._progress(self._entry.name, done, self._blob.size)


class _PartSink:
    """Writes fetched blocks at their offsets, then notes them in the journal."""

    ordered = False

    def __init__(self, part: int, journal: Journal, count: _Counter) -> None:
        self._part = part
        self._journal = journal
        self._count = count

    def write(self, index: int, offset: int, data: memoryview) -> None:
        if index in self._journal:
            return
        write_all(self._part, offset, data)
        self._journal.add(index)
        with self._count.lock:
            self._count.fetched += len(data)


class _Left:
    """Reads back the blocks that an earlier run wrote."""

    def __init__(self, part: int, journal: Journal, block: int, count: _Counter) -> None:
        self._part = part
        self._journal = journal
        self._block = block
        self._count = count

    def __call__(self, index: int, view: memoryview) -> bool:
        if index not in self._journal:
            return False
        with self._count.lock:
            self._count.reused += len(view)
        if os.preadv(self._part, [view], index * self._block) == len(view):
            return True
        self._journal.distrust(index)
        return False
