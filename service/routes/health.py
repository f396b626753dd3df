"""Liveness, readiness and metrics."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from exporter.contract.errors import WeightlessError
from service.routes.access import Allowed

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """200 while the process can answer at all."""
    return {"status": "ok"}


@router.get("/readyz", responses={503: {"description": "Something that exports need is out of reach."}})
def readyz(request: Request) -> Response:
    """200 if the database, the store and an executor are reachable; else 503 that names what is not."""
    state = request.app.state
    checks = {
        "database": _check(state.jobs.ping),
        "store": _check(lambda: state.store.head(".weightless.json")),
        "executor": _check(state.executors.check_alive),
    }
    if state.feed.stopping:
        checks["service"] = "shutting down"
    ready = all(result == "ok" for result in checks.values())
    headers = {} if ready else {"Retry-After": "5"}
    return JSONResponse({"status": "ready" if ready else "not ready", "checks": checks}, 200 if ready else 503, headers)


@router.get("/metrics", response_class=Response)
def metrics(request: Request, allowed: Allowed) -> Response:
    """Prometheus metrics; scope read."""
    allowed.require("read")
    return Response(request.app.state.metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _check(question: Callable[[], object]) -> str:
    try:
        question()
    except WeightlessError as error:
        return error.message
    return "ok"
