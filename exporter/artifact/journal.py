"""What a pull has written so far: one line a block, in a file beside the part.

A journal is a hint and no proof. Blocks that it lists are read back and hashed like any other, so a torn write, a lost
page after a power cut or a changed file is found, and fetched again.
"""

from __future__ import annotations

import json
import os
import threading

MAX_JOURNAL = 64 * 2**20
"""Bytes of a journal that are read back; a longer one is ignored."""


class Journal:
    """The blocks that a part holds. `identity` is the digest of what the part is a copy of.

    A journal of something else, or of another block size, is started anew (`fresh` is then true).
    """

    def __init__(self, descriptor: int, identity: str, block: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._blocks = self._read(identity, block)
        self.fresh = self._blocks is None
        if self._blocks is None:
            self._blocks = set()
            os.ftruncate(descriptor, 0)
            self._append(json.dumps({"v": 1, "identity": identity, "block": block}) + "\n")

    def _read(self, identity: str, block: int) -> set[int] | None:
        size = os.fstat(self._descriptor).st_size
        if not 0 < size <= MAX_JOURNAL:
            return None
        first, *rest = os.pread(self._descriptor, size, 0).split(b"\n")
        try:
            head = json.loads(first)
        except ValueError:
            return None
        if head != {"v": 1, "identity": identity, "block": block}:
            return None
        if rest and rest[-1]:
            self._append("\n")
        return {int(line) for line in rest[:-1] if line.isdigit() and len(line) < 12}

    def __contains__(self, index: int) -> bool:
        with self._lock:
            return index in (self._blocks or ())

    def __len__(self) -> int:
        return len(self._blocks or ())

    def add(self, index: int) -> None:
        """Note that block `index` was written."""
        with self._lock:
            if self._blocks is not None and index not in self._blocks:
                self._blocks.add(index)
                self._append(f"{index}\n")

    def distrust(self, index: int) -> None:
        """Forget block `index`: its bytes turned out wrong. Holds for this run."""
        with self._lock:
            if self._blocks is not None:
                self._blocks.discard(index)

    def _append(self, line: str) -> None:
        os.write(self._descriptor, line.encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
