"""The HTTP API against a real server with a tiny exporter: every call, every refusal."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.integration.service_process import ServiceProcess

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    service = ServiceProcess(tmp_path_factory.mktemp("service"), slots="4")
    service.start()
    yield service
    service.close()


def refused(answer: httpx2.Response, status: int, code: str, field: str | None = None) -> dict[str, Any]:
    """The problem document of a refusal, checked."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert (problem["code"], problem["status"]) == (code, status)
    assert problem["detail"]
    assert problem["hint"]
    assert isinstance(problem["retryable"], bool)
    if field is not None:
        assert problem["field"] == field
    return dict(problem)


def test_an_export_from_queued_to_succeeded(service: ServiceProcess) -> None:
    answer = service.client.post("/exports", json=service.body(labels={"pr": "1"}, priority=3))
    assert answer.status_code == 202
    export = answer.json()
    assert answer.headers["location"] == f"{service.url}/exports/{export['id']}" == export["links"]["self"]
    assert export["state"] in ("queued", "starting")
    seen = list(service.events(export["id"]))
    assert [number for number, _, _ in seen] == list(range(1, len(seen) + 1))
    states = [(data["from"], data["to"]) for _, kind, data in seen if kind == "state"]
    assert states == [(None, "queued"), ("queued", "starting"), ("starting", "running"), ("running", "succeeded")]
    assert seen[-1][1] == "state"
    done = service.get(export["id"])
    assert done["manifest"]["uri"].endswith(f"/exports/{export['id']}/manifest.json")
    assert done["labels"] == {"pr": "1"}
    assert done["attempts"][0]["number"] == done["attempt"] == 1
    assert {"startedAt", "finishedAt", "createdAt", "resources", "caller", "owner", "budgets", "target"} <= set(done)


def test_events_resume_behind_the_last_one(service: ServiceProcess) -> None:
    export = service.submit(seconds=0.5)
    first = list(itertools.islice(service.events(export), 5))
    rest = list(service.events(export, last=5))
    assert [number for number, _, _ in first + rest] == list(range(1, len(first + rest) + 1))
    assert rest[-1][2]["to"] == "succeeded"
    assert list(service.events(export, last=rest[-1][0])) == []
    assert list(service.events(export, last=99_999)) == []
    refused(
        service.client.get(f"/exports/{export}/events", headers={"Last-Event-ID": "x"}), 422, "invalid-request",
        "Last-Event-ID",
    )  # fmt: skip


def test_logs_are_text_and_can_be_followed(service: ServiceProcess) -> None:
    export = service.submit(seconds=1.0)
    with service.client.stream("GET", f"/exports/{export}/logs?follow=1") as answer:
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"
        text = "".join(answer.iter_text())
    assert text == "a line of the log\n"
    assert service.get(export)["state"] == "succeeded"
    assert service.client.get(f"/exports/{export}/logs").text == text
    refused(service.client.get(f"/exports/{export}/logs?attempt=7"), 404, "not-found")


def test_cancel_is_idempotent_and_leaves_a_finished_export(service: ServiceProcess) -> None:
    export = service.submit(seconds=60.0)
    service.wait(export, "running")
    begun = time.monotonic()
    for _ in range(3):
        assert service.client.post(f"/exports/{export}/cancel").status_code == 202
    assert service.wait(export)["state"] == "cancelled"
    assert time.monotonic() - begun < 10
    assert service.client.post(f"/exports/{export}/cancel").json()["state"] == "cancelled"
    finished = service.submit()
    service.wait(finished)
    assert service.client.post(f"/exports/{finished}/cancel").json()["state"] == "succeeded"


