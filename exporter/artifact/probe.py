"""What a store can really do, found out by trying: for `weightless doctor`. Leaves nothing behind."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import httpx2

from exporter.artifact.links import tls_context
from exporter.artifact.ports import SweptStore
from exporter.contract.errors import StoreRejected, WeightlessError
from exporter.contract.machine import Check
from exporter.contract.objects import Capabilities, Part, StoredObject, Upload

_NEEDED = ("store",)


class ProbedStore(SweptStore, Protocol):
    """A store with everything that an export and a download need of it."""

    @property
    def capabilities(self) -> Capabilities:
        """What the store is taken to be able to do."""

    def create_upload(self, key: str, *, media_type: str, metadata: Mapping[str, str], part_size: int) -> Upload:
        """Open a multipart upload."""

    def upload_part(self, upload: Upload, number: int, body: memoryview, *, crc64nvme: str | None) -> Part:
        """Send a part."""

    def complete_upload(self, upload: Upload, parts: Sequence[Part], *, crc64nvme: str | None) -> StoredObject:
        """Join the parts."""

    def presign(self, key: str, expires_in: int) -> str:
        """A link."""


def probe_store(store: ProbedStore, ca_bundle: str | None = None) -> list[Check]:
    """One check for each thing that exports rely on; a store that lacks an optional one still passes, and says so."""
    prefix = f".weightless-doctor/{secrets.token_hex(8)}"
    probe = _Probe(store, prefix, ca_bundle)
    checks = [_checked("write and read", probe.write)]
    if checks[0].ok:
        checks += [
            _checked("write that must be refused", probe.refuse),
            _checked("listing", probe.listing),
            _checked("multipart upload", probe.multipart),
            _checked("abort and listing of uploads", probe.abort),
            _checked("presigned link", probe.link),
        ]
    checks.append(_checked("removal", probe.remove))
    return checks


def _checked(name: str, call: Callable[[], str]) -> Check:
    try:
        return Check(name=f"store: {name}", ok=True, message=call(), needed_for=_NEEDED)
    except WeightlessError as error:
        return Check(
            name=f"store: {name}", ok=False, message=f"{error.message} {error.hint}".strip(), needed_for=_NEEDED
        )


class _Probe:
    def __init__(self, store: ProbedStore, prefix: str, ca_bundle: str | None) -> None:
        self._store = store
        self._ca_bundle = ca_bundle
        self._key = f"{prefix}/object"
        self._upload_key = f"{prefix}/upload"
        self._body = secrets.token_bytes(1000)

    def write(self) -> str:
        self._store.put(self._key, self._body, media_type="application/octet-stream")
        if self._store.read(self._key, 10, 500) != self._body[10:510]:
            raise StoreRejected("a range of an object reads back other bytes than were written")
        return "works, by range too"

    def refuse(self) -> str:
        answer = self._store.put(self._key, b"second", media_type="application/octet-stream", if_absent=True)
        found = self._store.head(self._key)
        if answer is None and found is not None and found.size == len(self._body):
            return "If-None-Match is honoured: a manifest is written once"
        if self._store.capabilities.conditional_put:
            raise StoreRejected(
                "a conditional write went through although the object was there",
                hint="Set WEIGHTLESS_S3_PROFILE to the store's kind.",
            )
        self._store.put(self._key, self._body, media_type="application/octet-stream")
        return "not supported: attempts are fenced by the database alone"

    def listing(self) -> str:
        keys = [item.key for item in self._store.list(self._key.rpartition("/")[0] + "/")]
        if keys != [self._key]:
            raise StoreRejected(f"the listing has {len(keys)} keys where one was written")
        return "works"

    def multipart(self) -> str:
        size = max(self._store.capabilities.min_part, 4096)
        body = memoryview(self._body * (size // len(self._body) + 1))[:size]
        upload = self._open(size)
        try:
            # The second part goes first, as a weight stream's header does.
            last = self._store.upload_part(upload, 2, body[:100], crc64nvme=None)
            first = self._store.upload_part(upload, 1, body, crc64nvme=None)
            stored = self._store.complete_upload(upload, [first, last], crc64nvme=None)
        except WeightlessError:
            self._store.abort_upload(upload)
            raise
        if stored.size != size + 100 or self._store.read(self._upload_key, size, 100) != bytes(body[:100]):
            raise StoreRejected("the parts were not joined as they were sent")
        return "works, parts in any order"

    def abort(self) -> str:
        upload = self._open(max(self._store.capabilities.min_part, 4096))
        try:
            if not self._store.capabilities.list_uploads:
                return "uploads cannot be listed: orphans are found by recorded ids only"
            prefix = self._upload_key.rpartition("/")[0] + "/"
            if upload.id not in [found.id for found in self._store.list_uploads(prefix)]:
                raise StoreRejected("an open upload is missing from the list of uploads")
        finally:
            self._store.abort_upload(upload)
        return "works"

    def link(self) -> str:
        if not self._store.capabilities.presign:
            return "this kind of store has no links; consumers need access of their own"
        url = self._store.presign(self._key, 60)
        try:
            answer = httpx2.get(url, timeout=20.0, verify=tls_context(self._ca_bundle))
        except httpx2.TransportError as error:
            raise StoreRejected(f"a presigned link cannot be fetched: {type(error).__name__}") from error
        if answer.status_code != 200 or answer.content != self._body:
            raise StoreRejected(f"a presigned link answered {answer.status_code}")
        return "works"

    def remove(self) -> str:
        for key in (self._key, self._upload_key):
            self._store.delete(key)
            if self._store.head(key) is not None:
                raise StoreRejected(f"{key} is still there after its removal")
        return "works"

    def _open(self, size: int) -> Upload:
        return self._store.create_upload(
            self._upload_key, media_type="application/octet-stream", metadata={}, part_size=size
        )
