"""What a scheduler holds in memory of one attempt, and how long it waits for what."""

from __future__ import annotations

from dataclasses import dataclass, field

from exporter.contract.errors import WeightlessError
from exporter.contract.events import AnyEvent, FailedEvent, FinishedEvent, UploadEvent
from service.executors.base import Ended, Fate, RunningAttempt
from service.jobs import Export

TICK_SECONDS = 0.2
KILL_AFTER = 8.0
"""Seconds between SIGTERM and SIGKILL: a cancelled export is `cancelled` within ten."""
WALL_GRACE = 5.0
"""Seconds past `wallTime` in which the exporter may stop itself, with better words."""
BACKOFF_SECONDS = 2.0
"""Wait before the first retry; doubled for each further one, up to a minute."""
REPORT_SECONDS = 600.0
"""How often an executor looks at its machine again."""


@dataclass(slots=True)
class Running:
    """An attempt that this scheduler watches. Memory: its upload and its last few hundred events."""

    export: Export
    attempt: RunningAttempt
    slot: int
    started: float
    terminal: FinishedEvent | FailedEvent | None = None
    uploads: dict[str, UploadEvent] = field(default_factory=dict)
    recent: list[AnyEvent] = field(default_factory=list)
    stop_reason: WeightlessError | None = None
    stopped_at: float | None = None
    killed: bool = False
    ended: Ended | None = None
    ended_at: float | None = None
    ask_store_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Knobs that tests turn; seconds."""

    tick: float = TICK_SECONDS
    kill_after: float = KILL_AFTER
    wall_grace: float = WALL_GRACE
    backoff: float = BACKOFF_SECONDS
    report_every: float = REPORT_SECONDS
    lease: float = 60.0
    store_again: float = 5.0
    """Between two questions to a store that did not answer."""


class Gone:
    """An attempt of an executor that is out of reach."""

    def lines(self) -> list[AnyEvent]:
        """Nothing more."""
        return []

    def ended(self) -> Ended:
        """Nobody knows."""
        return Ended(Fate.VANISHED)

    def stop(self) -> None:
        """Nothing to reach."""

    def kill(self) -> None:
        """Nothing to reach."""

    def clean(self) -> None:
        """Nothing to reach."""
