"""The scheduler with the local executor and a tiny real child process: outcomes, retries, cancels, restarts, strays."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from exporter.contract.errors import StoreUnavailable, WeightlessError
from exporter.contract.objects import StoredObject, Upload
from exporter.contract.spec import SourcePolicy
from exporter.store.open import open_store
from service.database import Database
from service.executor_table import ExecutorTable
from service.executors.local import LocalExecutor, LocalLogs
from service.job_queue import Claimer, JobQueue
from service.job_store import JobStore
from service.jobs import Export, State
from service.ports import ArtifactStore
from service.running import Timing
from service.scheduler import Scheduler
from service.settings import Settings
from tests.unit.service.conftest import MakeExport

CHILD = (sys.executable, str(Path(__file__).with_name("child.py")))
# A scheduler that is dropped leaves its exporters running, as a killed service does; Python remarks on that.
pytestmark = pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
QUICK = Timing(tick=0.02, kill_after=1.0, wall_grace=0.2, backoff=0.05, lease=60.0)


class Place:
    """A data directory with its database and store; schedulers come and go in it."""

    def __init__(self, folder: Path, template: Path) -> None:
        self.settings = Settings(data_dir=folder / "data")
        self.settings.data_dir.mkdir()
        shutil.copy(template, self.settings.data_dir / "weightless.db")
        self.database = Database(self.settings.sqlalchemy_url)
        self.jobs = JobStore(self.database)
        self.table = ExecutorTable(self.database)
        self.store: ArtifactStore = open_store(self.settings.store_spec())
        self.executor: LocalExecutor | None = None

    @contextlib.contextmanager
    def scheduler(self, *, slots: int = 2, timing: Timing = QUICK) -> Iterator[Scheduler]:
        """A scheduler that has described its machine; at the end it is dropped as if the process had been killed."""
        executor = self.executor = LocalExecutor(self.settings.data_dir, slots=slots, command=CHILD, host="host")
        scheduler = Scheduler(
            queue=JobQueue(self.database),
            table=self.table,
            executor=executor,
            store=self.store,
            store_spec=self.settings.store_spec,
            sources=SourcePolicy(),
            timing=timing,
        )
        scheduler.begin()
        deadline = time.monotonic() + 30
        while not scheduler.ready and time.monotonic() < deadline:
            time.sleep(0.02)
        try:
            yield scheduler
        finally:
            scheduler.stop()
            executor.close()

    def submit(self, export: Export) -> Export:
        return self.jobs.submit(export)[0]

    def until(self, scheduler: Scheduler, done: Callable[[], bool], seconds: float = 30.0) -> None:
        """Tick until `done`, failing after `seconds`."""
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, "the condition did not come about"
            scheduler.tick()
            time.sleep(0.02)

    def state(self, export: Export) -> State:
        return self.jobs.get(export.id).state

    def finish(self, scheduler: Scheduler, *exports: Export) -> None:
        self.until(scheduler, lambda: all(self.state(export).terminal for export in exports))

    def folder(self, export: Export, attempt: int = 1) -> Path:
        return self.settings.data_dir / "jobs" / export.id / str(attempt)


@pytest.fixture
def place(tmp_path: Path, sqlite_template: Path) -> Iterator[Place]:
    place = Place(tmp_path, sqlite_template)
    yield place
    place.database.dispose()
    for process in processes_in(tmp_path):
        process.kill()


def processes_in(folder: Path) -> list[psutil.Process]:
    """Processes that work below `folder`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if Path(process.cwd()).is_relative_to(folder):
                found.append(process)
    return found


@pytest.fixture
def make(make_export: MakeExport) -> Callable[..., Export]:
    """An export whose source says what the child does."""

    def made(what: str, *, seconds: float = 0.0, budgets: dict[str, Any] | None = None, **fields: Any) -> Export:
        export = make_export({"recipe": "fake", "source": f"file:///{what}", "options": {"seconds": seconds}}, **fields)
        return export.evolve(request={**export.request, "budgets": budgets or {}})

    return made


