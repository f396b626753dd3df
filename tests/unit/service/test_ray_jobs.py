"""The client of the Jobs API against small HTTP servers: who is trusted with a token, and what each answer means."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed (pip install weightless[ray])")

from exporter.contract.errors import ExecutorLost, InvalidRequest
from exporter.contract.machine import BackendReport, MachineReport, RecipeReport
from exporter.contract.spec import ExportSpec
from service.executors.base import Ended, Fate
from service.executors.ray import RayExecutor, how_it_ended
from service.executors.ray_cluster import merge, slots, with_features
from service.executors.ray_jobs import Job, Node, ray_token

TOKEN = "ray-token-0123456789"
Answer = Callable[[str, str, str | None], tuple[int, Any]]


@contextmanager
def dashboard(answer: Answer) -> Iterator[tuple[str, list[tuple[str, str, str | None]]]]:
    """A server in the place of Ray's dashboard: its URL and (method, path, Authorization) of each request."""
    seen: list[tuple[str, str, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def _any(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            asked = (self.command, self.path, self.headers.get("Authorization"))
            seen.append(asked)
            status, body = answer(*asked)
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "/stolen")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_DELETE = _any

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def executor(folder: Path, address: str, *, insecure: bool = False) -> Iterator[RayExecutor]:
    running = RayExecutor(folder, address, insecure=insecure)
    try:
        yield running
    finally:
        running.close()


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)


def closed(method: str, path: str, authorization: str | None) -> tuple[int, Any]:
    """A cluster that wants the token and knows no job."""
    if authorization != f"Bearer {TOKEN}":
        return 401, "Unauthorized: Missing authentication token"
    return (200, []) if path == "/api/jobs/" and method == "GET" else (404, "no such job")


def spec() -> ExportSpec:
    return ExportSpec.model_validate(
        {
            "id": "exp_01J0000000000000000000000A",
            "attempt": 1,
            "createdAt": "2026-01-01T00:00:00Z",
            "request": {"recipe": "r", "source": "s3://b/m", "target": {"backend": "portable"}},
            "store": {"uri": "memory://"},
        }
    )


@pytest.mark.parametrize("status", [200, 302, 404, 500])
def test_ray_an_open_cluster_is_refused(tmp_path: Path, status: int) -> None:
    with dashboard(lambda *_: (status, {})) as (address, seen):
        with pytest.raises(InvalidRequest) as caught, executor(tmp_path, address):
            pass
        assert "without a token" in caught.value.message
        assert "WEIGHTLESS_RAY_INSECURE" in caught.value.hint
        assert seen == [("GET", "/api/version", None)]


def test_ray_an_open_cluster_may_be_allowed(tmp_path: Path) -> None:
    with dashboard(lambda *_: (200, [])) as (address, _), executor(tmp_path, address, insecure=True) as running:
        running.sweep(set())


def test_ray_a_closed_cluster_needs_our_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    with dashboard(closed) as (address, _):
        with pytest.raises(InvalidRequest), executor(tmp_path, address):
            pass
        (tmp_path / "token").write_text(f"{TOKEN}\n")
        with executor(tmp_path, address) as running:
            running.sweep(set())


def test_ray_the_token_is_not_shown_to_a_redirect(tmp_path: Path) -> None:
    def moved(method: str, path: str, authorization: str | None) -> tuple[int, Any]:
        return (401, "") if authorization is None else (302, "")

    with dashboard(moved) as (address, seen), executor(tmp_path, address) as running:
        with pytest.raises(ExecutorLost):
            running.describe()
        assert "/stolen" not in [path for _, path, _ in seen]


def test_ray_a_refused_token_is_named(tmp_path: Path) -> None:
    with dashboard(lambda *_: (403, "Forbidden")) as (address, _), executor(tmp_path, address) as running:
        with pytest.raises(ExecutorLost) as caught:
            running.describe()
        assert "RAY_AUTH_TOKEN" in caught.value.hint
        assert TOKEN not in str(caught.value.as_dict())


@pytest.mark.parametrize("body", ["not json", "[]", {"data": None}, {"data": {"result": {"result": [1]}}}, "{" * 1000])
def test_ray_a_strange_list_of_nodes_is_an_error(tmp_path: Path, body: Any) -> None:
    def strange(method: str, path: str, authorization: str | None) -> tuple[int, Any]:
        return (401, "") if authorization is None else (200, body)

    with (
        dashboard(strange) as (address, _),
        executor(tmp_path, address) as running,
        pytest.raises(ExecutorLost),
    ):
        running.describe()


def test_ray_a_refused_submission_is_an_error(tmp_path: Path) -> None:
    with dashboard(closed) as (address, _), executor(tmp_path, address) as running, pytest.raises(ExecutorLost):
        running.start(spec(), 0)


def test_ray_a_submission_that_ray_has_already_is_followed(tmp_path: Path) -> None:
    """The answer to an earlier submission was lost: Ray refuses the id, and knows the job."""

    def has_it(method: str, path: str, authorization: str | None) -> tuple[int, Any]:
        if authorization is None:
            return 401, ""
        return (400, "already exists") if method == "POST" else (200, {"status": "PENDING"})

    with dashboard(has_it) as (address, _), executor(tmp_path, address) as running:
        attempt = running.start(spec(), 0)
        assert attempt.ended() is None
        attempt.clean()


def test_ray_a_job_without_trace_never_ran_and_one_with_a_log_vanished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.executors.ray.POLL_SECONDS", 0.01)
    with dashboard(closed) as (address, _), executor(tmp_path, address) as running:
        fresh = running.attach(spec().id, 1)
        (tmp_path / "jobs" / spec().id / "2").mkdir(parents=True)
        (tmp_path / "jobs" / spec().id / "2" / "log.txt").write_text("Running entrypoint\n")
        ran = running.attach(spec().id, 2)
        for attempt, fate in ((fresh, Fate.NEVER_RAN), (ran, Fate.VANISHED)):
            attempt._follower.result(10)
            assert attempt.ended() == Ended(fate)


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (Job("SUCCEEDED"), Ended(Fate.EXITED, 0)),
        (Job("FAILED", 1, "JOB_ENTRYPOINT_COMMAND_ERROR"), Ended(Fate.EXITED, 1)),
        (Job("FAILED", 137, "JOB_ENTRYPOINT_COMMAND_ERROR"), Ended(Fate.EXITED, 137)),
        (Job("FAILED", -9, "JOB_ENTRYPOINT_COMMAND_ERROR"), Ended(Fate.EXITED, 137)),
        (Job("FAILED", None, "JOB_SUPERVISOR_ACTOR_DIED"), Ended(Fate.VANISHED)),
        (Job("FAILED", None, "JOB_SUPERVISOR_ACTOR_START_TIMEOUT"), Ended(Fate.VANISHED)),
        (Job("FAILED"), Ended(Fate.VANISHED)),
        (Job("STOPPED"), Ended(Fate.VANISHED)),
    ],
)
def test_ray_how_a_job_ended(job: Job, expected: Ended) -> None:
    assert how_it_ended(job) == expected


