"""ETags as S3 makes them of bodies that it does not encrypt: MD5s, and an MD5 of MD5s."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from exporter.contract.objects import Part


def is_md5(text: str) -> bool:
    """Whether an ETag, without its quotes, could be an MD5."""
    return re.fullmatch(r"[0-9a-f]{32}", text) is not None


def multipart_etag(parts: Sequence[Part]) -> str | None:
    """What S3 names a multipart object whose parts' ETags are their MD5s."""
    plain = [part.etag.strip('"').lower() for part in parts]
    if not all(is_md5(etag) for etag in plain):
        return None
    joined = b"".join(bytes.fromhex(etag) for etag in plain)
    return f"{hashlib.md5(joined, usedforsecurity=False).hexdigest()}-{len(parts)}"
