"""Signed links, against a real HTTP server with faults: ranges, retries, expiry, and never a signature in a message."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx2
import pytest

from exporter.artifact.links import LinkOrigin, SignedLinks
from exporter.artifact.pull import pull
from exporter.artifact.transfer import Limits
from exporter.contract.errors import NotFound, StoreRejected, StoreUnavailable, WeightlessError

from .conftest import Export

SMALL = Limits(parallel=3, block=16 * 1024)
SECRET = "X-Amz-Signature=topsecret"


class Server(ThreadingHTTPServer):
    """Serves files by range; `fault(number)` names what goes wrong at a request, counted from 0."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.fault: Callable[[int], str | None] = lambda number: None
        self.count = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    wbufsize = 2**20  # head and body in one packet: two would wait for each other's acknowledgement

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        with self.server.lock:
            number = self.server.count
            self.server.count += 1
        kind = self.server.fault(number)
        path, _, query = self.path.partition("?")
        data = self.server.files.get(path)
        if kind == "reset":
            self.close_connection = True
            self.connection.close()
            return
        if kind == "expired" or query.endswith("old"):
            self.answer(403, b"<Error><Code>AccessDenied</Code></Error>")
        elif kind == "503":
            self.answer(503, b"")
        elif kind == "redirect":
            self.send_response(302)
            self.send_header("Location", "http://169.254.169.254/")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif data is None:
            self.answer(404, b"")
        else:
            self.ranged(data, kind)

    def ranged(self, data: bytes, kind: str | None) -> None:
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        if int(first) >= len(data):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(data)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        part = data[int(first) : int(last) + 1]
        if kind == "whole":
            self.answer(200, data)
            return
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if kind == "truncated":
            self.wfile.write(part[:-1])
            self.wfile.flush()
            self.connection.shutdown(2)
            self.close_connection = True
            return
        self.wfile.write(part[::-1] if kind == "reversed" else part)

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield running
    running.shutdown()
    running.server_close()
    thread.join()


@pytest.fixture
def http() -> Iterator[httpx2.Client]:
    with httpx2.Client(timeout=5.0) as client:
        yield client


def origin_of(server: Server, http: httpx2.Client, export: Export) -> LinkOrigin:
    server.files = {f"/{name}": export.bytes_of(name) for name in export.keys}
    links = {name: f"{server.url}/{name}?{SECRET}" for name in export.keys}
    return LinkOrigin(SignedLinks(lambda: links), http, sleep=lambda seconds: None)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} if folder.exists() else {}


def test_files_arrive_by_links(tmp_path: Path, server: Server, http: httpx2.Client, export: Export) -> None:
    pull(export.manifest, origin_of(server, http, export), tmp_path / "out", limits=SMALL)
    assert contents(tmp_path / "out") == {name: export.bytes_of(name) for name in export.keys}


@pytest.mark.parametrize("kind", ["503", "reset", "truncated"])
@pytest.mark.parametrize("at", range(0, 26, 3))
def test_faults_that_pass_cost_a_retry(
    tmp_path: Path, server: Server, http: httpx2.Client, export: Export, kind: str, at: int
) -> None:
    origin = origin_of(server, http, export)
    server.fault = lambda number: kind if number == at else None
    pull(export.manifest, origin, tmp_path / "out", limits=SMALL)
    assert contents(tmp_path / "out") == {name: export.bytes_of(name) for name in export.keys}


@pytest.mark.parametrize("kind", ["503", "reset", "truncated", "expired", "redirect", "reversed", "whole"])
def test_faults_that_stay_end_in_an_error_without_a_signature(
    tmp_path: Path, server: Server, http: httpx2.Client, export: Export, kind: str
) -> None:
    origin = origin_of(server, http, export)
    server.fault = lambda number: kind if number > 4 else None
    with pytest.raises(WeightlessError) as caught:
        pull(export.manifest, origin, tmp_path / "out", limits=SMALL)
    assert "topsecret" not in str(caught.value.as_dict())
    assert contents(tmp_path / "out") == {}


def test_a_link_that_expired_is_renewed_once_for_all(
    tmp_path: Path, server: Server, http: httpx2.Client, export: Export
) -> None:
    server.files = {f"/{name}": export.bytes_of(name) for name in export.keys}
    rounds: list[int] = []

    def renew() -> dict[str, str]:
        rounds.append(len(rounds))
        age = "old" if len(rounds) == 1 else "new"
        return {name: f"{server.url}/{name}?{SECRET}&{age}" for name in export.keys}

    pull(export.manifest, LinkOrigin(SignedLinks(renew), http), tmp_path / "out", limits=SMALL)
    assert contents(tmp_path / "out") == {name: export.bytes_of(name) for name in export.keys}
    assert len(rounds) == 2


def test_a_missing_file_is_named(tmp_path: Path, server: Server, http: httpx2.Client, export: Export) -> None:
    origin = origin_of(server, http, export)
    del server.files["/model.ptd"]
    with pytest.raises(NotFound):
        pull(export.manifest, origin, tmp_path / "out")
    with pytest.raises(NotFound, match="no link"):
        LinkOrigin(SignedLinks(dict), http).locate("model.pte", ["model.pte"])


def test_an_empty_file_has_a_size(server: Server, http: httpx2.Client) -> None:
    server.files = {"/empty": b""}
    origin = LinkOrigin(SignedLinks(lambda: {"empty": f"{server.url}/empty?{SECRET}"}), http)
    blob = origin.locate("empty", ["x"])
    assert blob.size == 0
    assert blob.uri == f"{server.url}/empty"


def test_errors_have_the_right_kind(server: Server, http: httpx2.Client, export: Export) -> None:
    origin = origin_of(server, http, export)
    server.fault = lambda number: "redirect"
    with pytest.raises(StoreRejected):
        origin.locate("model.pte", ["x"])
    server.fault = lambda number: "503"
    with pytest.raises(StoreUnavailable):
        origin.locate("model.pte", ["x"])
