"""`file://`: objects are files below one directory. Private (0600, 0700), durable (fsync, rename), no symlink followed.

An upload is a directory below ``.uploads`` with the growing file, a description, and a line for each part. Parts are
written at their offsets; Complete syncs and renames, so that readers see a whole object or none.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from exporter.contract.errors import (
    InvalidRequest,
    NotFound,
    StoreRejected,
    StoreUnavailable,
    WeightlessError,
)
from exporter.contract.objects import Capabilities, Part, StoredObject, Upload
from exporter.store import crc
from exporter.store.keys import check_key, quote_path, relative_key
from exporter.store.local_files import DIRECTORY, NEW, names_in, pwrite, read_all, walk, wrapped, write_new

UPLOADS = ".uploads"
"""Directory, below the root, of uploads and temporary files; no key may start with it."""
STALE = 24 * 3600
"""Seconds after which a temporary file has no writer any more."""
_ID = re.compile(r"[0-9a-f]{32}")


class LocalStore:
    """A store below one directory, which is made when the first object is. Keys become relative paths."""

    def __init__(self, uri: str) -> None:
        split = urlsplit(uri)
        if split.scheme != "file" or split.netloc not in ("", "localhost") or split.query or split.fragment:
            raise InvalidRequest("a file store's URI is file:///directory")
        path = unquote(split.path)
        if not path.startswith("/") or "\0" in path or ".." in path.split("/"):
            raise InvalidRequest("a file store's URI is file:///directory, absolute and without '..'")
        self.root = Path(os.path.normpath(path))
        self._base = "file://" + quote_path(str(self.root)).rstrip("/") + "/"
        self._lock = threading.Lock()
        self._swept = False

    @property
    def capabilities(self) -> Capabilities:
        """Parts are written at their offsets, so they are equal; files have no URLs and no metadata."""
        return Capabilities(min_part=1, equal_parts=True, presign=False, metadata=False)

    def uri(self, key: str) -> str:
        """``file:///root/key``, percent-encoded."""
        return self._base + quote_path(_checked(key))

    def key_of(self, uri: str) -> str | None:
        """The key of a URI below this directory, else None."""
        key = relative_key(uri, self._base, quoted=True)
        return None if key is None or key.split("/")[0] == UPLOADS else key

    # --- multipart ---

    def create_upload(self, key: str, *, media_type: str, metadata: Mapping[str, str], part_size: int) -> Upload:
        """Open an upload: a private directory with an empty file."""
        upload = Upload(_checked(key), uuid.uuid4().hex, time.time())
        about = {"key": key, "started": upload.started, "partSize": part_size}
        with wrapped(self._base), self._directory([UPLOADS, upload.id], create=True) as directory:
            write_new(directory, "upload.json", json.dumps(about).encode())
            os.close(os.open("data", NEW | os.O_WRONLY, 0o600, dir_fd=directory))
            os.close(os.open("parts", NEW | os.O_WRONLY, 0o600, dir_fd=directory))
        return upload

    def upload_part(self, upload: Upload, number: int, body: memoryview, *, crc64nvme: str | None) -> Part:
        """Write a part at its offset. `DiskFull` where no space is left."""
        if crc64nvme is not None and crc.crc64nvme(body) != crc64nvme:
            raise StoreRejected(f"part {number} does not have the CRC that was sent with it")
        ours = crc64nvme or crc.crc64nvme(body)
        part = Part(number, len(body), ours, ours)
        with wrapped(self._base), self._open_upload(upload) as (directory, part_size):
            _check_part(part, part_size)
            fd = os.open("data", os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            try:
                pwrite(fd, body, (number - 1) * part_size)
            finally:
                os.close(fd)
            _append_line(directory, part)
        return part

    def copy_part(self, upload: Upload, number: int, source_key: str, offset: int, length: int) -> Part:
        """Copy a range of a stored object into a part, a piece at a time."""
        with wrapped(self._base), self._open_upload(upload) as (directory, part_size):
            ours = crc.crc64nvme(b"")
            _check_part(Part(number, length, ours, ours), part_size)
            fd = os.open("data", os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            try:
                for start in range(0, length, 2**20):
                    piece = self.read(source_key, offset + start, min(2**20, length - start))
                    pwrite(fd, memoryview(piece), (number - 1) * part_size + start)
                    ours = crc.combine([(ours, start), (crc.crc64nvme(piece), len(piece))])
            finally:
                os.close(fd)
            part = Part(number, length, ours, ours)
            _append_line(directory, part)
        return part

    def list_parts(self, upload: Upload) -> Sequence[Part]:
        """The parts written, in order; of a part written twice the last."""
        with wrapped(self._base), self._open_upload(upload) as (directory, _):
            lines = read_all(directory, "parts").decode().splitlines()
        parts: dict[int, Part] = {}
        for line in lines:
            with contextlib.suppress(ValueError):  # a line that a kill cut short
                number, size, etag = json.loads(line)
                parts[number] = Part(number, size, etag, etag)
        return [parts[number] for number in sorted(parts)]

    def complete_upload(self, upload: Upload, parts: Sequence[Part], *, crc64nvme: str | None) -> StoredObject:
        """Sync the file and move it to its key."""
        known = {part.number: part for part in self.list_parts(upload)}
        if not parts or [part.number for part in parts] != list(range(1, len(parts) + 1)):
            raise StoreRejected("the parts are not in order from 1")
        if any(part.number not in known or known[part.number].etag != part.etag for part in parts):
            raise StoreRejected("a part is not the one that was sent")
        if crc64nvme is not None and crc.combine((p.etag, p.size) for p in parts) != crc64nvme:
            raise StoreRejected("the parts do not have the CRC that was sent with them")
        with wrapped(self._base), self._open_upload(upload) as (directory, part_size):
            if any(part.size != part_size for part in parts[:-1]):
                raise StoreRejected("a part before the last is not of the part size")
            fd = os.open("data", os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            try:
                os.ftruncate(fd, sum(part.size for part in parts))
                os.fsync(fd)
            finally:
                os.close(fd)
            self._publish(directory, "data", upload.key, replace=True)
        self._discard(upload.id)
        stored = self.head(upload.key)
        if stored is None:
            raise StoreUnavailable(f"{self.uri(upload.key)} vanished after it was written")
        return stored

    def abort_upload(self, upload: Upload) -> None:
        """Remove an upload's directory."""
        if not _ID.fullmatch(upload.id):
            raise InvalidRequest("this is not an upload's id")
        with wrapped(self._base):
            self._discard(upload.id)

    def list_uploads(self, prefix: str) -> Iterator[Upload]:
        """Open uploads below `prefix`."""
        check_key(prefix, prefix=True)
        with wrapped(self._base):
            try:
                with self._directory([UPLOADS]) as directory:
                    ids = sorted(name for name in names_in(directory) if _ID.fullmatch(name))
            except FileNotFoundError:
                return
        for name in ids:
            with contextlib.suppress(WeightlessError), self._open_upload(Upload("", name), any_key=True) as (fd, _):
                about = json.loads(read_all(fd, "upload.json"))
                if about["key"].startswith(prefix):
                    yield Upload(about["key"], name, about["started"])

    # --- whole objects ---

    def put(
        self,
        key: str,
        body: bytes | memoryview,
        *,
        media_type: str,
        metadata: Mapping[str, str] | None = None,
        if_absent: bool = False,
    ) -> StoredObject | None:
        """Write a file at once; with `if_absent` a hard link decides, so that one of several writers wins."""
        name = uuid.uuid4().hex + ".put"
        _checked(key)
        with wrapped(self._base), self._directory([UPLOADS], create=True) as directory:
            self._sweep(directory)
            try:
                write_new(directory, name, body)
                if not self._publish(directory, name, key, replace=not if_absent):
                    return None
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=directory)
        return self.head(key)

    def delete(self, key: str) -> None:
        """Remove a file, and directories that it leaves empty."""
        parts = _checked(key).split("/")
        with wrapped(self._base), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            with self._directory(parts[:-1]) as directory:
                os.unlink(parts[-1], dir_fd=directory)
            for depth in range(len(parts) - 1, 0, -1):
                with self._directory(parts[: depth - 1]) as directory:
                    try:
                        os.rmdir(parts[depth - 1], dir_fd=directory)
                    except OSError:
                        break

    def head(self, key: str) -> StoredObject | None:
        """Size and time of a regular file."""
        parts = _checked(key).split("/")
        with wrapped(self._base):
            try:
                with self._directory(parts[:-1]) as directory:
                    found = os.stat(parts[-1], dir_fd=directory, follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return _describe(key, found) if stat.S_ISREG(found.st_mode) else None

    def read(self, key: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`."""
        buffer = bytearray(length)
        with memoryview(buffer) as view:
            self.read_into(key, offset, view)
        return bytes(buffer)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`. `NotFound` where there is no file, `StoreUnavailable` past its end."""
        parts = _checked(key).split("/")
        with wrapped(self._base):
            try:
                with self._directory(parts[:-1]) as directory:
                    fd = os.open(
                        parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory
                    )
            except (FileNotFoundError, NotADirectoryError):
                raise NotFound(f"there is no object {self.uri(key)}") from None
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise NotFound(f"there is no object {self.uri(key)}")
                at = 0
                while at < len(buffer):
                    count = os.preadv(fd, [buffer[at:]], offset + at)
                    if count == 0:
                        raise StoreUnavailable(f"{self.uri(key)} has no {len(buffer)} bytes at {offset}")
                    at += count
            finally:
                os.close(fd)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """Every regular file whose key starts with `prefix`, by key."""
        start = check_key(prefix, prefix=True)
        folder = start.rpartition("/")[0]
        found: list[StoredObject] = []
        with wrapped(self._base):
            for path, names, files, _ in walk(self.root / folder):
                if path == str(self.root):
                    names[:] = [name for name in names if name != UPLOADS]
                relative = os.path.relpath(path, self.root)
                for name in files:
                    key = name if relative == "." else f"{relative}/{name}"
                    if key.startswith(start) and (item := self._listed(key)) is not None:
                        found.append(item)
        yield from sorted(found, key=lambda item: item.key)

    def _listed(self, key: str) -> StoredObject | None:
        try:
            return self.head(key)
        except InvalidRequest:  # a file that somebody else put there under a name that is no key
            return None

    def presign(self, key: str, expires_in: int) -> str:
        """A directory has no URLs that others could read: always `StoreRejected`."""
        raise StoreRejected(
            "a file:// store has no URLs that others could read", hint="Download through the service, or use s3://."
        )

    # --- directories ---

    @contextlib.contextmanager
    def _directory(self, parts: Sequence[str], *, create: bool = False) -> Iterator[int]:
        """A descriptor of a directory below the root, reached without following a symlink."""
        fd = self._walk_down(parts, create)
        try:
            yield fd
        finally:
            os.close(fd)

    def _walk_down(self, parts: Sequence[str], create: bool) -> int:
        for _ in range(8):  # a delete may remove a directory between its making and its use
            if create:
                self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                for part in parts:
                    if create:
                        with contextlib.suppress(FileExistsError):
                            os.mkdir(part, 0o700, dir_fd=fd)
                    below = os.open(part, DIRECTORY, dir_fd=fd)
                    os.close(fd)
                    fd = below
                return fd
            except FileNotFoundError:
                os.close(fd)
                if not create:
                    raise
            except BaseException:
                os.close(fd)
                raise
        raise StoreUnavailable(f"a directory below {self._base} keeps vanishing")

    @contextlib.contextmanager
    def _open_upload(self, upload: Upload, *, any_key: bool = False) -> Iterator[tuple[int, int]]:
        """The directory and part size of an open upload."""
        missing = StoreRejected(f"there is no open upload of {upload.key!r} with this id")
        if not _ID.fullmatch(upload.id):
            raise missing
        try:
            fd = self._walk_down([UPLOADS, upload.id], create=False)
        except FileNotFoundError:
            raise missing from None
        try:
            try:
                about = json.loads(read_all(fd, "upload.json"))
            except (FileNotFoundError, ValueError):
                raise missing from None
            if not any_key and about["key"] != upload.key:
                raise missing
            yield fd, int(about["partSize"])
        finally:
            os.close(fd)

    def _publish(self, directory: int, name: str, key: str, *, replace: bool) -> bool:
        """Move a synced file to its key; False where one is there and `replace` is not set."""
        parts = key.split("/")
        for _ in range(8):
            with self._directory(parts[:-1], create=True) as target:
                try:
                    if replace:
                        os.replace(name, parts[-1], src_dir_fd=directory, dst_dir_fd=target)
                    else:
                        os.link(name, parts[-1], src_dir_fd=directory, dst_dir_fd=target, follow_symlinks=False)
                except FileExistsError:
                    return False
                except FileNotFoundError:
                    continue
                os.fsync(target)
                return True
        raise StoreUnavailable(f"a directory below {self._base} keeps vanishing")

    def _sweep(self, directory: int) -> None:
        """Once for each store: remove what writers that were killed in the middle of a `put` left behind."""
        with self._lock:
            if self._swept:
                return
            self._swept = True
        for name in names_in(directory):
            with contextlib.suppress(FileNotFoundError):
                if name.endswith(".put") and _age(directory, name) > STALE:
                    os.unlink(name, dir_fd=directory)

    def _discard(self, upload_id: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            with self._directory([UPLOADS, upload_id]) as directory:
                for name in names_in(directory):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=directory)
            with self._directory([UPLOADS]) as directory:
                os.rmdir(upload_id, dir_fd=directory)


def _checked(key: str) -> str:
    if check_key(key).split("/")[0] == UPLOADS:
        raise InvalidRequest(f"a key may not start with {UPLOADS}")
    return key


def _check_part(part: Part, part_size: int) -> None:
    if not 1 <= part.number <= 10_000 or part.size > part_size:
        raise StoreRejected(f"part {part.number} of {part.size} bytes does not fit parts of {part_size}")


def _describe(key: str, found: os.stat_result) -> StoredObject:
    etag = f'"{found.st_mtime_ns:x}-{found.st_size:x}-{found.st_ino:x}"'
    return StoredObject(key, found.st_size, etag, None, found.st_mtime_ns / 1e9)


def _age(directory: int, name: str) -> float:
    return time.time() - os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime


def _append_line(directory: int, part: Part) -> None:
    line = json.dumps([part.number, part.size, part.etag]).encode() + b"\n"
    fd = os.open("parts", os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        os.write(fd, line)
    finally:
        os.close(fd)
