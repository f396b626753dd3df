"""Weights that were pulled before, kept by content: a pull that finds its `.ptd` here fetches only the program.

A file is named by the digest of what the manifest says of it, its name and URLs apart. It is hashed again before it is
used, so a changed or torn one costs a download and nothing else. The least recently used go when there are too many.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
from pathlib import Path

from exporter.artifact.folder import local_errors
from exporter.contract.manifest import Data, digest

_ENTRY = re.compile(r"[0-9a-f]{64}\.ptd")
COPY_CHUNK = 64 * 2**20
READ_CHUNK = 2**20


def cache_name(data: Data) -> str:
    """The entry for a data file: equal for equal bytes, whatever the file is called and wherever it is stored."""
    content = {
        "size": data.size,
        "header": data.header_digest,
        "base": data.segment_base_offset,
        "segments": [[segment.offset, segment.size, segment.digest] for segment in data.segments],
    }
    return digest(json.dumps(content, sort_keys=True).encode()).removeprefix("sha256:") + ".ptd"


class WeightCache:
    """A directory of `.ptd` files, at most `max_size` bytes in all."""

    def __init__(self, path: Path, max_size: int) -> None:
        self._path = path
        self._max_size = max_size
        with local_errors(str(path)):
            path.mkdir(parents=True, exist_ok=True)

    def open(self, data: Data) -> int | None:
        """A descriptor of the entry for `data`, None if there is none of its size."""
        try:
            descriptor = os.open(self._path / cache_name(data), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        if os.fstat(descriptor).st_size != data.size:
            os.close(descriptor)
            return None
        return descriptor

    def touch(self, data: Data) -> None:
        """Note that the entry was used."""
        with contextlib.suppress(OSError):
            os.utime(self._path / cache_name(data))

    def discard(self, data: Data) -> None:
        """Forget a bad entry."""
        with contextlib.suppress(OSError):
            (self._path / cache_name(data)).unlink()

    def keep(self, data: Data, source: int) -> None:
        """Keep the whole, checked file behind the descriptor `source`; a cache that cannot take it is left as it is."""
        if data.size > self._max_size:
            return
        temporary = self._path / f".{secrets.token_hex(8)}.tmp"
        try:
            copy_file(source, temporary, data.size)
            temporary.replace(self._path / cache_name(data))
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            return
        self._shrink(cache_name(data))

    def _shrink(self, newest: str) -> None:
        entries = []
        for path in self._path.iterdir():
            if _ENTRY.fullmatch(path.name):
                with contextlib.suppress(OSError):
                    found = path.lstat()
                    entries.append((path.name == newest, found.st_mtime, found.st_size, path))
        total = sum(size for _, _, size, _ in entries)
        for _, _, size, path in sorted(entries):
            if total <= self._max_size:
                return
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size


def copy_file(source: int, target: Path, size: int) -> None:
    """A new file with the bytes of `source`, shared with it where the file system can."""
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        copy_bytes(source, descriptor, size)
    finally:
        os.close(descriptor)


def copy_bytes(source: int, target: int, size: int) -> None:
    """Copy `size` bytes from the start of one file to the start of another. Raises `OSError`."""
    done = 0
    while done < size:
        try:
            count = os.copy_file_range(source, target, min(COPY_CHUNK, size - done), done, done)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            # Two file systems of different kinds, or an old kernel.
            count = os.pwrite(target, os.pread(source, min(READ_CHUNK, size - done), done), done)
        if count == 0:
            raise OSError(errno.EIO, f"the file ended at {done} of {size} bytes")
        done += count