def test_a_retry_is_a_new_export_with_a_parent(service: ServiceProcess) -> None:
    running = service.submit(seconds=60.0)
    refused(service.client.post(f"/exports/{running}/retry"), 409, "illegal-state")
    service.client.post(f"/exports/{running}/cancel")
    before = service.wait(running)
    answer = service.client.post(f"/exports/{running}/retry")
    assert answer.status_code == 202
    again = answer.json()
    assert again["parent"] == running != again["id"]
    assert {name: again[name] for name in ("recipe", "source", "options", "target")} == {
        name: before[name] for name in ("recipe", "source", "options", "target")
    }
    service.client.post(f"/exports/{again['id']}/cancel")


def test_idempotency(service: ServiceProcess) -> None:
    body = service.body(labels={"click": "double"})
    headers = {"Idempotency-Key": "click-1"}

    def click(_: int) -> tuple[int, str]:
        answer = service.client.post("/exports", json=body, headers=headers)
        return answer.status_code, answer.json()["id"]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(click, range(16)))
    assert len({export for _, export in answers}) == 1
    assert sorted(status for status, _ in answers) == [200] * 15 + [202]
    other = service.client.post("/exports", json=service.body("silent"), headers=headers)
    refused(other, 409, "idempotency-conflict")
    bad = service.client.post("/exports", json=body, headers={"Idempotency-Key": "x" * 300})
    refused(bad, 422, "invalid-request", "idempotency-key")


def test_a_dry_run_stores_nothing(service: ServiceProcess) -> None:
    before = service.client.get("/exports?limit=1").json()["items"][0]["id"]
    answer = service.client.post("/exports?dryRun=1", json=service.body())
    assert answer.status_code == 200
    assert set(answer.json()) == {"preflight", "estimate", "reuse"}
    assert set(answer.json()["estimate"]) >= {"peaks", "bytes"}
    assert service.client.get("/exports?limit=1").json()["items"][0]["id"] == before


def test_lists_are_paged_and_filtered(service: ServiceProcess) -> None:
    ids = [service.submit(labels={"page": "yes"}) for _ in range(5)]
    seen: list[str] = []
    query = {"label": "page=yes", "limit": "2"}
    while True:
        page = service.client.get("/exports", params=query).json()
        seen += [item["id"] for item in page["items"]]
        if page["nextCursor"] is None:
            break
        query["cursor"] = page["nextCursor"]
    assert seen == sorted(ids, reverse=True)
    assert service.client.get("/exports", params={"recipe": "none"}).json() == {"items": [], "nextCursor": None}
    for query in ({"cursor": "!!"}, {"limit": "0"}, {"limit": "5000"}, {"state": "lost"}, {"recipe": "a\0b"}):
        refused(service.client.get("/exports", params=query), 422, "invalid-request", next(iter(query)))


def test_a_deleted_export_is_gone_with_its_folder(service: ServiceProcess) -> None:
    export = service.submit(seconds=30.0)
    refused(service.client.delete(f"/exports/{export}"), 409, "illegal-state")
    service.client.post(f"/exports/{export}/cancel")
    service.wait(export)
    assert service.client.delete(f"/exports/{export}").status_code == 204
    refused(service.client.get(f"/exports/{export}"), 404, "not-found")
    refused(service.client.get(f"/exports/{export}/events"), 404, "not-found")
    assert not (service.folder / "data" / "jobs" / export).exists()


def test_the_manifest_is_the_stored_bytes(service: ServiceProcess) -> None:
    export = service.submit("commit")
    done = service.wait(export)
    assert done["state"] == "succeeded"
    answer = service.client.get(f"/exports/{export}/manifest", headers={"Accept": "text/html"})
    assert answer.content == b"{}"
    assert answer.headers["etag"] == f'"{done["manifest"]["digest"]}"'
    same = service.client.get(f"/exports/{export}/manifest", headers={"If-None-Match": answer.headers["etag"]})
    assert (same.status_code, same.content) == (304, b"")
    running = service.submit(seconds=30.0)
    refused(service.client.get(f"/exports/{running}/manifest"), 409, "not-finished")
    refused(service.client.post(f"/exports/{running}/downloads", json={}), 409, "not-finished")
    service.client.post(f"/exports/{running}/cancel")


