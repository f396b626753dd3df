"""What the weight stream needs of others: a store that takes parts, and somebody to tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from exporter.contract.objects import Capabilities, Part, StoredObject, Upload


class MultipartTarget(Protocol):
    """A place that takes an object in parts, in any order. Calls are safe from several threads.

    Every call either did what it says or raises `StoreUnavailable`, `StoreRejected` or `DiskFull`; retries of passing
    faults happen inside. A body may be read more than once and is not kept after the call.
    """

    @property
    def capabilities(self) -> Capabilities:
        """Limits to plan by."""

    def uri(self, key: str) -> str:
        """The object's URI, as manifests and events name it."""

    def create_upload(self, key: str, *, media_type: str, metadata: Mapping[str, str], part_size: int) -> Upload:
        """Open a multipart upload. Every part but the last will have `part_size` bytes."""

    def upload_part(self, upload: Upload, number: int, body: memoryview, *, crc64nvme: str | None) -> Part:
        """Send part `number` (from 1); the store must refuse a body whose CRC differs, where it can."""

    def copy_part(self, upload: Upload, number: int, source_key: str, offset: int, length: int) -> Part:
        """Make a part from a range of a stored object, without sending bytes. Only with `capabilities.copy_part`."""

    def list_parts(self, upload: Upload) -> Sequence[Part]:
        """The parts that the store holds for an open upload, in order."""

    def complete_upload(self, upload: Upload, parts: Sequence[Part], *, crc64nvme: str | None) -> StoredObject:
        """Join the parts. A lost reply is resolved by looking: success only if the object is the one just made."""

    def abort_upload(self, upload: Upload) -> None:
        """Give the parts back; no error if the upload is gone already."""

    def put(
        self,
        key: str,
        body: bytes | memoryview,
        *,
        media_type: str,
        metadata: Mapping[str, str] | None = None,
        if_absent: bool = False,
    ) -> StoredObject | None:
        """Write a small object at once. With `if_absent`, None says that one was there already, and nothing changed."""

    def head(self, key: str) -> StoredObject | None:
        """What is stored under `key`, None if nothing."""


class StreamListener(Protocol):
    """Who is told about an upload. `sent` comes from upload threads, one call at a time."""

    def opened(self, upload: Upload, uri: str, part_size: int) -> None:
        """A multipart upload exists; called before its first part, so that it can be recorded and later aborted."""

    def completed(self, upload: Upload, uri: str, part_size: int) -> None:
        """The object is there."""

    def aborted(self, upload: Upload, uri: str, part_size: int) -> None:
        """The parts were given back."""

    def sent(self, done: int, total: int) -> None:
        """`done` of about `total` bytes are in the store."""


class ReuseTarget(MultipartTarget, Protocol):
    """What the reuse of stored weights needs besides: reading and listing the index, taking leases back."""

    def read(self, key: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`; `NotFound` where there is no object."""

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """Every object whose key starts with `prefix`."""

    def delete(self, key: str) -> None:
        """Remove an object; no error if it is gone already."""
