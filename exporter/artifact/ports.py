"""What pull, verify, inspect, gc and the reaper need of a store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from exporter.contract.objects import StoredObject, Upload


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
