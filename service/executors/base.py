"""What a scheduler needs of an executor, and how the end of a process is read.

An executor starts attempts and reports what they say; it decides nothing. The scheduler holds the database.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

from exporter.contract.errors import ExecutorLost, HostOutOfMemory, InternalError, WeightlessError
from exporter.contract.events import AnyEvent, ResourcesEvent, StageEvent
from exporter.contract.machine import MachineReport
from exporter.contract.spec import ExportSpec

NEAR_LIMIT = 0.9
"""A last sample at or above this share of the memory limit is evidence that memory ended a process."""


class Fate(enum.StrEnum):
    """What became of an attempt whose executor was asked."""

    EXITED = "exited"
    """It ended, and its exit status is known (128 + n for signal n)."""
    VANISHED = "vanished"
    """It is gone and nobody knows how it ended."""
    NEVER_RAN = "never-ran"
    """It was claimed, but its process never started."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How an attempt ended. `oom_kills` counts the cgroup's out-of-memory kills while it ran; limits are bytes."""

    fate: Fate
    status: int | None = None
    oom_kills: int = 0
    memory_limit: int | None = None


class RunningAttempt(Protocol):
    """One attempt that an executor has. Methods do not block for longer than a file read or one request."""

    def lines(self) -> Sequence[AnyEvent]:
        """Events since the last call, in order; after a re-attachment from the first one on."""

    def ended(self) -> Ended | None:
        """How it ended, None while it runs. Once it has ended, `lines` gives the rest."""

    def stop(self) -> None:
        """Ask it to end (SIGTERM); it aborts its upload and writes a terminal event."""

    def kill(self) -> None:
        """End it and everything that it started."""

    def clean(self) -> None:
        """Remove what it leaves behind but its spec, its events and its log."""


class Executor(Protocol):
    """Where attempts run."""

    @property
    def id(self) -> str:
        """Stable across restarts of the service: attempts are found again by it."""

    @property
    def kind(self) -> str:
        """`local` or `ray`."""

    @property
    def host(self) -> str:
        """The name in `{host}/{index}`."""

    @property
    def reattachable(self) -> bool:
        """Whether attempts live on when the service stops, and can be found again."""

    def describe(self) -> MachineReport:
        """Look at the machine; takes seconds. `WeightlessError` where that fails."""

    def slots(self, report: MachineReport | None) -> int:
        """How many attempts may run at once."""

    def start(self, spec: ExportSpec, slot: int) -> RunningAttempt:
        """Start an attempt in a slot. Whatever a crash interrupts, `attach` finds out what became of it."""

    def sweep(self, known: Set[tuple[str, int]]) -> None:
        """End attempts that still run though they are not in `known`: another scheduler was given their exports."""

    def attach(self, export_id: str, attempt: int) -> RunningAttempt:
        """Find an attempt that an earlier process of this service started, or was about to start."""


def classify(ended: Ended, events: Sequence[AnyEvent], request: Mapping[str, Any], incident: str) -> WeightlessError:
    """The error of an attempt that ended without a terminal event."""
    stage = next((event.name for event in reversed(events) if isinstance(event, StageEvent)), None)
    samples = [event for event in events if isinstance(event, ResourcesEvent)]
    peak = max((sample.host_anon_bytes for sample in samples), default=0)
    if ended.fate is not Fate.EXITED or ended.status is None:
        return ExecutorLost("the exporter disappeared without a last word", stage=stage)
    number = ended.status - 128 if ended.status > 128 else 0
    if number == signal.SIGKILL and _memory_ended_it(ended, samples):
        return HostOutOfMemory(
            f"the exporter was killed for memory while {stage or 'starting'}",
            stage=stage,
            peak=peak,
            limit=ended.memory_limit,
            budget=(request.get("budgets") or {}).get("hostMemory"),
        )
    if number:
        name = _signal_name(number)
        return ExecutorLost(f"the exporter was ended by {name} while {stage or 'starting'}", stage=stage, signal=name)
    return InternalError(
        f"the exporter ended with status {ended.status} and no terminal event",
        stage=stage,
        incident=incident,
        status=ended.status,
    )


def _memory_ended_it(ended: Ended, samples: Sequence[ResourcesEvent]) -> bool:
    if ended.oom_kills > 0:
        return True
    if ended.memory_limit is None or not samples:
        return False
    return samples[-1].host_anon_bytes >= NEAR_LIMIT * ended.memory_limit


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
