"""A service in a process of its own, on a free port of loopback, with everything it writes in a folder of the test."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPTED = ("tests/e2e/scripted_service.py",)
REAL = ("-m", "service")


@dataclass(frozen=True)
class LiveService:
    """Where a running service is, and its folder."""

    url: str
    folder: Path
    process: subprocess.Popen[bytes]
    environment: Mapping[str, str]

    def run(self, *arguments: str) -> str:
        """Run `weightless` beside the service's database and return what it prints."""
        command = [sys.executable, "-m", "service.cli", *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=dict(self.environment), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def get(self, path: str, accept: str = "application/json", **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of a GET."""
        return self._call("GET", path, None, {"Accept": accept, **headers})

    def submit(self, **body: Any) -> dict[str, Any]:
        """POST an export of recipe `scripted` unless told otherwise, and return it."""
        asked = {"recipe": "scripted", "source": self.source, "target": {"backend": "portable"}, **body}
        data = json.dumps(asked).encode()
        status, _, content = self._call("POST", "/exports", data, {"Content-Type": "application/json"})
        assert status == 202, content
        found: dict[str, Any] = json.loads(content)
        return found

    def export(self, export_id: str) -> dict[str, Any]:
        """The export as the API has it now."""
        found: dict[str, Any] = json.loads(self.get(f"/exports/{export_id}")[2])
        return found

    def wait_for(self, export_id: str, *states: str) -> dict[str, Any]:
        """Poll until the export is in one of `states`; two minutes at most."""
        wanted = states or ("succeeded", "failed", "cancelled")
        for _ in range(1200):
            found = self.export(export_id)
            if found["state"] in wanted:
                return found
            time.sleep(0.1)
        raise AssertionError(f"{export_id} is {found['state']}, not {wanted}: {self.log()}")

    @property
    def source(self) -> str:
        """A source that the service allows."""
        return f"file://{self.folder}/models/model.pt2"

    def log(self) -> str:
        """The end of what the service logged."""
        return (self.folder / "service.log").read_text()[-3000:]

    def _call(
        self, method: str, path: str, data: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        request = urllib.request.Request(self.url + path, data=data, headers=dict(headers), method=method)
        try:
            with urllib.request.urlopen(request, timeout=90) as answer:
                return answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, {k.lower(): v for k, v in error.headers.items()}, error.read()


def free_port() -> int:
    """A port of loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(
    folder: Path, program: tuple[str, ...] = SCRIPTED, port: int | None = None, **settings: str
) -> Iterator[LiveService]:
    """A service that is ready; it is told to stop at the end, and must. Folder and port make it the same one again."""
    port = free_port() if port is None else port
    (folder / "models").mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "WEIGHTLESS_DATA_DIR": str(folder / "data"),
        "WEIGHTLESS_PORT": str(port),
        "WEIGHTLESS_SOURCE_ROOTS": str(folder / "models"),
        **settings,
    }
    with (folder / "service.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *program], cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    service = LiveService(f"http://127.0.0.1:{port}", folder, process, environment)
    try:
        _wait_until_ready(service)
        yield service
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait_until_ready(service: LiveService) -> None:
    for _ in range(1200):
        assert service.process.poll() is None, service.log()
        try:
            if service.get("/readyz")[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"the service is not ready: {service.log()}")
