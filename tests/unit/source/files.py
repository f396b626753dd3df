"""Bytes as sources, for tests: an object store of a dict, and trees over temporary files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from exporter.contract.errors import SourceNotFound
from exporter.source.local import LocalTree


class Objects(dict[str, bytes]):
    """A bucket as `ObjectReads`, which counts the largest read."""

    largest = 0

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        return iter([(key, len(body)) for key, body in sorted(self.items()) if key.startswith(prefix)])

    def size(self, key: str) -> int:
        if key not in self:
            raise SourceNotFound(f"no {key}")
        return len(self[key])

    def read(self, key: str, offset: int, length: int) -> bytes:
        self.largest = max(self.largest, length)
        return self[key][offset : offset + length]


class Buffer:
    """Bytes as a `RangeReader`, which remembers the largest read."""

    def __init__(self, data: bytes, size: int | None = None) -> None:
        self.data = data
        self._size = len(data) if size is None else size
        self.largest = 0

    @property
    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        assert offset >= 0
        assert offset + length <= self._size
        self.largest = max(self.largest, length)
        return self.data[offset : offset + length].ljust(length, b"\0")

    def chunks(self, offset: int, length: int, chunk_size: int) -> Iterator[bytes]:
        for position in range(offset, offset + length, chunk_size):
            yield self.read(position, min(chunk_size, offset + length - position))

    def close(self) -> None:
        return None


def tree_of(folder: Path, **files: bytes) -> LocalTree:
    """A local source with these files; `__` in a name stands for a dot."""
    for name, data in files.items():
        (folder / name.replace("__", ".")).write_bytes(data)
    return LocalTree(str(folder), str(folder), [str(folder)])
