"""`WeightIndex`: which weight sets a store holds, by layout; and leases on them, so that nobody deletes what is used.

Keys, from contract.md: ``weights/by-layout/{layout}/{weight-set}.json``, ``{folder of the file}/leases/{export id}``.
"""

from __future__ import annotations

import json

from pydantic import Field, ValidationError

from exporter.contract.base import Lenient
from exporter.contract.errors import NotFound, StoreUnavailable, WeightlessError
from exporter.contract.manifest import Bytes, Crc, Data, Digest, canonical_json
from exporter.stream.ports import ReuseTarget

INDEX = "weights/by-layout/"
MEDIA_TYPE = "application/vnd.weightless.weights.v1+json"
MAX_ENTRY = 16 * 2**20
"""Bytes of an index entry that are read."""
MAX_CANDIDATES = 32
"""Entries of one layout that are looked at, the newest first."""


class PartDigest(Lenient):
    """One part of a stored file, as it was sent."""

    number: int = Field(ge=1)
    size: Bytes
    crc64nvme: Crc
    sha256: Digest


class IndexEntry(Lenient):
    """A stored weight set: its file's key in the store, the file as manifests describe it, and its parts."""

    schema_version: int = 1
    key: str
    part_size: int = Field(ge=1)
    data: Data
    parts: tuple[PartDigest, ...] = ()

    def equals(self, data: Data) -> bool:
        """Whether the stored file has the very bytes that `data` describes."""
        mine, other = self.data, data
        return (mine.size, mine.header_digest, mine.crc64nvme, mine.segment_base_offset) == (
            other.size,
            other.header_digest,
            other.crc64nvme,
            other.segment_base_offset,
        ) and [(s.offset, s.size, s.digest) for s in mine.segments] == [
            (s.offset, s.size, s.digest) for s in other.segments
        ]


class WeightIndex:
    """The index of one store prefix. Reuse never crosses a prefix, since keys are relative to it."""

    def __init__(self, target: ReuseTarget, holder: str) -> None:
        """`holder`: the id of the export that leases."""
        self._target = target
        self._holder = holder

    def candidates(self, layout: str) -> list[IndexEntry]:
        """Entries with this layout digest whose file is there with its size, the newest first.

        An entry that cannot be read is passed over: the index only saves work.
        """
        listed = sorted(self._target.list(_folder(layout)), key=lambda item: item.modified or 0.0, reverse=True)
        found = []
        for item in listed[:MAX_CANDIDATES]:
            entry = self._read(item.key, item.size)
            if entry is not None and self._is_there(entry):
                found.append(entry)
        return found

    def add(self, layout: str, entry: IndexEntry) -> IndexEntry | None:
        """Write an entry; the one that was there first, if there was one, else None.

        One whose file is gone (its export failed after all, or gc took it) is replaced.
        """
        key = self.key(layout, entry)
        body = canonical_json(entry.model_dump(mode="json", by_alias=True, exclude_none=True))
        for _ in range(3):
            if self._target.put(key, body, media_type=MEDIA_TYPE, if_absent=True) is not None:
                return None
            found = self._target.head(key)
            first = None if found is None else self._read(key, found.size)
            if first is not None and self._is_there(first):
                return first
            self._target.delete(key)
        return None

    def remove(self, layout: str, entry: IndexEntry) -> None:
        """Take an entry back, where it still is this one."""
        key = self.key(layout, entry)
        found = self._target.head(key)
        if found is not None and (there := self._read(key, found.size)) is not None and there.key == entry.key:
            self._target.delete(key)

    @staticmethod
    def key(layout: str, entry: IndexEntry) -> str:
        """The entry's key in the store."""
        return f"{_folder(layout)}{(entry.data.weight_set or '').removeprefix('sha256:')}.json"

    def lease(self, entry: IndexEntry) -> bool:
        """Say that this export uses the file, then look whether it is still there."""
        self._target.put(self._lease_key(entry.key), b"{}", media_type="application/json")
        if self._is_there(entry):
            return True
        self.release(entry.key)
        return False

    def release(self, key: str) -> None:
        """Take the lease on a file back; its manifest keeps it from now on."""
        self._target.delete(self._lease_key(key))

    def check(self, entry: IndexEntry) -> None:
        """Just before the commit: `StoreUnavailable`, to be retried, where a leased file went away all the same."""
        if not self._is_there(entry):
            raise StoreUnavailable(
                f"the stored weights {self._target.uri(entry.key)} went away while they were used",
                hint="Submit the export again: it will send the weights.",
            )

    def _is_there(self, entry: IndexEntry) -> bool:
        found = self._target.head(entry.key)
        return (
            found is not None
            and found.size == entry.data.size
            and (found.crc64nvme is None or found.crc64nvme == entry.data.crc64nvme)
        )

    def _read(self, key: str, size: int) -> IndexEntry | None:
        if size > MAX_ENTRY:
            return None
        try:
            entry = IndexEntry.model_validate(json.loads(self._target.read(key, 0, size)))
            self._target.uri(entry.key)  # refuses a key that would leave the store
        except (NotFound, ValidationError, ValueError, RecursionError):
            return None
        except WeightlessError as error:
            if error.code == "invalid-request":
                return None
            raise
        return entry if entry.schema_version == 1 and entry.key.startswith("weights/") else None

    def _lease_key(self, key: str) -> str:
        return f"{key.rpartition('/')[0]}/leases/{self._holder}"


def _folder(layout: str) -> str:
    return f"{INDEX}{layout.removeprefix('sha256:')}/"
