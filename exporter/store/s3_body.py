"""Bodies that a retry can send again, without a copy."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer


def as_body(view: memoryview) -> bytes | bytearray | io.RawIOBase:
    """What botocore takes for the bytes of `view`.

    A view over a whole `bytes` or `bytearray` gives that object, which the connection sends in one piece; any other a
    seekable reader, which it sends in small ones.
    """
    whole = view.obj
    if isinstance(whole, (bytes, bytearray)) and len(whole) == view.nbytes and view.contiguous:
        return whole
    return ViewReader(view)


class ViewReader(io.RawIOBase):
    """A seekable, read-only file over a view."""

    def __init__(self, view: memoryview) -> None:
        super().__init__()
        self._view = view
        self._at = 0

    def __len__(self) -> int:
        return self._view.nbytes

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """The offset of the next byte."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move; the new offset."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._view.nbytes}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Buffer, /) -> int:
        """Fill `buffer` as far as there are bytes; `RawIOBase.read` is made of it."""
        with memoryview(buffer).cast("B") as target:
            count = min(len(target), max(0, self._view.nbytes - self._at))
            target[:count] = self._view[self._at : self._at + count]
        self._at += count
        return count
