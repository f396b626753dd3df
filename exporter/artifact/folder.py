"""The folder that a pull fills: opened once without following links, everything in it named by one path component.

Parts and their journals are kept in `.weightless-pull` below it, and renamed into place when every file is whole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from exporter.contract.errors import DiskFull, IllegalState, InvalidRequest, WeightlessError

WORK = ".weightless-pull"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def local_errors(what: str) -> Iterator[None]:
    """Turns an `OSError` of this machine's disk into `DiskFull` or `InvalidRequest`, naming `what`."""
    try:
        yield
    except OSError as error:
        raise local_error(error, what) from error


def local_error(error: OSError, what: str) -> WeightlessError:
    """The error for a failed local write or read."""
    if error.errno in _FULL:
        return DiskFull(f"no space is left for {what}: {os.strerror(error.errno or 0)}")
    reason = os.strerror(error.errno) if error.errno else str(error)
    return InvalidRequest(f"{what}: {reason}", hint="Choose a folder that you may write to.")


class Folder:
    """An output folder and its work folder, open and locked. A context manager.

    `IllegalState` where another pull fills the same folder; `InvalidRequest` where it cannot be made or is a link.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with local_errors(str(path)):
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                path.mkdir()
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            self._out = os.open(path, flags)
            try:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(WORK, 0o700, dir_fd=self._out)
                self._work = os.open(WORK, flags, dir_fd=self._out)
            except OSError:
                os.close(self._out)
                raise
        try:
            fcntl.flock(self._work, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._close()
            raise IllegalState(
                f"another pull is filling {path}", hint="Wait for it, or choose another folder."
            ) from error

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        os.close(self._work)
        os.close(self._out)

    @staticmethod
    def _stem(name: str) -> str:
        return hashlib.sha256(name.encode()).hexdigest()[:24]

    def open_part(self, name: str) -> int:
        """A descriptor of the unfinished file `name`, made if it is not there; a link or a device is refused."""
        return self._open(f"{self._stem(name)}.part", os.O_RDWR | os.O_CREAT, 0o666)

    def open_journal(self, name: str) -> int:
        """A descriptor of the journal of `name`, for reading and appending."""
        return self._open(f"{self._stem(name)}.journal", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)

    def discard_part(self, name: str) -> None:
        """Forget what an earlier run left of `name`."""
        for ending in ("part", "journal"):
            with local_errors(str(self.path / name)), contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self._stem(name)}.{ending}", dir_fd=self._work)

    def _open(self, entry: str, flags: int, mode: int) -> int:
        with local_errors(str(self.path / WORK / entry)):
            descriptor = os.open(entry, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=self._work)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise InvalidRequest(f"{self.path / WORK / entry} is not a regular file")
        return descriptor

    def open_finished(self, name: str) -> int | None:
        """A descriptor of a file that is in its place already, None if there is none or it is not a regular file."""
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self._out)
        except OSError:
            return None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            return None
        return descriptor

    def publish(self, name: str) -> None:
        """Move the whole, synced part of `name` to its place."""
        with local_errors(str(self.path / name)):
            os.rename(f"{self._stem(name)}.part", name, src_dir_fd=self._work, dst_dir_fd=self._out)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self._stem(name)}.journal", dir_fd=self._work)

    def write_small(self, name: str, content: bytes) -> None:
        """Write a small file at once, whole or not at all."""
        self.discard_part(name)
        descriptor = self.open_part(name)
        with local_errors(str(self.path / name)), os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        self.publish(name)

    def finish(self) -> None:
        """Sync the folder and remove the work folder if nothing is left in it."""
        with local_errors(str(self.path)):
            os.fsync(self._out)
            with contextlib.suppress(OSError):
                os.rmdir(WORK, dir_fd=self._out)
