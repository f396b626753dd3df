"""A real service in a child process, on a free port, with a tiny exporter; and a client for it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil

ROOT = Path(__file__).parents[2]
CHILD = ROOT / "tests" / "unit" / "service" / "child.py"
PROGRAM = """
import sys
from service.__main__ import serve
from service.settings import load_settings
serve(load_settings(), command=sys.argv[1:])
"""


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServiceProcess:
    """A service that can be started, stopped and killed, over and over on one data directory."""

    def __init__(self, folder: Path, *, command: list[str] | None = None, **settings: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx2.Client(base_url=self.url, timeout=60.0)
        self._command = command or [sys.executable, str(CHILD)]
        self._settings = {
            "WEIGHTLESS_DATA_DIR": str(folder / "data"),
            "WEIGHTLESS_PORT": str(self.port),
            "WEIGHTLESS_SOURCE_ROOTS": str(folder / "models"),
            **{f"WEIGHTLESS_{name.upper()}": value for name, value in settings.items()},
        }
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "models").mkdir(exist_ok=True)

    def start(self, *, ready: bool = True) -> None:
        """Start, and wait until it answers (and, with `ready`, until its executor has described itself)."""
        with (self.folder / "service.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *self._command],
                cwd=ROOT,
                env={**os.environ, **self._settings},
                stdout=log,
                stderr=log,
            )
        self._answers("/readyz" if ready else "/healthz")

    def wait_ready(self) -> None:
        """Wait until its executor has described itself."""
        self._answers("/readyz")

    def _answers(self, path: str) -> None:
        assert self._process is not None
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(httpx2.TransportError):
                if self.client.get(path).status_code == 200:
                    return
            assert self._process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)

    def signal(self, number: int = signal.SIGTERM, *, seconds: float = 30.0) -> int:
        """Send a signal, wait for the end, return the exit status."""
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(seconds)

    def kill(self) -> None:
        """kill -9."""
        self.signal(signal.SIGKILL)

    def close(self) -> None:
        """End the service and every exporter."""
        self.client.close()
        if self._process is not None and self._process.poll() is None:
            self.kill()
        for process in self.exporters():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def exporters(self) -> list[psutil.Process]:
        """Processes that work in a job's folder."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if Path(process.cwd()).is_relative_to(self.folder / "data" / "jobs"):
                    found.append(process)
        return found

    def pin(self, cores: set[int]) -> None:
        """Keep the service to some cores."""
        assert self._process is not None
        for thread in psutil.Process(self._process.pid).threads():
            os.sched_setaffinity(thread.id, cores)

    def memory(self) -> int:
        """Resident bytes of the service's own process."""
        assert self._process is not None
        return int(psutil.Process(self._process.pid).memory_info().rss)

    def log(self) -> str:
        """What the service wrote."""
        return (self.folder / "service.log").read_text(errors="replace")

    def body(self, what: str = "fine", **fields: Any) -> dict[str, Any]:
        """A request whose source says what the tiny exporter does."""
        source = f"file://{self.folder}/models/{what}"
        return {"recipe": "fake", "source": source, "target": {"backend": "xnnpack"}, **fields}

    def submit(self, what: str = "fine", seconds: float = 0.0, **fields: Any) -> str:
        """Queue an export and return its id."""
        answer = self.client.post("/exports", json=self.body(what, options={"seconds": seconds}, **fields))
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    def get(self, export_id: str) -> dict[str, Any]:
        """The export."""
        answer = self.client.get(f"/exports/{export_id}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def wait(self, export_id: str, *states: str, seconds: float = 60.0) -> dict[str, Any]:
        """The export as soon as it is in one of `states` (default: finished)."""
        wanted = states or ("succeeded", "failed", "cancelled")
        deadline = time.monotonic() + seconds
        while (export := self.get(export_id))["state"] not in wanted:
            assert time.monotonic() < deadline, export
            time.sleep(0.05)
        return export

    def events(self, export_id: str, last: int | None = None) -> Iterator[tuple[int, str, dict[str, Any]]]:
        """(id, type, data) of each event until the server ends the stream."""
        headers = {} if last is None else {"Last-Event-ID": str(last)}
        with self.client.stream("GET", f"/exports/{export_id}/events", headers=headers, timeout=60) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            fields: dict[str, str] = {}
            for line in answer.iter_lines():
                if line.startswith(":"):
                    continue
                if line:
                    name, _, value = line.partition(": ")
                    fields[name] = value
                elif fields:
                    yield int(fields["id"]), fields["event"], json.loads(fields["data"])
                    fields = {}
