"""What the meter measures and what it stops."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from exporter.contract.errors import WeightlessError
from exporter.contract.spec import Budgets
from exporter.meter import Meter, folder_bytes, host_memory, process_tree

MiB = 2**20


class Recorder:
    """Keeps events; tells when one came."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def emit(self, kind: str, **fields: Any) -> None:
        self.events.append({"type": kind, **fields})


class Stop:
    """Keeps the errors that the meter tells."""

    def __init__(self) -> None:
        self.errors: list[WeightlessError] = []
        self.told = threading.Event()

    def __call__(self, error: WeightlessError) -> None:
        self.errors.append(error)
        self.told.set()


@contextmanager
def running(meter: Meter) -> Iterator[Meter]:
    meter.start()
    try:
        yield meter
    finally:
        meter.stop()


def make(tmp_path: Path, **parts: Any) -> tuple[Meter, Recorder, Stop]:
    recorder, stop = Recorder(), Stop()
    budgets = Budgets.model_validate(parts.pop("budgets", {}))
    return Meter(recorder, budgets, tmp_path, stop, **parts), recorder, stop


def test_memory_that_is_touched_is_counted_once(tmp_path: Path) -> None:
    meter, recorder, stop = make(tmp_path)
    with running(meter), meter.stage("capturing"):
        before = host_memory(os.getpid())[0]
        block = bytearray(b"x") * (64 * MiB)
        after = host_memory(os.getpid())[0]
    assert 60 * MiB <= after - before <= 80 * MiB
    resources = meter.resources()
    assert resources.host_peak_anon_bytes >= after - MiB
    assert resources.host_peak_rss_bytes >= resources.host_peak_anon_bytes
    assert resources.stages[0].name == "capturing"
    assert resources.stages[0].host_peak_anon_bytes >= after - MiB
    assert recorder.events[0]["type"] == "resources"
    assert stop.errors == []
    assert len(block) == 64 * MiB


def test_children_are_part_of_the_tree() -> None:
    script = "import sys; block = bytearray(b'x') * (48 * 2**20); print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in process_tree(os.getpid())
        assert host_memory(child.pid)[0] >= 48 * MiB
        assert child.stdin is not None
        child.stdin.close()
    assert child.pid not in process_tree(os.getpid())
    assert host_memory(child.pid) == (0, 0)


@pytest.mark.parametrize(
    ("budgets", "code", "name"),
    [
        ({"hostMemory": MiB}, "budget-exceeded", "hostMemory"),
        ({"gpuMemory": 10}, "budget-exceeded", "gpuMemory"),
        ({"scratchDisk": 100}, "budget-exceeded", "scratchDisk"),
    ],
)
def test_a_budget_is_told_once_with_stage_limit_and_use(
    tmp_path: Path, budgets: dict[str, int], code: str, name: str
) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_bytes(b"x" * 100_000)
    meter, recorder, stop = make(tmp_path, budgets=budgets, gpu=lambda pids: 11)
    with meter.stage("compiling"), running(meter):
        assert stop.told.wait(30)
        count = len(recorder.events)
        while len(recorder.events) == count:  # at least one more round of samples
            time.sleep(0.05)
    (error,) = stop.errors
    assert (error.code, error.stage) == (code, "compiling")
    assert error.details["budget"] == name
    used, limit = error.details["used"], error.details["limit"]
    assert isinstance(used, int)
    assert isinstance(limit, int)
    assert used > limit == budgets[name]


def test_the_deadline(tmp_path: Path) -> None:
    meter, _, stop = make(tmp_path, budgets={"wallTime": 1})
    meter._began = time.monotonic() - 2
    with meter.stage("uploading"), running(meter):
        assert stop.told.wait(30)
    assert (stop.errors[0].code, stop.errors[0].stage) == ("deadline-exceeded", "uploading")


def test_a_stage_that_is_entered_again_goes_on(tmp_path: Path) -> None:
    meter, _, _ = make(tmp_path)
    with meter.stage("committing"):
        pass
    with meter.stage("verifying"):
        pass
    with meter.stage("committing"):
        pass
    assert [stage.name for stage in meter.resources().stages] == ["committing", "verifying"]


def test_folder_bytes_counts_files_and_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 8192)
    (tmp_path / "link").symlink_to("/proc/self/exe")
    assert 8192 <= folder_bytes(tmp_path) < 8192 + MiB
    assert folder_bytes(tmp_path / "missing") == 0