def test_a_failed_export_says_what_when_and_whose(service: ServiceProcess) -> None:
    done = service.wait(service.submit("unsupported-model"))
    assert done["state"] == "failed"
    assert done["error"]["code"] == "unsupported-model"
    assert done["attempts"][0]["error"] == done["error"]
    assert set(done["error"]) == {"code", "message", "hint", "retryable", "stage", "details"}


def test_recipes_and_health(service: ServiceProcess) -> None:
    items = {item["name"]: item for item in service.client.get("/recipes").json()["items"]}
    assert items["fake"]["available"] is True
    assert (items["off"]["available"], items["off"]["reason"]) == (False, "torch is missing")
    assert service.client.get("/recipes/off").status_code == 200
    refused(service.client.get("/recipes/none"), 404, "not-found")
    assert service.client.get("/healthz").json() == {"status": "ok"}
    assert service.client.get("/readyz").json()["checks"] == {"database": "ok", "store": "ok", "executor": "ok"}
    metrics = service.client.get("/metrics").text
    assert 'weightless_slots{host="' in metrics
    assert "weightless_queue_depth" in metrics
    refused(service.client.get("/nothing"), 404, "not-found")
    refused(service.client.put("/exports"), 405, "invalid-request")
    assert service.client.get("/openapi.json").status_code == 200


def bad_bodies(folder: str) -> Iterator[tuple[str, dict[str, Any], int, str, str | None]]:
    """(name, changes to a good body, status, code, field)."""
    yield "unknown recipe", {"recipe": "nope"}, 422, "invalid-request", "recipe"
    yield "unknown option", {"options": {"nope": 1}}, 422, "invalid-request", "options.nope"
    yield "wrong option", {"options": {"seconds": "x"}}, 422, "invalid-request", "options.seconds"
    yield "unknown field", {"nope": 1}, 422, "invalid-request", "nope"
    yield "missing target", {"target": None}, 422, "invalid-request", "target"
    yield "no executor", {"target": {"backend": "cuda"}}, 422, "toolchain-mismatch", "target"
    yield "no such back end", {"target": {"backend": "tpu"}}, 422, "invalid-request", "target.backend"
    yield "unavailable recipe", {"recipe": "off"}, 422, "toolchain-mismatch", "target"
    yield "negative budget", {"budgets": {"hostMemory": -1}}, 422, "invalid-request", "budgets.hostMemory"
    yield "negative budget text", {"budgets": {"gpuMemory": "-8GiB"}}, 422, "invalid-request", "budgets.gpuMemory"
    yield "fractional budget", {"budgets": {"wallTime": 1.5}}, 422, "invalid-request", "budgets.wallTime"
    yield "huge budget", {"budgets": {"scratchDisk": 2**62}}, 422, "invalid-request", "budgets.scratchDisk"
    yield "priority", {"priority": 1000}, 422, "invalid-request", "priority"
    yield "label", {"labels": {"a b": "c"}}, 422, "invalid-request", None
    yield "webhook off", {"webhook": {"url": "https://example.org"}}, 422, "invalid-request", "webhook"
    yield "webhook http", {"webhook": {"url": "http://example.org"}}, 422, "invalid-request", "webhook.url"
    for source in (
        "file:///etc",
        "file:///etc/passwd",
        f"file://{folder}/models/../../etc",
        f"file://{folder}/models/%2e%2e/x",
        f"file://{folder}/models/%252e%252e/x",
        f"file://{folder}/models/out",
        f"file://{folder}/modelsx/y",
        "file://host/etc",
        "file:/etc/passwd",
        "/etc/passwd",
        "http://169.254.169.254/latest",
        "https://example.org/m",
        "s3://bucket/key",
        "s3://../etc",
        "hf://a/../../b",
        "ftp://x/y",
        "gopher:x",
    ):
        yield source, {"source": source}, 403, "source-access-denied", "source"