Make = Callable[..., Export]


def test_success(place: Place, make: Make) -> None:
    export = place.submit(make("fine"))
    with place.scheduler() as scheduler:
        place.finish(scheduler, export)
    done = place.jobs.get(export.id)
    assert done.state is State.SUCCEEDED
    assert done.manifest_uri == place.store.uri(done.key)
    assert place.jobs.attempts([export.id])[export.id][0].executor in ("host/0", "host/1")
    folder = place.folder(export)
    assert json.loads((folder / "spec.json").read_text())["id"] == export.id
    assert not (folder / "tmp").exists()
    assert LocalLogs(place.settings.data_dir).read(export.id, 1, 0, 100) == b"a line of the log\n"
    assert (folder / "events.jsonl").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("what", "code", "attempts"),
    [
        ("unsupported-model", "unsupported-model", 1),
        ("disk-full", "disk-full", 3),
        ("kill", "executor-lost", 4),
        ("silent", "internal", 1),
    ],
)
def test_failures(place: Place, make: Make, what: str, code: str, attempts: int) -> None:
    export = place.submit(make(what))
    with place.scheduler() as scheduler:
        place.finish(scheduler, export)
    done = place.jobs.get(export.id)
    assert done.error is not None
    assert (done.error["code"], done.attempt) == (code, attempts)


def test_a_kill_with_evidence_of_memory_is_out_of_memory(place: Place, make: Make) -> None:
    limit = psutil.virtual_memory().total
    export = place.submit(make("sample", budgets={"hostMemory": limit}))
    with place.scheduler() as scheduler:
        place.finish(scheduler, export)
    error = place.jobs.get(export.id).error
    assert error is not None
    assert (error["code"], error["stage"], error["details"]["peak"]) == ("host-out-of-memory", "capturing", limit)


def test_an_exporter_that_died_behind_its_commit_has_succeeded(place: Place, make: Make) -> None:
    export = place.submit(make("commit"))
    with place.scheduler() as scheduler:
        place.finish(scheduler, export)
    done = place.jobs.get(export.id)
    assert (done.state, done.attempt) == (State.SUCCEEDED, 1)
    assert done.manifest_digest == "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


@pytest.mark.parametrize("what", ["fine", "ignores-term"])
def test_cancel_ends_the_process_group(place: Place, make: Make, what: str) -> None:
    export = place.submit(make(what, seconds=600.0))
    with place.scheduler() as scheduler:
        place.until(scheduler, lambda: place.state(export) is State.RUNNING)
        place.jobs.cancel(export.id)
        place.finish(scheduler, export)
    done = place.jobs.get(export.id)
    assert (done.state, done.attempt, done.error) == (State.CANCELLED, 1, None)
    assert processes_in(place.folder(export)) == []


def test_the_wall_time_is_kept_for_an_exporter_that_does_not(place: Place, make: Make) -> None:
    export = place.submit(make("ignores-term", seconds=600.0, budgets={"wallTime": 1}))
    with place.scheduler() as scheduler:
        place.finish(scheduler, export)
    error = place.jobs.get(export.id).error
    assert error is not None
    assert error["code"] == "deadline-exceeded"


def test_a_sigterm_from_elsewhere_is_a_lost_attempt(place: Place, make: Make) -> None:
    export = place.submit(make("fine", seconds=600.0))
    with place.scheduler() as scheduler:
        place.until(scheduler, lambda: place.state(export) is State.RUNNING)
        os.killpg(int((place.folder(export) / "group").read_text()), signal.SIGTERM)
        place.until(scheduler, lambda: place.jobs.get(export.id).attempt == 2)
        place.jobs.cancel(export.id)
        place.finish(scheduler, export)
    assert place.jobs.get(export.id).lost == 1


