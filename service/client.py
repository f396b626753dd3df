"""The HTTP client under the command line: the exports API, its event stream, and links to files.

A fresh token is asked for on every call, since a CI job's token lives for minutes and an export for hours. Calls that
may be repeated are (reads, and submissions by their idempotency key); redirects are never followed.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlsplit

import httpx2

from exporter.contract.errors import (
    Forbidden,
    InternalError,
    InvalidRequest,
    NotFound,
    RateLimited,
    Unauthenticated,
    WeightlessError,
    error_class,
)
from exporter.contract.manifest import MAX_MANIFEST

TERMINAL = frozenset({"succeeded", "failed", "cancelled"})
"""States that nothing follows; the event stream ends after one."""
SILENCE = 45.0
"""Seconds without a byte after which an event stream counts as lost: the service sends a ping every 15."""
PATIENCE = 300.0
"""Seconds for which an event stream's service may be away before the client gives up."""
RETRIES = 5
"""Further tries of a call that may be repeated, with waits of 0.2 s, doubling."""
MAX_ANSWER = 64 * 2**20
"""Bytes of a JSON answer that are read."""
_PASSING = frozenset({429, 502, 503, 504})

TokenSource = Callable[[], str | None]


class ServiceUnreachable(WeightlessError):
    """The service does not answer at its URL, or something else does."""

    code = "service-unreachable"
    actor = "operator"
    retryable = True
    default_hint = "Check --url or WEIGHTLESS_URL, and that `weightless serve` runs there."


class WaitTimeout(WeightlessError):
    """The wait was given up; the export goes on."""

    code = "wait-timeout"
    actor = "user"
    default_hint = "The export goes on; `weightless status` and `weightless logs --follow` show it."


