"""Request bodies, before anything reads them: at most 1 MiB, JSON by media type, and JSON in fact.

The limit holds for bodies without Content-Length too. JSON is read strictly (no NaN or Infinity, no lone surrogates,
no U+0000, which PostgreSQL cannot store, no repeated keys): every later reader sees the same values.
"""

from __future__ import annotations

import json
from email.message import Message as MailMessage
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from exporter.contract.errors import BodyTooLarge, InvalidRequest, UnsupportedMediaType, WeightlessError
from service.problems import finite, problem

MAX_BODY = 2**20
"""Bytes of a request body."""
MAX_DEPTH = 64
"""Levels of nesting in a request body."""


class StrictJsonBodies:
    """ASGI middleware that answers bad bodies itself and replays good ones; it holds at most `MAX_BODY` a request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        try:
            body = await _read(headers, receive)
            if body is None:
                return
            if body:
                _check_media_type(headers)
                check_json(body)
        except WeightlessError as error:
            await problem(error)(scope, receive, send)
            return
        replayed = False

        async def replay() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)


async def _read(headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
    """The whole body, None where the client has gone; `BodyTooLarge` as soon as that is certain."""
    announced = headers.get(b"content-length", b"0")
    if announced.isdigit() and int(announced) > MAX_BODY:
        raise BodyTooLarge(f"the body has {int(announced)} bytes, more than {MAX_BODY}")
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > MAX_BODY:
            raise BodyTooLarge(f"the body has more than {MAX_BODY} bytes")
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _check_media_type(headers: dict[bytes, bytes]) -> None:
    mail = MailMessage()
    mail["content-type"] = headers.get(b"content-type", b"").decode("latin-1")
    given = mail.get_content_type() if headers.get(b"content-type") else ""
    charset = str(mail.get_param("charset") or "utf-8").lower()
    if given != "application/json" or charset not in ("utf-8", "utf8"):
        raise UnsupportedMediaType("the body must be application/json in UTF-8")


def check_json(body: bytes) -> Any:
    """The value of a JSON text; `InvalidRequest` where it is none or holds what JSON or a database cannot."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse, parse_float=finite, object_pairs_hook=_unique)
        _check_text(value, 0)
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    except ValueError as error:
        raise InvalidRequest(f"the body is not strict JSON: {str(error)[:200]}", field="") from error
    return value


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key is repeated in an object")
    return value


def _check_text(value: Any, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError("the body is nested too deeply")
    if isinstance(value, str):
        if "\0" in value:
            raise ValueError("a string holds U+0000")
        value.encode("utf-8")
    elif isinstance(value, list):
        for item in value:
            _check_text(item, depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_text(key, depth + 1)
            _check_text(item, depth + 1)
    elif isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**63:
        raise ValueError("an integer is out of range")
