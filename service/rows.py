"""Rows to records and back, and the one way in which event rows are numbered."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, RowMapping, bindparam, insert, select, update

from service.delivery_table import enqueue
from service.jobs import Attempt, EventRow, Export, State, requirement
from service.tables import attempts, events, exports

_EXPORT_FIELDS = tuple(Export.__dataclass_fields__)
EXPORT_COLUMNS = tuple(exports.c[name] for name in _EXPORT_FIELDS)
# Statements that every request runs are made once: building one costs more than running it.
_INSERT_EXPORT, _INSERT_EVENTS, _INSERT_ATTEMPT = insert(exports), insert(events), insert(attempts)
_BY_ID = select(*EXPORT_COLUMNS).where(exports.c.id == bindparam("export_id"))
_LOCK_BY_ID = _BY_ID.with_for_update()


def rfc3339(seconds: float) -> str:
    """Seconds since the epoch as RFC 3339 in UTC with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def export_of(row: RowMapping) -> Export:
    """The record of a row of `exports`."""
    values = {name: row[name] for name in _EXPORT_FIELDS}
    values["state"] = State(values["state"])
    return Export(**values)


def values_of(export: Export) -> dict[str, Any]:
    """All columns of a new row."""
    values = {name: getattr(export, name) for name in _EXPORT_FIELDS}
    values["state"] = export.state.value
    values["recipe"] = export.request["recipe"]
    values["requirement"] = requirement(export.body)
    values["repository"] = export.caller.get("repository")
    return values


def attempt_of(row: RowMapping) -> Attempt:
    """The record of a row of `attempts`."""
    return Attempt(
        export_id=row["export_id"],
        number=row["number"],
        executor=row["executor"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        error=row["error"],
        last_seq=row["last_seq"],
    )


def event_of(row: RowMapping) -> EventRow:
    """The record of a row of `events`."""
    return EventRow(
        id=row["id"], attempt=row["attempt"], seq=row["seq"], type=row["type"], time=row["time"], data=row["data"]
    )


def locked(connection: Connection, export_id: str) -> Export | None:
    """The export, with its row locked until the transaction ends."""
    row = connection.execute(_LOCK_BY_ID, {"export_id": export_id}).mappings().first()
    return None if row is None else export_of(row)


def loaded(connection: Connection, export_id: str) -> Export | None:
    """The export."""
    row = connection.execute(_BY_ID, {"export_id": export_id}).mappings().first()
    return None if row is None else export_of(row)


def new_export(connection: Connection, export: Export, now: float) -> Export:
    """Insert an export and its first event; returns the record as stored."""
    stored = export.evolve(last_event=export.last_event + 1)
    connection.execute(_INSERT_EXPORT, values_of(stored))
    moved(connection, export, export, now)
    return stored


def save(connection: Connection, before: Export, after: Export) -> None:
    """Write the columns in which `after` differs from `before`."""
    changed = {name: getattr(after, name) for name in _EXPORT_FIELDS if getattr(after, name) != getattr(before, name)}
    if "error" in changed:
        changed["error_code"] = None if after.error is None else after.error["code"]
    if changed:
        connection.execute(update(exports).where(exports.c.id == after.id).values(**changed))


def append(connection: Connection, export: Export, rows: Sequence[tuple[int | None, Mapping[str, Any]]]) -> Export:
    """Store events of the newest attempt behind the last one and return the export with its new `last_event`.

    Each row is (seq, event); seq is None for an event of the service, which gets its row's number as `seq`. The caller
    holds the export's row lock and saves the returned record in the same transaction.
    """
    number = export.last_event
    stored: list[dict[str, Any]] = []
    for seq, event in rows:
        number += 1
        data = {**event, "attempt": export.attempt} if seq is not None else {"v": 1, "seq": number, **event}
        stored.append(
            {
                "export_id": export.id,
                "id": number,
                "attempt": export.attempt,
                "seq": seq,
                "type": event["type"],
                "time": event["time"],
                "data": json.dumps(data, ensure_ascii=False, separators=(",", ":")),
            }
        )
    if stored:
        connection.execute(_INSERT_EVENTS, stored)
        for row, (_, event) in zip(stored, rows, strict=True):
            enqueue(connection, export, row["id"], event, time.time())
    return export.evolve(last_event=number)


def moved(connection: Connection, before: Export, after: Export, now: float, reason: str | None = None) -> Export:
    """Store the state event of a move from `before` to `after`; the caller saves the returned record."""
    event: dict[str, Any] = {
        "time": rfc3339(now),
        "type": "state",
        "from": None if before is after else before.state.value,
        "to": after.state.value,
        "attempt": after.attempt,
    }
    if reason is not None:
        event["reason"] = reason
    return append(connection, after, [(None, event)])


def new_attempt(connection: Connection, attempt: Attempt) -> None:
    """Insert an attempt."""
    connection.execute(_INSERT_ATTEMPT, asdict(attempt))
