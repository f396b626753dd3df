"""Targets that stand between a weight stream and its store, for the reuse of stored weights."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence

from exporter.contract.errors import StoreRejected
from exporter.contract.objects import Capabilities, Part, StoredObject, Upload
from exporter.stream import crc
from exporter.stream.index import IndexEntry, PartDigest
from exporter.stream.ports import MultipartTarget, StreamListener


class HashingTarget:
    """A target that keeps nothing but the digests of parts; plans as for the store that it stands for."""

    def __init__(self, target: MultipartTarget) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._size = 0

    @property
    def capabilities(self) -> Capabilities:
        """The store's own."""
        return self._target.capabilities

    def uri(self, key: str) -> str:
        """The URI that the object would have."""
        return self._target.uri(key)

    def create_upload(self, key: str, *, media_type: str, metadata: Mapping[str, str], part_size: int) -> Upload:
        """An upload in name only."""
        return Upload(key, "hashing")

    def upload_part(self, upload: Upload, number: int, body: memoryview, *, crc64nvme: str | None) -> Part:
        """Count the part."""
        with self._lock:
            self._size += len(body)
        return Part(number, len(body), "hashing", crc64nvme)

    def copy_part(self, upload: Upload, number: int, source_key: str, offset: int, length: int) -> Part:
        """There is nothing to copy into."""
        raise StoreRejected("nothing is stored while weights are only hashed")

    def list_parts(self, upload: Upload) -> Sequence[Part]:
        """None are held."""
        return []

    def complete_upload(self, upload: Upload, parts: Sequence[Part], *, crc64nvme: str | None) -> StoredObject:
        """The object that it would be."""
        return StoredObject(upload.key, self._size, None, crc64nvme)

    def abort_upload(self, upload: Upload) -> None:
        """Nothing is held."""

    def put(
        self,
        key: str,
        body: bytes | memoryview,
        *,
        media_type: str,
        metadata: Mapping[str, str] | None = None,
        if_absent: bool = False,
    ) -> StoredObject | None:
        """The object that it would be."""
        return StoredObject(key, len(body), None, None)

    def head(self, key: str) -> StoredObject | None:
        """Nothing is stored."""
        return None


class PassingTarget:
    """Passes everything on to the store."""

    def __init__(self, target: MultipartTarget) -> None:
        self._target = target

    @property
    def capabilities(self) -> Capabilities:
        """The store's own."""
        return self._target.capabilities

    def uri(self, key: str) -> str:
        """As the store."""
        return self._target.uri(key)

    def create_upload(self, key: str, *, media_type: str, metadata: Mapping[str, str], part_size: int) -> Upload:
        """As the store."""
        return self._target.create_upload(key, media_type=media_type, metadata=metadata, part_size=part_size)

    def upload_part(self, upload: Upload, number: int, body: memoryview, *, crc64nvme: str | None) -> Part:
        """As the store."""
        return self._target.upload_part(upload, number, body, crc64nvme=crc64nvme)

    def copy_part(self, upload: Upload, number: int, source_key: str, offset: int, length: int) -> Part:
        """As the store."""
        return self._target.copy_part(upload, number, source_key, offset, length)

    def list_parts(self, upload: Upload) -> Sequence[Part]:
        """As the store."""
        return self._target.list_parts(upload)

    def complete_upload(self, upload: Upload, parts: Sequence[Part], *, crc64nvme: str | None) -> StoredObject:
        """As the store."""
        return self._target.complete_upload(upload, parts, crc64nvme=crc64nvme)

    def abort_upload(self, upload: Upload) -> None:
        """As the store."""
        self._target.abort_upload(upload)

    def put(
        self,
        key: str,
        body: bytes | memoryview,
        *,
        media_type: str,
        metadata: Mapping[str, str] | None = None,
        if_absent: bool = False,
    ) -> StoredObject | None:
        """As the store."""
        return self._target.put(key, body, media_type=media_type, metadata=metadata, if_absent=if_absent)

    def head(self, key: str) -> StoredObject | None:
        """As the store."""
        return self._target.head(key)


class DigestingTarget(PassingTarget):
    """Passes everything on, and keeps the digests of parts; copies parts of `source` that are equal.

    A copy counts only where SHA-256 and CRC say so, and where the store's own CRC of it, if it gives one, agrees.
    """

    def __init__(self, target: MultipartTarget, source: IndexEntry | None = None) -> None:
        super().__init__(target)
        self._source = source
        self._known = {(part.crc64nvme, part.size): part for part in source.parts} if source else {}
        self._lock = threading.Lock()
        self._digests: dict[int, PartDigest] = {}
        self.copied_bytes = 0

    @property
    def parts(self) -> tuple[PartDigest, ...]:
        """Digests of the parts, in order."""
        return tuple(self._digests[number] for number in sorted(self._digests))

    def upload_part(self, upload: Upload, number: int, body: memoryview, *, crc64nvme: str | None) -> Part:
        """Copy where the source has the same bytes, else send."""
        checksum = crc64nvme or crc.crc64nvme(body)
        if not self.capabilities.copy_part:  # nobody could ever use a part's digest
            return self._target.upload_part(upload, number, body, crc64nvme=checksum)
        sha256 = "sha256:" + hashlib.sha256(body).hexdigest()
        digest = PartDigest(number=number, size=len(body), crc64nvme=checksum, sha256=sha256)
        part = self._copy(upload, digest) or self._target.upload_part(upload, number, body, crc64nvme=checksum)
        with self._lock:
            self._digests[number] = digest
        return part

    def _copy(self, upload: Upload, wanted: PartDigest) -> Part | None:
        there = self._known.get((wanted.crc64nvme, wanted.size))
        if self._source is None or there is None or there.sha256 != wanted.sha256:
            return None
        offset = (there.number - 1) * self._source.part_size
        try:
            part = self._target.copy_part(upload, wanted.number, self._source.key, offset, wanted.size)
        except StoreRejected:  # the source went away, or the store cannot copy: sent instead
            return None
        if part.crc64nvme is not None and part.crc64nvme != wanted.crc64nvme:
            return None
        with self._lock:
            self.copied_bytes += wanted.size
        return part


class HashingListener:
    """Tells a listener of the progress of a pass that opens no upload."""

    def __init__(self, listener: StreamListener) -> None:
        self._listener = listener

    def opened(self, upload: Upload, uri: str, part_size: int) -> None:
        """There is none."""

    def completed(self, upload: Upload, uri: str, part_size: int) -> None:
        """There was none."""

    def aborted(self, upload: Upload, uri: str, part_size: int) -> None:
        """There was none."""

    def sent(self, done: int, total: int) -> None:
        """So much is hashed."""
        self._listener.sent(done, total)
