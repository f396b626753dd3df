"""What HTTP does with exports: submit, read, list, cancel, delete. The scheduler's side is `job_queue.py`.

Every method is one short transaction and may be called from any thread. Cursors, filters and positions read indexes,
so that their cost does not grow with the table.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Integer,
    Select,
    and_,
    bindparam,
    delete,
    func,
    insert,
    or_,
    select,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite

from exporter.contract.errors import Forbidden, IdempotencyConflict, IllegalState, NotFound, QueueFull
from service.counters import Totals, read_totals
from service.database import Clock, Database
from service.jobs import ACTIVE, Attempt, EventRow, Export, State
from service.rows import EXPORT_COLUMNS, attempt_of, event_of, export_of, loaded, locked, moved, new_export, save
from service.tables import attempts, events, exports, idempotency, labels

IDEMPOTENCY_SECONDS = 24 * 3600
"""How long an Idempotency-Key is remembered."""
MAX_POSITION = 1000
"""Positions in the queue are counted up to here; behind it an export has none."""


def _ahead() -> Select[Any]:
    """How many queued exports come before one: those of higher priority, and older ones of the same."""
    queued, priority = exports.c.state == State.QUEUED.value, bindparam("priority", type_=Integer)
    windows = (
        select(exports.c.id).where(queued, exports.c.priority > priority),
        select(exports.c.id).where(queued, exports.c.priority == priority, exports.c.id < bindparam("id")),
    )
    higher, older = (
        select(func.count()).select_from(window.limit(MAX_POSITION).subquery()).scalar_subquery() for window in windows
    )
    return select(higher + older)


_AHEAD = _ahead()


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """A caller's Idempotency-Key and the digest of the body that came with it."""

    key: str
    body_digest: str


@dataclass(frozen=True, slots=True)
class ListFilter:
    """What a list is narrowed to; None is "any". `labels` are (key, value), value None for "has the key"."""

    owner: str | None = None
    state: State | None = None
    recipe: str | None = None
    repository: str | None = None
    labels: tuple[tuple[str, str | None], ...] = ()


