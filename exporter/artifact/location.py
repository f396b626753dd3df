"""Where a manifest is, and what may be read on its word: files of its own bucket, directory or host, nothing else."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from exporter.artifact.ports import Blob, StoreReads
from exporter.contract.errors import Forbidden, InvalidRequest, NotFound
from exporter.contract.manifest import MAX_MANIFEST, Manifest, parse_manifest

OpenReads = Callable[[str], StoreReads]
"""Opens a store by its URI (``file:///dir`` or ``s3://bucket``), for reading."""

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_STORED = re.compile(r"(?:(.*)/)?exports/[^/]+/[^/]+")
"""A manifest's key in a store: what stands before `exports/` is the store's own prefix."""


@dataclass(frozen=True, slots=True)
class StoredBlob:
    """A store's object as a `Blob`."""

    store: StoreReads
    key: str
    size: int
    crc64nvme: str | None = None

    @property
    def uri(self) -> str:
        """The object's URI."""
        return self.store.uri(self.key)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` in one ranged request."""
        self.store.read_into(self.key, offset, buffer)


def stored_blob(store: StoreReads, key: str) -> StoredBlob:
    """The object under `key`; `NotFound` where there is none."""
    found = store.head(key)
    if found is None:
        raise NotFound(
            f"nothing is stored at {store.uri(key)}", hint="Check the path or the URI, and the store's settings."
        )
    return StoredBlob(store, key, found.size, found.crc64nvme)


class StoreOrigin:
    """The store that holds a manifest. `base` is the manifest's own folder in it, without a slash at its end.

    `siblings`: look first for a file of the manifest's name beside it, as `pull` leaves them.
    `allowed`: more stores that absolute URLs may lead to, given by the user and never by the manifest.
    """

    def __init__(
        self, store: StoreReads, base: str, *, siblings: bool = False, allowed: Sequence[StoreReads] = ()
    ) -> None:
        self._store = store
        self._base = base
        self._siblings = siblings
        self._allowed = allowed

    def locate(self, name: str, urls: Sequence[str]) -> Blob:
        """The first of the URLs, in order, that has an object."""
        foreign: list[str] = []
        places: list[tuple[StoreReads, str]] = []
        if self._siblings:
            places.append((self._store, join_key(self._base, name)))
        for url in urls:
            try:
                place = self._place(url)
            except Forbidden:
                if self._siblings and "://" not in url:
                    continue  # a manifest that was pulled: its own relative URLs lead out of the folder
                raise
            if place is None:
                foreign.append(url)
            else:
                places.append(place)
        for store, key in places:
            found = store.head(key)
            if found is not None:
                return StoredBlob(store, key, found.size, found.crc64nvme)
        if foreign and len(foreign) == len(urls):
            raise foreign_origin(name, foreign[0], self._store.uri(self._base))
        raise NotFound(f"{name} is not stored: there is nothing at {places[-1][0].uri(places[-1][1])}", file=name)

    def _place(self, url: str) -> tuple[StoreReads, str] | None:
        if not _SCHEME.match(url):
            return self._store, join_key(self._base, url)
        for store in (self._store, *self._allowed):
            key = store.key_of(url)
            if key is not None:
                return store, key
        return None


def foreign_origin(name: str, url: str, origin: str) -> Forbidden:
    """The refusal to follow a manifest to another place; the URL is shown without its query."""
    # Neither a query, which may be a signature, nor a user and password are shown.
    shown = re.sub(r"//[^/@]*@", "//", url.split("?", 1)[0])[:200]
    return Forbidden(
        f"{name}: the manifest points at {shown!r}, outside of its own origin {origin}",
        hint="If you trust that place, name it with --allow-origin.",
        reason="source",
        file=name,
    )


def join_key(base: str, relative: str) -> str:
    """The key of a URL relative to the folder `base` (RFC 3986); `Forbidden` where it climbs out of the store."""
    parts = base.split("/") if base else []
    decoded = unquote(relative)
    if decoded.startswith("/") or "\\" in decoded or "\x00" in decoded:
        raise _outside(relative)
    for part in decoded.split("/"):
        if part == "..":
            if not parts:
                raise _outside(relative)
            parts.pop()
        elif part == "" or (part == "." and decoded == "."):
            raise _outside(relative)
        elif part != ".":
            parts.append(part)
    if not parts:
        raise _outside(relative)
    return "/".join(parts)


def _outside(url: str) -> Forbidden:
    return Forbidden(f"{url[:200]!r} is not a key in the manifest's own store", reason="source")


@dataclass(frozen=True, slots=True)
class Located:
    """A manifest, its bytes as stored, where they are, and the origin of its files."""

    manifest: Manifest
    content: bytes
    uri: str
    origin: StoreOrigin


def split_uri(target: str) -> tuple[str, str]:
    """The store's URI and the key in it, of a path, ``file://`` or ``s3://`` URI that names one object.

    The store is the whole bucket, or the directory above `exports/` where the path has the form of a stored export,
    else the file's own directory.
    """
    parts = urlsplit(target)
    if parts.scheme == "s3":
        key = target.split("://", 1)[1].partition("/")[2]
        if not parts.netloc or not key:
            raise InvalidRequest(f"{target} names no object: it needs a bucket and a key")
        return f"s3://{parts.netloc}", key
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise InvalidRequest(f"{target}: a file URI has no host")
        path = Path(unquote(parts.path))
    elif "://" in target:
        raise InvalidRequest(f"{target}: give an export id, a path, file://, s3:// or the service's URL")
    else:
        # A path is the user's own word: a link that it names is followed, as any other program would.
        path = Path(target).resolve()
    path = path.parent.resolve() / path.name
    match = _STORED.fullmatch(path.parent.as_posix().lstrip("/") + "/" + path.name)
    root = Path("/" + (match.group(1) or "")) if match else path.parent
    return "file://" + quote(root.as_posix()), path.relative_to(root).as_posix()


def locate_manifest(target: str, open_reads: OpenReads, allowed: Sequence[str] = ()) -> Located:
    """The manifest at a path, ``file://`` or ``s3://`` URI. A directory stands for the `manifest.json` in it.

    `NotFound` where there is none; `VerificationFailed` where it is not a manifest.
    """
    if "://" not in target and Path(target).is_dir():
        target = str(Path(target) / "manifest.json")
    root, key = split_uri(target)
    store = open_reads(root)
    blob = stored_blob(store, key)
    content = read_whole(blob, MAX_MANIFEST)
    base = posixpath.dirname(key)
    if any("://" not in uri for uri in allowed):
        raise InvalidRequest("an allowed origin is the URI of a store, such as s3://bucket")
    origin = StoreOrigin(store, base, siblings=root.startswith("file:"), allowed=[open_reads(uri) for uri in allowed])
    return Located(parse_manifest(content), content, blob.uri, origin)


def read_whole(blob: Blob, limit: int) -> bytes:
    """All bytes of a small file; `InvalidRequest` if it has more than `limit`."""
    if blob.size > limit:
        raise InvalidRequest(f"{blob.uri} has {blob.size} bytes, more than the {limit} that such a file may have")
    buffer = bytearray(blob.size)
    if buffer:
        blob.read_into(0, memoryview(buffer))
    return bytes(buffer)
