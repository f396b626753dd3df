"""`ResumingTarget`: goes on with an upload that a killed attempt left open, and sends only the parts that it lacks."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

from exporter.contract.errors import NotFound, StoreRejected, StoreUnavailable, WeightlessError
from exporter.contract.objects import Part, StoredObject, Upload
from exporter.contract.spec import OpenUpload
from exporter.stream.ports import MultipartTarget
from exporter.stream.targets import PassingTarget


class ResumingTarget(PassingTarget):
    """Offers the earlier upload in place of a new one, where its key and part size fit and the store holds parts of it.

    A part is left out only where the store's own CRC64NVME or MD5 of it, and its size, are those of the bytes at hand.
    """

    def __init__(self, target: MultipartTarget, earlier: OpenUpload) -> None:
        super().__init__(target)
        self._earlier = earlier
        self._upload = Upload(earlier.key, earlier.upload_id)
        self._held: dict[int, Part] = {}
        self._lock = threading.Lock()
        self._settled = False
        self.kept_bytes = 0
        """Bytes that were in the store already."""

    def create_upload(self, key: str, *, media_type: str, metadata: Mapping[str, str], part_size: int) -> Upload:
        """The earlier upload; a new one where that is gone, is empty, or was cut otherwise."""
        if not self._settled and (key, part_size) == (self._earlier.key, self._earlier.part_size):
            with contextlib.suppress(StoreRejected, NotFound):  # given back meanwhile
                self._held = {part.number: part for part in self._target.list_parts(self._upload)}
            if self._held:
                self._settled = True
                return self._upload
        self.drop()
        return self._target.create_upload(key, media_type=media_type, metadata=metadata, part_size=part_size)

    def upload_part(self, upload: Upload, number: int, body: memoryview, *, crc64nvme: str | None) -> Part:
        """Nothing is sent where the store holds the same bytes under the same number."""
        with self._lock:
            held = self._held.pop(number, None)
        if held is None or not _equal(held, body, crc64nvme):
            return self._target.upload_part(upload, number, body, crc64nvme=crc64nvme)
        with self._lock:
            self.kept_bytes += len(body)
        return replace(held, crc64nvme=crc64nvme)

    def complete_upload(self, upload: Upload, parts: Sequence[Part], *, crc64nvme: str | None) -> StoredObject:
        """As the store. `StoreUnavailable` where the earlier attempt sent more parts than there are now: some stores
        want every part named, and none can take one back."""
        if self._held:
            raise StoreUnavailable(
                f"the upload of {self._target.uri(upload.key)} that was to be resumed holds parts of other weights",
                hint="Submit the export again: it starts a new upload.",
            )
        return self._target.complete_upload(upload, parts, crc64nvme=crc64nvme)

    def drop(self) -> None:
        """Give the earlier upload back, if it is not the one in use. What cannot be done now, the reaper does."""
        if not self._settled:
            self._settled = True
            with contextlib.suppress(WeightlessError):
                self._target.abort_upload(self._upload)


def _equal(held: Part, body: memoryview, crc64nvme: str | None) -> bool:
    if held.size != len(body):
        return False
    if held.crc64nvme is not None and crc64nvme is not None:
        return held.crc64nvme == crc64nvme
    # An ETag that is no MD5 (encryption) is equal to none, and the part is sent again.
    return held.etag.strip('"').lower() == hashlib.md5(body, usedforsecurity=False).hexdigest()
