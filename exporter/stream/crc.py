"""CRC64NVME as S3 writes it: base64 of eight big-endian bytes."""

from __future__ import annotations

import base64
from collections.abc import Iterable

from awscrt import checksums


def crc64nvme(data: bytes | bytearray | memoryview) -> str:
    """The CRC of `data`."""
    return encode(checksums.crc64nvme(data))


def encode(value: int) -> str:
    """S3's text for a CRC."""
    return base64.b64encode(value.to_bytes(8, "big")).decode("ascii")


def decode(text: str) -> int:
    """The CRC in S3's text; ``ValueError`` where it is none."""
    raw = base64.b64decode(text, validate=True)
    if len(raw) != 8:
        raise ValueError("a CRC64NVME has eight bytes")
    return int.from_bytes(raw, "big")


def combine(parts: Iterable[tuple[str, int]]) -> str:
    """The CRC of runs of bytes joined in order, from each run's `(CRC, length)`."""
    total = 0
    for crc, length in parts:
        total = checksums.combine_crc64nvme(total, decode(crc), length)
    return encode(total)
