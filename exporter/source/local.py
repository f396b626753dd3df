"""Files of this machine: ranged reads that leave no page cache behind, and maps for tensors that need an address."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from exporter.contract.errors import SourceNotFound, SourceUnsafe
from exporter.source.confine import is_folder, open_regular, regular_files


class LocalReader:
    """One regular file, read with `pread`. Satisfies `RangeReader`; safe from several threads."""

    def __init__(self, descriptor: int, name: str) -> None:
        """Takes over `descriptor`; `name` is what messages call the file."""
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size
        self.name = name

    @property
    def size(self) -> int:
        """Bytes of the file when it was opened."""
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`; `SourceUnsafe` past the end."""
        self._check(offset, length)
        pieces = []
        while length:
            piece = self._pread(offset, length)
            pieces.append(piece)
            offset += len(piece)
            length -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def chunks(self, offset: int, length: int, chunk_size: int) -> Iterator[bytes]:
        """The same bytes in pieces of at most `chunk_size`; each piece's pages are dropped after it was read."""
        self._check(offset, length)
        while length:
            piece = self._pread(offset, min(length, chunk_size))
            os.posix_fadvise(self._descriptor, offset, len(piece), os.POSIX_FADV_DONTNEED)
            yield piece
            offset += len(piece)
            length -= len(piece)

    def map(self) -> mmap.mmap:
        """The whole file as private pages: reads come from the file, writes stay in this process."""
        try:
            return mmap.mmap(self._descriptor, self._size, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise SourceNotFound(f"{self.name} cannot be mapped: {error}.") from error

    def close(self) -> None:
        """Close the descriptor; maps stay valid."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()

    def _check(self, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > self._size:
            raise SourceUnsafe(
                f"{self.name} ends at byte {self._size}, before {offset + length}.", file=self.name, offset=offset
            )

    def _pread(self, offset: int, length: int) -> bytes:
        try:
            piece = os.pread(self._descriptor, length, offset)
        except OSError as error:
            raise SourceNotFound(f"{self.name} can no longer be read: {error.strerror}.", file=self.name) from error
        if not piece:
            raise SourceUnsafe(f"{self.name} was cut short while it was being read.", file=self.name, offset=offset)
        return piece


class LocalTree:
    """A confined file or folder of this machine. Satisfies `SourceTree`."""

    def __init__(self, uri: str, path: str, roots: Sequence[str]) -> None:
        """`path` is a real path that was found to lie under `roots` (real paths too)."""
        self._uri = uri
        self._roots = tuple(roots)
        self._files: dict[str, tuple[str, int]]
        if is_folder(path):
            self._files = regular_files(path, self._roots)
        else:
            descriptor = open_regular(path, self._roots)
            try:
                self._files = {PurePosixPath(path).name: (path, os.fstat(descriptor).st_size)}
            finally:
                os.close(descriptor)

    @property
    def uri(self) -> str:
        return self._uri

    @property
    def revision(self) -> str | None:
        return None

    def files(self) -> Mapping[str, int]:
        """Relative names and sizes, as they were when the source was resolved."""
        return {name: size for name, (_, size) in self._files.items()}

    def open(self, name: str) -> LocalReader:
        """Open a file of `files()`; `SourceUnsafe` if its size changed since."""
        if name not in self._files:
            raise SourceNotFound(f"The source has no file {name}.", file=name)
        path, size = self._files[name]
        reader = LocalReader(open_regular(path, self._roots), name)
        if reader.size != size:
            reader.close()
            raise SourceUnsafe(
                f"{name} changed from {size} to {reader.size} bytes while it was being read.",
                hint="Write weights to a new name and rename them when complete.",
                file=name,
            )
        return reader

    def local_path(self, name: str) -> str | None:
        """The real path of a file of `files()`."""
        return self._files[name][0] if name in self._files else None
