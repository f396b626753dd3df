"""What an export takes: host memory, GPU memory and disk, sampled over the process tree, held against its budgets.

Host memory is the sum of `Pss_Anon` (`hostAnonBytes`) and `Pss` (`hostRssBytes`) of `/proc/PID/smaps_rollup`: pages
that forked workers share are counted once. Clean page cache of a mapped source is in the second and not in the first,
so a `hostMemory` budget is about the first. `write_bytes` of `/proc/PID/io` counts what reached the disk layer.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from exporter.contract.errors import BudgetExceeded, DeadlineExceeded, WeightlessError
from exporter.contract.manifest import Resources, StageUse
from exporter.contract.spec import Budgets

SAMPLE_INTERVAL = 0.1
"""Seconds between samples."""
REPORT_INTERVAL = 1.0
"""Seconds between `resources` events."""
SCRATCH_INTERVAL = 1.0
"""Seconds between walks of the scratch folder."""


class Events(Protocol):
    """Where samples are reported."""

    def emit(self, kind: str, **fields: Any) -> None:
        """Write one event."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment of the process tree, in bytes."""

    host_anon: int = 0
    host_rss: int = 0
    gpu: int = 0
    disk_written: int = 0


@dataclass(slots=True)
class _Stage:
    milliseconds: float = 0.0
    host_anon: int = 0
    gpu: int = 0
    started: float | None = None


