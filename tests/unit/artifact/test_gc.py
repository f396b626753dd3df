"""gc and the reaper, on a real `file://` store: garbage goes, in two steps where it is shared, and nothing else."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exporter.artifact.gc import Sweep, Swept
from exporter.artifact.owners import Owner, owner_of
from exporter.artifact.reap import UNKNOWN_AGE, reap
from exporter.contract.errors import IllegalState
from exporter.contract.objects import Capabilities, Upload
from exporter.store.local import LocalStore
from exporter.stream.index import IndexEntry, WeightIndex

from .conftest import make_export

DAY = 86_400
NOW = 2_000_000_000.0
IDS = [f"exp_{'0' * 25}{letter}" for letter in "ABCDEFGH"]


class Store:
    """A `file://` store whose objects have ages, and exports in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.real = LocalStore(root.as_uri())

    def put(self, key: str, body: bytes = b"x", *, age: float = 100 * DAY) -> None:
        self.real.put(key, body, media_type="application/octet-stream")
        os.utime(self.root / key, (NOW - age, NOW - age))

    def export(self, name: str, *, weights: str | None = None, age: float = 100 * DAY, attempt: int = 1) -> None:
        """A finished export whose `.ptd` is in the folder `weights`, by default its own."""
        owner = weights or f"{name}-{attempt}"
        raw: dict[str, Any] = make_export([64]).manifest.model_dump(mode="json", by_alias=True, exclude_none=True)
        raw["export"] |= {"id": name, "attempt": attempt, "createdAt": "2020-01-01T00:00:00Z"}
        raw["program"]["urls"] = [f"{attempt}/model.pte"]
        raw["files"] = []
        raw["data"][0]["urls"] = [self.real.uri(f"weights/{owner}/model.ptd")]
        self.put(f"exports/{name}/{attempt}/model.pte", age=age)
        if weights is None:
            self.put(f"weights/{owner}/model.ptd", age=age)
            entry = json.dumps({"file": self.real.uri(f"weights/{owner}/model.ptd")}).encode()
            self.put(f"weights/by-layout/aa/{name}.json", entry, age=age)
        self.put(f"exports/{name}/manifest.json", json.dumps(raw).encode(), age=age)

    def weights(self, name: str, *, age: float = 100 * DAY, indexed: bool = True) -> None:
        """Weights without an export."""
        self.put(f"weights/{name}/model.ptd", age=age)
        if indexed:
            entry = json.dumps({"file": {"key": f"weights/{name}/model.ptd"}}).encode()
            self.put(f"weights/by-layout/bb/{name}.json", entry, age=age)

    def held(self) -> set[str]:
        return {item.key for item in self.real.list("")}

    def sweep(self, *, now: float = NOW, **given: Any) -> Swept:
        settings: dict[str, Any] = {
            "active": set(), "known": set(IDS), "cutoff": None, "wait": DAY, "grace": 3600.0, **given,
        }  # fmt: skip
        return Sweep(self.real, now=now, **settings).run()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_an_expired_export_goes_and_a_younger_one_stays(store: Store) -> None:
    store.export(IDS[0])
    store.export(IDS[1], age=10 * DAY)
    found = store.sweep(cutoff=NOW - 30 * DAY)
    assert found.expired == [IDS[0]]
    assert not any(key.startswith(f"exports/{IDS[0]}") for key in store.held())
    assert f"exports/{IDS[1]}/manifest.json" in store.held()
    assert found.deleted[0] == f"exports/{IDS[0]}/manifest.json"


def test_nothing_expires_without_an_age(store: Store) -> None:
    store.export(IDS[0])
    before = store.held()
    assert store.sweep() == Swept()
    assert store.held() == before
    assert store.sweep(due={IDS[0]}).expired == [IDS[0]]


def test_a_failed_export_goes_whole_when_its_time_has_come(store: Store) -> None:
    store.put(f"exports/{IDS[0]}/1/model.pte", age=60)
    store.put(f"exports/{IDS[1]}/1/model.pte", age=60)
    assert store.sweep(due={IDS[0], IDS[1]}, active={IDS[1]}).expired == [IDS[0]]
    assert store.held() == {f"exports/{IDS[1]}/1/model.pte"}


def test_a_running_export_never_expires(store: Store) -> None:
    store.export(IDS[0])
    assert store.sweep(cutoff=NOW, active={IDS[0]}).expired == []


def test_unused_weights_go_in_two_steps(store: Store) -> None:
    store.export(IDS[0])
    weights = f"weights/{IDS[0]}-1/"
    first = store.sweep(cutoff=NOW - 30 * DAY)
    assert first.marked == [weights]
    assert weights + "model.ptd" in store.held()
    assert f"weights/by-layout/aa/{IDS[0]}.json" not in store.held()
    assert store.sweep(now=NOW + DAY - 60).waiting == [weights]
    assert weights + "model.ptd" in store.held()
    store.sweep(now=NOW + DAY + 1)
    assert store.held() == set()


