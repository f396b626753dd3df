"""Claims, leases, events and outcomes, on both databases."""

from __future__ import annotations

import json
from typing import Any

import pytest

from exporter.contract.errors import Cancelled, ExecutorLost, StoreUnavailable, UnsupportedModel
from exporter.contract.events import AnyEvent, parse_event
from service.database import Database
from service.job_queue import Claimer, JobQueue, LeaseLost
from service.job_store import JobStore
from service.jobs import Export, State, new_id
from tests.unit.service.conftest import MakeExport

LEASE = 60.0


class Clock:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


class Room:
    """A job store and a queue over one database and one clock."""

    def __init__(self, database: Database) -> None:
        self.clock = Clock()
        self.jobs = JobStore(database, clock=self.clock)
        self.queue = JobQueue(database, clock=self.clock)

    def claim(self, name: str = "me", executor: str = "executor", needs: str = "xnnpack") -> Export | None:
        return self.queue.claim(Claimer(name, executor, frozenset({needs})), "host/0", LEASE)

    def claimed(self, name: str = "me") -> Export:
        export = self.claim(name)
        assert export is not None
        return export


@pytest.fixture
def room(database: Database) -> Room:
    return Room(database)


def line(seq: int, kind: str = "stage", **fields: Any) -> AnyEvent:
    if kind == "stage" and not fields:
        fields = {"name": "capturing", "state": "started"}
    return parse_event(json.dumps({"v": 1, "seq": seq, "time": "2026-01-01T00:00:00.000Z", "type": kind, **fields}))


def test_a_claim_has_an_attempt_a_lease_and_an_event(room: Room, make_export: MakeExport) -> None:
    room.jobs.submit(make_export())
    export = room.claimed()
    assert (export.state, export.attempt, export.lease_owner) == (State.STARTING, 1, "me")
    assert export.lease_until == room.clock.now + LEASE
    assert room.jobs.get(export.id) == export
    [attempt] = room.jobs.attempts([export.id])[export.id]
    assert (attempt.number, attempt.executor, attempt.started_at) == (1, "host/0", room.clock.now)
    assert room.claim() is None


def test_order_is_priority_then_fair_share_then_age(room: Room, make_export: MakeExport) -> None:
    ids = sorted(new_id() for _ in range(6))
    owners = ["a", "a", "a", "b", "b", "a"]
    for item, owner, priority in zip(ids, owners, [0, 0, 0, 0, 0, 9], strict=True):
        room.jobs.submit(make_export(id=item, owner=owner, priority=priority))
    order = [ids.index(room.claimed().id) for _ in range(6)]
    # The urgent one first; then b, which has nothing running; then whoever has less, the older export first.
    assert order == [5, 3, 0, 4, 1, 2]


def test_only_what_the_executor_can_serve_is_claimed(room: Room, make_export: MakeExport) -> None:
    room.jobs.submit(make_export({"target": {"backend": "cuda", "cudaVersion": "13.0"}}))
    assert room.claim(needs="xnnpack") is None
    assert room.claim(needs="cuda") is None
    assert room.claim(needs="cuda-13.0") is not None


def test_a_callers_limit_holds(room: Room, make_export: MakeExport) -> None:
    for _ in range(3):
        room.jobs.submit(make_export(owner="a", concurrent=2))
    room.jobs.submit(make_export(owner="b"))
    owners = [room.claimed().owner for _ in range(3)]
    assert sorted(owners) == ["a", "a", "b"]
    assert room.claim() is None


def test_backoff_delays_the_next_claim(room: Room, make_export: MakeExport) -> None:
    room.jobs.submit(make_export())
    export = room.claimed()
    room.queue.requeue(export, StoreUnavailable("no answer"), lost=False, delay=30)
    assert room.claim() is None
    room.clock.now += 31
    again = room.claimed()
    assert (again.id, again.attempt, again.faults, again.lost) == (export.id, 2, 1, 0)


