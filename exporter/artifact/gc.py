"""Garbage in a store: expired exports, files of attempts that did not win, weights that no manifest names.

Weights are shared, so they go in two steps. The first run that finds a weight folder unused takes its index entry away,
so that no new export finds it, and leaves a mark with the time. A run that comes `wait` seconds later (the longest
deadline plus grace) reads leases and manifests again, and only then deletes. An export that reuses weights writes its
lease first and looks at the file again just before its commit, so between the two runs it either shows or moves away.
Weights of a dead attempt that never came into the index, and were never leased, are nobody else's and go at once.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from exporter.artifact.location import join_key
from exporter.artifact.owners import EXPORTS, INDEX, WEIGHTS, Owner, check_deployment, owner_of
from exporter.artifact.ports import SweptStore
from exporter.artifact.reap import UNKNOWN_AGE
from exporter.contract.errors import Forbidden, NotFound, VerificationFailed
from exporter.contract.manifest import MAX_MANIFEST, Manifest, parse_manifest
from exporter.contract.objects import StoredObject
from exporter.contract.spec import EXPORT_ID

MARK = "gc.json"
MAX_INDEX_ENTRY = 16 * 2**20
"""Bytes of an index entry that are read."""


@dataclass(slots=True)
class Swept:
    """What a sweep did, or would do in a dry run. `problems` stop the deletion of weights."""

    expired: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    marked: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    freed_bytes: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Folder:
    """A folder of weights and what is in it."""

    owner: Owner
    objects: list[StoredObject] = field(default_factory=list)

    @property
    def mark(self) -> StoredObject | None:
        return next((item for item in self.objects if item.key == self.owner.weights + MARK), None)

    @property
    def newest(self) -> float:
        return max((item.modified or 0.0 for item in self.objects if item != self.mark), default=0.0)

    def leases(self) -> Iterator[tuple[str, float]]:
        """Export ids that hold a lease, and when they took it."""
        prefix = self.owner.weights + "leases/"
        for item in self.objects:
            if item.key.startswith(prefix):
                yield item.key.removeprefix(prefix), item.modified or 0.0


class Sweep:
    """One run over one store's prefix.

    `active`: ids of exports that have not ended. `known`: ids of every export in the database; whatever belongs to
    others is left alone until it is a week old. `due`: ids whose time has come whatever their age. `cutoff`: exports
    finished before this time expire; None keeps all. `wait`: seconds between mark and deletion. `grace`: seconds for
    which anything new is left alone.
    """

    def __init__(
        self,
        store: SweptStore,
        *,
        active: Collection[str],
        known: Collection[str],
        due: Collection[str] = (),
        cutoff: float | None,
        now: float,
        wait: float,
        grace: float,
        deployment: str | None = None,
        dry_run: bool = False,
    ) -> None:
        self._store = store
        self._active = active
        self._known = known
        self._due = due
        self._cutoff = cutoff
        self._now = now
        self._wait = wait
        self._grace = grace
        self._deployment = deployment
        self._dry_run = dry_run
        self._gone: set[str] = set()
        self._index: dict[Owner, list[StoredObject]] | None = None
        self._swept = Swept()

    def run(self) -> Swept:
        """Do it, or with `dry_run` find out what would be done."""
        check_deployment(self._store, self._deployment)
        winners = self._exports()
        self._stray_files(winners)
        used = self._used_keys()
        if used is not None:
            self._weights(used)
        return self._swept

    # --- exports ---

    def _exports(self) -> dict[str, int | None]:
        """Remove expired exports; the others' ids with the attempt that won, None where there is no manifest."""
        found: dict[str, int | None] = {}
        for item in self._store.list(EXPORTS):
            name = item.key.removeprefix(EXPORTS).partition("/")[0]
            if not EXPORT_ID.fullmatch(name):
                continue
            found.setdefault(name, None)
            if item.key != f"{EXPORTS}{name}/manifest.json":
                continue
            manifest = self._manifest(item)
            if manifest is not None:
                found[name] = manifest.export.attempt
                if self._expired(name, manifest, item):
                    self._swept.expired.append(name)
        over = set(self._due) - set(self._active) - set(self._swept.expired)
        self._swept.expired += [name for name in found if name in over]
        for name in self._swept.expired:
            del found[name]
            # The manifest goes first: before anything else is gone, the export is.
            self._delete(self._store.head(f"{EXPORTS}{name}/manifest.json"))
            for item in list(self._store.list(f"{EXPORTS}{name}/")):
                self._delete(item)
        return found

    def _expired(self, name: str, manifest: Manifest, item: StoredObject) -> bool:
        if name in self._active:
            return False
        if name in self._due:
            return True
        if self._cutoff is None:
            return False
        times = [item.modified] if item.modified is not None else []
        with contextlib.suppress(ValueError):
            times.append(datetime.fromisoformat(manifest.export.created_at).timestamp())
        cutoff = self._cutoff if name in self._known else min(self._cutoff, self._now - UNKNOWN_AGE)
        return bool(times) and max(times) < cutoff

    def _stray_files(self, winners: dict[str, int | None]) -> None:
        for name, attempt in winners.items():
            if name in self._active:
                continue
            if attempt is None and any(f"{EXPORTS}{name}/manifest.json" in text for text in self._swept.problems):
                continue
            files = [item for item in self._store.list(f"{EXPORTS}{name}/") if owner_of(item.key) is not None]
            for item in files:
                owner = owner_of(item.key)
                if owner is not None and owner.attempt != attempt and self._old(name, item.modified):
                    self._delete(item)

    def _old(self, export: str, modified: float | None) -> bool:
        age = self._now - (modified or 0.0)
        return age >= (self._grace if export in self._known else max(UNKNOWN_AGE, self._grace))

    # --- weights ---

    def _manifest(self, item: StoredObject) -> Manifest | None:
        try:
            if item.size > MAX_MANIFEST:
                raise VerificationFailed("it is too large for a manifest")
            return parse_manifest(self._store.read(item.key, 0, item.size))
        except (VerificationFailed, NotFound) as error:
            self._swept.problems.append(f"{item.key} cannot be read: {error.message}")
            return None

    def _used_keys(self) -> set[str] | None:
        """Keys that manifests name, read now; None where one cannot be read, and so nobody knows."""
        used: set[str] = set()
        for item in self._store.list(EXPORTS):
            if not item.key.endswith("/manifest.json") or item.key in self._gone:
                continue
            manifest = self._manifest(item)
            if manifest is None:
                return None
            folder = item.key.removesuffix("/manifest.json")
            for data in manifest.data:
                for url in data.urls:
                    key = self._store.key_of(url) if "://" in url else _relative(folder, url)
                    if key is not None:
                        used.add(key)
        return used

    def _folders(self) -> list[_Folder]:
        folders: dict[Owner, _Folder] = {}
        for item in self._store.list(WEIGHTS):
            owner = owner_of(item.key)
            if owner is not None and item.key.startswith(WEIGHTS):
                folders.setdefault(owner, _Folder(owner)).objects.append(item)
        return list(folders.values())

    def _weights(self, used: set[str]) -> None:
        doomed: list[_Folder] = []
        for folder in self._folders():
            if self._live(folder, used):
                if folder.mark is not None:
                    self._delete(folder.mark)
            elif folder.mark is None and self._can_be_found(folder):
                self._mark(folder)
            elif folder.mark is None:
                doomed.append(folder)
            elif self._now - self._marked_at(folder.mark) < self._wait:
                self._swept.waiting.append(folder.owner.weights)
            else:
                doomed.append(folder)
        for folder in doomed:
            self._delete_folder(folder)

    def _live(self, folder: _Folder, used: set[str]) -> bool:
        if folder.owner.export in self._active or any(item.key in used for item in folder.objects):
            return True
        if not self._old(folder.owner.export, folder.newest):
            return True
        return any(
            export in self._active or self._now - taken < max(self._wait, self._grace)
            for export, taken in folder.leases()
        )

    def _can_be_found(self, folder: _Folder) -> bool:
        """Whether another export may have the file in mind: it is in the index, or has been leased."""
        return any(folder.leases()) or bool(self._entries_of(folder))

    def _mark(self, folder: _Folder) -> None:
        self._swept.marked.append(folder.owner.weights)
        for item in self._entries_of(folder):
            self._delete(item)
        if not self._dry_run:
            body = json.dumps({"markedAt": int(self._now)}).encode()
            self._store.put(folder.owner.weights + MARK, body, media_type="application/json")

    def _entries_of(self, folder: _Folder) -> list[StoredObject]:
        """The index entries that name a file of the folder; the index is read once."""
        if self._index is None:
            self._index = {}
            for item in self._store.list(INDEX):
                for owner in self._named(item):
                    self._index.setdefault(owner, []).append(item)
        return self._index.get(folder.owner, [])

    def _named(self, item: StoredObject) -> set[Owner]:
        """Whose files an index entry names."""
        if item.size > MAX_INDEX_ENTRY:
            return set()
        try:
            entry = json.loads(self._store.read(item.key, 0, item.size))
        except (ValueError, NotFound):
            return set()
        owners = (owner_of(self._store.key_of(text) or text) for text in _strings(entry))
        return {owner for owner in owners if owner is not None}

    def _marked_at(self, mark: StoredObject) -> float:
        try:
            marked = json.loads(self._store.read(mark.key, 0, min(mark.size, 4096)))["markedAt"]
        except (ValueError, KeyError, TypeError, NotFound):
            return self._now
        return float(marked) if isinstance(marked, int) else self._now

    def _delete_folder(self, folder: _Folder) -> None:
        # Read again: an export may have committed since the lists above.
        used = self._used_keys()
        fresh = _Folder(folder.owner, list(self._store.list(folder.owner.weights)))
        if used is None or self._live(fresh, used):
            return
        for item in sorted(fresh.objects, key=lambda item: item == fresh.mark):
            self._delete(item)

    def _delete(self, item: StoredObject | None) -> None:
        if item is None or item.key in self._gone:
            return
        self._gone.add(item.key)
        self._swept.deleted.append(item.key)
        self._swept.freed_bytes += item.size
        if not self._dry_run:
            self._store.delete(item.key)


def _relative(folder: str, url: str) -> str | None:
    try:
        return join_key(folder, url)
    except Forbidden:
        return None


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
