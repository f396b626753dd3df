"""The table of webhook deliveries: an outbox filled with the events, and the log of what became of each."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, insert, select, update
from ulid import ULID

from service.database import Clock, Database
from service.jobs import Export, State
from service.tables import deliveries

LEASE_SECONDS = 60.0
"""After this a delivery that was taken and not settled is taken again: its sender died."""
_INSERT = insert(deliveries)


@dataclass(frozen=True, slots=True)
class Delivery:
    """One notification. `tries` counts those before now."""

    id: str
    export_id: str
    event_id: int
    url: str
    body: str
    tries: int
    delivered_at: float | None = None
    status: int | None = None
    error: str | None = None


def enqueue(connection: Connection, export: Export, event_id: int, event: Mapping[str, Any], now: float) -> None:
    """Store what the export's webhook is to be told of an event, in the transaction that stores the event."""
    webhook = export.request.get("webhook")
    if not webhook:
        return
    kind = _kind(event, set(webhook["events"]))
    if kind is None:
        return
    shown = {
        "id": export.id,
        "state": export.state.value,
        "attempt": export.attempt,
        "labels": export.request.get("labels", {}),
        "error": export.error,
        "manifest": {"uri": export.manifest_uri, "digest": export.manifest_digest} if export.manifest_uri else None,
    }
    identity = str(ULID())
    body = {"delivery": identity, "type": kind, "eventId": event_id, "event": dict(event), "export": shown}
    row = {
        "id": identity,
        "export_id": export.id,
        "event_id": event_id,
        "url": webhook["url"],
        "body": json.dumps(body, ensure_ascii=False),
        "tries": 0,
        "next_at": now,
    }
    connection.execute(_INSERT, row)


def _kind(event: Mapping[str, Any], wanted: set[str]) -> str | None:
    """What a delivery about the event is called: an export's end is `finished` or `failed` where that is wanted."""
    if event["type"] == "state":
        ended = {State.SUCCEEDED: "finished", State.FAILED: "failed", State.CANCELLED: "failed"}
        end = ended.get(State(event["to"]))
        if end in wanted:
            return end
    return event["type"] if event["type"] in wanted & {"state", "stage"} else None


class DeliveryTable:
    """The deliveries, as a sender uses them."""

    def __init__(self, database: Database, *, clock: Clock = time.time) -> None:
        self._db = database
        self._clock = clock

    def take(self) -> Delivery | None:
        """A delivery that is due, not to be taken by another sender for a minute; None where there is none."""
        now = self._clock()
        due = select(deliveries).where(deliveries.c.next_at <= now).order_by(deliveries.c.next_at).limit(1)
        with self._db.read() as connection:
            if connection.execute(due).first() is None:
                return None
        with self._db.write() as connection:
            row = connection.execute(due.with_for_update(skip_locked=True)).mappings().first()
            if row is None:
                return None
            connection.execute(
                update(deliveries).where(deliveries.c.id == row["id"]).values(next_at=now + LEASE_SECONDS)
            )
        names = ("id", "export_id", "event_id", "url", "body", "tries", "delivered_at", "status", "error")
        return Delivery(**{name: row[name] for name in names})

    def delivered(self, delivery: Delivery, status: int) -> None:
        """It arrived."""
        self._settle(delivery, next_at=None, delivered_at=self._clock(), status=status, error=None)

    def failed(self, delivery: Delivery, status: int | None, error: str, wait: float | None) -> None:
        """It did not; try again in `wait` seconds, or never where that is None."""
        again = None if wait is None else self._clock() + wait
        self._settle(delivery, next_at=again, status=status, error=error[:500])

    def log(self, export_id: str) -> list[Delivery]:
        """What became of an export's deliveries, oldest first."""
        query = select(deliveries).where(deliveries.c.export_id == export_id).order_by(deliveries.c.id)
        names = ("id", "export_id", "event_id", "url", "body", "tries", "delivered_at", "status", "error")
        with self._db.read() as connection:
            return [Delivery(**{name: row[name] for name in names}) for row in connection.execute(query).mappings()]

    def _settle(self, delivery: Delivery, **values: Any) -> None:
        with self._db.write() as connection:
            connection.execute(
                update(deliveries).where(deliveries.c.id == delivery.id).values(tries=delivery.tries + 1, **values)
            )
