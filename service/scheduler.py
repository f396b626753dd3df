"""The scheduler: claims exports, has an executor run them, and records what they say and how they end.

One thread, one loop: `tick` does a little of everything and never waits for an exporter. All that must outlive this
process is in the database or in the executor's hands, so that it may be killed between any two statements.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
import uuid
from collections.abc import Callable

import structlog

from exporter.contract.errors import (
    Cancelled,
    DeadlineExceeded,
    ExecutorLost,
    InternalError,
    StoreUnavailable,
    WeightlessError,
    error_from_dict,
)
from exporter.contract.events import FailedEvent, FinishedEvent, UploadEvent
from exporter.contract.machine import MachineReport
from exporter.contract.manifest import MAX_MANIFEST
from exporter.contract.objects import Upload
from exporter.contract.spec import ExportSpec, SourcePolicy, StoreSpec
from service.executor_table import ExecutorTable
from service.executors.base import Executor, Fate, RunningAttempt, classify
from service.job_queue import Claimer, JobQueue, LeaseLost
from service.jobs import Export
from service.ports import ArtifactStore
from service.recipe_check import capabilities
from service.resume import may_go_on, open_upload
from service.rows import rfc3339
from service.running import Gone, Running, Timing

log = structlog.get_logger(__name__)

MAX_BACKOFF = 60.0
STUCK_SECONDS = 600.0
STORE_PATIENCE = 120.0
"""How long the store is asked what became of a lost attempt before the attempt counts as failed."""


class Scheduler:
    """Runs exports on one executor. `run` is its loop; `stop` and `drain` may be called from other threads."""

    def __init__(
        self,
        *,
        queue: JobQueue,
        table: ExecutorTable,
        executor: Executor,
        store: ArtifactStore,
        store_spec: Callable[[str], StoreSpec],
        sources: SourcePolicy,
        deployment: str = "",
        timing: Timing | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._queue = queue
        self._table = table
        self._executor = executor
        self._store = store
        self._store_spec = store_spec
        self._sources = sources
        self._deployment = deployment
        self._timing = timing or Timing()
        self._clock = clock
        self._name = f"{executor.host}:{uuid.uuid4().hex[:12]}"
        self._running: dict[str, Running] = {}
        self._report: MachineReport | None = None
        self._slots = 0
        self._stop = threading.Event()
        self._draining = threading.Event()
        self._evicting = threading.Event()
        self._ticked = 0.0
        self._lost: set[tuple[str, int]] = set()
        self._leaser = threading.Thread(target=self._keep_leases, name="leases", daemon=True)
        self._reporter = threading.Thread(target=self._keep_describing, name="executor-report", daemon=True)

    @property
    def ready(self) -> bool:
        """Whether the executor has described itself."""
        return self._report is not None

    @property
    def claimer(self) -> Claimer:
        """Who this scheduler is, and what its executor can serve."""
        able: frozenset[str] = frozenset() if self._report is None else capabilities(self._report)
        return Claimer(self._name, self._executor.id, able)

    @property
    def busy(self) -> int:
        """Attempts in hand."""
        return len(self._running)

    def run(self) -> None:
        """Take over what an earlier process left, then tick until stopped."""
        while not self._stop.is_set():
            try:
                self.begin()
                break
            except WeightlessError as error:
                log.error("the scheduler cannot begin and tries again", error=error.message)
                self._stop.wait(1.0)
        while not self._stop.wait(self._timing.tick):
            try:
                self.tick()
            except WeightlessError as error:
                log.error("the scheduler met an error and goes on", error=error.message)
            except Exception:
                log.exception("the scheduler met an unexpected error and goes on")

    def begin(self) -> None:
        """Register, find attempts again, start describing the machine."""
        self._table.register(self._executor.id, self._executor.kind, self._executor.host, self._executor.slots(None))
        self._report = next((row.report for row in self._table.all() if row.id == self._executor.id), None)
        self._slots = self._executor.slots(self._report) if self._report is not None else 0
        adopted = self._queue.adopt(self.claimer, self._timing.lease)
        self._executor.sweep({(export.id, export.attempt) for export in adopted})
        for export in adopted:
            log.info("attempt found again", export=export.id, attempt=export.attempt)
            self._watch(export, self._executor.attach(export.id, export.attempt), _slot_index(export))
        self._ticked = time.monotonic()
        self._reporter.start()
        self._leaser.start()

    def drain(self) -> None:
        """Claim nothing more."""
        self._draining.set()

    def evict(self) -> None:
        """Tell every attempt to end: its export goes back to the queue, for the next process."""
        self._evicting.set()

    def stop(self) -> None:
        """End the loop; attempts go on without us."""
        self._draining.set()
        self._stop.set()

    def tick(self) -> None:
        """One round: leases, cancellations, each attempt, new claims, exports whose scheduler is gone."""
        now = self._clock()
        self._ticked = time.monotonic()
        while self._lost:
            export_id, attempt = self._lost.pop()
            lost = self._running.get(export_id)
            if lost is not None and lost.export.attempt == attempt:
                self._forget(lost)
        for export_id in self._queue.cancelled(self._name):
            if export_id in self._running:
                self._ask_to_stop(self._running[export_id], Cancelled("the export was cancelled on request"), now)
        if self._evicting.is_set():
            for running in self._running.values():
                self._ask_to_stop(running, ExecutorLost("the service stopped, and its exporters with it"), now)
        for running in list(self._running.values()):
            try:
                self._look_after(running, now)
            except LeaseLost:
                self._forget(running)
            except WeightlessError as error:
                log.warning("an attempt could not be looked after", export=running.export.id, error=error.message)
        if not self._draining.is_set():
            self._claim_all(now)
            self._take_expired()

    def _keep_leases(self) -> None:
        """Renew leases and the heartbeat, in a thread of its own: a store that is slow to answer must not cost a lease.

        A loop that has not come round for `STUCK_SECONDS` is taken for dead, and its exports are let go.
        """
        while not self._stop.wait(min(10.0, self._timing.lease / 3)):
            if time.monotonic() - self._ticked > STUCK_SECONDS:
                continue
            held = {running.export.id: running.export.attempt for running in list(self._running.values())}
            try:
                self._table.beat(self._executor.id, busy=len(held), draining=self._draining.is_set())
                kept = self._queue.renew(self._name, list(held), self._timing.lease)
                self._lost |= {(export_id, attempt) for export_id, attempt in held.items() if export_id not in kept}
            except WeightlessError as error:
                log.warning("leases could not be renewed", error=error.message)

    def _claim_all(self, now: float) -> None:
        claimer = self.claimer
        if not claimer.capabilities:
            return
        taken = {running.slot for running in self._running.values()}
        for slot in range(self._slots):
            if slot in taken:
                continue
            export = self._queue.claim(claimer, f"{self._executor.host}/{slot}", self._timing.lease)
            if export is None:
                return
            self._start(export, slot)

    def _start(self, export: Export, slot: int) -> None:
        spec = ExportSpec(
            id=export.id,
            attempt=export.attempt,
            created_at=rfc3339(export.created_at),
            request=export.body,
            store=self._store_spec(export.prefix),
            sources=self._sources,
            deployment=self._deployment,
            resume=open_upload(export, self._queue.open_uploads(export, earlier=True), self._store),
        )
        log.info("attempt starts", export=export.id, attempt=export.attempt, slot=slot)
        try:
            self._watch(export, self._executor.start(spec, slot), slot)
        except WeightlessError as error:
            self._running.pop(export.id, None)
            lost = isinstance(error, ExecutorLost)
            self._queue.requeue_or_fail(export, error, lost=lost, delay=self._backoff(export.lost))
        except Exception as error:
            self._running.pop(export.id, None)
            incident = uuid.uuid4().hex[:12]
            log.exception("an attempt could not be started", export=export.id, incident=incident)
            shown = InternalError(f"the attempt could not be started: {type(error).__name__}", incident=incident)
            self._queue.fail(export, shown)

    def _watch(self, export: Export, attempt: RunningAttempt, slot: int) -> None:
        started = self._queue.attempt(export).started_at
        self._running[export.id] = Running(export, attempt, slot, started)

    def _look_after(self, running: Running, now: float) -> None:
        if running.ended is None:
            running.ended = running.attempt.ended()
            running.ended_at = now if running.ended is not None else None
        self._read(running)
        if running.ended is not None and running.ended.fate is Fate.NEVER_RAN and running.stop_reason is None:
            # We died between the claim and the start: nothing has happened, so it is still the same attempt.
            self._start(running.export, running.slot)
            return
        if running.ended is not None:
            self._settle(running, now)
            return
        wall = (running.export.request.get("budgets") or {}).get("wallTime")
        if wall is not None and now - running.started > wall + self._timing.wall_grace:
            over = DeadlineExceeded(f"the export took longer than its wallTime of {wall} seconds", budget="wallTime")
            self._ask_to_stop(running, over, now)
        if running.terminal is not None and running.stopped_at is None:
            # It has said its last word; what is left of it gets as long to end as if it had been told to.
            running.stopped_at = now
        if running.stopped_at is not None and not running.killed and now - running.stopped_at > self._timing.kill_after:
            running.attempt.kill()
            running.killed = True

    def _read(self, running: Running) -> None:
        while lines := running.attempt.lines():
            for line in lines:
                if isinstance(line, UploadEvent):
                    self._note_upload(running, line)
                elif isinstance(line, (FinishedEvent, FailedEvent)) and running.terminal is None:
                    running.terminal = line
            running.recent = [*running.recent, *lines][-300:]
            running.export = self._queue.record(running.export, lines)

    @staticmethod
    def _note_upload(running: Running, line: UploadEvent) -> None:
        if line.state == "opened":
            running.uploads[line.upload_id] = line
        else:
            running.uploads.pop(line.upload_id, None)

    def _ask_to_stop(self, running: Running, reason: WeightlessError, now: float) -> None:
        if running.stop_reason is None:
            running.stop_reason = reason
            running.stopped_at = now
            running.attempt.stop()

    def _settle(self, running: Running, now: float) -> None:
        """The attempt is over: find out what it came to, record that, clean up."""
        assert running.ended is not None
        if isinstance(running.terminal, FinishedEvent):
            self._queue.succeed(running.export, running.terminal.manifest_uri, running.terminal.manifest_digest)
            self._done(running, "succeeded")
            return
        if now < running.ask_store_at:
            return
        try:
            if self._committed(running):
                self._done(running, "succeeded")
                return
        except WeightlessError as silent:
            if now - (running.ended_at or now) < STORE_PATIENCE:
                running.ask_store_at = now + self._timing.store_again
                return
            running.stop_reason = running.stop_reason or StoreUnavailable(
                f"the store does not say whether the export is there: {silent.message}"
            )
        error = self._error_of(running)
        if not may_go_on(running, error):
            self._abort_uploads(running)
        if isinstance(running.stop_reason, Cancelled):
            self._queue.cancel(running.export, running.stop_reason)
        else:
            lost = isinstance(error, ExecutorLost)
            used = running.export.lost if lost else running.export.faults
            self._queue.requeue_or_fail(running.export, error, lost=lost, delay=self._backoff(used))
        self._done(running, error.code)

    def _error_of(self, running: Running) -> WeightlessError:
        assert running.ended is not None
        if running.stop_reason is not None:
            return running.stop_reason
        if isinstance(running.terminal, FailedEvent):
            said = error_from_dict(running.terminal.error.model_dump())
            if not isinstance(said, Cancelled):
                return said
            return ExecutorLost("the exporter was told to stop, and not by this service", stage=said.stage)
        incident = uuid.uuid4().hex[:12]
        error = classify(running.ended, running.recent, running.export.request, incident)
        log.warning("attempt ended without a last word", export=running.export.id, incident=incident, code=error.code)
        return error

    def _committed(self, running: Running) -> bool:
        """Whether the manifest is in the store, whatever the exporter said; then the export has succeeded."""
        key = running.export.key
        stored = self._store.head(key)
        if stored is None or stored.size > MAX_MANIFEST:
            return False
        digest = hashlib.sha256(self._store.read(key, 0, stored.size)).hexdigest()
        self._queue.succeed(running.export, self._store.uri(key), f"sha256:{digest}")
        return True

    def _abort_uploads(self, running: Running) -> None:
        for line in running.uploads.values():
            key = self._store.key_of(line.uri)
            if key is None:
                continue
            try:
                self._store.abort_upload(Upload(key=key, id=line.upload_id))
            except WeightlessError as error:
                log.warning("an upload could not be given back", export=running.export.id, error=error.message)

    def _done(self, running: Running, outcome: str) -> None:
        log.info("attempt ended", export=running.export.id, attempt=running.export.attempt, outcome=outcome)
        running.attempt.clean()
        self._running.pop(running.export.id, None)

    def _forget(self, running: Running) -> None:
        """Another scheduler has the export: end our process, say nothing."""
        log.warning("the lease of an attempt is lost", export=running.export.id, attempt=running.export.attempt)
        running.attempt.kill()
        running.attempt.clean()
        self._running.pop(running.export.id, None)

    def _take_expired(self) -> None:
        """Exports whose scheduler died elsewhere: their outcome is what the store says."""
        for export in self._queue.take_expired(self.claimer, self._timing.lease):
            if export.id not in self._running:
                self._watch(export, Gone(), -1)
                uploads = self._queue.open_uploads(export)
                self._running[export.id].uploads = {line.upload_id: line for line in uploads}

    def _backoff(self, used: int) -> float:
        wait: float = min(self._timing.backoff * 2.0**used, MAX_BACKOFF)
        return wait * random.uniform(1.0, 1.25)  # noqa: S311 - spreads retries, no secret

    def _keep_describing(self) -> None:
        while not self._stop.is_set():
            try:
                report = self._executor.describe()
                self._table.report(self._executor.id, report, self._executor.slots(report))
                self._report, self._slots = report, self._executor.slots(report)
            except WeightlessError as error:
                log.error("the executor cannot describe itself", error=error.message, hint=error.hint)
            except Exception:
                log.exception("the executor cannot describe itself")
            self._stop.wait(self._timing.report_every if self._report is not None else 10.0)


def _slot_index(export: Export) -> int:
    index = (export.executor or "").rpartition("/")[2]
    return int(index) if index.isdigit() else 0
