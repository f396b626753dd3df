"""The export as the service keeps it: one frozen record, its states, and the only moves between them.

`queued -> starting -> running -> succeeded | failed | cancelled`; an attempt that was lost, or that failed in a way
that a retry can help, goes back to `queued`. Times are seconds since the epoch.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ulid import ULID

from exporter.contract.errors import IllegalState
from exporter.contract.spec import ExportRequest

MAX_LOST = 3
"""Attempts that may be lost (`executor-lost`) and retried; they are not the user's fault and count apart."""
MAX_FAULTS = 2
"""Retries of a fault whose error says that a retry can help (a store that did not answer, a full disk)."""


class State(enum.StrEnum):
    """Where an export is. The last three are terminal: nothing leaves them."""

    QUEUED = "queued"
    STARTING = "starting"
    """Claimed by a scheduler; its process has not said anything yet."""
    RUNNING = "running"
    """Its process has written an event; `stage` says what it works on."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        """Whether nothing follows."""
        return self in TERMINAL


TERMINAL = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED})
ACTIVE = frozenset({State.STARTING, State.RUNNING})
"""States in which an export holds a slot and a lease."""

LEGAL: Mapping[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.STARTING, State.FAILED, State.CANCELLED}),
    State.STARTING: frozenset({State.RUNNING, State.QUEUED, State.FAILED, State.CANCELLED}),
    State.RUNNING: frozenset({State.QUEUED, State.SUCCEEDED, State.FAILED, State.CANCELLED}),
    State.SUCCEEDED: frozenset(),
    State.FAILED: frozenset(),
    State.CANCELLED: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """One export. Change it with `evolve` (anything but the state) or `move` (the state, and what belongs to it)."""

    id: str
    owner: str
    """`repository:{id}`, `token:{id}`, or `local` without authentication."""
    caller: Mapping[str, Any]
    """Who asked, for people to read: kind, repository, ref, runUrl, actor."""
    request: Mapping[str, Any]
    """The body of POST /exports in canonical form (camelCase, sizes in bytes)."""
    created_at: float
    state: State = State.QUEUED
    stage: str | None = None
    """What a running export works on."""
    priority: int = 0
    prefix: str = ""
    """Below the store's prefix, from the caller's policy rule."""
    concurrent: int | None = None
    """How many exports of this owner may be active at once, from the caller's policy rule."""
    attempt: int = 0
    """The newest attempt's number; 0 before the first claim."""
    lost: int = 0
    """Attempts that ended as `executor-lost`."""
    faults: int = 0
    """Attempts that ended in an error that a retry can help."""
    not_before: float = 0.0
    """Earliest time of the next claim (backoff)."""
    started_at: float | None = None
    finished_at: float | None = None
    expires_at: float | None = None
    cancel_requested_at: float | None = None
    executor: str | None = None
    """Slot of the newest attempt, `{host}/{index}`."""
    executor_id: str | None = None
    """Stable identity of the executor that has the newest attempt; it may re-attach after a restart."""
    lease_owner: str | None = None
    """The scheduler that may write about this export, while it is active."""
    lease_until: float | None = None
    progress: Mapping[str, Any] | None = None
    peaks: Mapping[str, int] = field(default_factory=dict)
    bytes_uploaded: int = 0
    bytes_reused: int = 0
    error: Mapping[str, Any] | None = None
    manifest_uri: str | None = None
    manifest_digest: str | None = None
    parent: str | None = None
    last_event: int = 0
    """Number of the newest event row; rows are numbered from 1 without gaps."""

    def __post_init__(self) -> None:
        terminal = self.state in TERMINAL
        if terminal != (self.finished_at is not None):
            raise IllegalState(f"an export that is {self.state} {'needs' if terminal else 'has no'} finish time")
        if (self.state is State.FAILED) != (self.error is not None):
            raise IllegalState(f"an export has an error if and only if it failed; this one is {self.state}")
        if (self.state is State.SUCCEEDED) != (self.manifest_uri is not None):
            raise IllegalState(f"an export has a manifest if and only if it succeeded; this one is {self.state}")
        if (self.state in ACTIVE) != (self.lease_owner is not None):
            raise IllegalState(f"an export has a lease if and only if it is active; this one is {self.state}")

    def evolve(self, **changes: Any) -> Export:
        """A copy with `changes`; `IllegalState` for a change of the state, which only `move` makes."""
        if "state" in changes or "id" in changes:
            raise IllegalState("an export's state changes by a move, and its id never")
        return replace(self, **changes)

    def move(self, to: State, **changes: Any) -> Export:
        """A copy in state `to`, with what that state needs; `IllegalState` where the move is not legal."""
        if to not in LEGAL[self.state]:
            raise IllegalState(f"an export that is {self.state} cannot become {to}")
        if to not in ACTIVE:
            changes = {"lease_owner": None, "lease_until": None, **changes}
        if to is not State.RUNNING:
            changes = {"stage": None, **changes}
        return replace(self, state=to, **changes)

    def may_retry(self, retryable: bool, *, lost: bool) -> bool:
        """Whether an error is worth another attempt, and one is left; lost attempts are counted apart."""
        if lost:
            return self.lost < MAX_LOST
        return retryable and self.faults < MAX_FAULTS

    @property
    def body(self) -> ExportRequest:
        """The request as a model."""
        return ExportRequest.model_validate(self.request)

    @property
    def key(self) -> str:
        """Key of the manifest relative to the service's store."""
        return f"{self.prefix}/exports/{self.id}/manifest.json".lstrip("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try at an export."""

    export_id: str
    number: int
    executor: str
    started_at: float
    finished_at: float | None = None
    error: Mapping[str, Any] | None = None
    last_seq: int = 0
    """The newest `seq` of the attempt's own event lines that is stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRow:
    """A stored event. `data` is the JSON text that clients get; `seq` is None for rows of the service itself."""

    id: int
    attempt: int
    seq: int | None
    type: str
    time: str
    data: str


def new_id() -> str:
    """A fresh export id: `exp_` and a ULID, so that ids sort by time of creation."""
    return f"exp_{ULID()}"


def requirement(request: ExportRequest) -> str:
    """What an executor must have to serve the request: a back end, for CUDA with its version where one is asked."""
    target = request.target
    if target.backend == "cuda" and target.cuda_version:
        return f"cuda-{target.cuda_version}"
    return target.backend
