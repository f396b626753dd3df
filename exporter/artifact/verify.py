"""Re-check stored bytes against the manifest: everything is read once, nothing is written to disk.

Memory: the bound of `transfer.Limits`, and the manifest. What differs is told apart as far as bytes can tell it:
absent, empty, cut short, too long, zeroed, altered, or another export's file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from exporter.artifact.headers import check_header, regions_of
from exporter.artifact.ports import Blob, Origin
from exporter.artifact.regions import Region
from exporter.artifact.transfer import CheckedPass, Limits, all_zero
from exporter.contract.errors import NotFound, VerificationFailed
from exporter.contract.manifest import Data, File, Manifest

MAX_PROBLEMS = 20
"""Problems that one file's report lists; their count is always exact."""
_PAGE = 256
"""Bytes; a run of zeros in altered bytes is looked for at this grain."""


@dataclass(frozen=True, slots=True)
class FileCheck:
    """The outcome for one file: `problems` are sentences; `bad_bytes` counts bytes of regions that differ."""

    name: str
    uri: str | None
    size: int
    regions: int
    problems: tuple[str, ...] = ()
    bad_regions: int = 0
    bad_bytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether the stored bytes are those of the manifest."""
        return not self.problems


def verify(
    manifest: Manifest,
    origin: Origin,
    *,
    limits: Limits | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> list[FileCheck]:
    """Check every file. A file's faults are in its report; an error is raised where the store cannot be read."""
    entries: list[File | Data] = [manifest.program, *manifest.data, *manifest.files]
    return [check_file(entry, origin, limits or Limits(), progress) for entry in entries]


def check_file(
    entry: File | Data, origin: Origin, limits: Limits, progress: Callable[[str, int], None] | None = None
) -> FileCheck:
    """Read one file once and report."""
    try:
        blob = origin.locate(entry.name, entry.urls)
    except NotFound as error:
        return FileCheck(entry.name, None, entry.size, 0, (error.message,))
    if problem := size_problem(entry, blob):
        return FileCheck(entry.name, blob.uri, entry.size, 0, (problem,))
    try:
        regions = regions_of(entry, blob)
    except VerificationFailed as error:
        return FileCheck(entry.name, blob.uri, entry.size, 0, (f"{entry.name}: {error.message}",))

    def count(size: int) -> None:
        if progress is not None:
            progress(entry.name, size)

    outcome = CheckedPass(blob, regions, limits, progress=count, stop_early=False).run()
    problems = describe(entry, blob, regions, outcome.bad) if outcome.bad else []
    if not problems:
        problems = _whole_problems(entry, blob, outcome.crc64nvme)
    return FileCheck(
        entry.name,
        blob.uri,
        entry.size,
        len(regions),
        tuple(problems),
        len(outcome.bad),
        sum(region.size for region in outcome.bad),
    )


def _whole_problems(entry: File | Data, blob: Blob, crc: str) -> list[str]:
    if problem := crc_problem(entry, blob, crc):
        return [problem]
    if isinstance(entry, Data):
        try:
            check_header(entry, blob)
        except VerificationFailed as error:
            return [error.message]
    return []


def size_problem(entry: File | Data, blob: Blob) -> str | None:
    """The sentence for a stored size that is not the manifest's."""
    if blob.size == entry.size:
        return None
    if blob.size == 0:
        return f"{entry.name} is empty where {entry.size} bytes are expected: {blob.uri}"
    if blob.size < entry.size:
        return f"{entry.name} is cut short: {blob.size} of {entry.size} bytes are at {blob.uri}"
    return f"{entry.name} is too long: {blob.size} bytes are at {blob.uri}, {entry.size} are expected"


def crc_problem(entry: File | Data, blob: Blob, crc: str) -> str | None:
    """The sentence for a CRC64NVME of the whole that differs from the manifest's or from the store's own."""
    if isinstance(entry, Data) and entry.crc64nvme is not None and entry.crc64nvme != crc:
        return f"{entry.name}: the CRC64NVME of its bytes is {crc}, the manifest says {entry.crc64nvme}"
    if blob.crc64nvme is not None and blob.crc64nvme != crc:
        return f"{entry.name}: the CRC64NVME of its bytes is {crc}, its store says {blob.crc64nvme}"
    return None


def describe(entry: File | Data, blob: Blob, regions: Sequence[Region], bad: Sequence[Region]) -> list[str]:
    """Sentences for regions that differ; reads the first ones again to tell zeroed from altered bytes."""
    digested = [region for region in regions if region.digest is not None]
    differing = [region for region in bad if region.digest is not None]
    zeroed = {region.offset for region in differing[:MAX_PROBLEMS] if _zeroed(blob, region)}
    bad_bytes, all_bytes = sum(region.size for region in differing), sum(region.size for region in digested)
    if isinstance(entry, Data) and len(differing) > 1 and 2 * bad_bytes > all_bytes and not zeroed:
        return [
            f"{entry.name} is another file: {len(differing)} of {len(digested)} regions differ from the manifest, "
            f"{differing[0].label} first"
        ]
    return [_sentence(entry, region, region.offset in zeroed) for region in bad[:MAX_PROBLEMS]]


def _sentence(entry: File | Data, region: Region, zeroed: bool) -> str:
    where = f"{entry.name}: {region.label} at {region.offset} of {region.size} bytes"
    if region.digest is None:
        return f"{where} is not zeros"
    if zeroed:
        return f"{where} was zeroed, in whole or in part: its SHA-256 is not {region.digest}"
    return f"{where} was altered: its SHA-256 is not {region.digest}"


def _zeroed(blob: Blob, region: Region) -> bool:
    """Whether a quarter or more of a region's pages are zeros, which bytes altered at random never are."""
    buffer = bytearray(min(region.size, 4 * 2**20))
    pages = zeros = 0
    for at in range(region.offset, region.end, len(buffer)):
        size = min(len(buffer), region.end - at)
        blob.read_into(at, memoryview(buffer)[:size])
        for start in range(0, size, _PAGE):
            pages += 1
            zeros += all_zero(buffer, start, min(start + _PAGE, size))
    return 4 * zeros >= pages
