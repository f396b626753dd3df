"""`s3://`: objects in a bucket of any S3-compatible store, spoken to by boto3.

Bodies go out as they are, with plain headers: CRC64NVME where the store knows it, else Content-MD5. `checksums=auto`
asks once and remembers. What a reply got lost for is resolved by looking.
"""

from __future__ import annotations

import base64
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import botocore.exceptions as bc

from exporter.contract.errors import InvalidRequest, NotFound, StoreRejected, StoreUnavailable, WeightlessError
from exporter.contract.objects import Capabilities, Part, StoredObject, Upload
from exporter.contract.spec import StoreSpec
from exporter.store import crc
from exporter.store.etag import is_md5, multipart_etag
from exporter.store.keys import check_key, pack_metadata, relative_key, split_s3_uri
from exporter.store.s3_body import as_body
from exporter.store.s3_client import RetryPolicy, S3Client, endpoint_of
from exporter.store.s3_errors import code_of, is_upload_gone
from exporter.store.s3_profiles import Profile, profile_for
from exporter.store.s3_reads import BucketReads

NONCE = "weightless-nonce"
"""Metadata that says whose write an object is: how a lost reply is told from an older object."""
MAX_PRESIGN = 7 * 24 * 3600
_REFUSED_CHECKSUM = frozenset({400, 401, 403, 405, 411, 501})


@dataclass(slots=True)
class _Open:
    """What this process knows of an upload that it opened."""

    nonce: str | None = None
    crc64nvme: bool = False
    answered: bool = False


