"""What the service needs of a store: it reads manifests, signs links, and cleans up after an attempt that died."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from exporter.contract.objects import StoredObject, Upload


class ArtifactStore(Protocol):
    """The store as the service sees it. Keys are relative to the store's prefix; no weights pass through here."""

    def uri(self, key: str) -> str:
        """The object's URI."""

    def key_of(self, uri: str) -> str | None:
        """The key of a URI in this very store, else None."""

    def head(self, key: str) -> StoredObject | None:
        """What is stored under `key`, None if nothing."""

    def read(self, key: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`; `NotFound` where there is no object."""

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """Every object below `prefix`."""

    def delete(self, key: str) -> None:
        """Remove an object; no error if it is gone already."""

    def presign(self, key: str, expires_in: int) -> str:
        """A URL that reads `key` for `expires_in` seconds without credentials; `StoreRejected` if it has none."""

    def abort_upload(self, upload: Upload) -> None:
        """Give an upload's parts back; no error if it is gone already."""


class LogSource(Protocol):
    """The exporters' logs, wherever their executor keeps them."""

    def read(self, export_id: str, attempt: int, offset: int, length: int) -> bytes | None:
        """At most `length` bytes of an attempt's log from `offset`, empty at its end; None where there is no log."""

    def remove(self, export_id: str) -> None:
        """Forget every attempt's log; no error if there is none."""
