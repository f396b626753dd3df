"""Descriptor-level file work of the local store: short writes finished, symlinks refused, errors turned into ours."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from exporter.contract.errors import DiskFull, StoreRejected, StoreUnavailable

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
WRITE_STEP = 64 * 1024
"""Bytes of one write: larger ones make the kernel look for large runs of free pages, which costs more than calls."""
NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def pwrite(fd: int, body: memoryview, offset: int) -> None:
    at = 0
    while at < len(body):
        at += os.pwrite(fd, body[at : at + WRITE_STEP], offset + at)


def write_new(directory: int, name: str, body: bytes | memoryview) -> None:
    fd = os.open(name, NEW | os.O_WRONLY, 0o600, dir_fd=directory)
    try:
        os.fchmod(fd, 0o600)
        pwrite(fd, memoryview(body), 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def names_in(directory: int) -> list[str]:
    """The names in an open directory."""
    return os.listdir(directory)


def read_all(directory: int, name: str) -> bytes:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    with os.fdopen(fd, "rb") as file:
        return file.read()


def walk(top: Path) -> Iterator[tuple[str, list[str], list[str], int]]:
    try:
        fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    os.close(fd)
    for path, names, files in os.walk(top, followlinks=False):
        yield path, names, files, 0


@contextlib.contextmanager
def wrapped(base: str) -> Iterator[None]:
    """The system's errors as ours."""
    try:
        yield
    except FileNotFoundError as error:
        raise StoreUnavailable(f"something below {base} vanished while it was used") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DiskFull(f"no space is left in {base}", path=base) from error
        if error.errno in (
            errno.EACCES,
            errno.EPERM,
            errno.ENOTDIR,
            errno.EROFS,
            errno.ELOOP,
            errno.EISDIR,
            errno.ENAMETOOLONG,
        ):
            raise StoreRejected(
                f"{base} cannot be used: {os.strerror(error.errno or 0)}",
                hint="Check the directory's owner and permissions; symbolic links below it are not followed.",
            ) from error
        raise StoreUnavailable(f"{base} cannot be used: {error.strerror or type(error).__name__}") from error
