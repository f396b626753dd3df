"""Token authentication over HTTP, owners kept apart, and no secret in anything that a run leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from service.database import Database
from service.tokens import TokenTable
from tests.integration.service_process import ServiceProcess

WEBHOOK_CANARY = "canary-webhook-5c1d"
STORE_CANARY = "canary-store-77aa"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    environment = pytest.MonkeyPatch()
    environment.setenv("AWS_SECRET_ACCESS_KEY", STORE_CANARY)
    environment.setenv("GITHUB_TOKEN", "canary-github")
    folder = tmp_path_factory.mktemp("service")
    service = ServiceProcess(folder, auth="token", webhook_key=WEBHOOK_CANARY, slots="2", log_level="debug")
    try:
        service.start()
        yield service
    finally:
        service.close()
        environment.undo()


def token(service: ServiceProcess, *scopes: str) -> str:
    database = Database(f"sqlite:///{service.folder}/data/weightless.db")
    try:
        return TokenTable(database).create("test", scopes)[1]
    finally:
        database.dispose()


def client(service: ServiceProcess, *scopes: str) -> httpx2.Client:
    headers = {"Authorization": f"Bearer {token(service, *scopes)}"}
    return httpx2.Client(base_url=service.url, headers=headers, timeout=60)


def test_health_needs_no_token_and_all_else_does(service: ServiceProcess) -> None:
    for path in ("/healthz", "/readyz"):
        assert service.client.get(path).status_code == 200
    for path in ("/exports", "/recipes", "/metrics", "/exports/exp_" + "0" * 26):
        answer = service.client.get(path)
        assert (answer.status_code, answer.json()["code"], answer.json()["reason"]) == (
            401,
            "unauthenticated",
            "missing",
        )
        assert answer.headers["www-authenticate"] == "Bearer"


def test_owners_do_not_see_each_other(service: ServiceProcess) -> None:
    with (
        client(service, "read", "submit", "cancel") as one,
        client(service, "read", "submit", "cancel", "delete") as other,
        client(service, "read-all", "read") as auditor,
        client(service, "read") as reader,
    ):
        answer = one.post("/exports", json=service.body())
        assert answer.status_code == 202
        export = answer.json()["id"]
        assert answer.json()["owner"].startswith("token:")
        for call in (
            other.get(f"/exports/{export}"),
            other.get(f"/exports/{export}/events"),
            other.get(f"/exports/{export}/logs"),
            other.get(f"/exports/{export}/manifest"),
            other.post(f"/exports/{export}/downloads"),
            other.post(f"/exports/{export}/cancel"),
            other.post(f"/exports/{export}/retry"),
            other.delete(f"/exports/{export}"),
        ):
            assert (call.status_code, call.json()["code"]) == (404, "not-found")
        assert other.get("/exports").json()["items"] == []
        assert [item["id"] for item in one.get("/exports").json()["items"]] == [export]
        assert auditor.get(f"/exports/{export}").status_code == 200
        assert auditor.post(f"/exports/{export}/cancel").status_code == 403
        refused = reader.post("/exports", json=service.body())
        assert (refused.status_code, refused.json()["reason"]) == (403, "scope")
        same_key = {"Idempotency-Key": "k"}
        first = one.post("/exports", json=service.body(), headers=same_key)
        second = other.post("/exports", json=service.body("silent"), headers=same_key)
        assert (first.status_code, second.status_code) == (202, 202)
        assert one.delete(f"/exports/{export}").status_code == 403


def test_no_secret_is_left_anywhere(service: ServiceProcess) -> None:
    secret = token(service, "read", "submit")
    with httpx2.Client(base_url=service.url, headers={"Authorization": f"Bearer {secret}"}, timeout=60) as caller:
        export = caller.post("/exports", json=service.body("environment", options={"seconds": 2.0})).json()["id"]
        while caller.get(f"/exports/{export}").json()["state"] != "running":
            pass
        inside = b""
        for process in service.exporters():
            inside += Path(f"/proc/{process.pid}/environ").read_bytes()
        # The store's credentials are the exporter's own; nothing else of the service's environment reaches it.
        assert STORE_CANARY.encode() in inside
        for canary in (b"WEIGHTLESS_", b"canary-webhook", b"canary-github", secret.encode()):
            assert canary not in inside
        caller.get("/exports", headers={"Authorization": f"Bearer {secret}x"})
        with caller.stream("GET", f"/exports/{export}/events") as answer:
            events = answer.read()
    canaries = [WEBHOOK_CANARY.encode(), b"canary-github", secret.encode(), secret.rpartition("_")[2].encode()]
    for canary in canaries:
        assert canary not in events
        for path in service.folder.rglob("*"):
            if path.is_file():
                assert canary not in path.read_bytes(), path
