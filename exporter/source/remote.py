"""Objects of a bucket as a source: every read is a ranged request, nothing is written to disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from exporter.contract.errors import SourceNotFound, SourceUnsafe
from exporter.source.confine import MAX_FILES
from exporter.source.ports import ObjectReads


def read_ahead(read: Callable[[int, int], bytes], offset: int, length: int, chunk_size: int) -> Iterator[bytes]:
    """Pieces of a range in order, the next one fetched while the caller works. Holds two pieces at most."""
    if not length:
        return
    if length <= chunk_size:
        yield read(offset, length)
        return
    spans = [(start, min(chunk_size, offset + length - start)) for start in range(offset, offset + length, chunk_size)]
    pool = ThreadPoolExecutor(1, thread_name_prefix="source")
    try:
        coming = pool.submit(read, *spans[0])
        for span in spans[1:]:
            piece = coming.result()
            coming = pool.submit(read, *span)
            yield piece
            del piece
        yield coming.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class RemoteReader:
    """One file that is read by ranged requests. Satisfies `RangeReader`; as safe from several threads as `fetch` is."""

    def __init__(self, name: str, size: int, fetch: Callable[[int, int], bytes]) -> None:
        """`fetch(offset, length)` makes one request for a range that lies within the file and is not empty."""
        self._name = name
        self._size = size
        self._fetch = fetch

    @property
    def size(self) -> int:
        """Bytes of the file when the source was resolved."""
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`; `SourceUnsafe` past the end or if fewer are given."""
        if offset < 0 or length < 0 or offset + length > self._size:
            raise SourceUnsafe(f"{self._name} ends at byte {self._size}, before {offset + length}.", offset=offset)
        if not length:
            return b""
        data = self._fetch(offset, length)
        if len(data) != length:
            raise SourceUnsafe(f"{self._name} gave {len(data)} bytes instead of {length}.", offset=offset)
        return data

    def chunks(self, offset: int, length: int, chunk_size: int) -> Iterator[bytes]:
        """The same bytes in pieces of at most `chunk_size`, one request each, one of them ahead."""
        return read_ahead(self.read, offset, length, chunk_size)

    def close(self) -> None:
        """Nothing is held between requests."""


class ObjectTree:
    """An object, or all objects under a prefix taken as a folder. Satisfies `SourceTree`."""

    def __init__(self, uri: str, key: str, objects: ObjectReads) -> None:
        """`key` has no slash at either end. `SourceNotFound` if there is nothing."""
        self._uri = uri
        self._objects = objects
        self._files = _single(key, objects) or _listed(key, objects)
        if not self._files:
            raise SourceNotFound(f"There is nothing at {uri}.", source=uri)

    @property
    def uri(self) -> str:
        return self._uri

    @property
    def revision(self) -> str | None:
        return None

    def files(self) -> Mapping[str, int]:
        """Relative names and sizes, as they were when the source was resolved."""
        return {name: size for name, (_, size) in self._files.items()}

    def open(self, name: str) -> RemoteReader:
        """Open a file of `files()`; no request is made before the first read."""
        if name not in self._files:
            raise SourceNotFound(f"The source has no file {name}.", file=name)
        key, size = self._files[name]
        return RemoteReader(key, size, partial(self._objects.read, key))

    def local_path(self, name: str) -> str | None:
        """None: an object has no path."""
        return None


def _single(key: str, objects: ObjectReads) -> dict[str, tuple[str, int]]:
    if not key:
        return {}
    try:
        return {key.rpartition("/")[2]: (key, objects.size(key))}
    except SourceNotFound:
        return {}


def _listed(key: str, objects: ObjectReads) -> dict[str, tuple[str, int]]:
    prefix = f"{key}/" if key else ""
    found: dict[str, tuple[str, int]] = {}
    for full, size in objects.list(prefix):
        name = full[len(prefix) :]
        if not full.startswith(prefix) or any(part in ("", ".", "..") for part in name.split("/")):
            continue
        found[name] = (full, size)
        if len(found) > MAX_FILES:
            raise SourceUnsafe(f"The source has more than {MAX_FILES} objects.", hint="Name a narrower prefix.")
    return found