def test_ray_reports_become_one() -> None:
    def recipe(name: str, available: bool) -> RecipeReport:
        return RecipeReport(name=name, description="", options_schema={}, example={}, available=available)

    def backend(version: str | None) -> BackendReport:
        return BackendReport(name="cuda", available=version is not None, reason="no GPU", cuda_version=version)

    head = MachineReport(recipes=(recipe("a", False), recipe("b", True)), backends=(backend(None),))
    old = MachineReport(recipes=(recipe("a", True),), backends=(backend("12.9"),))
    new = MachineReport(recipes=(recipe("a", False),), backends=(backend("13.0"),))
    found = merge([head, old, new])
    assert {item.name: item.available for item in found.recipes} == {"a": True, "b": True}
    assert [item.cuda_version for item in found.backends] == ["12.9", "13.0"]
    assert [item.available for item in merge([head]).backends] == [False]


def test_ray_a_cuda_version_that_ray_does_not_know_of_is_not_available() -> None:
    report = MachineReport(backends=(BackendReport(name="cuda", available=True, cuda_version="13.0"),))
    (hidden,) = with_features(report, frozenset({"cuda-12.9"})).backends
    assert not hidden.available
    assert "cuda-13.0" in str(hidden.reason)
    assert with_features(report, frozenset({"cuda-13.0"})) == report


def test_ray_slots() -> None:
    cpu, gpu = Node("1", "a", {"CPU": 4.0}), Node("2", "b", {"CPU": 4.0, "GPU": 2.0})
    assert [slots(nodes) for nodes in ([], [cpu], [cpu, cpu], [cpu, gpu], [gpu, gpu])] == [1, 1, 2, 2, 4]


def test_ray_a_token_is_found_where_ray_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ray_token() == TOKEN
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ray_token() is None
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(" from-home \n")
    assert ray_token() == "from-home"


@pytest.mark.parametrize("address", ["ray://head:10001", "head:8265", "auto"])
def test_ray_an_address_is_the_dashboards_url(tmp_path: Path, address: str) -> None:
    with pytest.raises(InvalidRequest):
        RayExecutor(tmp_path, address)
