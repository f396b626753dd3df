"""Submitting, reading, listing, cancelling and deleting, on both databases."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from exporter.contract.errors import IdempotencyConflict, IllegalState, NotFound, QueueFull
from service.database import Database
from service.job_queue import Claimer, JobQueue
from service.job_store import IDEMPOTENCY_SECONDS, IdempotencyKey, JobStore, ListFilter
from service.jobs import Export, State, new_id
from tests.unit.service.conftest import MakeExport

ME = Claimer("me", "executor", frozenset({"xnnpack"}))


class Clock:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def test_what_is_stored_comes_back(database: Database, make_export: MakeExport) -> None:
    jobs = JobStore(database)
    export = make_export({"labels": {"pr": "12"}, "options": {"text": "ünï\u2028 '\"%"}}, caller={"kind": "github"})
    stored, created = jobs.submit(export)
    assert created
    assert jobs.get(export.id) == stored == export.evolve(last_event=1)
    [event] = jobs.events(export.id)
    assert json.loads(event.data) == {
        "v": 1,
        "seq": 1,
        "time": event.time,
        "type": "state",
        "from": None,
        "to": "queued",
        "attempt": 0,
    }


def test_an_unknown_export_is_not_found(database: Database) -> None:
    jobs = JobStore(database)
    for call in (jobs.get, jobs.cancel, jobs.delete):
        with pytest.raises(NotFound):
            call(new_id())


def test_the_same_key_gives_the_same_export(database: Database, make_export: MakeExport) -> None:
    clock = Clock()
    jobs = JobStore(database, clock=clock)
    first, _ = jobs.submit(make_export(), key=IdempotencyKey("k", "digest"))
    again, created = jobs.submit(make_export(), key=IdempotencyKey("k", "digest"))
    assert (again, created) == (first, False)
    with pytest.raises(IdempotencyConflict):
        jobs.submit(make_export(), key=IdempotencyKey("k", "other"))
    other, created = jobs.submit(make_export(owner="token:2"), key=IdempotencyKey("k", "other"))
    assert created
    assert other.id != first.id
    clock.now += IDEMPOTENCY_SECONDS + 1
    assert jobs.submit(make_export(), key=IdempotencyKey("k", "other"))[1]


def test_a_double_click_makes_one_export(database: Database, make_export: MakeExport) -> None:
    jobs = JobStore(database)

    def click(_: int) -> str:
        return jobs.submit(make_export(), key=IdempotencyKey("same", "body"))[0].id

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(click, range(24)))) == 1
    assert len(jobs.list(ListFilter(), limit=100)) == 1


def test_a_full_queue_refuses_its_owner_alone(database: Database, make_export: MakeExport) -> None:
    jobs = JobStore(database)
    for _ in range(3):
        jobs.submit(make_export(owner="token:1"), queue_limit=3)
    with pytest.raises(QueueFull):
        jobs.submit(make_export(owner="token:1"), queue_limit=3, key=IdempotencyKey("k", "d"))
    jobs.submit(make_export(owner="token:2"), queue_limit=3)
    jobs.submit(make_export(owner="token:1"), queue_limit=4, key=IdempotencyKey("k", "d"))


def test_lists_are_newest_first_and_paged(database: Database, make_export: MakeExport) -> None:
    jobs = JobStore(database)
    ids = sorted((jobs.submit(make_export())[0].id for _ in range(7)), reverse=True)
    seen: list[str] = []
    before = None
    while page := jobs.list(ListFilter(), limit=3, before=before):
        seen += [export.id for export in page]
        before = page[-1].id
    assert seen == ids


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (ListFilter(owner="token:1"), "a"),
        (ListFilter(recipe="exported-program"), "b"),
        (ListFilter(repository="o/r"), "c"),
        (ListFilter(labels=(("pr", "7"),)), "d"),
        (ListFilter(labels=(("pr", None),)), "cd"),
        (ListFilter(labels=(("pr", None), ("team", "x"))), "c"),
        (ListFilter(state=State.CANCELLED), "e"),
        (ListFilter(state=State.QUEUED, repository="o/r"), "c"),
        (ListFilter(), "abcde"),
        (ListFilter(owner="nobody"), ""),
    ],
)
def test_filters(database: Database, make_export: MakeExport, where: ListFilter, expected: str) -> None:
    jobs = JobStore(database)
    made = {
        "a": make_export(owner="token:1"),
        "b": make_export({"recipe": "exported-program"}),
        "c": make_export({"labels": {"pr": "8", "team": "x"}}, caller={"kind": "github", "repository": "o/r"}),
        "d": make_export({"labels": {"pr": "7"}}),
        "e": make_export(),
    }
    for export in made.values():
        jobs.submit(export)
    jobs.cancel(made["e"].id)
    found = {export.id for export in jobs.list(where, limit=10)}
    assert found == {made[name].id for name in expected}


def test_position_counts_higher_priorities_and_older_exports(database: Database, make_export: MakeExport) -> None:
    jobs = JobStore(database)
    ids = sorted(new_id() for _ in range(4))
    exports = [
        jobs.submit(make_export(id=item, priority=priority))[0]
        for item, priority in zip(ids, (0, 0, 5, -1), strict=True)
    ]
    assert [jobs.position(export) for export in exports] == [2, 3, 1, 4]
    assert jobs.position(jobs.cancel(ids[0])) is None


def test_cancel_is_at_once_while_queued_and_a_mark_while_active(database: Database, make_export: MakeExport) -> None:
    jobs, queue = JobStore(database), JobQueue(database)
    queued, _ = jobs.submit(make_export())
    assert jobs.cancel(queued.id).state is State.CANCELLED
    assert jobs.cancel(queued.id) == jobs.get(queued.id)
    jobs.submit(make_export())
    active = queue.claim(ME, "host/0", 60)
    assert active is not None
    assert active.id != queued.id
    marked = jobs.cancel(active.id)
    assert marked.state is State.STARTING
    assert marked.cancel_requested_at is not None
    assert queue.cancelled("me") == {active.id}
    assert queue.cancelled("another") == set()


def test_only_a_finished_export_is_deleted_with_all_its_rows(database: Database, make_export: MakeExport) -> None:
    jobs = JobStore(database)
    export, _ = jobs.submit(make_export({"labels": {"a": "b"}}))
    with pytest.raises(IllegalState):
        jobs.delete(export.id)
    jobs.cancel(export.id)
    jobs.delete(export.id)
    with pytest.raises(NotFound):
        jobs.get(export.id)
    assert jobs.events(export.id) == []
    assert jobs.newest_events([export.id]) == {}


def test_previous_is_the_newest_success_of_the_same_source(database: Database, make_export: MakeExport) -> None:
    jobs, queue = JobStore(database), JobQueue(database)

    def succeed(**body: Any) -> Export:
        jobs.submit(make_export(body))
        claimed = queue.claim(ME, "host/0", 60)
        assert claimed is not None
        return queue.succeed(claimed, "file:///m", "sha256:0")

    assert jobs.previous(None, "huggingface", "file:///m") is None
    succeed(source="file:///m")
    newest = succeed(source="file:///m")
    succeed(source="file:///other")
    found = jobs.previous(None, "huggingface", "file:///m")
    assert found is not None
    assert found.id == newest.id
    assert jobs.previous("token:1", "huggingface", "file:///m") is None