def test_weights_that_another_export_uses_stay(store: Store) -> None:
    store.export(IDS[0])
    store.export(IDS[1], weights=f"{IDS[0]}-1", age=DAY)
    store.sweep(cutoff=NOW - 30 * DAY)
    store.sweep(now=NOW + 10 * DAY)
    assert f"weights/{IDS[0]}-1/model.ptd" in store.held()
    assert f"weights/by-layout/aa/{IDS[0]}.json" in store.held()


def test_a_commit_between_mark_and_deletion_saves_the_weights(store: Store) -> None:
    store.export(IDS[0])
    store.sweep(cutoff=NOW - 30 * DAY)
    store.export(IDS[1], weights=f"{IDS[0]}-1", age=0)
    found = store.sweep(now=NOW + 2 * DAY)
    assert f"weights/{IDS[0]}-1/model.ptd" in store.held()
    assert found.deleted == [f"weights/{IDS[0]}-1/gc.json"]


@pytest.mark.parametrize(
    ("active", "age", "kept"), [({IDS[1]}, 100 * DAY, True), (set(), 3600, True), (set(), 30 * DAY, False)]
)
def test_a_lease_keeps_weights_while_it_means_something(store: Store, active: set[str], age: float, kept: bool) -> None:
    store.weights(f"{IDS[0]}-1", indexed=False)
    store.put(f"weights/{IDS[0]}-1/leases/{IDS[1]}", age=age)
    assert (store.sweep(active=active, grace=60.0).marked == []) == kept


def test_the_weights_of_a_running_export_stay(store: Store) -> None:
    store.weights(f"{IDS[0]}-2")
    assert store.sweep(active={IDS[0]}).marked == []
    assert store.sweep().marked == [f"weights/{IDS[0]}-2/"]


def test_new_weights_are_left_alone(store: Store) -> None:
    store.weights(f"{IDS[0]}-1", age=60)
    store.weights(f"{IDS[1]}-1", age=60, indexed=False)
    assert (store.sweep().marked, store.sweep().deleted) == ([], [])


def test_weights_of_a_dead_attempt_that_nobody_can_find_go_at_once(store: Store) -> None:
    store.weights(f"{IDS[0]}-1", indexed=False)
    store.weights(f"{IDS[0]}-2", indexed=False)
    store.weights(f"{IDS[1]}-1", indexed=False)
    assert store.sweep(active={IDS[1]}).deleted == [f"weights/{IDS[0]}-1/model.ptd", f"weights/{IDS[0]}-2/model.ptd"]
    assert store.held() == {f"weights/{IDS[1]}-1/model.ptd"}


def test_files_of_attempts_that_did_not_win_go(store: Store) -> None:
    store.export(IDS[0], attempt=2)
    store.put(f"exports/{IDS[0]}/1/model.pte")
    store.put(f"exports/{IDS[1]}/1/model.pte")
    store.put(f"exports/{IDS[2]}/1/model.pte", age=60)
    found = store.sweep()
    assert sorted(found.deleted) == [f"exports/{IDS[0]}/1/model.pte", f"exports/{IDS[1]}/1/model.pte"]


def test_an_unreadable_manifest_stops_the_deletion_of_weights(store: Store) -> None:
    store.put(f"weights/{IDS[0]}-1/model.ptd")
    store.put(f"exports/{IDS[1]}/manifest.json", b'{"schemaVersion": 99}')
    store.put(f"exports/{IDS[1]}/1/model.pte")
    found = store.sweep(cutoff=NOW)
    assert found.problems
    assert (found.marked, found.deleted, found.expired) == ([], [], [])


def test_what_this_database_does_not_know_is_left_for_a_week(store: Store) -> None:
    store.export(IDS[0], age=6 * DAY)
    store.weights(f"{IDS[1]}-1", age=6 * DAY)
    store.put(f"exports/{IDS[2]}/1/model.pte", age=6 * DAY)
    found = store.sweep(known=set(), cutoff=NOW - DAY)
    assert (found.expired, found.marked, found.deleted) == ([], [], [])
    later = store.sweep(known=set(), cutoff=NOW - DAY, now=NOW + 2 * DAY)
    assert later.expired == [IDS[0]]
    assert later.marked


def test_foreign_objects_are_not_touched(store: Store) -> None:
    others = {
        "exports/readme.txt",
        "weights/mine.ptd",
        "data/x",
        "exports/exp_short/1/x",
        "weights/by-layout/zz/y.json",
    }
    for key in others:
        store.put(key, b"{}")
    assert store.sweep(cutoff=NOW, known=set()).deleted == []
    assert store.held() == others