class JobStore:
    """Exports in the database, as the routes use them."""

    def __init__(self, database: Database, *, clock: Clock = time.time) -> None:
        self._db = database
        self._clock = clock

    def ping(self) -> None:
        """Raise `WeightlessError` unless the database answers."""
        self._db.ping()

    def submit(
        self,
        export: Export,
        *,
        key: IdempotencyKey | None = None,
        queue_limit: int | None = None,
        unfinished_limit: int | None = None,
    ) -> tuple[Export, bool]:
        """Store a new export and True; or the export that the same key and body made before, and False.

        `IdempotencyConflict` where the key came with another body; `QueueFull` where its owner has
        `queue_limit` queued; `Forbidden` where its owner has `unfinished_limit` queued or running.
        """
        now = self._clock()
        with self._db.write() as connection:
            if key is not None and (existing := self._remembered(connection, export, key, now)) is not None:
                return existing, False
            if unfinished_limit is not None:
                self._check_unfinished(connection, export.owner, unfinished_limit)
            if queue_limit is not None:
                self._check_queue(connection, export.owner, queue_limit)
            stored = new_export(connection, export, now)
            given = export.request.get("labels") or {}
            if given:
                rows = [{"key": name, "value": value, "export_id": export.id} for name, value in given.items()]
                connection.execute(insert(labels), rows)
        return stored, True

    def get(self, export_id: str) -> Export:
        """The export; `NotFound` where there is none."""
        with self._db.read() as connection:
            export = loaded(connection, export_id)
        if export is None:
            raise NotFound(f"there is no export {export_id}")
        return export

    def list(self, where: ListFilter, *, limit: int, before: str | None = None) -> Sequence[Export]:
        """At most `limit` exports, newest first, older than the export id `before`."""
        query = select(*EXPORT_COLUMNS).order_by(exports.c.id.desc()).limit(limit)
        for condition in self._conditions(where, before):
            query = query.where(condition)
        with self._db.read() as connection:
            return [export_of(row) for row in connection.execute(query).mappings()]

    def prefixes(self) -> set[str]:
        """Every store prefix that an export has; reads the whole table."""
        with self._db.read() as connection:
            return set(connection.execute(select(exports.c.prefix).distinct()).scalars())

    def attempts(self, export_ids: Sequence[str]) -> dict[str, Sequence[Attempt]]:
        """The attempts of each export, oldest first."""
        found: dict[str, list[Attempt]] = {export_id: [] for export_id in export_ids}
        if not found:
            return {}
        query = select(attempts).where(attempts.c.export_id.in_(found)).order_by(attempts.c.number)
        with self._db.read() as connection:
            for row in connection.execute(query).mappings():
                found[row["export_id"]].append(attempt_of(row))
        return dict(found)

    def events(
        self, export_id: str, *, after: int = 0, limit: int = 500, kind: str | None = None
    ) -> Sequence[EventRow]:
        """Events with a number above `after`, in order; only of type `kind` where one is given."""
        query = (
            select(events)
            .where(events.c.export_id == export_id, events.c.id > after)
            .order_by(events.c.id)
            .limit(limit)
        )
        if kind is not None:
            query = query.where(events.c.type == kind)
        with self._db.read() as connection:
            return [event_of(row) for row in connection.execute(query).mappings()]

    def newest_events(self, export_ids: Sequence[str]) -> dict[str, int]:
        """The number of each export's newest event; exports that are gone are absent."""
        found: dict[str, int] = {}
        with self._db.read() as connection:
            for start in range(0, len(export_ids), 500):
                part = export_ids[start : start + 500]
                query = select(exports.c.id, exports.c.last_event).where(exports.c.id.in_(part))
                found.update((row.id, row.last_event) for row in connection.execute(query))
        return found

    def position(self, export: Export) -> int | None:
        """How many queued exports are ahead, plus one; None past `MAX_POSITION` or where it is not queued."""
        if export.state is not State.QUEUED:
            return None
        with self._db.read() as connection:
            ahead: int = connection.execute(_AHEAD, {"priority": export.priority, "id": export.id}).scalar_one()
        return ahead + 1 if ahead < MAX_POSITION else None

    def previous(self, owner: str | None, recipe: str, source: str) -> Export | None:
        """The newest export of the same recipe and source that succeeded, among the last hundred of that recipe."""
        where = ListFilter(owner=owner, recipe=recipe, state=State.SUCCEEDED)
        for export in self.list(where, limit=100):
            if export.request["source"] == source:
                return export
        return None

    def totals(self) -> Totals:
        """Figures over all exports, for metrics; reads a whole index, so do not ask often."""
        with self._db.read() as connection:
            return read_totals(connection)

    def cancel(self, export_id: str) -> Export:
        """Ask for an end: a queued export is cancelled at once, an active one is marked, a finished one stays."""
        now = self._clock()
        with self._db.write() as connection:
            export = locked(connection, export_id)
            if export is None:
                raise NotFound(f"there is no export {export_id}")
            if export.state.terminal or export.cancel_requested_at is not None:
                return export
            changed = export.evolve(cancel_requested_at=now)
            if export.state is State.QUEUED:
                changed = changed.move(State.CANCELLED, finished_at=now)
                changed = moved(connection, export, changed, now, "cancelled on request")
            save(connection, export, changed)
        return changed

    def delete(self, export_id: str) -> None:
        """Forget a finished export and its events; `IllegalState` before it is finished."""
        with self._db.write() as connection:
            export = locked(connection, export_id)
            if export is None:
                raise NotFound(f"there is no export {export_id}")
            if not export.state.terminal:
                raise IllegalState(f"the export is {export.state}; only a finished one can be deleted")
            connection.execute(delete(exports).where(exports.c.id == export_id))

    def _remembered(self, connection: Connection, export: Export, key: IdempotencyKey, now: float) -> Export | None:
        oldest = now - IDEMPOTENCY_SECONDS
        mine = and_(idempotency.c.owner == export.owner, idempotency.c.key == key.key)
        connection.execute(delete(idempotency).where(idempotency.c.created_at < oldest))
        taken = connection.execute(
            self._insert_once()
            .values(
                owner=export.owner,
                key=key.key,
                body_digest=key.body_digest,
                export_id=export.id,
                created_at=now,
            )
            .returning(idempotency.c.key)
        ).first()
        if taken is not None:
            return None
        row = connection.execute(select(idempotency).where(mine)).mappings().one()
        if row["body_digest"] != key.body_digest:
            raise IdempotencyConflict("this Idempotency-Key came with another body before", field="Idempotency-Key")
        existing = locked(connection, row["export_id"])
        if existing is None:
            raise IdempotencyConflict(
                "this Idempotency-Key made an export that was deleted since", field="Idempotency-Key"
            )
        return existing

    def _insert_once(self) -> sqlite.Insert | postgresql.Insert:
        insert_into = sqlite.insert if self._db.sqlite else postgresql.insert
        return insert_into(idempotency).on_conflict_do_nothing()

    @staticmethod
    def _check_queue(connection: Connection, owner: str, limit: int) -> None:
        window = (
            select(exports.c.id)
            .where(exports.c.owner == owner, exports.c.state == State.QUEUED.value)
            .limit(limit)
            .subquery()
        )
        queued = connection.execute(select(func.count()).select_from(window)).scalar_one()
        if queued >= limit:
            raise QueueFull(f"{queued} exports of this caller are queued already", limit=limit)

    def _check_unfinished(self, connection: Connection, owner: str, limit: int) -> None:
        if not self._db.sqlite:
            connection.execute(text("SELECT pg_advisory_xact_lock(hashtext(:owner))"), {"owner": owner})
        unfinished = or_(*(exports.c.state == state.value for state in (State.QUEUED, *sorted(ACTIVE))))
        window = select(exports.c.id).where(exports.c.owner == owner, unfinished).limit(limit).subquery()
        found = connection.execute(select(func.count()).select_from(window)).scalar_one()
        if found >= limit:
            raise Forbidden(
                f"this caller has {found} unfinished exports, as many as its rule allows",
                hint="Wait until one of them has ended, or ask the operator for a higher `concurrent`.",
                reason="concurrency",
            )

    @staticmethod
    def _conditions(where: ListFilter, before: str | None) -> Sequence[ColumnElement[bool]]:
        found: list[ColumnElement[bool]] = []
        if where.owner is not None:
            found.append(exports.c.owner == where.owner)
        if where.state is not None:
            found.append(exports.c.state == where.state.value)
        if where.recipe is not None:
            found.append(exports.c.recipe == where.recipe)
        if where.repository is not None:
            found.append(exports.c.repository == where.repository)
        for key, value in where.labels:
            match = [labels.c.export_id == exports.c.id, labels.c.key == key]
            if value is not None:
                match.append(labels.c.value == value)
            found.append(select(labels.c.export_id).where(*match).exists())
        if before is not None:
            found.append(exports.c.id < before)
        return found