def test_bad_requests_are_refused_with_code_and_field(service: ServiceProcess) -> None:
    link = service.folder / "models" / "out"
    if not link.exists():
        link.symlink_to("/etc")
    before = service.client.get("/exports?limit=1").json()["items"]
    for name, changes, status, code, field in bad_bodies(str(service.folder)):
        body = {key: value for key, value in {**service.body(), **changes}.items() if value is not None}
        try:
            refused(service.client.post("/exports", json=body), status, code, field)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    assert service.client.get("/exports?limit=1").json()["items"] == before


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b"{", 422, "invalid-request"),
        (b"\xff\xfe", 422, "invalid-request"),
        (b'{"priority": NaN}', 422, "invalid-request"),
        (b'{"options": {"seconds": Infinity}}', 422, "invalid-request"),
        (b'{"options": {"seconds": 1e999}}', 422, "invalid-request"),
        (b'{"options": {"a": "\\u0000"}}', 422, "invalid-request"),
        (b'{"options": {"a": "\\ud800"}}', 422, "invalid-request"),
        (b'{"recipe": "fake", "recipe": "fake"}', 422, "invalid-request"),
        (b'{"options": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", 422, "invalid-request"),
        (b'{"priority": ' + b"9" * 5000 + b"}", 422, "invalid-request"),
        (b"[]", 422, "invalid-request"),
        (b"null", 422, "invalid-request"),
        (b"", 422, "invalid-request"),
        (b'{"a": "' + b"x" * 2**21 + b'"}', 413, "body-too-large"),
    ],
    ids=lambda value: repr(value)[:30] if isinstance(value, bytes) else None,
)
def test_bad_bodies(service: ServiceProcess, content: bytes, status: int, code: str) -> None:
    refused(service.client.post("/exports", content=content, headers=JSON), status, code)
    assert service.client.get("/healthz").status_code == 200


def test_a_chunked_body_is_limited_too(service: ServiceProcess) -> None:
    def chunks() -> Iterator[bytes]:
        yield b'{"a": "'
        for _ in range(32):
            yield b"x" * 2**16
        yield b'"}'

    refused(service.client.post("/exports", content=chunks(), headers=JSON), 413, "body-too-large")


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/json; charset=utf-16"]
)
def test_other_media_types_are_refused(service: ServiceProcess, kind: str) -> None:
    content = json.dumps(service.body()).encode()
    answer = service.client.post("/exports", content=content, headers={"Content-Type": kind} if kind else {})
    refused(answer, 415, "unsupported-media-type")


@pytest.mark.parametrize("path", ["exp_1", "exp_" + "0" * 26, "..%2f..", "%00", "exp_01M8PNZ9MRNR8A9RSC8VNJ051x"])
@pytest.mark.parametrize("tail", ["", "/manifest", "/events", "/logs"])
def test_unknown_exports_are_not_found(service: ServiceProcess, path: str, tail: str) -> None:
    refused(service.client.get(f"/exports/{path}{tail}"), 404, "not-found")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"verify_": False}, "verify_"),
        ({"reuse_weights": False}, "reuse_weights"),
        ({"budgets": {"gpu_memory": 5}}, "budgets.gpu_memory"),
        ({"verify": "no"}, "verify"),
        ({"priority": True}, "priority"),
        ({"priority": "5"}, "priority"),
    ],
)
def test_only_the_documented_names_and_types_are_read(
    service: ServiceProcess, fields: dict[str, Any], field: str
) -> None:
    refused(service.client.post("/exports", json=service.body(**fields)), 422, "invalid-request", field)


def test_a_misspelt_dry_run_queues_nothing(service: ServiceProcess) -> None:
    refused(service.client.post("/exports?dryrun=1", json=service.body()), 422, "invalid-request", "dryrun")


def test_filters_without_a_value_filter_nothing(service: ServiceProcess) -> None:
    service.submit()
    found = service.client.get("/exports?state=&recipe=&repository=&label=&cursor=").json()
    assert found["items"]