class S3Store:
    """A store below one prefix of one bucket. Calls are safe from several threads."""

    def __init__(
        self,
        spec: StoreSpec,
        *,
        profile: Profile | None = None,
        retry: RetryPolicy | None = None,
        sleep: Callable[[float], None] = time.sleep,
        read_timeout: float = 60,
    ) -> None:
        self._bucket, prefix = split_s3_uri(spec.uri)
        self._prefix = prefix + "/" if prefix else ""
        self._base = f"s3://{self._bucket}/{self._prefix}"
        self._spec = spec
        self._profile = profile or profile_for(spec.profile, endpoint_of(spec))
        known = {"crc64nvme": True, "off": False, "auto": self._profile.crc64nvme}
        self._crc = known[spec.checksums]
        self._client = S3Client(spec, retry=retry, sleep=sleep, read_timeout=read_timeout)
        self._reads = BucketReads(self._client, self._bucket)
        self._lock = threading.Lock()
        self._open: dict[str, _Open] = {}

    @property
    def capabilities(self) -> Capabilities:
        """The profile's limits, and what was learned about checksums."""
        return replace(self._profile.capabilities, crc64nvme=self._crc is not False)

    @property
    def retries(self) -> int:
        """Requests that were sent again, in all."""
        return self._client.retries

    def uri(self, key: str) -> str:
        """``s3://bucket/prefix/key``, the key as it is."""
        return self._base + check_key(key)

    def key_of(self, uri: str) -> str | None:
        """The key of a URI below this bucket and prefix, else None."""
        return relative_key(uri, self._base, quoted=False)

    def _where(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + check_key(key)}

    # --- multipart ---

    def create_upload(self, key: str, *, media_type: str, metadata: Mapping[str, str], part_size: int) -> Upload:
        """Open a multipart upload; the first one finds out whether the store knows CRC64NVME."""
        nonce = uuid.uuid4().hex
        parameters = {**self._where(key), **self._attributes(media_type, {**metadata, NONCE: nonce})}

        def create(checksums: bool) -> Any:
            extra = {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"} if checksums else {}
            return self._client.call("CreateMultipartUpload", self.uri(key), **parameters, **extra)

        reply = self._with_checksums(create, lambda r: r.get("ChecksumAlgorithm") == "CRC64NVME")
        identifier = reply.get("UploadId")
        if not identifier:
            raise StoreUnavailable(f"the store gave no upload id for {self.uri(key)}")
        with self._lock:
            self._open[identifier] = _Open(nonce, bool(self._crc))
        return Upload(key, identifier, time.time())

    def upload_part(self, upload: Upload, number: int, body: memoryview, *, crc64nvme: str | None) -> Part:
        """Send a part, with its CRC64NVME or Content-MD5 in a plain header."""
        known = self._known(upload)
        headers: dict[str, Any] = {}
        digest = b""
        if known.crc64nvme:
            crc64nvme = crc64nvme or crc.crc64nvme(body)
            headers["ChecksumCRC64NVME"] = crc64nvme
        else:
            digest = crc.md5(body)
            headers["ContentMD5"] = base64.b64encode(digest).decode("ascii")
        parameters = {**self._where(upload.key), "UploadId": upload.id, "PartNumber": number, **headers}
        doubts = 0

        def send(client: Any) -> Any:
            nonlocal doubts
            reply = client.upload_part(Body=as_body(body), ContentLength=len(body), **parameters)
            if not reply.get("ETag"):
                raise bc.ResponseStreamingError(error="no ETag in the reply")
            other = reply.get("ChecksumCRC64NVME", crc64nvme)
            plain = str(reply["ETag"]).strip('"').lower()
            if (known.crc64nvme and other != crc64nvme) or (digest and is_md5(plain) and plain != digest.hex()):
                # Damaged on the way, or an ETag that is no MD5 (encryption): sent again once to find out.
                doubts += 1
                if doubts == 1:
                    raise bc.ChecksumError(checksum_type="part", expected_checksum="", actual_checksum="")
                if known.crc64nvme:
                    raise StoreRejected(f"the store holds other bytes than were sent for {self.uri(upload.key)}")
            return reply

        silences = 0

        def waits_for_part_1(error: Exception) -> WeightlessError | None:
            """A gateway that takes parts in order never answers any, since part 1 (the header) comes last."""
            nonlocal silences
            silences += isinstance(error, bc.ReadTimeoutError)
            if number == 1 or known.answered or silences < 2:
                return None
            return StoreRejected(
                f"the store twice did not answer part {number} before part 1 had come; it seems to want them in order",
                hint="A streamed file's header is sent last. Use a store or gateway that takes parts in any order.",
            )

        try:
            reply = self._client.attempt("UploadPart", self.uri(upload.key), send, stop=waits_for_part_1)
        except StoreRejected as error:
            if known.crc64nvme or known.nonce is not None or error.details.get("status") != 400:
                raise
            # Another process opened this upload, with checksums that the listing of its parts did not tell.
            known.crc64nvme = True
            return self.upload_part(upload, number, body, crc64nvme=crc64nvme)
        known.answered = True
        return Part(number, len(body), reply["ETag"], crc64nvme)

    def copy_part(self, upload: Upload, number: int, source_key: str, offset: int, length: int) -> Part:
        """Make a part from a range of a stored object, inside the store."""
        reply = self._client.call(
            "UploadPartCopy",
            self.uri(source_key),
            **self._where(upload.key),
            UploadId=upload.id,
            PartNumber=number,
            CopySource=self._where(source_key),
            CopySourceRange=f"bytes={offset}-{offset + length - 1}",
        )
        result = reply.get("CopyPartResult") or {}
        if not result.get("ETag"):
            raise StoreUnavailable(f"the store did not say that it copied {self.uri(source_key)}")
        return Part(number, length, result["ETag"], result.get("ChecksumCRC64NVME"))

    def list_parts(self, upload: Upload) -> Sequence[Part]:
        """The parts held, in order, over all pages."""
        held = self._reads.parts(self._where(upload.key)["Key"], upload.id)
        with self._lock:  # another process may have opened it
            self._open.setdefault(upload.id, _Open(crc64nvme=any(part.crc64nvme for part in held)))
        return held

    def complete_upload(self, upload: Upload, parts: Sequence[Part], *, crc64nvme: str | None) -> StoredObject:
        """Join the parts, then look: a lost reply is a success only if the object is the one just made."""
        known = self._known(upload)
        extra: dict[str, Any] = {}
        if known.crc64nvme and crc64nvme:
            extra = {"ChecksumCRC64NVME": crc64nvme, "ChecksumType": "FULL_OBJECT"}
        unsure = False

        def ask(client: Any, listed: Sequence[Part]) -> None:
            named = [{"PartNumber": part.number, "ETag": part.etag, **_part_crc(part, known)} for part in listed]
            client.complete_multipart_upload(
                **self._where(upload.key), UploadId=upload.id, MultipartUpload={"Parts": named}, **extra
            )

        def complete(client: Any) -> StoredObject:
            nonlocal unsure
            if unsure and (ours := self._ours(upload, known, parts, crc64nvme)):
                return ours
            unsure = True
            try:
                ask(client, parts)
            except bc.ClientError as error:
                if is_upload_gone(error) and (ours := self._ours(upload, known, parts, crc64nvme)):
                    return ours
                if code_of(error) != "InvalidPart" or not extra:
                    raise
                # A reply to a part may have come with a damaged ETag. The store knows what it holds, and checks the CRC
                # of the whole.
                ask(client, self._relisted(upload, parts))
            found = self._head(upload.key)
            if found is None or found.size != sum(part.size for part in parts):
                raise bc.ResponseStreamingError(error="the object is not there as completed")
            return found

        try:
            stored = self._client.attempt("CompleteMultipartUpload", self.uri(upload.key), complete)
        except StoreUnavailable:
            ours = self._ours(upload, known, parts, crc64nvme)
            if ours is None:
                raise
            stored = ours
        with self._lock:
            self._open.pop(upload.id, None)
        return _without_mark(stored)

    def _relisted(self, upload: Upload, parts: Sequence[Part]) -> Sequence[Part]:
        """The parts with the ETags that the store lists, where it holds the same numbers and sizes."""
        held = self.list_parts(upload)
        if [(part.number, part.size) for part in held] != [(part.number, part.size) for part in parts]:
            return parts
        return [replace(part, etag=there.etag) for part, there in zip(parts, held, strict=True)]

    def _ours(self, upload: Upload, known: _Open, parts: Sequence[Part], crc64nvme: str | None) -> StoredObject | None:
        """The object under the key, if it came from this upload: by our mark, else by CRC, else by its ETag."""
        found = self._head(upload.key)
        if found is None or found.size != sum(part.size for part in parts):
            return None
        mark = found.metadata.get(NONCE)
        if known.nonce is not None and mark is not None:
            same = mark == known.nonce
        elif crc64nvme is not None and found.crc64nvme is not None:
            same = found.crc64nvme == crc64nvme
        else:
            same = found.etag is not None and found.etag.strip('"') == multipart_etag(parts)
        return found if same else None

    def abort_upload(self, upload: Upload) -> None:
        """Give the parts back; no error if the upload is gone already."""
        try:
            self._client.call(
                "AbortMultipartUpload", self.uri(upload.key), **self._where(upload.key), UploadId=upload.id
            )
        except StoreRejected as error:
            if error.details.get("status") != 404 or error.details.get("code") == "NoSuchBucket":
                raise
        with self._lock:
            self._open.pop(upload.id, None)

    def list_uploads(self, prefix: str) -> Iterator[Upload]:
        """Open uploads below `prefix`, over all pages."""
        start = self._prefix + check_key(prefix, prefix=True)
        for upload in self._reads.uploads(start):
            yield replace(upload, key=upload.key[len(self._prefix) :])

    def put(
        self,
        key: str,
        body: bytes | memoryview,
        *,
        media_type: str,
        metadata: Mapping[str, str] | None = None,
        if_absent: bool = False,
    ) -> StoredObject | None:
        """Write an object at once. With `if_absent`, one of several writers wins, and the others get None."""
        if if_absent and not self.capabilities.conditional_put and self.head(key) is not None:
            return None
        nonce = uuid.uuid4().hex
        parameters: dict[str, Any] = {
            **self._where(key),
            **self._attributes(media_type, {**(metadata or {}), NONCE: nonce}),
            "ContentLength": len(body),
        }
        if if_absent and self.capabilities.conditional_put:
            parameters["IfNoneMatch"] = "*"
        view = memoryview(body)
        checksum = crc.crc64nvme(view)

        def put(client: Any, extra: Mapping[str, str]) -> Any:
            reply = client.put_object(Body=as_body(view), **parameters, **extra)
            if not reply.get("ETag"):  # a page of some proxy
                raise bc.ResponseStreamingError(error="no ETag in the reply")
            return reply

        def send(checksums: bool) -> Any:
            extra: dict[str, str] = {"ChecksumCRC64NVME": checksum} if checksums else {}
            if self._crc is not True or not checksums:
                extra["ContentMD5"] = base64.b64encode(crc.md5(view)).decode("ascii")
            return self._client.attempt("PutObject", self.uri(key), lambda client: put(client, extra))

        try:
            reply = self._with_checksums(send, lambda r: r.get("ChecksumCRC64NVME") == checksum)
        except StoreRejected as error:
            if not if_absent or error.details.get("status") != 412:
                raise
            # The reply to our own write may have been lost, and its retry refused.
            found = self._head(key)
            return _without_mark(found) if found is not None and found.metadata.get(NONCE) == nonce else None
        return StoredObject(
            key, len(body), reply.get("ETag"), reply.get("ChecksumCRC64NVME"), time.time(), dict(metadata or {})
        )

    def delete(self, key: str) -> None:
        """Remove an object; no error if it is gone already."""
        try:
            self._client.call("DeleteObject", self.uri(key), **self._where(key))
        except NotFound:
            return

    def head(self, key: str) -> StoredObject | None:
        """What is stored under `key`."""
        found = self._head(key)
        return None if found is None else _without_mark(found)

    def _head(self, key: str) -> StoredObject | None:
        found = self._reads.head(self._where(key)["Key"], checksums=self._crc is True)
        return None if found is None else replace(found, key=key)

    def read(self, key: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`, in one ranged request."""
        buffer = bytearray(length)
        with memoryview(buffer) as view:
            self.read_into(key, offset, view)
        return bytes(buffer)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`, in one ranged request."""
        self._reads.read_into(self._where(key)["Key"], offset, buffer)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """Every object whose key starts with `prefix`, over all pages."""
        for item in self._reads.list(self._prefix + check_key(prefix, prefix=True)):
            yield replace(item, key=item.key[len(self._prefix) :])

    def presign(self, key: str, expires_in: int) -> str:
        """A URL that reads `key` for `expires_in` seconds (at most seven days) without credentials."""
        if not 1 <= expires_in <= MAX_PRESIGN:
            raise InvalidRequest(f"a link lives between 1 and {MAX_PRESIGN} seconds")
        return self._client.attempt(
            "the signing",
            self.uri(key),
            lambda client: str(
                client.generate_presigned_url("get_object", Params=self._where(key), ExpiresIn=expires_in)
            ),
        )

    def _attributes(self, media_type: str, metadata: Mapping[str, str]) -> dict[str, Any]:
        extra: dict[str, Any] = {"ContentType": media_type, "Metadata": pack_metadata(metadata)}
        if self._spec.kms_key_id:
            extra |= {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": self._spec.kms_key_id}
        if self._spec.storage_class:
            extra["StorageClass"] = self._spec.storage_class
        return extra

    def _with_checksums(self, send: Callable[[bool], Any], confirmed: Callable[[Any], bool]) -> Any:
        """`send` with checksum headers where they are known or not known to be refused; remembers what came of it."""
        crc_known = self._crc
        if crc_known is not None:
            return send(crc_known)
        try:
            reply = send(True)
        except StoreRejected as error:
            if error.details.get("status") not in _REFUSED_CHECKSUM:
                raise
            reply = send(False)
            self._crc = False
            return reply
        # A store that ignores the headers does not repeat them: it gets Content-MD5 from now on.
        self._crc = confirmed(reply)
        return reply

    def _known(self, upload: Upload) -> _Open:
        with self._lock:
            return self._open.setdefault(upload.id, _Open())


def _without_mark(item: StoredObject) -> StoredObject:
    return replace(item, metadata={name: value for name, value in item.metadata.items() if name != NONCE})


def _part_crc(part: Part, known: _Open) -> dict[str, str]:
    return {"ChecksumCRC64NVME": part.crc64nvme} if known.crc64nvme and part.crc64nvme else {}
