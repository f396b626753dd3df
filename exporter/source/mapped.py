"""A local file as tensors that are not resident until touched, and back from a tensor to its place in the file."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from exporter.source.local import LocalReader


class MappedFile:
    """One file mapped privately: a write stays in this process and the file is never changed.

    Keeps its reader open, so that the bytes behind a tensor can be read with `pread` instead of through the map: that
    leaves nothing resident.
    """

    def __init__(self, reader: LocalReader) -> None:
        """The file must not be empty."""
        self.reader = reader
        self._map = reader.map()
        self._start = torch.frombuffer(self._map, dtype=torch.uint8, count=1).data_ptr()

    def storage(self, offset: int, length: int) -> torch.UntypedStorage:
        """`length` bytes of the file, at least one, as a storage; the map lives as long as the storage does."""
        return torch.frombuffer(self._map, dtype=torch.uint8, count=length, offset=offset).untyped_storage()

    def tensor(
        self, offset: int, length: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]
    ) -> torch.Tensor:
        """A tensor over `length` bytes of the file; the shape and strides must fit them."""
        return over(self.storage(offset, length), dtype, shape, strides, 0)

    def locate(self, storage: torch.UntypedStorage) -> int | None:
        """Where in the file a storage begins; None if it is not one of this map's."""
        place = storage.data_ptr() - self._start
        inside = place >= 0 and place + storage.nbytes() <= self.reader.size
        return place if storage.nbytes() and inside else None


def over(
    storage: torch.UntypedStorage, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], offset: int
) -> torch.Tensor:
    """A tensor on `storage`; `offset` and strides in elements."""
    return torch.empty(0, dtype=dtype).set_(storage, offset, tuple(shape), tuple(strides))
