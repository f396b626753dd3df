"""Request bodies over part buffers: sent without a copy, and again by a retry."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

STEP = 1 << 20
"""Bytes handed to the connection at a time."""


class Body(io.RawIOBase):
    """A seekable, read-only stream over a view.

    A plain `bytearray` would do for botocore, but its CRT signer copies one to look at it. `read` gives views, and more
    than it is asked for: urllib3 asks for 16 KiB at a time, which costs more than the TLS of it.
    """

    def __init__(self, view: memoryview) -> None:
        super().__init__()
        self._view = view.cast("B")
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

    def read(self, size: int | None = -1) -> memoryview:
        """The next bytes: all that are left if `size` is negative, else at most `STEP` or `size`, if that is more."""
        left = max(0, self._view.nbytes - self._at)
        count = left if size is None or size < 0 else min(left, max(size, STEP))
        piece = self._view[self._at : self._at + count]
        self._at += count
        return piece

    def readinto(self, buffer: Buffer, /) -> int:
        """Fill `buffer` as far as there are bytes; how many there were."""
        with memoryview(buffer).cast("B") as target:
            count = min(len(target), max(0, self._view.nbytes - self._at))
            target[:count] = self._view[self._at : self._at + count]
        self._at += count
        return count


def as_body(view: memoryview) -> Body | bytes:
    """What botocore takes for the bytes of `view`; each try needs a new one."""
    return Body(view) if view.nbytes else b""
