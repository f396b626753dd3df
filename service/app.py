"""`create_app`: routes, middleware, lifespan. Concrete parts are handed in; routes find them on `app.state`.

`app.state` holds: `settings` (Settings), `jobs` (JobStore), `executors` (ExecutorTable), `store` (ArtifactStore),
`authenticator` (Authenticator), `policy` (Policy), `feed` (EventFeed), `logs` (LogSource), `metrics` (Metrics) and
`export_page` (`service.routes.pages.export_page(request, export) -> Response`, the answer to Accept: text/html).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from fastapi import FastAPI

from service import problems
from service.auth import Authenticator
from service.body import StrictJsonBodies
from service.event_feed import EventFeed
from service.executor_table import ExecutorTable
from service.head_requests import HeadRequests
from service.job_store import JobStore
from service.metrics import Metrics
from service.policy import Policy
from service.ports import ArtifactStore, LogSource
from service.routes import docs, exports, health, recipes, streams
from service.same_site import SameSite
from service.schemas import Problem
from service.settings import Settings


@dataclass(frozen=True, slots=True)
class Parts:
    """What an app is made of. `background` runs as long as the app does (the scheduler, webhooks)."""

    settings: Settings
    jobs: JobStore
    executors: ExecutorTable
    store: ArtifactStore
    authenticator: Authenticator
    policy: Policy
    logs: LogSource
    metrics: Metrics
    background: Callable[[], AbstractAsyncContextManager[None]] | None = None


def create_app(parts: Parts) -> FastAPI:
    """The HTTP application."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        feed: EventFeed = app.state.feed
        polling = asyncio.create_task(feed.run())
        try:
            if parts.background is None:
                yield
            else:
                async with parts.background():
                    yield
        finally:
            feed.stop()
            with suppress(asyncio.CancelledError):
                await polling

    app = FastAPI(
        title="Weightless",
        version=_version(),
        summary="Exports PyTorch models to ExecuTorch without holding their weights.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would take scheme and host from the request
        responses={
            code: {"model": Problem, "content": {problems.PROBLEM: {}}, "description": "An error (RFC 9457)."}
            for code in (401, 403, 404, 409, 413, 415, 422, 429, 500, 502, 503, 507)
        },
    )
    app.state.settings = parts.settings
    app.state.jobs = parts.jobs
    app.state.executors = parts.executors
    app.state.store = parts.store
    app.state.authenticator = parts.authenticator
    app.state.policy = parts.policy
    app.state.logs = parts.logs
    app.state.metrics = parts.metrics
    app.state.feed = EventFeed(parts.jobs)
    app.state.described = False  # whether an executor was ever seen to have described itself
    app.add_middleware(StrictJsonBodies)
    if parts.authenticator.anonymous:
        app.add_middleware(SameSite, settings=parts.settings)
    problems.install(app)
    for room in (exports, streams, recipes, health, docs):
        app.include_router(room.router)
    app.state.export_page = None
    if find_spec("service.routes.pages") is not None:
        pages = import_module("service.routes.pages")
        app.include_router(pages.router)
        app.state.export_page = getattr(pages, "export_page", None)
        app.add_middleware(pages.middleware)
    app.add_middleware(HeadRequests)
    return app


def _version() -> str:
    try:
        return version("weightless")
    except PackageNotFoundError:
        return "0"