def test_events_are_numbered_without_gaps_and_stored_once(room: Room, make_export: MakeExport) -> None:
    room.jobs.submit(make_export())
    export = room.claimed()
    room.queue.record(export, [line(1), line(2)])
    room.queue.record(export, [line(1), line(2), line(3)])
    room.queue.record(export, [line(3)])
    export = room.queue.requeue(export, ExecutorLost("gone"), lost=True, delay=0)
    export = room.claimed()
    room.queue.record(export, [line(1)])
    rows = room.jobs.events(export.id)
    assert [row.id for row in rows] == list(range(1, len(rows) + 1))
    assert [(row.attempt, row.seq) for row in rows if row.seq] == [(1, 1), (1, 2), (1, 3), (2, 1)]
    states = [json.loads(row.data)["to"] for row in rows if row.type == "state"]
    assert states == ["queued", "starting", "running", "queued", "starting", "running"]
    assert room.jobs.events(export.id, after=len(rows) - 1) == rows[-1:]


def test_an_exporter_cannot_write_the_services_events(room: Room, make_export: MakeExport) -> None:
    room.jobs.submit(make_export())
    export = room.claimed()
    forged = line(1, "state", **{"from": "running", "to": "succeeded", "attempt": 1})
    assert room.queue.record(export, [forged]).state is State.STARTING


def test_what_events_say_is_on_the_export(room: Room, make_export: MakeExport) -> None:
    room.jobs.submit(make_export())
    sample = {"hostAnonBytes": 5, "hostRssBytes": 9, "gpuBytes": 0, "diskWrittenBytes": 1}
    lines = [
        line(1),
        line(2, "resources", **sample),
        line(3, "resources", **{**sample, "hostAnonBytes": 3, "gpuBytes": 7}),
        line(4, "progress", stage="capturing", done=1, total=4, unit="methods"),
        line(5, "finished", manifestUri="u", manifestDigest="sha256:0", bytesUploaded=2**40, bytesReused=3),
    ]
    export = room.queue.record(room.claimed(), lines)
    assert (export.state, export.stage) == (State.RUNNING, "capturing")
    assert export.peaks == {"hostAnonBytes": 5, "hostRssBytes": 9, "gpuBytes": 7, "diskWrittenBytes": 1}
    assert export.progress == {"stage": "capturing", "done": 1, "total": 4, "unit": "methods"}
    assert (export.bytes_uploaded, export.bytes_reused) == (2**40, 3)
    assert room.jobs.get(export.id) == export


def test_the_outcome_is_recorded_once(room: Room, make_export: MakeExport) -> None:
    room.jobs.submit(make_export())
    export = room.queue.record(room.claimed(), [line(1)])
    done = room.queue.succeed(export, "file:///m", "sha256:0")
    assert room.jobs.get(export.id) == done
    assert (done.state, done.finished_at) == (State.SUCCEEDED, room.clock.now)
    for again in (
        lambda: room.queue.succeed(export, "file:///m", "sha256:0"),
        lambda: room.queue.fail(export, UnsupportedModel("no")),
        lambda: room.queue.cancel(export, Cancelled("no")),
        lambda: room.queue.record(export, [line(2)]),
        lambda: room.queue.requeue(export, ExecutorLost("no"), lost=True, delay=0),
    ):
        with pytest.raises(LeaseLost):
            again()
    assert room.jobs.get(export.id) == done


def test_a_failure_is_on_the_export_and_its_attempt(room: Room, make_export: MakeExport) -> None:
    room.jobs.submit(make_export())
    error = UnsupportedModel("no kernel", stage="compiling", operators=["a::b"])
    failed = room.queue.fail(room.claimed(), error)
    assert failed.error == error.as_dict()
    assert room.jobs.attempts([failed.id])[failed.id][0].error == error.as_dict()
    [*_, last] = room.jobs.events(failed.id)
    assert json.loads(last.data)["reason"] == "unsupported-model"


