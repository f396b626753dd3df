"""Value types that stores and their callers exchange: objects, parts, capabilities. Sizes in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MiB = 2**20


@dataclass(frozen=True, slots=True)
class StoredObject:
    """What a store says of one object. `crc64nvme` is S3's base64 of eight big-endian bytes, None where unknown."""

    key: str
    size: int
    etag: str | None = None
    crc64nvme: str | None = None
    modified: float | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Upload:
    """An open multipart upload: the key that it will create and the store's id of it."""

    key: str
    id: str
    started: float | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A part that a store has taken: number (from 1), size, the store's ETag, our CRC64NVME (base64) where computed."""

    number: int
    size: int
    etag: str
    crc64nvme: str | None = None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store can do; a caller plans by it, and a test is skipped only by it.

    `min_part` holds for every part but the last; `conditional_put` is `If-None-Match: *` on a single PUT.
    """

    max_parts: int = 10_000
    min_part: int = 5 * MiB
    max_part: int = 5 * 1024 * MiB
    equal_parts: bool = False
    conditional_put: bool = True
    crc64nvme: bool = True
    copy_part: bool = True
    list_uploads: bool = True
    presign: bool = True
    metadata: bool = True
