"""What pull, verify, inspect, gc and the reaper need of a store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from exporter.contract.objects import Capabilities, StoredObject, Upload


class StoreReads(Protocol):
    """Reads. Keys are relative to the store's own prefix. Calls are safe from several threads."""

    def uri(self, key: str) -> str:
        """The object's URI."""

    def key_of(self, uri: str) -> str | None:
        """The key of a URI in this very store (same bucket or directory, below its prefix), else None."""

    def head(self, key: str) -> StoredObject | None:
        """What is stored under `key`, None if nothing."""

    def read(self, key: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`; `NotFound` where there is none, `StoreUnavailable` on a short read."""

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`, in one ranged request."""

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """Every object whose key starts with `prefix`, however many there are."""


class StoreDeletes(Protocol):
    """Removals, for gc and the reaper."""

    def delete(self, key: str) -> None:
        """Remove an object; no error if it is gone already."""

    def list_uploads(self, prefix: str) -> Iterator[Upload]:
        """Open multipart uploads below `prefix`; only with `capabilities.list_uploads`."""

    def abort_upload(self, upload: Upload) -> None:
        """Give an upload's parts back; no error if it is gone already."""


class StoreWrites(Protocol):
    """The one write that gc makes: its marks."""

    def put(
        self,
        key: str,
        body: bytes | memoryview,
        *,
        media_type: str,
        metadata: Mapping[str, str] | None = None,
        if_absent: bool = False,
    ) -> StoredObject | None:
        """Write a small object at once."""


class SweptStore(StoreReads, StoreDeletes, StoreWrites, Protocol):
    """What gc and the reaper work on."""

    @property
    def capabilities(self) -> Capabilities:
        """Whether uploads can be listed."""


class Blob(Protocol):
    """One stored file, read by range. Calls are safe from several threads."""

    @property
    def uri(self) -> str:
        """Where it is, for messages; never with a signature."""

    @property
    def size(self) -> int:
        """Bytes, as its holder says."""

    @property
    def crc64nvme(self) -> str | None:
        """The CRC64NVME of the whole that its holder keeps (base64), None where it keeps none."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`; `StoreUnavailable` on a short read."""


class Origin(Protocol):
    """Where a manifest came from, and so the only place that its files are read from."""

    def locate(self, name: str, urls: Sequence[str]) -> Blob:
        """The file `name`, that the manifest says is at one of `urls`.

        `NotFound` where nothing is stored there; `Forbidden` where every URL leads to another origin.
        """
