"""The client: every answer of a service becomes its error, and an event stream is whole whatever breaks."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from exporter.contract import errors
from service.client import Client, ServiceUnreachable, WaitTimeout, problem
from service.commands.session import same_origin, token_source

from .conftest import EXPORT, Service


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    with Client(service.url, sleep=lambda seconds: None, patience=0.2) as opened:
        yield opened


def sse(*events: tuple[int, dict[str, Any]]) -> bytes:
    return b"".join(
        f"event: {event['type']}\r\ndata: {json.dumps(event)}\r\nid: {number}\r\n\r\n".encode()
        for number, event in events
    )


def state(to: str) -> dict[str, Any]:
    return {"type": "state", "to": to}


STREAM = {"Content-Type": "text/event-stream"}


def test_events_come_in_order_and_once_over_broken_streams(service: Service, client: Client) -> None:
    everything = [(n, {"type": "progress", "n": n}) for n in range(1, 9)] + [(9, state("succeeded"))]

    def script(method: str, path: str, headers: dict[str, str], body: bytes) -> Any:
        last = int(headers["last-event-id"])
        round_ = len(service.seen)
        if round_ == 2:
            return None
        if round_ == 3:
            return 503, {}, b""
        # An overlap, as a replica that is behind would send, then a break in the middle of an event.
        part = [item for item in everything if item[0] > max(0, last - 1)][:3]
        return 200, STREAM, [b": ping\n\n", sse(*part), b'data: {"type": "pro', None]

    service.script = script
    found = list(client.events(EXPORT))
    assert [event.get("n", 9) for event in found] == list(range(1, 10))
    resumed = [int(headers["last-event-id"]) for _, _, headers, _ in service.seen]
    assert resumed == sorted(resumed)


def test_a_stream_that_ends_early_is_taken_up(service: Service, client: Client) -> None:
    parts = iter([sse((1, state("queued"))), sse((2, state("running"))), sse((3, state("failed")))])
    service.script = lambda *_: (200, STREAM, [next(parts)])
    assert [event["to"] for event in client.events(EXPORT)] == ["queued", "running", "failed"]


def test_an_export_that_ended_without_an_event_ends_the_wait(service: Service, client: Client) -> None:
    service.script = lambda method, path, *_: (
        (200, STREAM, [b": ping\n\n"]) if path.endswith("/events") else (200, {}, b'{"state": "succeeded"}')
    )
    assert list(client.events(EXPORT)) == []


def test_a_long_queue_does_not_use_up_the_patience(service: Service, client: Client) -> None:
    def queued() -> Iterator[bytes]:
        yield sse((1, state("queued")))
        for _ in range(30):
            time.sleep(0.01)
            yield b": ping\n\n"

    answers = iter([(200, STREAM, queued()), (503, {}, b""), (200, STREAM, [sse((2, state("succeeded")))])])
    service.script = lambda *_: next(answers)
    assert [event["to"] for event in client.events(EXPORT)] == ["queued", "succeeded"]


def test_the_deadline_is_seen_while_only_pings_arrive(service: Service, client: Client) -> None:
    def pings() -> Iterator[bytes]:
        for _ in range(500):
            time.sleep(0.01)
            yield b": ping\n\n"

    service.script = lambda *_: (200, STREAM, pings())
    with pytest.raises(WaitTimeout):
        list(client.events(EXPORT, deadline=time.monotonic() + 0.1))


def test_the_deadline_is_seen_while_nothing_arrives(service: Service, client: Client) -> None:
    def silence() -> Iterator[bytes]:
        yield b": hello\n\n"
        time.sleep(1)

    service.script = lambda *_: (200, STREAM, silence())
    with pytest.raises(WaitTimeout):
        list(client.events(EXPORT, deadline=time.monotonic() + 0.1))


def test_a_service_that_stays_away_ends_the_wait(service: Service, client: Client) -> None:
    service.script = lambda *_: (503, {}, b"")
    with pytest.raises(ServiceUnreachable):
        list(client.events(EXPORT))


def test_an_unknown_export_ends_the_wait_at_once(service: Service, client: Client) -> None:
    service.script = lambda *_: (404, {}, json.dumps({"code": "not-found", "detail": "no"}).encode())
    with pytest.raises(errors.NotFound):
        list(client.events(EXPORT))
    assert len(service.seen) == 1


def test_a_lost_answer_to_a_submission_does_not_queue_twice(service: Service, client: Client) -> None:
    def script(*_: object) -> Any:
        return None if len(service.seen) < 3 else (202, {}, b'{"id": "x"}')

    service.script = script
    assert client.submit({"recipe": "r"}) == {"id": "x"}
    keys = {headers["idempotency-key"] for _, _, headers, _ in service.seen}
    assert len(service.seen) == 3
    assert len(keys) == 1


def test_a_retry_is_not_repeated(service: Service, client: Client) -> None:
    service.script = lambda *_: None
    with pytest.raises(ServiceUnreachable):
        client.retry(EXPORT)
    assert len(service.seen) == 1


def test_each_call_has_a_fresh_token(service: Service) -> None:
    numbers = itertools.count()
    service.script = lambda *_: (200, {}, b"{}")
    with Client(service.url, lambda: f"token-{next(numbers)}") as client:
        client.export(EXPORT)
        client.exports()
    assert [headers["authorization"] for _, _, headers, _ in service.seen] == ["Bearer token-0", "Bearer token-1"]


def test_redirects_are_not_followed(service: Service, client: Client) -> None:
    service.script = lambda *_: (302, {"Location": "http://169.254.169.254/"}, b"")
    with pytest.raises(ServiceUnreachable, match="302"):
        client.export(EXPORT)


@pytest.mark.parametrize("content", [b"<html>", b"[1]", b"", b"\xff"])
def test_something_else_at_the_url_is_not_believed(service: Service, client: Client, content: bytes) -> None:
    service.script = lambda *_: (200, {}, content)
    with pytest.raises(ServiceUnreachable):
        client.export(EXPORT)


def test_an_id_cannot_change_the_path(service: Service, client: Client) -> None:
    service.script = lambda *_: (200, {}, b"{}")
    client.export("../../admin?x=1#y")
    assert service.seen[0][1] == "/exports/..%2F..%2Fadmin%3Fx%3D1%23y"


def test_nothing_listens() -> None:
    with Client("http://127.0.0.1:9", sleep=lambda seconds: None) as client, pytest.raises(ServiceUnreachable):
        client.export(EXPORT)


@pytest.mark.parametrize("url", ["ftp://x", "127.0.0.1:8080", "http://", "http://u:p@host", "http://h/?q=1", ""])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        Client(url)
    assert "u:p" not in caught.value.message


def test_a_problem_is_its_error() -> None:
    body = {
        "code": "forbidden", "detail": "no", "hint": "ask", "reason": "scope", "status": 403,
        "errors": [{"field": "a", "message": "b"}],
    }  # fmt: skip
    error = problem("http://s", 403, json.dumps(body).encode(), "7")
    assert isinstance(error, errors.Forbidden)
    assert (error.message, error.hint, error.details["reason"]) == ("no", "ask", "scope")
    assert error.details["errors"] == ["a: b"]
    assert error.details["retryAfter"] == 7


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, errors.Unauthenticated),
        (403, errors.Forbidden),
        (404, errors.NotFound),
        (429, errors.RateLimited),
        (500, ServiceUnreachable),
        (502, ServiceUnreachable),
    ],
)
def test_an_answer_without_a_problem_has_its_status(status: int, kind: type[Exception]) -> None:
    assert isinstance(problem("http://s", status, b"<html>"), kind)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("http://h", "http://h:80/x", True),
        ("https://h:443", "https://h", True),
        ("http://h", "https://h", False),
        ("http://h", "http://h.evil", False),
        ("http://h:1", "http://h:2", False),
    ],
)
def test_origins(one: str, other: str, same: bool) -> None:
    assert same_origin(one, other) is same


def test_tokens_of_a_github_job(service: Service) -> None:
    service.script = lambda *_: (200, {}, b'{"value": "ey.x.y"}')
    job = {"ACTIONS_ID_TOKEN_REQUEST_URL": f"{service.url}/token?v=2", "ACTIONS_ID_TOKEN_REQUEST_TOKEN": "secret"}
    assert token_source("https://export.example.org", job)() == "ey.x.y"
    _, path, headers, _ = service.seen[0]
    assert path == "/token?v=2&audience=https%3A%2F%2Fexport.example.org"
    assert headers["authorization"] == "Bearer secret"
    assert token_source("https://x", {**job, "WEIGHTLESS_TOKEN": "wl_1"})() == "wl_1"
    assert token_source("https://x", {})() is None


@pytest.mark.parametrize(
    "answer", [(403, {}, b"{}"), (200, {}, b"<html>"), (200, {}, b'{"value": 3}'), (200, {}, b"[]")]
)
def test_no_token_for_a_github_job(service: Service, answer: Any) -> None:
    service.script = lambda *_: answer
    job = {"ACTIONS_ID_TOKEN_REQUEST_URL": f"{service.url}/t", "ACTIONS_ID_TOKEN_REQUEST_TOKEN": "secret"}
    with pytest.raises(errors.Unauthenticated) as caught:
        token_source("https://x", job)()
    assert "secret" not in str(caught.value.as_dict())
    assert "id-token: write" in caught.value.hint


def script_of(answers: dict[str, Any]) -> Callable[..., Any]:
    return lambda method, path, headers, body: answers[f"{method} {path}"]