class Client:
    """Calls one service. Not for use from several threads. A context manager.

    Every method raises `ServiceUnreachable` where nothing answers, and the error of the service's own answer else.
    """

    def __init__(
        self,
        url: str,
        token: TokenSource = lambda: None,
        *,
        transport: httpx2.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
        patience: float = PATIENCE,
    ) -> None:
        self.url = checked_url(url)
        self._token = token
        self._sleep = sleep
        self._patience = patience
        self._transport = transport
        self._http = httpx2.Client(
            base_url=self.url,
            timeout=httpx2.Timeout(30.0, connect=10.0),
            transport=transport,
            # A proxy of the environment is not asked for the machine's own addresses.
            trust_env=urlsplit(self.url).hostname not in ("localhost", "127.0.0.1", "::1"),
            headers={"User-Agent": "weightless"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def again(self) -> Client:
        """Another client of the same service, with a connection of its own."""
        return Client(self.url, self._token, transport=self._transport, sleep=self._sleep, patience=self._patience)

    def submit(self, body: Mapping[str, Any], *, idempotency_key: str | None = None) -> dict[str, Any]:
        """Queue an export. Without a key one is made up, so that a lost answer never queues twice."""
        key = idempotency_key or secrets.token_hex(16)
        return self._object("POST", "/exports", json=body, headers={"Idempotency-Key": key})

    def dry_run(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """What the export would meet: `{preflight, estimate, reuse}`."""
        return self._object("POST", "/exports", json=body, params={"dryRun": "1"})

    def export(self, export_id: str) -> dict[str, Any]:
        """One export."""
        return self._object("GET", _path(export_id))

    def exports(self, **filters: str | int | list[str] | None) -> dict[str, Any]:
        """A page of exports: `{items, nextCursor}`."""
        return self._object("GET", "/exports", params={k: v for k, v in filters.items() if v is not None})

    def cancel(self, export_id: str) -> dict[str, Any]:
        """Ask for an end; an export that is finished stays as it is."""
        return self._object("POST", _path(export_id, "cancel"))

    def retry(self, export_id: str) -> dict[str, Any]:
        """A new export with the same body."""
        return self._object("POST", _path(export_id, "retry"), repeat=False)

    def delete(self, export_id: str) -> None:
        """Remove a finished export and what it stored."""
        self._call("DELETE", _path(export_id))

    def manifest(self, export_id: str) -> bytes:
        """The manifest's bytes as stored."""
        return self._call("GET", _path(export_id, "manifest"), limit=MAX_MANIFEST)

    def downloads(self, export_id: str, expires_in: int = 3600) -> dict[str, str]:
        """Links by file name that need no login. `StoreRejected` where the store cannot make any."""
        answer = self._object("POST", _path(export_id, "downloads"), json={"expiresIn": expires_in})
        urls = answer.get("urls")
        if not isinstance(urls, dict):
            raise ServiceUnreachable(f"{self.url} did not answer as the service would: no urls in downloads")
        return {str(name): str(url) for name, url in urls.items()}

    def recipes(self) -> list[dict[str, Any]]:
        """What can be exported."""
        items = self._object("GET", "/recipes").get("items", [])
        return list(items)

    def logs(self, export_id: str, *, follow: bool = False) -> Iterator[str]:
        """The log's lines; with `follow`, until the export has ended."""
        path = _path(export_id, "logs")
        timeout = httpx2.Timeout(30.0, read=None if follow else 30.0)
        with self._opened("GET", path, params={"follow": "1"} if follow else None, timeout=timeout) as response:
            try:
                yield from response.iter_lines()
            except httpx2.TransportError as error:
                raise self._unreachable(error) from error

    def events(self, export_id: str, *, after: int = 0, deadline: float | None = None) -> Iterator[dict[str, Any]]:
        """Every event after number `after`, in order and once, until one says that the export has ended.

        A lost stream is taken up where it broke. `WaitTimeout` when `time.monotonic()` passes `deadline`.
        """
        last, heard, wait = after, time.monotonic(), 0.2
        while True:
            before = last
            try:
                for number, event in self._event_stream(export_id, last, deadline):
                    heard = time.monotonic()
                    if event is None or number <= last:
                        continue
                    last, wait = number, 0.2
                    yield event
                    if event.get("type") == "state" and event.get("to") in TERMINAL:
                        return
                self._check_deadline(export_id, deadline)
                if last == before and self.export(export_id).get("state") in TERMINAL:
                    return
            except WeightlessError as error:
                if not error.retryable or time.monotonic() - heard > self._patience:
                    raise
            self._check_deadline(export_id, deadline, wait)
            self._sleep(wait)
            wait = min(wait * 2, 10.0)

    def _event_stream(
        self, export_id: str, last: int, deadline: float | None
    ) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """The events of one connection with their numbers, and None for each line that ends none: a sign of life."""
        silence = SILENCE if deadline is None else min(SILENCE, max(deadline - time.monotonic(), 0.05))
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(last)}
        timeout = httpx2.Timeout(30.0, read=silence)
        try:
            with self._opened("GET", _path(export_id, "events"), headers=headers, timeout=timeout) as response:
                number, data = last, []
                # Line by line and not by httpx2's EventSource, which keeps pings to itself: a deadline must be seen
                # while an export waits in the queue and nothing but pings arrives.
                for line in response.iter_lines():
                    field, _, value = line.partition(":")
                    value = value.removeprefix(" ")
                    if field == "id" and value.isascii() and value.isdigit():
                        number = int(value)
                    elif field == "data":
                        data.append(value)
                    elif not line and data:
                        yield number, self._event("\n".join(data))
                        data = []
                        continue
                    self._check_deadline(export_id, deadline)
                    yield number, None
        except httpx2.ReadTimeout:
            return
        except httpx2.TransportError as error:
            raise self._unreachable(error) from error

    def _event(self, text: str) -> dict[str, Any]:
        try:
            event = json.loads(text)
        except ValueError as error:
            raise ServiceUnreachable(f"{self.url} sent an event that is not JSON") from error
        return dict(event) if isinstance(event, dict) else {}

    def _check_deadline(self, export_id: str, deadline: float | None, ahead: float = 0.0) -> None:
        if deadline is not None and time.monotonic() + ahead >= deadline:
            raise WaitTimeout(f"{export_id} has not ended within the time given")

    def _object(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        content = self._call(method, path, **options)
        try:
            answer = json.loads(content)
        except ValueError as error:
            raise ServiceUnreachable(f"{self.url} answered with something that is not JSON") from error
        if not isinstance(answer, dict):
            raise ServiceUnreachable(f"{self.url} did not answer as the service would")
        return answer

    def _call(self, method: str, path: str, *, repeat: bool = True, limit: int = MAX_ANSWER, **options: Any) -> bytes:
        wait = 0.2
        for tries in range(RETRIES + 1):
            try:
                with self._opened(method, path, **options) as response:
                    return self._read(response, limit)
            except ServiceUnreachable:
                if tries == RETRIES or not repeat:
                    raise
            except WeightlessError as error:
                status = error.details.get("status")
                if tries == RETRIES or not repeat or status not in _PASSING:
                    raise
                after = error.details.get("retryAfter")
                wait = max(wait, min(float(after), 30.0)) if isinstance(after, int) else wait
            except httpx2.TransportError as error:
                if tries == RETRIES or not repeat:
                    raise self._unreachable(error) from error
            self._sleep(wait)
            wait *= 2
        raise InternalError("a retry loop ended without an answer")

    def _read(self, response: httpx2.Response, limit: int) -> bytes:
        content = bytearray()
        for chunk in response.iter_bytes():
            content += chunk
            if len(content) > limit:
                raise InvalidRequest(f"{self.url} answered with more than {limit} bytes")
        return bytes(content)

    def _opened(self, method: str, path: str, **options: Any) -> _Opened:
        headers = {"Accept": "application/json", **options.pop("headers", {})}
        token = self._token()
        if token is not None:
            headers["Authorization"] = f"Bearer {checked_token(token)}"
        return _Opened(self, self._http.stream(method, path, headers=headers, **options))

    def _unreachable(self, error: Exception) -> ServiceUnreachable:
        # Errors about what we sent ourselves quote it, and a header may be a login.
        reason = (
            type(error).__name__ if isinstance(error, httpx2.LocalProtocolError) else str(error) or type(error).__name__
        )
        return ServiceUnreachable(f"the service at {self.url} cannot be reached: {reason}")


class _Opened:
    """A response that is being read; a refusal is raised as its error before the caller sees a byte."""

    def __init__(self, client: Client, stream: Any) -> None:
        self._client = client
        self._stream = stream

    def __enter__(self) -> httpx2.Response:
        try:
            response: httpx2.Response = self._stream.__enter__()
        except httpx2.TransportError as error:
            raise self._client._unreachable(error) from error
        except httpx2.InvalidURL as error:
            raise InvalidRequest(f"{self._client.url} is not a usable URL: {error}") from error
        if response.is_success:
            return response
        try:
            content = self._client._read(response, MAX_ANSWER)
        except httpx2.TransportError:
            content = b""
        finally:
            self._stream.__exit__(None, None, None)
        raise problem(self._client.url, response.status_code, content, response.headers.get("Retry-After"))

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.__exit__(kind, value, trace)


def _path(export_id: str, *more: str) -> str:
    return "/".join(["/exports", quote(export_id, safe=""), *more])


def checked_token(token: str) -> str:
    """The token without blanks around it; `Unauthenticated` where it cannot be one, before a library quotes it."""
    plain = token.strip()
    if not plain or not plain.isascii() or not plain.isprintable() or " " in plain:
        raise Unauthenticated(
            "the token holds characters that no token has", hint="Check WEIGHTLESS_TOKEN.", reason="malformed"
        )
    return plain


def checked_url(url: str) -> str:
    """The service's URL without a slash at its end; `InvalidRequest` for anything but http or https."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise InvalidRequest(f"{url[:200]!r} is not the URL of a service", hint="It looks like http://127.0.0.1:8080.")
    if parts.username or parts.password:
        raise InvalidRequest("the service's URL holds a password", hint="Give the token in WEIGHTLESS_TOKEN.")
    return url.rstrip("/")


def problem(url: str, status: int, content: bytes, retry_after: str | None = None) -> WeightlessError:
    """The error of an answer that is not a success: its problem+json where it is one, else by its status."""
    try:
        body = json.loads(content)
    except ValueError:
        body = None
    if not isinstance(body, dict) or not isinstance(body.get("code"), str):
        return _bare(url, status)
    message = str(body.get("detail") or body.get("title") or body["code"])
    error = error_class(body["code"])(message, hint=str(body.get("hint") or ""))
    details = body.get("details")
    error.details = dict(details) if isinstance(details, dict) else {}
    for name in ("reason", "field"):
        if isinstance(body.get(name), str):
            error.details[name] = body[name]
    if isinstance(body.get("errors"), list):
        error.details["errors"] = [f"{item.get('field')}: {item.get('message')}" for item in body["errors"][:20]]
    error.details["status"] = status
    if retry_after is not None and retry_after.isdigit():
        error.details["retryAfter"] = int(retry_after)
    return error


def _bare(url: str, status: int) -> WeightlessError:
    message = f"{url} answered {status}"
    kinds: dict[int, type[WeightlessError]] = {401: Unauthenticated, 403: Forbidden, 404: NotFound, 429: RateLimited}
    return kinds.get(status, ServiceUnreachable)(message, status=status)
