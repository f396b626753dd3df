"""What executors say of themselves: kept by schedulers with a heartbeat, read by routes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import delete, insert, select, update

from exporter.contract.errors import ExecutorLost
from exporter.contract.machine import MachineReport, RecipeReport
from service.database import Clock, Database
from service.tables import executors

STALE_SECONDS = 60.0
"""An executor without a heartbeat for this long is not counted as reachable."""
CACHE_SECONDS = 1.0
"""How old an answer about executors may be: requests ask on every call, descriptions change rarely."""
FORGET_SECONDS = 24 * 3600.0
"""An executor without a heartbeat for this long is removed."""


@dataclass(frozen=True, slots=True)
class ExecutorRow:
    """An executor as its scheduler described it last. `report` is None until the first description is complete."""

    id: str
    kind: str
    host: str
    slots: int
    busy: int
    draining: bool
    report: MachineReport | None
    heartbeat_at: float
    alive: bool


class ExecutorTable:
    """The table of executors."""

    def __init__(self, database: Database, *, clock: Clock = time.time) -> None:
        self._db = database
        self._clock = clock
        self._cached: tuple[float, list[ExecutorRow]] | None = None

    def register(self, executor_id: str, kind: str, host: str, slots: int) -> None:
        """Say that an executor is there; an earlier report of the same executor stays until it reports again."""
        now = self._clock()
        values = {"kind": kind, "host": host, "slots": slots, "busy": 0, "draining": False, "heartbeat_at": now}
        with self._db.write() as connection:
            connection.execute(delete(executors).where(executors.c.heartbeat_at < now - FORGET_SECONDS))
            changed = connection.execute(update(executors).where(executors.c.id == executor_id).values(**values))
            if changed.rowcount == 0:
                connection.execute(insert(executors).values(id=executor_id, started_at=now, **values))

    def report(self, executor_id: str, report: MachineReport, slots: int) -> None:
        """Store what `doctor` found."""
        now = self._clock()
        body = report.model_dump(mode="json", by_alias=True)
        with self._db.write() as connection:
            connection.execute(
                update(executors)
                .where(executors.c.id == executor_id)
                .values(report=body, slots=slots, reported_at=now, heartbeat_at=now)
            )

    def beat(self, executor_id: str, *, busy: int, draining: bool = False) -> None:
        """Say that an executor is still there."""
        with self._db.write() as connection:
            connection.execute(
                update(executors)
                .where(executors.c.id == executor_id)
                .values(heartbeat_at=self._clock(), busy=busy, draining=draining)
            )

    def all(self) -> list[ExecutorRow]:
        """Every executor, those first whose heartbeat is newest. Remembered for `CACHE_SECONDS`."""
        now = self._clock()
        if self._cached is not None and 0 <= now - self._cached[0] < CACHE_SECONDS:
            return self._cached[1]
        with self._db.read() as connection:
            rows = connection.execute(select(executors).order_by(executors.c.heartbeat_at.desc())).mappings().all()
        found = [
            ExecutorRow(
                id=row["id"],
                kind=row["kind"],
                host=row["host"],
                slots=row["slots"],
                busy=row["busy"],
                draining=row["draining"],
                report=None if row["report"] is None else MachineReport.model_validate(row["report"]),
                heartbeat_at=row["heartbeat_at"],
                alive=now - row["heartbeat_at"] < STALE_SECONDS,
            )
            for row in rows
        ]
        self._cached = (now, found)
        return found

    def recipes(self) -> dict[str, RecipeReport]:
        """Every recipe that some executor described, by name; the description of one that can run it is preferred."""
        found: dict[str, RecipeReport] = {}
        for recipe in self._reported_recipes():
            known = found.get(recipe.name)
            if known is None or (recipe.available and not known.available):
                found[recipe.name] = recipe
        return dict(sorted(found.items()))

    def described(self) -> bool:
        """Whether any executor, there or not, has described itself."""
        return any(row.report is not None for row in self.all())

    def check_alive(self) -> None:
        """`ExecutorLost` unless an executor that has described itself has a fresh heartbeat."""
        if not any(row.alive and row.report is not None for row in self.all()):
            raise ExecutorLost(
                "no executor is there", hint="A first start takes some seconds: it looks at the machine."
            )

    def _reported_recipes(self) -> Iterator[RecipeReport]:
        for row in self.all():
            if row.report is not None:
                yield from row.report.recipes
