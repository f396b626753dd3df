"""Counters that only grow, kept in the database beside the exports that they are about; and the totals for metrics."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, func, insert, select, update

from service.jobs import Export, State
from service.tables import counters, events, exports

RECENT = 100
"""Finished exports whose peaks the metrics look at."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Figures for metrics. `by_state` is keyed by (state, error code or ""); `counted` by (counter, label)."""

    by_state: dict[tuple[str, str], int]
    oldest_queued: float | None
    counted: dict[tuple[str, str], float]
    peaks: dict[str, int]


def count_attempt(connection: Connection, export: Export) -> None:
    """Add what an attempt that has just ended took: seconds of each stage and, for a success, its bytes."""
    for stage, seconds in _stage_seconds(connection, export).items():
        _add(connection, "stage_seconds", stage, seconds)
    if export.state is State.SUCCEEDED:
        _add(connection, "bytes_sent", "", export.bytes_uploaded)
        _add(connection, "bytes_reused", "", export.bytes_reused)


def read_totals(connection: Connection) -> Totals:
    """Every figure."""
    states = select(exports.c.state, exports.c.error_code, func.count()).group_by(exports.c.state, exports.c.error_code)
    queued = select(func.min(exports.c.created_at)).where(exports.c.state == State.QUEUED.value)
    recent = (
        select(exports.c.peaks)
        .where(exports.c.state == State.SUCCEEDED.value)
        .order_by(exports.c.id.desc())
        .limit(RECENT)
    )
    peaks: dict[str, int] = {}
    for found in connection.execute(recent).scalars():
        for name, value in found.items():
            peaks[name] = max(peaks.get(name, 0), value)
    return Totals(
        by_state={(state, code or ""): count for state, code, count in connection.execute(states)},
        oldest_queued=connection.execute(queued).scalar(),
        counted={(row.name, row.label): row.value for row in connection.execute(select(counters))},
        peaks=peaks,
    )


def _stage_seconds(connection: Connection, export: Export) -> dict[str, float]:
    query = (
        select(events.c.data)
        .where(events.c.export_id == export.id, events.c.attempt == export.attempt, events.c.type == "stage")
        .order_by(events.c.id)
    )
    begun: dict[tuple[str, str | None], float] = {}
    spent: dict[str, float] = {}
    for text in connection.execute(query).scalars():
        line = json.loads(text)
        key, at = (line["name"], line.get("method")), datetime.fromisoformat(line["time"]).timestamp()
        if line["state"] == "started":
            begun[key] = at
        elif key in begun:
            spent[line["name"]] = spent.get(line["name"], 0.0) + max(0.0, at - begun.pop(key))
    return spent


def _add(connection: Connection, name: str, label: str, value: float) -> None:
    if not value:
        return
    same = (counters.c.name == name, counters.c.label == label)
    changed = connection.execute(update(counters).where(*same).values(value=counters.c.value + value))
    if changed.rowcount == 0:
        connection.execute(insert(counters).values(name=name, label=label, value=value))
