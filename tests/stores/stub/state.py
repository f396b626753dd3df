"""What a scripted S3 server holds and does, without HTTP: objects, uploads, and S3's own checks."""

from __future__ import annotations

import base64
import hashlib
import threading
import time
import uuid
from dataclasses import dataclass, field

from awscrt import checksums

from tests.stores.stub.personality import Personality


class Refusal(Exception):
    """An S3 error answer."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status = status
        self.code = code


@dataclass
class StubObject:
    """A stored object."""

    body: bytes
    etag: str
    headers: dict[str, str]
    crc64nvme: str
    modified: float = field(default_factory=time.time)


@dataclass
class StubUpload:
    """An open multipart upload; parts are `(body, etag)`."""

    key: str
    headers: dict[str, str]
    full_crc: bool
    started: float = field(default_factory=time.time)
    parts: dict[int, tuple[bytes, str]] = field(default_factory=dict)


def crc_text(body: bytes) -> str:
    """S3's text of a CRC64NVME."""
    return base64.b64encode(checksums.crc64nvme(body).to_bytes(8, "big")).decode()


class StubState:
    """One bucket. All methods are called with `lock` held."""

    def __init__(self, personality: Personality) -> None:
        self.personality = personality
        self.lock = threading.RLock()
        self.objects: dict[str, StubObject] = {}
        self.uploads: dict[str, StubUpload] = {}

    def check_body(self, headers: dict[str, str], body: bytes) -> None:
        """Every digest that came with a body has to be right."""
        sha256 = headers.get("x-amz-content-sha256", "UNSIGNED-PAYLOAD")
        if (
            sha256.startswith("STREAMING")
            or "x-amz-trailer" in headers
            or "chunked" in headers.get("content-encoding", "")
        ):
            raise Refusal(self.personality.trailer_status, "MissingContentLength")
        if "content-length" not in headers:
            raise Refusal(411, "MissingContentLength")
        if sha256 != "UNSIGNED-PAYLOAD" and sha256 != hashlib.sha256(body).hexdigest():
            raise Refusal(400, "XAmzContentSHA256Mismatch")
        md5 = headers.get("content-md5")
        if md5 is not None and md5 != base64.b64encode(hashlib.md5(body).digest()).decode():
            raise Refusal(400, "BadDigest")
        self._check_checksum(headers, body)

    def _check_checksum(self, headers: dict[str, str], body: bytes) -> None:
        given = {
            name for name in headers if name.startswith("x-amz-checksum-") or name == "x-amz-sdk-checksum-algorithm"
        }
        if given and self.personality.checksums == "refuse":
            raise Refusal(self.personality.refuse_status, "NotImplemented")
        crc = headers.get("x-amz-checksum-crc64nvme")
        if self.personality.checksums == "verify" and crc is not None and crc != crc_text(body):
            raise Refusal(400, "BadDigest")

    def etag(self, body: bytes) -> str:
        """The MD5, or something else where objects are encrypted."""
        md5 = hashlib.md5(body).hexdigest()
        return md5 if self.personality.etag_is_md5 else hashlib.md5(md5.encode()).hexdigest()

    def kept(self, headers: dict[str, str]) -> dict[str, str]:
        """Headers that come back with the object."""
        names = ["content-type"]
        if self.personality.keeps_metadata:
            names += [name for name in headers if name.startswith("x-amz-meta-")]
        return {name: headers[name] for name in names if name in headers}

    def put(self, key: str, headers: dict[str, str], body: bytes) -> StubObject:
        """PutObject."""
        if headers.get("if-none-match") == "*" and self.personality.conditional == "honour" and key in self.objects:
            raise Refusal(412, "PreconditionFailed")
        self.objects[key] = StubObject(body, self.etag(body), self.kept(headers), crc_text(body))
        return self.objects[key]

    def create(self, key: str, headers: dict[str, str]) -> str:
        """CreateMultipartUpload; the id."""
        algorithm = headers.get("x-amz-checksum-algorithm")
        if algorithm and self.personality.checksums == "refuse":
            raise Refusal(self.personality.refuse_status, "NotImplemented")
        full = self.personality.checksums == "verify" and algorithm == "CRC64NVME"
        identifier = uuid.uuid4().hex
        self.uploads[identifier] = StubUpload(key, self.kept(headers), full)
        return identifier

    def upload(self, key: str, identifier: str) -> StubUpload:
        """The open upload of that id and key."""
        found = self.uploads.get(identifier)
        if found is None or found.key != key:
            raise Refusal(404, "NoSuchUpload")
        return found

    def part(self, key: str, identifier: str, number: int, body: bytes, headers: dict[str, str]) -> str:
        """UploadPart; the ETag."""
        upload = self.upload(key, identifier)
        if not 1 <= number <= self.personality.max_parts:
            raise Refusal(400, "InvalidArgument")
        if upload.full_crc and "x-amz-checksum-crc64nvme" not in headers:
            raise Refusal(400, "InvalidRequest")
        etag = self.etag(body)
        upload.parts[number] = (body, etag)
        return etag

    def complete(self, key: str, identifier: str, named: list[tuple[int, str]], headers: dict[str, str]) -> StubObject:
        """CompleteMultipartUpload, with every check that a strict store makes only here."""
        upload = self.upload(key, identifier)
        numbers = [number for number, _ in named]
        if not named or numbers != sorted(set(numbers)):
            raise Refusal(400, "InvalidPartOrder")
        if any(number not in upload.parts or upload.parts[number][1] != etag for number, etag in named):
            raise Refusal(400, "InvalidPart")
        if set(numbers) != set(upload.parts):
            raise Refusal(400, "InvalidPart")
        bodies = [upload.parts[number][0] for number in numbers]
        if any(len(body) < self.personality.min_part for body in bodies[:-1]):
            raise Refusal(400, "EntityTooSmall")
        if self.personality.equal_parts and (
            len({len(body) for body in bodies[:-1]}) > 1 or len(bodies[-1]) > len(bodies[0])
        ):
            raise Refusal(400, "InvalidPart")
        whole = b"".join(bodies)
        if upload.full_crc and headers.get("x-amz-checksum-crc64nvme", crc_text(whole)) != crc_text(whole):
            raise Refusal(400, "BadDigest")
        joined = b"".join(bytes.fromhex(upload.parts[number][1]) for number in numbers)
        etag = f"{hashlib.md5(joined).hexdigest()}-{len(named)}"
        self.objects[key] = StubObject(whole, etag, upload.headers, crc_text(whole))
        del self.uploads[identifier]
        return self.objects[key]
