"""`memory://`: a complete store in this process, for tests. Stores of one URI share their objects.

Faults by call number: `faults[n]` says what goes wrong at the n-th call (from 1), see `Fault`.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import ParamSpec, TypeVar

from exporter.contract.errors import DiskFull, InvalidRequest, NotFound, StoreRejected, StoreUnavailable
from exporter.contract.objects import Capabilities, Part, StoredObject, Upload
from exporter.store import crc
from exporter.store.keys import check_key, relative_key

P = ParamSpec("P")
R = TypeVar("R")


class Fault(Enum):
    """What can go wrong at a call."""

    UNAVAILABLE = "the store does not answer; nothing happened"
    LOST_REPLY = "the store did it, but the reply was lost"
    REJECTED = "the store refuses for good"
    FULL = "no space is left"


@dataclass(slots=True)
class _Object:
    body: bytes
    crc64nvme: str
    modified: float
    metadata: dict[str, str]
    media_type: str


@dataclass(slots=True)
class _Open:
    upload: Upload
    part_size: int
    metadata: dict[str, str]
    media_type: str
    parts: dict[int, tuple[bytes, Part]] = field(default_factory=dict)


@dataclass(slots=True)
class Space:
    """What one `memory://NAME` holds; keys are whole, prefix included."""

    objects: dict[str, _Object] = field(default_factory=dict)
    uploads: dict[str, _Open] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)


_SPACES: dict[str, Space] = {}
_SPACES_LOCK = threading.Lock()


class MemoryStore:
    """Satisfies every protocol that a store is used through. `calls` lists the calls made, in order."""

    def __init__(
        self,
        uri: str,
        *,
        capabilities: Capabilities | None = None,
        faults: Mapping[int, Fault] | None = None,
    ) -> None:
        if not uri.startswith("memory://"):
            raise InvalidRequest("a memory store's URI starts with memory://")
        name, _, prefix = uri.removeprefix("memory://").strip("/").partition("/")
        self._base = "memory://" + "/".join(filter(None, (name, prefix)))
        self._prefix = check_key(prefix) + "/" if prefix else ""
        with _SPACES_LOCK:
            self._space = _SPACES.setdefault(name, Space())
        self._capabilities = capabilities or Capabilities(presign=False)
        self._faults = dict(faults or {})
        self.calls: list[str] = []

    @property
    def capabilities(self) -> Capabilities:
        """Limits and features."""
        return self._capabilities

    def uri(self, key: str) -> str:
        """``memory://NAME/prefix/key``."""
        return f"{self._base}/{check_key(key)}"

    def key_of(self, uri: str) -> str | None:
        """The key of a URI below this store's own, else None."""
        return relative_key(uri, self._base + "/", quoted=False)

    def _call(self, name: str, action: Callable[[], R]) -> R:
        with self._space.lock:
            self.calls.append(name)
            fault = self._faults.get(len(self.calls))
            if fault is Fault.UNAVAILABLE:
                raise StoreUnavailable(f"the store did not answer {name}")
            if fault is Fault.REJECTED:
                raise StoreRejected(f"the store refused {name}")
            if fault is Fault.FULL:
                raise DiskFull(f"no space is left in {self._base}")
            result = action()
            if fault is Fault.LOST_REPLY:
                raise StoreUnavailable(f"the reply to {name} was lost")
            return result

    # --- writes ---

    def create_upload(self, key: str, *, media_type: str, metadata: Mapping[str, str], part_size: int) -> Upload:
        """Open a multipart upload."""
        whole = self._prefix + check_key(key)

        def act() -> Upload:
            upload = Upload(key, uuid.uuid4().hex, time.time())
            self._space.uploads[upload.id] = _Open(replace(upload, key=whole), part_size, dict(metadata), media_type)
            return upload

        return self._call("create_upload", act)

    def upload_part(self, upload: Upload, number: int, body: memoryview, *, crc64nvme: str | None) -> Part:
        """Take a part; a wrong CRC is refused."""

        def act() -> Part:
            if not 1 <= number <= self._capabilities.max_parts or len(body) > self._capabilities.max_part:
                raise StoreRejected(f"part {number} of {len(body)} bytes is outside the store's limits")
            ours = crc.crc64nvme(body)
            if crc64nvme is not None and crc64nvme != ours:
                raise StoreRejected(f"part {number} does not have the CRC that was sent with it")
            part = Part(number, len(body), f'"{ours}"', ours)
            self._open(upload).parts[number] = (bytes(body), part)
            return part

        return self._call("upload_part", act)

    def copy_part(self, upload: Upload, number: int, source_key: str, offset: int, length: int) -> Part:
        """Make a part from a range of a stored object."""
        source = self._prefix + check_key(source_key)

        def act() -> Part:
            body = self._object(source).body[offset : offset + length]
            if len(body) != length:
                raise StoreRejected(f"{source_key!r} has no {length} bytes at {offset}")
            ours = crc.crc64nvme(body)
            part = Part(number, length, f'"{ours}"', ours)
            self._open(upload).parts[number] = (body, part)
            return part

        return self._call("copy_part", act)

    def list_parts(self, upload: Upload) -> Sequence[Part]:
        """The parts held, in order."""
        return self._call("list_parts", lambda: [part for _, (_, part) in sorted(self._open(upload).parts.items())])

    def complete_upload(self, upload: Upload, parts: Sequence[Part], *, crc64nvme: str | None) -> StoredObject:
        """Join the parts, checked as S3 does: order, ETags, minimum size of all but the last, CRC of the whole."""

        def act() -> StoredObject:
            held = self._open(upload)
            numbers = [part.number for part in parts]
            if not parts or numbers != sorted(set(numbers)):
                raise StoreRejected("the parts are not in order")
            bodies = []
            for part in parts:
                body, known = held.parts.get(part.number, (b"", None))
                if known is None or known.etag != part.etag:
                    raise StoreRejected(f"part {part.number} is not the one that was sent")
                bodies.append(body)
            if any(len(body) < self._capabilities.min_part for body in bodies[:-1]):
                raise StoreRejected("a part is smaller than the store's minimum")
            if self._capabilities.equal_parts and (
                len({len(body) for body in bodies[:-1]}) > 1 or len(bodies[-1]) > len(bodies[0])
            ):
                raise StoreRejected("the parts are not equal in size")
            whole = b"".join(bodies)
            if crc64nvme is not None and crc.crc64nvme(whole) != crc64nvme:
                raise StoreRejected("the object does not have the CRC that was sent with it")
            stored = self._store(held.upload.key, whole, held.media_type, held.metadata)
            del self._space.uploads[upload.id]
            return stored

        return self._call("complete_upload", act)

    def abort_upload(self, upload: Upload) -> None:
        """Forget an upload and its parts."""
        self._call("abort_upload", lambda: self._space.uploads.pop(upload.id, None))

    def put(
        self,
        key: str,
        body: bytes | memoryview,
        *,
        media_type: str,
        metadata: Mapping[str, str] | None = None,
        if_absent: bool = False,
    ) -> StoredObject | None:
        """Write an object at once; None where `if_absent` and there is one."""
        whole = self._prefix + check_key(key)

        def act() -> StoredObject | None:
            if if_absent and whole in self._space.objects:
                return None
            return self._store(whole, bytes(body), media_type, dict(metadata or {}))

        return self._call("put", act)

    def delete(self, key: str) -> None:
        """Remove an object; no error if it is gone already."""
        whole = self._prefix + check_key(key)
        self._call("delete", lambda: self._space.objects.pop(whole, None))

    # --- reads ---

    def head(self, key: str) -> StoredObject | None:
        """What is stored under `key`."""
        whole = self._prefix + check_key(key)

        def act() -> StoredObject | None:
            return self._describe(whole) if whole in self._space.objects else None

        return self._call("head", act)

    def read(self, key: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`."""
        whole = self._prefix + check_key(key)

        def act() -> bytes:
            body = self._object(whole).body[offset : offset + length]
            if len(body) != length:
                raise StoreUnavailable(f"{self.uri(key)} has no {length} bytes at {offset}")
            return body

        return self._call("read", act)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`."""
        buffer[:] = self.read(key, offset, len(buffer))

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """Every object whose key starts with `prefix`, by key."""
        start = self._prefix + check_key(prefix, prefix=True)

        def act() -> list[StoredObject]:
            return [self._describe(key) for key in sorted(self._space.objects) if key.startswith(start)]

        yield from self._call("list", act)

    def list_uploads(self, prefix: str) -> Iterator[Upload]:
        """Open uploads below `prefix`."""
        start = self._prefix + check_key(prefix, prefix=True)

        def act() -> list[Upload]:
            found = [item.upload for item in self._space.uploads.values() if item.upload.key.startswith(start)]
            return [replace(upload, key=upload.key[len(self._prefix) :]) for upload in found]

        yield from self._call("list_uploads", act)

    def presign(self, key: str, expires_in: int) -> str:
        """There are no URLs into a process's memory: always `StoreRejected`."""
        raise StoreRejected("a memory:// store has no URLs that others could read")

    # --- inside the lock ---

    def _open(self, upload: Upload) -> _Open:
        held = self._space.uploads.get(upload.id)
        if held is None or held.upload.key != self._prefix + upload.key:
            raise StoreRejected(f"there is no open upload of {upload.key!r} with this id")
        return held

    def _object(self, whole: str) -> _Object:
        found = self._space.objects.get(whole)
        if found is None:
            raise NotFound(f"there is no object {whole!r}")
        return found

    def _store(self, whole: str, body: bytes, media_type: str, metadata: dict[str, str]) -> StoredObject:
        self._space.objects[whole] = _Object(body, crc.crc64nvme(body), time.time(), metadata, media_type)
        return self._describe(whole)

    def _describe(self, whole: str) -> StoredObject:
        item = self._space.objects[whole]
        key = whole[len(self._prefix) :]
        return StoredObject(
            key, len(item.body), f'"{item.crc64nvme}"', item.crc64nvme, item.modified, dict(item.metadata)
        )
