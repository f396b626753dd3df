"""Reads of a bucket by whole keys: objects, ranges, and listings over all their pages."""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

import botocore.exceptions as bc

from exporter.contract.errors import NotFound, SourceAccessDenied, SourceNotFound, StoreRejected, StoreUnavailable
from exporter.contract.objects import Part, StoredObject, Upload
from exporter.contract.spec import StoreSpec
from exporter.store.s3_client import S3Client

MAX_PAGES = 100_000
"""Pages of a listing; a server that never ends is an error, not a loop."""


class BucketReads:
    """Reads of one bucket."""

    def __init__(self, client: S3Client, bucket: str) -> None:
        self._client = client
        self._bucket = bucket

    def _place(self, key: str) -> str:
        return f"s3://{self._bucket}/{key}"

    def head(self, key: str, *, checksums: bool = False) -> StoredObject | None:
        """What is stored under `key`, None if nothing. With `checksums`, its CRC64NVME is asked for."""
        mode = {"ChecksumMode": "ENABLED"} if checksums else {}
        try:
            reply = self._client.call("HeadObject", self._place(key), Bucket=self._bucket, Key=key, **mode)
        except NotFound:
            return None
        if "ContentLength" not in reply:
            raise StoreUnavailable(f"the store did not say how large {self._place(key)} is")
        return StoredObject(
            key,
            reply["ContentLength"],
            reply.get("ETag"),
            reply.get("ChecksumCRC64NVME"),
            _seconds(reply.get("LastModified")),
            {name.lower(): value for name, value in reply.get("Metadata", {}).items()},
        )

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`; a reply that breaks off is asked for again."""
        length = len(buffer)
        if not length:
            return
        span = f"bytes={offset}-{offset + length - 1}"

        def fetch(client: Any) -> None:
            reply = client.get_object(Bucket=self._bucket, Key=key, Range=span)
            with reply["Body"] as body:
                told = str(reply.get("ContentRange", ""))
                whole = not told and offset == 0 and reply.get("ContentLength") == length
                if not whole and not told.startswith(f"{span.replace('=', ' ')}/"):
                    raise StoreUnavailable(f"{self._place(key)} has no {length} bytes at {offset}")
                _fill(body, buffer)

        try:
            self._client.attempt("GetObject", self._place(key), fetch)
        except StoreRejected as error:
            if error.details.get("status") == 416:
                raise StoreUnavailable(f"{self._place(key)} has no {length} bytes at {offset}") from None
            raise

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """Every object whose key starts with `prefix`."""
        where: dict[str, Any] = {}
        for _ in range(MAX_PAGES):
            page = self._client.call("ListObjectsV2", self._place(prefix), Bucket=self._bucket, Prefix=prefix, **where)
            found = page.get("Contents", [])
            for item in found:
                yield StoredObject(
                    item["Key"], item["Size"], item.get("ETag"), None, _seconds(item.get("LastModified"))
                )
            if not page.get("IsTruncated"):
                return
            token = page.get("NextContinuationToken")
            after = {"ContinuationToken": token} if token else {"StartAfter": found[-1]["Key"]} if found else where
            if after == where:
                raise StoreUnavailable(f"the listing of {self._place(prefix)} does not go on")
            where = after
        raise StoreUnavailable(f"the listing of {self._place(prefix)} does not end")

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Every open multipart upload whose key starts with `prefix`."""
        where: dict[str, Any] = {}
        for _ in range(MAX_PAGES):
            page = self._client.call(
                "ListMultipartUploads", self._place(prefix), Bucket=self._bucket, Prefix=prefix, **where
            )
            for item in page.get("Uploads", []):
                if item["Key"].startswith(prefix):
                    yield Upload(item["Key"], item["UploadId"], _seconds(item.get("Initiated")))
            after = {"KeyMarker": page.get("NextKeyMarker"), "UploadIdMarker": page.get("NextUploadIdMarker")}
            after = {name: value for name, value in after.items() if value}
            if not page.get("IsTruncated") or not after or after == where:
                return
            where = after

    def parts(self, key: str, upload_id: str) -> Sequence[Part]:
        """The parts held for an upload, in order."""
        parts: builtins.list[Part] = []
        marker = 0
        for _ in range(MAX_PAGES):
            page = self._client.call(
                "ListParts",
                self._place(key),
                Bucket=self._bucket,
                Key=key,
                UploadId=upload_id,
                **({"PartNumberMarker": marker} if marker else {}),
            )
            parts += [
                Part(item["PartNumber"], item["Size"], item["ETag"], item.get("ChecksumCRC64NVME"))
                for item in page.get("Parts", [])
            ]
            following = int(page.get("NextPartNumberMarker") or 0)
            if not page.get("IsTruncated") or following <= marker:
                break
            marker = following
        return sorted(parts, key=lambda part: part.number)


class S3Reads:
    """Reads of a bucket that sources are in, as `exporter.source.ports.ObjectReads` says."""

    def __init__(self, bucket: str, spec: StoreSpec) -> None:
        self._reads = BucketReads(S3Client(spec), bucket)
        self._bucket = bucket

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Keys and sizes under `prefix`."""
        try:
            for item in self._reads.list(prefix):
                yield item.key, item.size
        except StoreRejected as error:
            raise self._denied(error) from None

    def size(self, key: str) -> int:
        """Bytes of one object; `SourceNotFound` where there is none."""
        try:
            found = self._reads.head(key)
        except StoreRejected as error:
            raise self._denied(error) from None
        if found is None:
            raise SourceNotFound(f"there is no object s3://{self._bucket}/{key}")
        return found.size

    def read(self, key: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes of an object."""
        buffer = bytearray(length)
        try:
            with memoryview(buffer) as view:
                self._reads.read_into(key, offset, view)
        except NotFound:
            raise SourceNotFound(f"there is no object s3://{self._bucket}/{key}") from None
        except StoreRejected as error:
            raise self._denied(error) from None
        return bytes(buffer)

    def _denied(self, error: StoreRejected) -> SourceAccessDenied | SourceNotFound:
        if error.details.get("code") == "NoSuchBucket":
            return SourceNotFound(f"there is no bucket s3://{self._bucket}")
        return SourceAccessDenied(error.message, hint="Let the store's credentials read the source's bucket.")


def _fill(body: Any, buffer: memoryview) -> None:
    at = 0
    while at < len(buffer):
        data = body.read(min(len(buffer) - at, 1 << 20))
        if not data:
            raise bc.IncompleteReadError(actual_bytes=at, expected_bytes=len(buffer))
        buffer[at : at + len(data)] = data
        at += len(data)


def _seconds(value: Any) -> float | None:
    return value.timestamp() if isinstance(value, datetime) else None
