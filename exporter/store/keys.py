"""Keys and store URIs: what a key may look like, and which URIs lie inside a store."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from urllib.parse import quote, unquote

from exporter.contract.errors import InvalidRequest

MAX_KEY = 1024
"""Bytes of a whole key in UTF-8; S3's limit."""
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def check_key(key: str, *, prefix: bool = False) -> str:
    """`key` if it is relative, printable, and without empty, ``.`` or ``..`` components; else `InvalidRequest`.

    A `prefix` may also be empty or end in a slash or inside a component.
    """
    parts = key.split("/")
    if prefix:
        parts = parts[:-1] if parts[-1] in ("", ".", "..") else parts
    try:
        encoded = key.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest("a key is not valid Unicode") from error
    if any(part in ("", ".", "..") for part in parts) or _CONTROL.search(key) or len(encoded) > MAX_KEY:
        raise InvalidRequest(
            f"{key[:200]!r} is not a key of this store",
            hint="A key is relative, has no empty, '.' or '..' component, and at most 1024 bytes.",
        )
    return key


def relative_key(uri: str, base: str, *, quoted: bool) -> str | None:
    """The key of `uri` below the store's `base` URI (which ends in a slash), None where it lies outside of it.

    `quoted`: the URI's path is percent-encoded (``file://``); in ``s3://`` URIs the key stands as it is.
    """
    if not uri.startswith(base):
        return None
    key = uri[len(base) :]
    if quoted:
        if re.search(r"%(?![0-9A-Fa-f]{2})|%2[fF]|[?#]", key):
            return None
        key = unquote(key, errors="surrogateescape")
    try:
        return check_key(key)
    except InvalidRequest:
        return None


def quote_path(path: str) -> str:
    """A path for a ``file://`` URI."""
    return quote(path, safe="/!$&'()*+,;=:@~-._")


def pack_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Metadata as S3 takes it: lower-case keys, values in ASCII (others as RFC 2047 words, as S3 itself answers)."""
    packed = {}
    for key, value in (metadata or {}).items():
        if not re.fullmatch(r"[a-z0-9-]{1,64}", key):
            raise InvalidRequest(f"{key[:64]!r} is not a name for metadata")
        if _CONTROL.search(value):
            raise InvalidRequest(f"the metadata {key!r} has control characters")
        packed[key] = value if value.isascii() else f"=?UTF-8?B?{base64.b64encode(value.encode()).decode()}?="
    return packed


def split_s3_uri(uri: str) -> tuple[str, str]:
    """Bucket and prefix (without slashes at its ends) of an ``s3://`` URI."""
    rest = uri.removeprefix("s3://")
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    if rest == uri or not _BUCKET.fullmatch(bucket):
        raise InvalidRequest("an S3 store's URI is s3://bucket/prefix")
    return bucket, check_key(prefix) if prefix else ""
