"""CRC64NVME as S3 writes it, and Content-MD5: base64 of the digest's bytes."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable

from awscrt import checksums


def crc64nvme(data: bytes | bytearray | memoryview) -> str:
    """The CRC of `data`, base64 of eight big-endian bytes."""
    return base64.b64encode(checksums.crc64nvme(data).to_bytes(8, "big")).decode("ascii")


def combine(parts: Iterable[tuple[str, int]]) -> str:
    """The CRC of runs of bytes joined in order, from each run's `(CRC, length)`."""
    total = 0
    for text, length in parts:
        total = checksums.combine_crc64nvme(total, int.from_bytes(base64.b64decode(text), "big"), length)
    return base64.b64encode(total.to_bytes(8, "big")).decode("ascii")


def md5(data: bytes | bytearray | memoryview) -> bytes:
    """The MD5 of `data`: transport integrity where a store has no CRC64NVME, never security."""
    return hashlib.md5(data, usedforsecurity=False).digest()
