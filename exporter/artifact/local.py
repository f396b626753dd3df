"""Files of this machine as blobs: read and written at offsets, whole or with an error."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from exporter.contract.errors import StoreUnavailable

WRITE_STEP = 64 * 1024
"""Bytes of one write. Larger ones make the kernel look for large runs of free pages, which it may have to clear out
first: pulls in writes of 8 MiB took 1.7 times the CPU seconds and twice the time (Linux 6.18, ext4)."""


@dataclass(frozen=True, slots=True)
class LocalBlob:
    """An open file. It does not own its descriptor."""

    descriptor: int
    uri: str
    size: int
    crc64nvme: str | None = None

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`; `StoreUnavailable` where the file is shorter or cannot be read."""
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self.descriptor, [buffer[done:]], offset + done)
            except OSError as error:
                raise StoreUnavailable(f"{self.uri} cannot be read: {error.strerror}") from error
            if count == 0:
                raise StoreUnavailable(f"{self.uri} ended at {offset + done} of {self.size} bytes")
            done += count


def local_blob(descriptor: int, path: Path) -> LocalBlob:
    """The file behind `descriptor`, called `path` in messages."""
    return LocalBlob(descriptor, str(path), os.fstat(descriptor).st_size)


def write_all(descriptor: int, offset: int, data: memoryview) -> None:
    """Write all of `data` at `offset`; the operating system may take less in one call. Raises `OSError`."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done : done + WRITE_STEP], offset + done)