def test_head_is_get_without_the_body(service: ServiceProcess) -> None:
    export_id = service.submit(seconds=5)
    for path in ("/healthz", "/exports", f"/exports/{export_id}", f"/exports/{export_id}/events", "/exports/no"):
        head = service.client.head(path)
        with service.client.stream("GET", path) as got:
            assert (head.status_code, head.headers["content-type"]) == (got.status_code, got.headers["content-type"])
        assert head.content == b""
    service.client.post(f"/exports/{export_id}/cancel")


def test_405_names_every_method_and_a_slash_at_the_end_is_another_address(service: ServiceProcess) -> None:
    answer = service.client.put("/exports", json={})
    refused(answer, 405, "invalid-request")
    assert answer.headers["allow"] == "GET, HEAD, POST"
    refused(service.client.get("/exports/"), 404, "not-found")


@pytest.mark.parametrize("form", ["{}", "W/{}", '"other", {}', "*"])
def test_a_known_manifest_is_not_sent_again(service: ServiceProcess, form: str) -> None:
    path = f"/exports/{service.wait(service.submit('commit'))['id']}/manifest"
    etag = service.client.get(path).headers["etag"]
    again = service.client.get(path, headers={"If-None-Match": form.replace("{}", etag)})
    assert (again.status_code, again.headers["etag"]) == (304, etag)


def test_the_docs_page_names_every_call_and_loads_nothing_foreign(service: ServiceProcess) -> None:
    page = service.client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    for path, methods in service.client.get("/openapi.json").json()["paths"].items():
        for method in methods:
            assert f"{method.upper()} {path}" in page.text
    assert "source-access-denied" in page.text
    assert all(link.startswith("/") for link in re.findall(r'(?:href|src)="([^"]*)"', page.text))


def test_other_sites_cannot_use_a_browser_on_this_machine(service: ServiceProcess) -> None:
    export = service.submit(seconds=30.0)
    refused(service.client.get("/exports", headers={"Host": "evil.example"}), 421, "invalid-request")
    cross = service.client.post(f"/exports/{export}/cancel", headers={"Origin": "https://evil.example"})
    refused(cross, 421, "invalid-request")
    assert service.get(export)["state"] not in ("cancelled",)
    assert service.client.get("/healthz", headers={"Host": "localhost:1"}).status_code == 200
    assert service.client.post(f"/exports/{export}/cancel", headers={"Origin": service.url}).status_code == 202


def test_a_page_is_given_to_browsers_alone(service: ServiceProcess) -> None:
    export = service.submit()
    answer = service.client.get(f"/exports/{export}", headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["vary"] == "Accept"
    for accept in ("*/*", "application/json", "application/json, text/html;q=0.5", "text/html;q=x", ""):
        answer = service.client.get(f"/exports/{export}", headers={"Accept": accept})
        assert answer.headers["content-type"] == "application/json"


def test_a_stop_with_open_streams_is_quick_and_exports_go_on(tmp_path: Path) -> None:
    service = ServiceProcess(tmp_path)
    try:
        service.start()
        export = service.submit(seconds=5.0)
        service.wait(export, "running")
        limits = httpx2.Limits(max_connections=200)
        with httpx2.Client(base_url=service.url, limits=limits, timeout=30) as client:
            streams = [client.stream("GET", f"/exports/{export}/{kind}") for kind in ["events", "logs?follow=1"] * 50]
            opened = [stream.__enter__() for stream in streams]
            assert {answer.status_code for answer in opened} == {200}
            begun = time.monotonic()
            assert service.signal(signal.SIGTERM) == 0
            assert time.monotonic() - begun < 5
            for stream in streams:
                stream.__exit__(None, None, None)
        assert service.exporters()
        service.start()
        done = service.wait(export)
        assert (done["state"], done["attempt"]) == ("succeeded", 1)
    finally:
        service.close()
