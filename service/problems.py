"""The one table from errors to HTTP, and the answers made from it (RFC 9457)."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError, ResponseValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match

from exporter.contract import errors

log = structlog.get_logger(__name__)

STATUS: Mapping[type[errors.WeightlessError], int] = {
    errors.InvalidRequest: 422,
    errors.SourceNotFound: 404,
    errors.SourceAccessDenied: 403,
    errors.SourceUnsafe: 422,
    errors.UnsupportedModel: 422,
    errors.ToolchainMismatch: 422,
    errors.VerificationFailed: 422,
    errors.BudgetExceeded: 422,
    errors.HostOutOfMemory: 503,
    errors.GpuOutOfMemory: 503,
    errors.DiskFull: 507,
    errors.StoreUnavailable: 503,
    errors.StoreRejected: 502,
    errors.DeadlineExceeded: 504,
    errors.ExecutorLost: 503,
    errors.Cancelled: 409,
    errors.NotFound: 404,
    errors.NotFinished: 409,
    errors.IdempotencyConflict: 409,
    errors.IllegalState: 409,
    errors.BodyTooLarge: 413,
    errors.UnsupportedMediaType: 415,
    errors.QueueFull: 429,
    errors.RateLimited: 429,
    errors.Unauthenticated: 401,
    errors.Forbidden: 403,
    errors.InternalError: 500,
}
"""HTTP status of each error that can reach a request. A test holds it against the whole tree."""

RETRY_AFTER = 5
"""Seconds that a caller is asked to wait where nothing better is known."""
PROBLEM = "application/problem+json"


def problem(error: errors.WeightlessError, *, status: int | None = None, extra: Any = None) -> JSONResponse:
    """The answer for an error."""
    status = STATUS.get(type(error), 500) if status is None else status
    details = dict(error.details)
    headers: dict[str, str] = {"Cache-Control": "no-store"}
    body: dict[str, Any] = {
        "type": "about:blank",
        "title": error.code.replace("-", " ").capitalize(),
        "status": status,
        "detail": error.message,
        "code": error.code,
        "hint": error.hint,
        "retryable": error.retryable,
    }
    for name in ("field", "reason"):
        if details.get(name) is not None:
            body[name] = details.pop(name)
    if isinstance(error, errors.Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer" if body.get("reason") == "missing" else 'Bearer error="invalid_token"'
    if status in (429, 503):
        headers["Retry-After"] = str(details.pop("retryAfter", RETRY_AFTER))
    if details:
        body["details"] = details
    if extra:
        body.update(extra)
    return JSONResponse(body, status, headers, media_type=PROBLEM)


def install(app: FastAPI) -> None:
    """Answer every error of the app with a problem document."""
    app.add_exception_handler(errors.WeightlessError, _weightless)
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ResponseValidationError, _unexpected)
    app.add_exception_handler(Exception, _unexpected)


async def _weightless(request: Request, error: Exception) -> Response:
    assert isinstance(error, errors.WeightlessError)
    if isinstance(error, errors.InternalError) and "incident" not in error.details:
        return await _unexpected(request, error)
    status = error.details.pop("httpStatus", None)
    return problem(error, status=status if isinstance(status, int) else None)


async def _validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = []
    for item in error.errors():
        where = [str(part) for part in item["loc"]]
        if where and where[0] in ("body", "query", "path", "header"):
            where = where[1:]
        found.append({"field": ".".join(where), "message": str(item["msg"]).removeprefix("Value error, ")})
    first = found[0] if found else {"field": "", "message": "the request is not valid"}
    message = f"{first['field']}: {first['message']}" if first["field"] else first["message"]
    return problem(errors.InvalidRequest(message, field=first["field"]), extra={"errors": found[:50]})


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return problem(errors.NotFound("there is nothing at this address", hint="GET /openapi.json lists the calls."))
    if error.status_code == 405:
        wrong = errors.InvalidRequest(
            f"{request.method} is not possible here", hint="GET /openapi.json lists the calls."
        )
        answer = problem(wrong, status=405)
        answer.headers["Allow"] = ", ".join(sorted(_methods(request)))
        return answer
    return problem(errors.InvalidRequest(str(error.detail)), status=error.status_code)


def _methods(request: Request) -> set[str]:
    """The methods that some route takes at the request's path; HEAD wherever GET is (`service.head_requests`).

    The router itself names the methods of the first route alone.
    """
    found = {
        method
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in request.app.routes)
    }
    return found | ({"HEAD"} if "GET" in found else set())


async def _unexpected(request: Request, error: Exception) -> Response:
    incident = uuid.uuid4().hex[:12]
    log.error("unexpected error", incident=incident, method=request.method, path=request.url.path, exc_info=error)
    shown = errors.InternalError("the service met an unexpected error", incident=incident)
    return problem(shown)


def finite(text: str) -> float:
    """A JSON number, or ValueError for one that is too large to be one."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is out of range")
    return value