def test_retries_end(room: Room, make_export: MakeExport) -> None:
    room.jobs.submit(make_export())
    states = []
    for _ in range(4):
        export = room.queue.requeue_or_fail(room.claimed(), ExecutorLost("gone"), lost=True, delay=0)
        states.append(export.state)
    assert states == [State.QUEUED, State.QUEUED, State.QUEUED, State.FAILED]
    assert export.attempt == 4


def test_a_cancelled_export_is_not_retried(room: Room, make_export: MakeExport) -> None:
    room.jobs.submit(make_export())
    export = room.claimed()
    room.jobs.cancel(export.id)
    assert room.queue.requeue_or_fail(export, ExecutorLost("gone"), lost=True, delay=0).state is State.CANCELLED


def test_another_scheduler_takes_over_when_a_lease_ends(room: Room, make_export: MakeExport) -> None:
    room.jobs.submit(make_export())
    export = room.claimed()
    other = Claimer("other", "elsewhere", frozenset({"xnnpack"}))
    room.clock.now += LEASE - 1
    assert room.queue.take_expired(other, LEASE) == []
    assert room.queue.renew("me", [export.id], LEASE) == {export.id}
    room.clock.now += LEASE + 1
    [taken] = room.queue.take_expired(other, LEASE)
    assert taken.lease_owner == "other"
    assert room.queue.take_expired(other, LEASE) == []
    assert room.queue.renew("me", [export.id], LEASE) == set()
    with pytest.raises(LeaseLost):
        room.queue.record(export, [line(1)])
    room.queue.requeue(taken, ExecutorLost("gone"), lost=True, delay=0)


def test_a_restarted_scheduler_adopts_its_own_executors_exports(room: Room, make_export: MakeExport) -> None:
    for _ in range(2):
        room.jobs.submit(make_export())
    mine, other = room.claim("before", "executor"), room.claim("elsewhere", "another")
    assert mine is not None
    assert other is not None
    adopted = room.queue.adopt(Claimer("after", "executor", frozenset()), LEASE)
    assert [export.id for export in adopted] == [mine.id]
    assert adopted[0].lease_owner == "after"
    room.queue.record(adopted[0], [line(1)])
    with pytest.raises(LeaseLost):
        room.queue.record(mine, [line(1)])


def test_open_uploads_are_those_without_an_end(room: Room, make_export: MakeExport) -> None:
    room.jobs.submit(make_export())
    export = room.claimed()
    upload = {"uri": "s3://b/k", "partSize": 5}
    lines = [
        line(1, "upload", uploadId="a", state="opened", **upload),
        line(2, "upload", uploadId="b", state="opened", **upload),
        line(3, "upload", uploadId="a", state="completed", **upload),
    ]
    room.queue.record(export, lines)
    assert [item.upload_id for item in room.queue.open_uploads(export)] == ["b"]


def test_totals_count_states_bytes_and_seconds(room: Room, make_export: MakeExport) -> None:
    for _ in range(3):
        room.jobs.submit(make_export())
    stage = {"name": "compiling"}
    lines = [
        line(1, "stage", state="started", **stage),
        parse_event(
            '{"v":1,"seq":2,"time":"2026-01-01T00:00:02.500Z","type":"stage","name":"compiling","state":"finished"}'
        ),
        line(3, "finished", manifestUri="u", manifestDigest="sha256:0", bytesUploaded=10, bytesReused=3),
    ]
    room.queue.succeed(room.queue.record(room.claimed(), lines), "u", "sha256:0")
    room.queue.fail(room.claimed(), UnsupportedModel("no"))
    totals = room.jobs.totals()
    assert totals.by_state == {("queued", ""): 1, ("succeeded", ""): 1, ("failed", "unsupported-model"): 1}
    assert totals.counted == {("bytes_sent", ""): 10, ("bytes_reused", ""): 3, ("stage_seconds", "compiling"): 2.5}
