"""Webhooks: signed, stored with their event, retried; and what a user's URL can not reach."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import http.server
import ipaddress
import json
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from exporter.contract.errors import InvalidRequest, UnsupportedModel
from service.database import Database
from service.delivery_table import DeliveryTable
from service.job_queue import Claimer, JobQueue
from service.job_store import JobStore
from service.jobs import Export
from service.webhooks import BACKOFF, WebhookSender, check_url, is_public
from tests.unit.service.conftest import MakeExport

KEY = b"secret"
ME = Claimer("me", "executor", frozenset({"xnnpack"}))


class Receiver(http.server.ThreadingHTTPServer):
    """An HTTPS server that keeps what it got and answers as told."""

    def __init__(self, folder: Path) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.status = 204
        self.location = ""
        super().__init__(("127.0.0.1", 0), _Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.certificate = _certificate(folder)
        context.load_cert_chain(self.certificate)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.url = f"https://hooks.test:{self.server_address[1]}/in?x=1"

    def handle_error(self, *_: Any) -> None:
        """A client that goes away is what some tests want."""


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Any = self.server
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server.got.append(({**self.headers, "path": self.path}, body))
        self.send_response(server.status)
        if server.location:
            self.send_header("Location", server.location)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def _certificate(folder: Path) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "hooks.test")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("hooks.test")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path = folder / "server.pem"
    path.write_bytes(pem + certificate.public_bytes(serialization.Encoding.PEM))
    return path


@pytest.fixture(scope="module")
def receiver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiver]:
    with Receiver(tmp_path_factory.mktemp("tls")) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Clock:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


class Room:
    def __init__(self, database: Database, receiver: Receiver, **options: Any) -> None:
        receiver.got.clear()
        receiver.status, receiver.location = 204, ""
        self.clock = Clock()
        self.jobs, self.queue = JobStore(database, clock=self.clock), JobQueue(database, clock=self.clock)
        # Rows are due from the wall clock on; this clock only moves the tries.
        self.clock.now = 4_000_000_000.0
        self.table = DeliveryTable(database, clock=self.clock)
        given = {
            "hosts": ["hooks.test"],
            "context": ssl.create_default_context(cafile=str(receiver.certificate)),
            "resolver": lambda host, port: ["127.0.0.1"],
            "clock": self.clock,
            **options,
        }
        self.sender = WebhookSender(self.table, KEY, **given)

    def run_one(self, export: Export, *, fail: bool = False) -> Export:
        self.jobs.submit(export)
        claimed = self.queue.claim(ME, "host/0", 60)
        assert claimed is not None
        if fail:
            return self.queue.fail(claimed, UnsupportedModel("no"))
        return self.queue.succeed(claimed, "s3://b/m.json", "sha256:0")


def hook(make_export: MakeExport, url: str, *events: str) -> Export:
    webhook: dict[str, Any] = {"url": url}
    if events:
        webhook["events"] = list(events)
    return make_export({"webhook": webhook})


def test_the_end_of_an_export_is_told_once_and_signed(
    database: Database, receiver: Receiver, make_export: MakeExport
) -> None:
    room = Room(database, receiver)
    export = room.run_one(hook(make_export, receiver.url))
    assert room.sender.send_due()
    assert not room.sender.send_due()
    [(headers, body)] = receiver.got
    told = json.loads(body)
    assert (told["type"], told["export"]["id"], told["export"]["state"]) == ("finished", export.id, "succeeded")
    assert told["export"]["manifest"] == {"uri": "s3://b/m.json", "digest": "sha256:0"}
    moment, mac = headers["Weightless-Signature"].removeprefix("t=").split(",v1=")
    assert mac == hmac.new(KEY, moment.encode() + b"." + body, hashlib.sha256).hexdigest()
    assert (headers["path"], headers["Content-Type"]) == ("/in?x=1", "application/json")
    [entry] = room.table.log(export.id)
    assert (entry.status, entry.tries, entry.error) == (204, 1, None)
    assert entry.delivered_at is not None


def test_states_are_told_in_order_where_they_are_wanted(
    database: Database, receiver: Receiver, make_export: MakeExport
) -> None:
    room = Room(database, receiver)
    room.run_one(hook(make_export, receiver.url, "state", "failed"), fail=True)
    while room.sender.send_due():
        pass
    told = [json.loads(body) for _, body in receiver.got]
    assert [item["type"] for item in told] == ["state", "state", "failed"]
    assert [item["eventId"] for item in told] == [1, 2, 3]
    assert told[-1]["export"]["error"]["code"] == "unsupported-model"


@pytest.mark.parametrize("status", [500, 302, 404, 100])
def test_what_does_not_arrive_is_tried_again_and_then_given_up(
    sqlite: Database, receiver: Receiver, make_export: MakeExport, status: int
) -> None:
    room = Room(sqlite, receiver)
    receiver.status, receiver.location = status, "https://hooks.test/elsewhere"
    export = room.run_one(hook(make_export, receiver.url))
    for wait in (*BACKOFF, None):
        assert room.sender.send_due()
        assert not room.sender.send_due()
        room.clock.now += wait or 10**6
    assert not room.sender.send_due()
    [entry] = room.table.log(export.id)
    assert (entry.tries, entry.delivered_at) == (5, None)
    if status != 100:
        assert entry.status == status
        assert len(receiver.got) == 5


def test_a_sender_that_died_is_replaced(sqlite: Database, receiver: Receiver, make_export: MakeExport) -> None:
    room = Room(sqlite, receiver)
    room.run_one(hook(make_export, receiver.url))
    assert room.table.take() is not None
    assert room.table.take() is None
    room.clock.now += 61
    assert room.sender.send_due()
    assert len(receiver.got) == 1


@pytest.mark.parametrize(
    "addresses", [["127.0.0.1"], ["10.0.0.1"], ["169.254.169.254"], ["93.184.216.34", "127.0.0.1"], ["::1"], []]
)
def test_a_host_that_resolves_to_the_inside_is_refused(
    sqlite: Database, receiver: Receiver, make_export: MakeExport, addresses: list[str]
) -> None:
    room = Room(sqlite, receiver, hosts=[], resolver=lambda host, port: addresses)
    export = room.run_one(hook(make_export, receiver.url))
    assert room.sender.send_due()
    assert receiver.got == []
    [entry] = room.table.log(export.id)
    assert entry.error is not None
    assert "address" in entry.error


def test_the_address_that_was_checked_is_the_one_that_is_used(
    sqlite: Database, receiver: Receiver, make_export: MakeExport, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    used: list[str] = []

    def once(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["93.184.216.34"] if len(asked) == 1 else ["127.0.0.1"]

    def connect(address: tuple[str, int], **_: Any) -> Any:
        used.append(address[0])
        raise ConnectionRefusedError

    monkeypatch.setattr("service.webhooks.socket.create_connection", connect)
    room = Room(sqlite, receiver, hosts=[], resolver=once)
    room.run_one(hook(make_export, receiver.url))
    assert room.sender.send_due()
    assert (asked, used) == (["hooks.test"], ["93.184.216.34"])


def test_a_certificate_for_another_name_is_refused(
    sqlite: Database, receiver: Receiver, make_export: MakeExport
) -> None:
    room = Room(sqlite, receiver, hosts=["other.test"])
    export = room.run_one(hook(make_export, receiver.url.replace("hooks.test", "other.test")))
    assert room.sender.send_due()
    assert receiver.got == []
    assert room.table.log(export.id)[0].status is None


@pytest.mark.parametrize(
    "url",
    [
        "http://example.org/",
        "https://user:pass@example.org/",
        "https://example.org:0/",
        "https://example.org:99999/",
        "https:///path",
        "https://127.0.0.1/",
        "https://10.1.2.3/",
        "https://192.168.0.1/",
        "https://169.254.169.254/latest",
        "https://[::1]/",
        "https://[::ffff:127.0.0.1]/",
        "https://[fd00::1]/",
        "https://[fe80::1]/",
        "https://[64:ff9b::7f00:1]/",
        "https://0.0.0.0/",
        "https://exämple.org/",
        "ftp://example.org/",
    ],
)
def test_urls_that_are_refused_at_once(url: str) -> None:
    with pytest.raises(InvalidRequest):
        check_url(url, [])


def test_an_allow_list_is_the_only_way_to_a_listed_host_and_lets_no_other_in() -> None:
    assert check_url("https://hooks.internal:8443/x", ["hooks.internal"]).hostname == "hooks.internal"
    for url in ("https://example.org/", "https://hooks.internal.example.org/", "https://xhooks.internal/"):
        with pytest.raises(InvalidRequest):
            check_url(url, ["hooks.internal"])


@pytest.mark.parametrize(
    ("network", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1", True),
        ("100.64.0.1", False),
        ("172.16.5.5", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("ff02::1", False),
        ("2002:7f00:1::", False),
        ("::ffff:10.0.0.1", False),
        ("fe80::1%eth0", False),
        ("192.0.2.1", False),
    ],
)
def test_public_addresses(network: str, public: bool) -> None:
    assert is_public(network) is public
    assert ipaddress.ip_address(network.partition("%")[0])
