"""Exports as Ray jobs: the way past one machine. Ray has the queue, the nodes and the processes; we ask and follow.

One thread with an event loop talks to Ray. Each attempt is followed by a coroutine that reads its log and its state;
the scheduler's thread only takes what is there.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Coroutine, Sequence, Set
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import structlog

from exporter.contract.errors import ExecutorLost, InvalidRequest, WeightlessError
from exporter.contract.events import AnyEvent, FailedEvent, FinishedEvent
from exporter.contract.machine import MachineReport
from exporter.contract.spec import ExportSpec
from service.executors.base import Ended, Fate
from service.executors.local import identity, take_lock
from service.executors.ray_cluster import DOCTOR_SECONDS, describe_cluster
from service.executors.ray_entrypoint import export_job, job_id
from service.executors.ray_jobs import TIMEOUT, Job, RayJobs, Unreachable
from service.executors.ray_log import FramedLog

log = structlog.get_logger(__name__)
T = TypeVar("T")

POLL_SECONDS = 1.0
SETTLE_SECONDS = 0.3
"""Wait for Ray to note the end of a job whose log is complete."""
UNREACHABLE_SECONDS = 900.0
"""How long Ray may be out of reach before its attempts count as lost: a head node that restarts finds its jobs."""
MAX_WAITING = 5000
"""Events that wait for the scheduler before reading goes on: at most 64 KiB each, mostly 200 bytes."""
LOG_TRIES = 3
"""How often the log of a job that is over is read, where its node does not give it."""
PENDING_SECONDS = 2.0
"""How long after a stop a job without a place may stay so: Ray ends it as soon as it gets one."""
ABSENT_POLLS = 3
"""How often in a row Ray must not know a job that left no trace, before it counts as never submitted."""


class RayExecutor:
    """Runs exporters as Ray jobs. Logs are kept below `{data}/jobs`, where the local executor has its own."""

    kind = "ray"
    reattachable = True

    def __init__(self, data_dir: Path, address: str, *, slots: int | None = None, insecure: bool = False) -> None:
        self._jobs = RayJobs(address, insecure=insecure)
        self._data_dir = data_dir
        self._slots = slots
        self._found_slots = 0
        self.host = urlsplit(address).netloc.rpartition("@")[2]
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = take_lock(data_dir / "executor.lock")
        self.id = f"ray-{identity(data_dir / 'executor.id')}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ray", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        self._call(self._jobs.open())
        try:
            self._check_now()
        except InvalidRequest:
            self.close()
            raise

    def _check_now(self) -> None:
        """Refuse an open cluster at once; one that is out of reach is checked when it is back."""
        try:
            self._call(self._jobs.check_access())
        except ExecutorLost as error:
            log.warning("the Ray cluster does not answer yet", address=self.host, error=error.message)

    def describe(self) -> MachineReport:
        """Describe the cluster's nodes by jobs of their own."""
        self._call(self._jobs.check_access())
        cluster = self._call(describe_cluster(self._jobs), DOCTOR_SECONDS + 4 * TIMEOUT)
        self._found_slots = cluster.slots
        return cluster.report

    def slots(self, report: MachineReport | None) -> int:
        """As many as were set, else the cluster's GPUs, else its nodes."""
        return self._slots if self._slots is not None else max(1, self._found_slots)

    def start(self, spec: ExportSpec, slot: int) -> RayAttempt:
        """Submit the job. A lost answer is not a lost job: the attempt is followed and tells."""
        body = export_job(spec, self.id)
        try:
            self._call(self._jobs.check_access())
            self._call(self._jobs.submit(body))
        except Unreachable as error:
            log.warning("a submission was not answered", job=body["submission_id"], error=error.message)
        except InvalidRequest as error:
            # Not the request's fault: another cluster answers at the address now.
            raise ExecutorLost(error.message, hint=error.hint) from error
        return self.attach(spec.id, spec.attempt)

    def attach(self, export_id: str, attempt: int) -> RayAttempt:
        """Follow a job, whoever submitted it."""
        found = RayAttempt(
            self._jobs,
            job_id(export_id, attempt),
            FramedLog(self._data_dir / "jobs" / export_id / str(attempt) / "log.txt"),
            self._loop,
        )
        found.follow()
        return found

    def sweep(self, known: Set[tuple[str, int]]) -> None:
        """Stop our jobs that the database has given to somebody else, or has seen the end of."""
        ours = {job_id(*key) for key in known}
        try:
            for job, metadata in self._call(self._jobs.unfinished()).items():
                if metadata.get("executor") == self.id and job not in ours:
                    log.warning("a Ray job that is not ours any more is stopped", job=job)
                    self._call(self._jobs.stop(job))
        except ExecutorLost as error:
            log.warning("Ray's jobs could not be looked through", error=error.message)

    def close(self) -> None:
        """Stop following; jobs go on, and another service may have the data directory."""
        if self._loop.is_closed():
            return
        atexit.unregister(self.close)
        self._call(self._end_followers())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        os.close(self._lock)

    async def _end_followers(self) -> None:
        followers = asyncio.all_tasks() - {asyncio.current_task()}
        for follower in followers:
            follower.cancel()
        await asyncio.gather(*followers, return_exceptions=True)
        await self._jobs.close()

    def _call(self, work: Coroutine[Any, Any, T], seconds: float = 3 * TIMEOUT) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(seconds)
        except TimeoutError as error:
            future.cancel()
            raise ExecutorLost(f"Ray did not answer within {seconds:.0f} seconds") from error


