"""Runs `weightless` in this process, and a scripted HTTP server that stands for a service with faults."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from service.cli import main

EXPORT = "exp_01JZZZZZZZZZZZZZZZZZZZZZZZ"


@dataclass(frozen=True)
class Ran:
    """How a command ended and what it printed."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """Standard output as the one JSON object that it must be."""
        assert self.out.count("\n") == 1, self.out
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


@pytest.fixture
def weightless(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ran]]:
    """`weightless(*arguments)` runs the command; signal handlers are put back afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setenv("WEIGHTLESS_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments: str) -> Ran:
        capfd.readouterr()
        status = main(list(arguments))
        printed = capfd.readouterr()
        return Ran(status, printed.out, printed.err)

    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


class Service(ThreadingHTTPServer):
    """Answers by `script(method, path, headers, body)`: `(status, headers, body)`, or None to break off.

    A body may be a list of chunks; None among them breaks the connection there.
    """

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is no error here."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script: Callable[..., Any] = lambda method, path, headers, body: (404, {}, b"")
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Service
    protocol_version = "HTTP/1.1"
    wbufsize = 2**20

    def log_message(self, *arguments: object) -> None:
        pass

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.seen.append((self.command, self.path, headers, body))
        answer = self.server.script(self.command, self.path, headers, body)
        if answer is None:
            self.close_connection = True
            return
        status, given, content = answer
        self.send_response(status)
        for name, value in given.items():
            self.send_header(name, value)
        if isinstance(content, bytes):
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            return
        self.close_connection = True
        self.send_header("Connection", "close")
        self.end_headers()
        for chunk in content:
            if chunk is None:
                break
            try:
                self.wfile.write(chunk)
                self.wfile.flush()
            except OSError:
                break

    do_GET = do_POST = do_DELETE = _serve


@pytest.fixture
def service() -> Iterator[Service]:
    running = Service()
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield running
    running.shutdown()
    running.server_close()
    thread.join()