@dataclass(slots=True)
class Meter:
    """Samples in a thread of its own until `stop`. The first budget that is passed is told to `over_budget`, once.

    `scratch` is the folder whose size a `scratchDisk` budget limits.
    """

    events: Events
    budgets: Budgets
    scratch: Path
    over_budget: Callable[[WeightlessError], None]
    gpu: Callable[[set[int]], int] = field(default=lambda pids: 0)
    _peak: Sample = field(default_factory=Sample)
    _stages: dict[str, _Stage] = field(default_factory=dict)
    _current: str = "resolving"
    _written: dict[int, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _began: float = field(default_factory=time.monotonic)
    _told: bool = False

    def start(self) -> None:
        """Begin to sample."""
        self._thread = threading.Thread(target=self._loop, name="meter", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End; one last sample is taken."""
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Account what happens inside to a stage; a stage entered again is continued, stages may overlap."""
        with self._lock:
            stage = self._stages.setdefault(name, _Stage())
            stage.started = time.monotonic()
            before, self._current = self._current, name
        self._take()
        try:
            yield
        finally:
            self._take()
            with self._lock:
                if stage.started is not None:
                    stage.milliseconds += 1000 * (time.monotonic() - stage.started)
                stage.started = None
                self._current = before

    def resources(self) -> Resources:
        """Peaks so far, for the manifest; what the stream moved is filled in by the caller."""
        self._take()
        with self._lock:
            now = time.monotonic()
            stages = tuple(
                StageUse(
                    name=name,
                    milliseconds=round(stage.milliseconds + (1000 * (now - stage.started) if stage.started else 0)),
                    host_peak_anon_bytes=stage.host_anon,
                    gpu_peak_bytes=stage.gpu,
                )
                for name, stage in self._stages.items()
            )
            return Resources(
                host_peak_anon_bytes=self._peak.host_anon,
                host_peak_rss_bytes=self._peak.host_rss,
                gpu_peak_bytes=self._peak.gpu,
                disk_written_bytes=self._peak.disk_written,
                stages=stages,
            )

    def _loop(self) -> None:
        next_report = next_walk = 0.0
        while True:
            sample = self._take()
            moment = time.monotonic()
            scratch = None
            if self.budgets.scratch_disk is not None and moment >= next_walk:
                scratch, next_walk = folder_bytes(self.scratch), moment + SCRATCH_INTERVAL
            self._enforce(sample, scratch, moment)
            if moment >= next_report:
                next_report = moment + REPORT_INTERVAL
                self.events.emit(
                    "resources",
                    host_anon_bytes=sample.host_anon,
                    host_rss_bytes=sample.host_rss,
                    gpu_bytes=sample.gpu,
                    disk_written_bytes=sample.disk_written,
                )
            if self._ended.wait(SAMPLE_INTERVAL):
                return

    def _take(self) -> Sample:
        pids = process_tree(os.getpid())
        anon = rss = 0
        for pid in pids:
            pss_anon, pss = host_memory(pid)
            anon, rss = anon + pss_anon, rss + pss
        gpu = self.gpu(set(pids))
        with self._lock:
            for pid in pids:
                self._written[pid] = max(self._written.get(pid, 0), written_bytes(pid))
            sample = Sample(anon, rss, gpu, sum(self._written.values()))
            peak = self._peak
            self._peak = Sample(
                max(peak.host_anon, anon), max(peak.host_rss, rss), max(peak.gpu, gpu), sample.disk_written
            )
            for stage in self._stages.values():
                if stage.started is not None:
                    stage.host_anon, stage.gpu = max(stage.host_anon, anon), max(stage.gpu, gpu)
        return sample

    def _enforce(self, sample: Sample, scratch: int | None, moment: float) -> None:
        if self._told:
            return
        limits = (
            ("hostMemory", self.budgets.host_memory, sample.host_anon),
            ("gpuMemory", self.budgets.gpu_memory, sample.gpu),
            ("scratchDisk", self.budgets.scratch_disk, scratch or 0),
        )
        for name, limit, used in limits:
            if limit is not None and used > limit:
                self._tell(budget_exceeded(name, limit, used, self._current))
                return
        limit, used = self.budgets.wall_time, int(moment - self._began)
        if limit is not None and moment - self._began > limit:
            self._tell(
                DeadlineExceeded(
                    f"the export took longer than its budget of {limit} s while {self._current}",
                    stage=self._current,
                    budget="wallTime",
                    limit=limit,
                    used=used,
                )
            )

    def _tell(self, error: WeightlessError) -> None:
        self._told = True
        self.over_budget(error)


def budget_exceeded(name: str, limit: int, used: int, stage: str) -> BudgetExceeded:
    """The error for a budget in bytes: names the stage, the limit and what was used."""
    return BudgetExceeded(
        f"{name} went over its budget while {stage}: {used} of {limit} bytes",
        stage=stage,
        budget=name,
        limit=limit,
        used=used,
    )


def process_tree(root: int) -> list[int]:
    """`root` and all its descendants that live now."""
    try:
        return [root, *(child.pid for child in psutil.Process(root).children(recursive=True))]
    except psutil.Error:
        return [root]


def host_memory(pid: int) -> tuple[int, int]:
    """(`Pss_Anon`, `Pss`) of a process in bytes; zeros once it is gone."""
    anon = pss = 0
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        for line in file:
            if line.startswith("Pss:"):
                pss = 1024 * int(line.split()[1])
            elif line.startswith("Pss_Anon:"):
                anon = 1024 * int(line.split()[1])
    return anon, pss


def written_bytes(pid: int) -> int:
    """`write_bytes` of a process less what it took back by truncating; 0 where it cannot be read."""
    fields = {}
    with contextlib.suppress(OSError), open(f"/proc/{pid}/io", encoding="ascii") as file:
        fields = dict(line.strip().split(": ") for line in file)
    return max(0, int(fields.get("write_bytes", 0)) - int(fields.get("cancelled_write_bytes", 0)))


def folder_bytes(folder: Path) -> int:
    """Disk space of the files under `folder`, in bytes, links not followed."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += 512 * os.lstat(f"{place}/{name}").st_blocks
    return total


def gpu_reader() -> Callable[[set[int]], int]:
    """A reader of the GPU memory of processes, from NVIDIA's driver; one that answers 0 where there is no driver.

    Where the driver cannot name our processes (another PID namespace), it is the growth of all use since the start.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        devices = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except Exception:
        return lambda pids: 0

    def used() -> int:
        return sum(int(pynvml.nvmlDeviceGetMemoryInfo(device).used) for device in devices)

    start = used()

    def read(pids: set[int]) -> int:
        try:
            running = [p for device in devices for p in pynvml.nvmlDeviceGetComputeRunningProcesses(device)]
            ours = [int(process.usedGpuMemory or 0) for process in running if process.pid in pids]
            return sum(ours) if any(ours) else max(0, used() - start)
        except pynvml.NVMLError:
            return 0

    return read
