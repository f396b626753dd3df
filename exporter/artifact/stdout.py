"""One file as a stream: read in parallel, written in order, the end held back until all of it was found good.

What is written before the end may be wrong; a reader must look at the exit status, as with any pipe.
"""

from __future__ import annotations

from typing import BinaryIO

from exporter.artifact.headers import regions_of
from exporter.artifact.ports import Origin
from exporter.artifact.pull import Entry, Progress
from exporter.artifact.transfer import CheckedPass, Limits
from exporter.artifact.verify import crc_problem, describe, size_problem
from exporter.contract.errors import VerificationFailed


class _StreamSink:
    ordered = True

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._held = b""

    def write(self, index: int, offset: int, data: memoryview) -> None:
        """Pass on the block before and keep this one."""
        self._stream.write(self._held)
        self._held = bytes(data)

    def finish(self) -> None:
        """Pass on the last block."""
        self._stream.write(self._held)
        self._stream.flush()


def stream_file(
    entry: Entry, origin: Origin, stream: BinaryIO, limits: Limits | None = None, progress: Progress | None = None
) -> int:
    """Write one file to `stream` and return its size; `VerificationFailed` before its last block where it differs."""
    limits = limits or Limits()
    blob = origin.locate(entry.name, entry.urls)
    if problem := size_problem(entry, blob):
        raise VerificationFailed(problem, file=entry.name)
    regions = regions_of(entry, blob)
    sink = _StreamSink(stream)
    outcome = CheckedPass(blob, regions, limits, sink=sink).run()
    if outcome.bad:
        raise VerificationFailed(describe(entry, blob, regions, outcome.bad)[0], file=entry.name)
    if problem := crc_problem(entry, blob, outcome.crc64nvme):
        raise VerificationFailed(problem, file=entry.name)
    sink.finish()
    if progress is not None:
        progress(entry.name, blob.size, blob.size)
    return blob.size
