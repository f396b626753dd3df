"""What a scheduler does with exports: claim, keep the lease, store what the exporter said, record the outcome.

Every write about an active export is fenced: it names the claimer and the attempt, and `LeaseLost` says that another
scheduler has the export now. SQLite serialises writers (BEGIN IMMEDIATE); PostgreSQL claims FOR UPDATE SKIP LOCKED.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, and_, func, or_, select, text, update

from exporter.contract.errors import WeightlessError
from exporter.contract.events import (
    AnyEvent,
    FinishedEvent,
    ProgressEvent,
    ResourcesEvent,
    StageEvent,
    UploadEvent,
    dump_event,
)
from service.counters import count_attempt
from service.database import Clock, Database
from service.jobs import ACTIVE, Attempt, Export, State
from service.rows import EXPORT_COLUMNS, append, attempt_of, export_of, locked, moved, new_attempt, save
from service.tables import attempts, events, exports

_ACTIVE = tuple(state.value for state in ACTIVE)


class LeaseLost(Exception):
    """Another scheduler has the export, or it is gone. Stays inside the service."""


@dataclass(frozen=True, slots=True)
class Claimer:
    """Who claims: the scheduler's own name (one per process), its executor's stable id, and what it can serve."""

    name: str
    executor_id: str
    capabilities: frozenset[str]


class JobQueue:
    """Exports in the database, as a scheduler uses them."""

    def __init__(self, database: Database, *, clock: Clock = time.time) -> None:
        self._db = database
        self._clock = clock

    def claim(self, claimer: Claimer, slot: str, lease_seconds: float) -> Export | None:
        """Take the next export that `claimer` can serve, or None.

        Highest priority first; within one, the caller with the fewest active exports; within one caller, the oldest.
        """
        now = self._clock()
        if not self._anything(now):
            return None
        with self._db.write() as connection:
            export = self._next(connection, claimer.capabilities, now)
            if export is None:
                return None
            number = export.attempt + 1
            taken = export.move(
                State.STARTING,
                attempt=number,
                executor=slot,
                executor_id=claimer.executor_id,
                lease_owner=claimer.name,
                lease_until=now + lease_seconds,
                started_at=export.started_at or now,
                progress=None,
            )
            new_attempt(connection, Attempt(export_id=export.id, number=number, executor=slot, started_at=now))
            taken = moved(connection, export, taken, now)
            save(connection, export, taken)
        return taken

    def adopt(self, claimer: Claimer, lease_seconds: float) -> list[Export]:
        """Take over the active exports that an earlier process with the same executor id left behind."""
        condition = and_(exports.c.state.in_(_ACTIVE), exports.c.executor_id == claimer.executor_id)
        until = self._clock() + lease_seconds
        with self._db.write() as connection:
            connection.execute(update(exports).where(condition).values(lease_owner=claimer.name, lease_until=until))
            query = select(*EXPORT_COLUMNS).where(condition).order_by(exports.c.id)
            return [export_of(row) for row in connection.execute(query).mappings()]

    def take_expired(self, claimer: Claimer, lease_seconds: float) -> list[Export]:
        """Take over at most ten active exports whose scheduler has stopped renewing its lease."""
        now = self._clock()
        condition = and_(exports.c.state.in_(_ACTIVE), exports.c.lease_until < now)
        query = select(*EXPORT_COLUMNS).where(condition).limit(10)
        with self._db.read() as connection:
            if connection.execute(query).first() is None:
                return []
        with self._db.write() as connection:
            rows = connection.execute(query.with_for_update(skip_locked=True)).mappings().all()
            found = [export_of(row) for row in rows]
            taken = [
                item.evolve(lease_owner=claimer.name, executor_id=claimer.executor_id, lease_until=now + lease_seconds)
                for item in found
            ]
            for before, after in zip(found, taken, strict=True):
                save(connection, before, after)
        return taken

    def renew(self, claimer: str, export_ids: Collection[str], lease_seconds: float) -> set[str]:
        """Extend the leases and return the exports that `claimer` still has."""
        if not export_ids:
            return set()
        condition = and_(exports.c.id.in_(export_ids), exports.c.lease_owner == claimer, exports.c.state.in_(_ACTIVE))
        with self._db.write() as connection:
            connection.execute(update(exports).where(condition).values(lease_until=self._clock() + lease_seconds))
            return set(connection.execute(select(exports.c.id).where(condition)).scalars())

    def cancelled(self, claimer: str) -> set[str]:
        """The active exports of `claimer` whose end was asked for."""
        condition = and_(
            exports.c.state.in_(_ACTIVE),
            exports.c.lease_owner == claimer,
            exports.c.cancel_requested_at.is_not(None),
        )
        with self._db.read() as connection:
            return set(connection.execute(select(exports.c.id).where(condition)).scalars())

    def open_uploads(self, export: Export, *, earlier: bool = False) -> list[UploadEvent]:
        """Uploads that the newest attempt, or all `earlier` ones, opened and did not end, from their stored events."""
        number = events.c.attempt
        whose = number < export.attempt if earlier else number == export.attempt
        query = (
            select(events.c.data)
            .where(events.c.export_id == export.id, whose, events.c.type == "upload")
            .order_by(events.c.id)
        )
        found: dict[str, UploadEvent] = {}
        with self._db.read() as connection:
            for data in connection.execute(query).scalars():
                line = UploadEvent.model_validate_json(data)
                found.pop(line.upload_id, None)
                if line.state == "opened":
                    found[line.upload_id] = line
        return list(found.values())

    def attempt(self, export: Export) -> Attempt:
        """The newest attempt; `LeaseLost` where it is gone."""
        query = select(attempts).where(attempts.c.export_id == export.id, attempts.c.number == export.attempt)
        with self._db.read() as connection:
            row = connection.execute(query).mappings().first()
        if row is None:
            raise LeaseLost(export.id)
        return attempt_of(row)

    def record(self, export: Export, lines: Sequence[AnyEvent]) -> Export:
        """Store event lines of the newest attempt, each `seq` once, and what follows from them.

        The first event of an attempt moves the export to running. Returns the export as stored.
        """
        now = self._clock()
        with self._db.write() as connection:
            before = self._fenced(connection, export)
            last = connection.execute(
                select(attempts.c.last_seq).where(
                    attempts.c.export_id == export.id, attempts.c.number == export.attempt
                )
            ).scalar_one()
            fresh = [line for line in lines if line.seq > last and line.type != "state"]
            if not fresh:
                return before
            after = before
            if before.state is State.STARTING:
                after = moved(connection, before, before.move(State.RUNNING), now)
            after = append(connection, after, [(line.seq, dump_event(line)) for line in fresh])
            after = _applied(after, fresh)
            save(connection, before, after)
            self._update_attempt(connection, export, last_seq=fresh[-1].seq)
        return after

    def succeed(self, export: Export, manifest_uri: str, manifest_digest: str) -> Export:
        """Record success."""
        now = self._clock()
        with self._db.write() as connection:
            before = self._fenced(connection, export)
            current = before
            if current.state is State.STARTING:
                current = moved(connection, before, before.move(State.RUNNING), now)
            after = current.move(
                State.SUCCEEDED, finished_at=now, manifest_uri=manifest_uri, manifest_digest=manifest_digest
            )
            after = moved(connection, current, after, now)
            self._update_attempt(connection, export, finished_at=now)
            save(connection, before, after)
            count_attempt(connection, after)
        return after

    def fail(self, export: Export, error: WeightlessError) -> Export:
        """Record failure, for good."""
        return self._end(export, State.FAILED, error, error.code)

    def cancel(self, export: Export, error: WeightlessError) -> Export:
        """Record that the export ended on request."""
        return self._end(export, State.CANCELLED, error, "cancelled on request")

    def requeue_or_fail(self, export: Export, error: WeightlessError, *, lost: bool, delay: float) -> Export:
        """Another attempt after `delay` seconds where the error is worth one and one is left, else failure."""
        if export.may_retry(error.retryable, lost=lost):
            return self.requeue(export, error, lost=lost, delay=delay)
        return self.fail(export, error)

    def requeue(self, export: Export, error: WeightlessError, *, lost: bool, delay: float) -> Export:
        """Put the export back into the queue after a failed attempt, not to be claimed for `delay` seconds."""
        now = self._clock()
        with self._db.write() as connection:
            before = self._fenced(connection, export)
            after = before.move(
                State.QUEUED,
                not_before=now + delay,
                lost=before.lost + lost,
                faults=before.faults + (not lost),
                progress=None,
                executor_id=None,
            )
            if before.cancel_requested_at is not None:
                after = before.move(State.CANCELLED, finished_at=now)
            after = moved(connection, before, after, now, error.code)
            self._update_attempt(connection, export, finished_at=now, error=error.as_dict())
            save(connection, before, after)
            count_attempt(connection, after)
        return after

    def _end(self, export: Export, state: State, error: WeightlessError, reason: str) -> Export:
        now = self._clock()
        with self._db.write() as connection:
            before = self._fenced(connection, export)
            changes = {"error": error.as_dict()} if state is State.FAILED else {}
            after = before.move(state, finished_at=now, **changes)
            after = moved(connection, before, after, now, reason)
            self._update_attempt(connection, export, finished_at=now, error=error.as_dict())
            save(connection, before, after)
            count_attempt(connection, after)
        return after

    @staticmethod
    def _fenced(connection: Connection, export: Export) -> Export:
        current = locked(connection, export.id)
        if (
            current is None
            or current.state not in ACTIVE
            or current.attempt != export.attempt
            or current.lease_owner != export.lease_owner
        ):
            raise LeaseLost(export.id)
        return current

    @staticmethod
    def _update_attempt(connection: Connection, export: Export, **values: Any) -> None:
        connection.execute(
            update(attempts)
            .where(attempts.c.export_id == export.id, attempts.c.number == export.attempt)
            .values(**values)
        )

    def _anything(self, now: float) -> bool:
        """Whether something is queued at all: asked without the write lock, since mostly nothing is."""
        query = select(exports.c.id).where(exports.c.state == State.QUEUED.value, exports.c.not_before <= now).limit(1)
        with self._db.read() as connection:
            return connection.execute(query).first() is not None

    def _next(self, connection: Connection, capabilities: Collection[str], now: float) -> Export | None:
        runnable = and_(
            exports.c.state == State.QUEUED.value,
            exports.c.requirement.in_(sorted(capabilities)),
            exports.c.not_before <= now,
        )
        below: int | None = None
        active: dict[str, int] | None = None
        while True:
            level = select(exports.c.priority).where(runnable).order_by(exports.c.priority.desc()).limit(1)
            if below is not None:
                level = level.where(exports.c.priority < below)
            priority = connection.execute(level).scalar()
            if priority is None:
                return None
            active = self._active(connection) if active is None else active
            heads = connection.execute(
                select(exports.c.owner, func.min(exports.c.id).label("head"))
                .where(runnable, exports.c.priority == priority)
                .group_by(exports.c.owner)
            ).all()
            for row in sorted(heads, key=lambda row: (active.get(row.owner, 0), row.head)):
                export = self._head(connection, and_(runnable, exports.c.priority == priority), row.owner)
                if export is not None and self._within_limit(connection, export):
                    return export
            below = priority

    @staticmethod
    def _active(connection: Connection) -> dict[str, int]:
        query = (
            select(exports.c.owner, func.count().label("active"))
            .where(or_(*(exports.c.state == state for state in _ACTIVE)))
            .group_by(exports.c.owner)
        )
        return {row.owner: row.active for row in connection.execute(query)}

    @staticmethod
    def _head(connection: Connection, condition: Any, owner: str) -> Export | None:
        query = (
            select(*EXPORT_COLUMNS)
            .where(condition, exports.c.owner == owner)
            .order_by(exports.c.id)
            .limit(1)
            .with_for_update(skip_locked=True)
        )
        row = connection.execute(query).mappings().first()
        return None if row is None else export_of(row)

    def _within_limit(self, connection: Connection, export: Export) -> bool:
        if export.concurrent is None:
            return True
        if not self._db.sqlite:
            connection.execute(text("SELECT pg_advisory_xact_lock(hashtext(:owner))"), {"owner": export.owner})
        return self._active(connection).get(export.owner, 0) < export.concurrent


def _applied(export: Export, lines: Sequence[AnyEvent]) -> Export:
    """The export after what its exporter said: stage, progress, peaks."""
    stage, progress, peaks = export.stage, export.progress, dict(export.peaks)
    uploaded, reused = export.bytes_uploaded, export.bytes_reused
    for line in lines:
        if isinstance(line, StageEvent) and line.state == "started":
            stage = line.name
        elif isinstance(line, ProgressEvent):
            stage = stage or line.stage
            progress = dump_event(line)
            for name in ("v", "seq", "time", "type"):
                progress.pop(name, None)
        elif isinstance(line, ResourcesEvent):
            for name in ("hostAnonBytes", "hostRssBytes", "gpuBytes", "diskWrittenBytes"):
                peaks[name] = max(peaks.get(name, 0), dump_event(line)[name])
        elif isinstance(line, FinishedEvent):
            uploaded, reused = line.bytes_uploaded, line.bytes_reused
    return export.evolve(stage=stage, progress=progress, peaks=peaks, bytes_uploaded=uploaded, bytes_reused=reused)