def test_a_dry_run_says_the_same_and_does_nothing(store: Store) -> None:
    store.export(IDS[0])
    store.put(f"exports/{IDS[3]}/1/model.pte")
    before = store.held()
    said = store.sweep(cutoff=NOW - 30 * DAY, dry_run=True)
    assert store.held() == before
    done = store.sweep(cutoff=NOW - 30 * DAY)
    assert (said.expired, said.deleted) == (done.expired, done.deleted)
    assert said.freed_bytes == done.freed_bytes > 0


def test_another_deployment_is_not_swept(store: Store) -> None:
    store.export(IDS[0])
    store.put(".weightless.json", b'{"deployment": "theirs"}')
    with pytest.raises(IllegalState):
        store.sweep(cutoff=NOW, deployment="ours")
    assert f"exports/{IDS[0]}/manifest.json" in store.held()
    assert store.sweep(cutoff=NOW, deployment="theirs").expired == [IDS[0]]


def test_owners_are_read_from_keys() -> None:
    assert owner_of(f"weights/{IDS[0]}-12/a/b.ptd") == Owner(IDS[0], 12)
    assert owner_of(f"exports/{IDS[0]}/3/model.pte") == Owner(IDS[0], 3)
    for key in (
        "weights/exp_x-1/a",
        f"weights/{IDS[0]}/a",
        f"exports/{IDS[0]}/manifest.json",
        f"x/weights/{IDS[0]}-1/a",
    ):
        assert owner_of(key) is None


# --- the reaper ---


@pytest.fixture
def open_upload(store: Store) -> Callable[[str], Upload]:
    def make(key: str) -> Upload:
        return store.real.create_upload(key, media_type="x/y", metadata={}, part_size=4096)

    return make


def reaped(store: Store, *, later: float, **given: Any) -> set[str]:
    settings: dict[str, Any] = {"running": set(), "known": set(), "grace": 3600.0, **given}
    return {upload.key for upload in reap(store.real, now=time.time() + later, **settings).aborted}


def test_orphaned_uploads_are_aborted_and_others_stay(store: Store, open_upload: Callable[[str], Upload]) -> None:
    dead = open_upload(f"weights/{IDS[0]}-1/model.ptd")
    alive = open_upload(f"weights/{IDS[0]}-2/model.ptd")
    foreign = open_upload("backup/weights.tar")
    unknown = open_upload(f"weights/{IDS[5]}-1/model.ptd")
    running = {Owner(IDS[0], 2)}
    assert reaped(store, later=10, running=running, known={IDS[0]}) == set()
    assert reaped(store, later=7200, running=running, known={IDS[0]}) == {dead.key}
    assert {upload.key for upload in store.real.list_uploads("")} == {alive.key, foreign.key, unknown.key}
    assert reaped(store, later=UNKNOWN_AGE + 60, running=running, known={IDS[0]}) == {unknown.key}
    assert {upload.key for upload in store.real.list_uploads("")} == {alive.key, foreign.key}


def test_recorded_uploads_are_enough_where_none_can_be_listed(store: Store) -> None:
    class Blind(LocalStore):
        @property
        def capabilities(self) -> Capabilities:
            return Capabilities(list_uploads=False)

    blind = Blind(store.root.as_uri())
    upload = blind.create_upload(f"weights/{IDS[0]}-1/model.ptd", media_type="x/y", metadata={}, part_size=4096)
    recorded = [Upload(upload.key, upload.id)]
    assert reap(blind, running=set(), known={IDS[0]}, now=NOW, grace=60).aborted == ()
    found = reap(blind, running=set(), known={IDS[0]}, recorded=recorded, now=NOW, grace=60)
    assert found.aborted == tuple(recorded)
    assert list(store.real.list_uploads("")) == []


def test_gc_reads_the_index_that_the_stream_writes(store: Store) -> None:
    export = make_export([64])
    key = f"weights/{IDS[0]}-1/model.ptd"
    data = export.manifest.data[0].model_copy(
        update={"urls": (store.real.uri(key),), "weight_set": "sha256:" + "1" * 64}
    )
    store.put(key, export.bytes_of("model.ptd"))
    index = WeightIndex(store.real, IDS[1])
    layout = "sha256:" + "2" * 64
    entry = IndexEntry(key=key, part_size=4096, data=data)
    assert index.add(layout, entry) is None
    assert index.lease(entry) is True
    assert store.sweep(active={IDS[1]}).marked == []
    index.release(key)
    assert store.sweep().marked == [f"weights/{IDS[0]}-1/"]
    assert index.candidates(layout) == []
    assert store.sweep(now=NOW + 2 * DAY).deleted == [key, f"weights/{IDS[0]}-1/gc.json"]