def test_what_an_exporter_started_ends_with_it(place: Place, make: Make) -> None:
    export = place.submit(make("stray"))
    with place.scheduler() as scheduler:
        place.finish(scheduler, export)
    assert processes_in(place.folder(export)) == []


def test_the_environment_is_an_allow_list(place: Place, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WEIGHTLESS_WEBHOOK_KEY", "WEIGHTLESS_DATABASE_URL", "GITHUB_TOKEN", "SECRET"):
        monkeypatch.setenv(name, "canary")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "wanted")
    export = place.submit(make("environment"))
    with place.scheduler() as scheduler:
        place.finish(scheduler, export)
    folder = place.folder(export)
    seen = json.loads((folder / "log.txt").read_text().splitlines()[1])
    assert "canary" not in json.dumps(seen)
    assert seen["AWS_SESSION_TOKEN"] == "wanted"
    for name in ("HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert Path(seen[name]).is_relative_to(folder)


def test_a_restarted_scheduler_finds_a_running_attempt_again(place: Place, make: Make) -> None:
    export = place.submit(make("fine", seconds=1.0))
    with place.scheduler() as scheduler:
        place.until(scheduler, lambda: len(place.jobs.events(export.id)) > 6)
    with place.scheduler() as scheduler:
        place.finish(scheduler, export)
    done = place.jobs.get(export.id)
    assert (done.state, done.attempt) == (State.SUCCEEDED, 1)
    rows = [row for row in place.jobs.events(export.id) if row.seq is not None]
    assert [row.seq for row in rows] == list(range(1, len(rows) + 1))


@pytest.mark.parametrize("what", ["fine", "kill", "unsupported-model"])
def test_a_restarted_scheduler_finds_what_an_attempt_came_to(place: Place, make: Make, what: str) -> None:
    export = place.submit(make(what, seconds=0.3))
    with place.scheduler() as scheduler:
        place.until(scheduler, lambda: place.state(export) is not State.QUEUED)
    time.sleep(1.0)
    with place.scheduler() as scheduler:
        place.finish(scheduler, export)
    done = place.jobs.get(export.id)
    assert done.state is (State.SUCCEEDED if what == "fine" else State.FAILED)
    assert done.attempt == {"fine": 1, "kill": 4, "unsupported-model": 1}[what]


def test_an_attempt_that_was_claimed_and_never_started_is_run(place: Place, make: Make) -> None:
    export = place.submit(make("fine"))
    with place.scheduler() as scheduler:
        queue = JobQueue(place.database)
        assert queue.claim(scheduler.claimer, "host/0", 60.0) is not None
    with place.scheduler() as scheduler:
        place.finish(scheduler, export)
    done = place.jobs.get(export.id)
    assert (done.state, done.attempt) == (State.SUCCEEDED, 1)


def test_an_upload_of_a_killed_exporter_is_given_back(place: Place, make: Make) -> None:
    aborted: list[Upload] = []

    class Recording:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def abort_upload(self, upload: Upload) -> None:
            aborted.append(upload)

    inner = place.store
    place.store = Recording()  # type: ignore[assignment]
    export = place.submit(make("upload"))
    with place.scheduler() as scheduler:
        place.until(scheduler, lambda: bool(aborted))
        place.jobs.cancel(export.id)
        place.finish(scheduler, export)
    assert aborted[0] == Upload(key="weights/x/model.ptd", id="u1")


def test_a_store_that_does_not_answer_delays_the_verdict(place: Place, make: Make) -> None:
    silent = True

    class Faulty:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def head(self, key: str) -> StoredObject | None:
            if silent:
                raise StoreUnavailable("no answer")
            return inner.head(key)

    inner = place.store
    place.store = Faulty()  # type: ignore[assignment]
    export = place.submit(make("commit"))
    with place.scheduler(timing=Timing(tick=0.02, store_again=0.1)) as scheduler:
        place.until(scheduler, lambda: place.state(export) is State.RUNNING)
        until = time.monotonic() + 0.5
        place.until(scheduler, lambda: time.monotonic() > until)
        assert place.state(export) is State.RUNNING
        silent = False
        place.finish(scheduler, export)
    assert place.state(export) is State.SUCCEEDED


def test_slots_are_the_gpus_that_were_found(place: Place, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_GPUS", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7,9")
    exports = [place.submit(make("environment", seconds=0.5)) for _ in range(3)]
    with place.scheduler(slots=None) as scheduler:  # type: ignore[arg-type]
        place.finish(scheduler, *exports)
    devices = {
        json.loads((place.folder(export) / "log.txt").read_text().splitlines()[1])["CUDA_VISIBLE_DEVICES"]
        for export in exports
    }
    assert devices == {"5", "7", "9"}


def test_more_slots_than_gpus_share_them(place: Place, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_GPUS", "2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    exports = [place.submit(make("environment", seconds=0.5)) for _ in range(4)]
    with place.scheduler(slots=4) as scheduler:
        place.finish(scheduler, *exports)
    devices = sorted(
        json.loads((place.folder(export) / "log.txt").read_text().splitlines()[1])["CUDA_VISIBLE_DEVICES"]
        for export in exports
    )
    assert devices == ["0", "0", "1", "1"]


def test_a_drained_scheduler_claims_nothing(place: Place, make: Make) -> None:
    with place.scheduler() as scheduler:
        scheduler.drain()
        export = place.submit(make("fine"))
        for _ in range(10):
            scheduler.tick()
        assert place.state(export) is State.QUEUED


def test_evicted_exports_go_back_to_the_queue(place: Place, make: Make) -> None:
    export = place.submit(make("fine", seconds=600.0))
    with place.scheduler() as scheduler:
        place.until(scheduler, lambda: place.state(export) is State.RUNNING)
        scheduler.drain()
        scheduler.evict()
        place.until(scheduler, lambda: scheduler.busy == 0)
    done = place.jobs.get(export.id)
    assert (done.state, done.lost) == (State.QUEUED, 1)
    assert processes_in(place.folder(export)) == []


def test_a_process_whose_export_went_to_another_scheduler_is_ended(place: Place, make: Make) -> None:
    export = place.submit(make("fine", seconds=600.0))
    with place.scheduler() as scheduler:
        place.until(scheduler, lambda: place.state(export) is State.RUNNING)
    assert processes_in(place.folder(export))
    other = JobQueue(place.database, clock=lambda: time.time() + 3600)
    [taken] = other.take_expired(Claimer("other", "elsewhere", frozenset()), 7200.0)
    with place.scheduler() as scheduler:
        scheduler.tick()
        assert processes_in(place.folder(export)) == []
    assert place.jobs.get(export.id) == taken


def test_leases_are_kept_while_the_loop_waits_and_given_up_when_lost(place: Place, make: Make) -> None:
    export = place.submit(make("fine", seconds=600.0))
    with place.scheduler(timing=Timing(tick=0.02, lease=1.0)) as scheduler:
        place.until(scheduler, lambda: place.state(export) is State.RUNNING)
        before = place.jobs.get(export.id).lease_until
        time.sleep(1.5)  # no tick: a store that is slow to answer
        after = place.jobs.get(export.id).lease_until
        assert before is not None
        assert after is not None
        assert after > before
        other = JobQueue(place.database, clock=lambda: time.time() + 3600)
        [taken] = other.take_expired(Claimer("other", "elsewhere", frozenset()), 7200.0)
        place.until(scheduler, lambda: scheduler.busy == 0)
        assert processes_in(place.folder(export)) == []
    assert place.jobs.get(export.id) == taken


def test_a_data_directory_has_one_executor(place: Place) -> None:
    with place.scheduler(), pytest.raises(WeightlessError, match="another service"):
        LocalExecutor(place.settings.data_dir, command=CHILD)
