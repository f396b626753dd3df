"""What a check is given, and what it needs of a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from exporter.contract.manifest import Data, Program
from exporter.contract.objects import StoredObject


class Reads(Protocol):
    """Ranged reads of stored objects."""

    def head(self, key: str) -> StoredObject | None:
        """What is stored under `key`, None if nothing."""

    def read(self, key: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`; `NotFound` where there is no object."""


@dataclass(frozen=True, slots=True)
class StoredArtifact:
    """An artifact that is in the store and not yet committed: descriptors, and the store's keys beside them."""

    program: Program
    program_key: str
    data: Sequence[tuple[str, Data]] = ()