class RayAttempt:
    """One job. Methods take what the follower left, and never wait."""

    def __init__(self, jobs: RayJobs, job: str, text: FramedLog, loop: asyncio.AbstractEventLoop) -> None:
        self._jobs = jobs
        self._id = job
        self._text = text
        self._loop = loop
        self._waiting: deque[AnyEvent] = deque()
        self._ended: Ended | None = None
        self._stopped_at: float | None = None
        self._killed_at: float | None = None
        self._last_word = False
        self._heard = time.monotonic()

    def follow(self) -> None:
        """Start the follower."""
        self._follower = asyncio.run_coroutine_threadsafe(self._follow(), self._loop)

    def lines(self) -> Sequence[AnyEvent]:
        """Events that arrived since the last call."""
        return [self._waiting.popleft() for _ in range(len(self._waiting))]

    def ended(self) -> Ended | None:
        """How it ended, once its log is read; a killed one that never got a node is given up."""
        if self._ended is None and self._killed_at is not None and time.monotonic() - self._killed_at > 1.0:
            return Ended(Fate.VANISHED)
        return self._ended

    def stop(self) -> None:
        """Have Ray send SIGTERM, and SIGKILL after the wait that the job's environment names."""
        self._stopped_at = self._stopped_at or time.monotonic()
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop)

    def kill(self) -> None:
        """Ray's own SIGKILL is due by now; whatever it says, the attempt is over for us."""
        self.stop()
        self._killed_at = time.monotonic()

    def clean(self) -> None:
        """Stop following. Ray keeps the job's state and log as it was told to."""
        self._follower.cancel()

    async def _stop(self) -> None:
        for wait in (0.2, 1.0, 3.0):
            try:
                await self._jobs.stop(self._id)
                return
            except WeightlessError as error:
                log.warning("a Ray job could not be stopped", job=self._id, error=error.message)
            await asyncio.sleep(wait)

    async def _follow(self) -> None:
        try:
            self._ended = await self._until_ended()
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("a Ray job cannot be followed", job=self._id)
            self._ended = Ended(Fate.VANISHED)

    async def _until_ended(self) -> Ended:
        tries = absent = 0
        complete = False
        while True:
            try:
                job = await self._jobs.find(self._id)
                self._heard = time.monotonic()
            except WeightlessError as error:
                if time.monotonic() - self._heard > UNREACHABLE_SECONDS:
                    log.error("Ray is out of reach for too long", job=self._id, error=error.message)
                    return Ended(Fate.VANISHED)
                await asyncio.sleep(2 * POLL_SECONDS)
                continue
            if job is None:
                absent += 1
                if not self._text.empty:
                    return Ended(Fate.VANISHED)
                if absent >= ABSENT_POLLS:
                    return Ended(Fate.NEVER_RAN)
                await asyncio.sleep(POLL_SECONDS)
                continue
            if job.status == "PENDING" and time.monotonic() - (self._stopped_at or math.inf) > PENDING_SECONDS:
                return Ended(Fate.VANISHED)
            if job.terminal and (complete or tries >= LOG_TRIES):
                return how_it_ended(job)
            absent = 0
            tries += job.terminal
            complete = self._last_word or (job.status != "PENDING" and await self._read_log())
            await asyncio.sleep(SETTLE_SECONDS if complete else POLL_SECONDS)

    async def _read_log(self) -> bool:
        """Read the log until its terminal event, or until Ray says that it is complete; False where it broke off.

        Ray itself takes some seconds to say so.
        """
        self._text.restart()
        try:
            async with contextlib.aclosing(self._jobs.tail(self._id)) as pieces:
                async for piece in pieces:
                    events = self._text.feed(piece)
                    self._waiting.extend(events)
                    self._last_word |= any(isinstance(event, (FinishedEvent, FailedEvent)) for event in events)
                    if self._last_word:
                        return True
                    while len(self._waiting) > MAX_WAITING:
                        await asyncio.sleep(0.2)
        except WeightlessError as error:
            log.info("a Ray job's log broke off", job=self._id, error=error.message)
            return False
        return True


def how_it_ended(job: Job) -> Ended:
    """What Ray knows. FAILED without an exit code means that Ray lost sight of the job: the store is to be asked."""
    if job.status == "SUCCEEDED":
        return Ended(Fate.EXITED, 0)
    if job.status == "FAILED" and job.exit_code is not None:
        return Ended(Fate.EXITED, job.exit_code if job.exit_code >= 0 else 128 - job.exit_code)
    log.warning("a Ray job ended without an exit status", status=job.status, error=job.error_type, message=job.message)
    return Ended(Fate.VANISHED)
