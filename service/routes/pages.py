"""The status pages and their pictures: for people, read only, made on the server."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, Response
from pydantic import StringConstraints

from exporter.contract.base import Strict
from exporter.contract.errors import InvalidRequest, NotFound, WeightlessError
from exporter.contract.events import clean_text
from exporter.contract.manifest import Manifest, parse_manifest
from exporter.contract.spec import EXPORT_ID
from service.executor_table import ExecutorTable
from service.job_store import JobStore, ListFilter
from service.jobs import EventRow, Export, State
from service.ports import ArtifactStore, LogSource
from service.routes.access import Allowed, ExportId, find, view
from service.schemas import export_view
from service.web import chart, render
from service.web.browser import COOKIE, MAX_TOKEN, ForBrowsers, acceptable
from service.web.timeline import timeline_of

router = APIRouter(include_in_schema=False)
middleware = ForBrowsers
"""What the app wraps itself in, so that a browser can sign in and read errors."""
PAGE_SIZE = 50
MAX_SHOWN_MANIFEST = 8 * 2**20
"""Bytes of a manifest that a page reads; a larger one is linked only."""
MAX_EVENTS = 100_000
"""Resource events that one chart reads: a day of them."""
MAX_LOG_READ = 4 * 2**20
LOG_TAIL = 16 * 1024
NEWEST = 20
"""Newest events that a page reads beside its stages, to know how long the attempt has run."""
_HEADERS = {
    "Content-Security-Policy": render.CSP,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "private, no-store",
}


@router.get("/")
def exports_page(
    request: Request,
    allowed: Allowed,
    state: Annotated[str, Query(max_length=16)] = "",
    recipe: Annotated[str, Query(max_length=64)] = "",
    before: Annotated[str, Query(max_length=64)] = "",
) -> Response:
    """The list of exports, newest first."""
    allowed.require("read")
    wanted = State(state) if state in set(State) else None
    older_than = before if EXPORT_ID.fullmatch(before) else None
    jobs: JobStore = request.app.state.jobs
    where = ListFilter(
        owner=None if {"read-all", "admin"} & allowed.actions else allowed.caller.owner,
        state=wanted,
        recipe=recipe or None,
    )
    found = jobs.list(where, limit=PAGE_SIZE + 1, before=older_than)
    shown = found[:PAGE_SIZE]
    base_url = request.app.state.settings.base_url
    table: ExecutorTable = request.app.state.executors
    base = _base(request)
    page = render.ListPage(
        exports=[export_view(export, [], base_url) for export in shown],
        recipes=sorted({*table.recipes(), *(export.request["recipe"] for export in shown)}),
        state=wanted.value if wanted else "",
        recipe=recipe,
        following=_following(base, state, recipe, shown[-1].id) if len(found) > PAGE_SIZE else None,
        first=older_than is None,
        now=datetime.now(UTC),
    )
    return _html(render.list_html(page, base))


def export_page(request: Request, export: Export) -> Response:
    """The page of one export, which the caller may see; called by GET /exports/{id} where text/html is asked for."""
    jobs: JobStore = request.app.state.jobs
    timeline = timeline_of(_events(export, _page_events(jobs, export)))
    page = render.ExportPage(
        export=view(request, export),
        timeline=timeline,
        sampled=bool(jobs.events(export.id, kind="resources", limit=1)),
        warnings=[json.loads(row.data) for row in jobs.events(export.id, kind="warning", limit=50)],
        manifest=_manifest(request.app.state.store, export),
        log=_log_tail(request.app.state.logs, export) if export.state is State.FAILED else "",
        last_event=export.last_event,
        picture=export.last_event if export.state.terminal else int(timeline.length / 5),
        now=datetime.now(UTC),
    )
    return _html(render.export_html(page, _base(request)))


@router.get("/exports/{export_id}/memory.svg")
def memory(request: Request, export_id: ExportId, allowed: Allowed) -> Response:
    """Host and GPU memory of the newest attempt over time, with stages and budgets."""
    export = find(request, allowed, export_id)
    jobs: JobStore = request.app.state.jobs
    rows = [
        *jobs.events(export.id, kind="resources", limit=MAX_EVENTS),
        *_page_events(jobs, export),
    ]
    svg = chart.memory_svg(timeline_of(_events(export, rows)), export.request["budgets"])
    return _svg(svg, export)


@router.get("/exports/{export_id}/badge.svg")
def badge(request: Request, export_id: ExportId, allowed: Allowed) -> Response:
    """A badge with the export's state."""
    export = find(request, allowed, export_id)
    return _svg(chart.badge_svg(export.state.value), export)


@router.get("/static/{name}")
def static(name: str) -> Response:
    """Style sheet, script and icon; their addresses carry a version, so they may be kept for good."""
    found = render.static_file(name)
    if found is None:
        raise NotFound("there is no such file")
    data, media_type = found
    headers = {
        "Cache-Control": "public, max-age=31536000, immutable",
        "X-Content-Type-Options": "nosniff",
        "Content-Security-Policy": _picture_policy(data),
    }
    return Response(data, headers=headers, media_type=media_type)


class SignIn(Strict):
    """A token that a person pasted into the form."""

    token: Annotated[str, StringConstraints(min_length=1, max_length=MAX_TOKEN)]


@router.post("/session", status_code=204)
def sign_in(request: Request, body: SignIn) -> Response:
    """Keep the token in a cookie until the browser closes. Whether it is any good, the next page says."""
    if not acceptable(body.token):
        raise InvalidRequest(
            "that is not a token", field="token", hint="Paste it as `weightless token create` printed it."
        )
    answer = Response(status_code=204, headers={"Cache-Control": "no-store"})
    secure = request.app.state.settings.base_url.startswith("https://")
    answer.set_cookie(COOKIE, body.token, path="/", httponly=True, samesite="strict", secure=secure)
    return answer


@router.delete("/session", status_code=204)
def sign_out() -> Response:
    """Forget the token."""
    answer = Response(status_code=204)
    answer.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")
    return answer


def _page_events(jobs: JobStore, export: Export) -> list[EventRow]:
    states = jobs.events(export.id, kind="state", limit=10_000)
    stages = jobs.events(export.id, kind="stage", limit=10_000)
    newest = jobs.events(export.id, after=max(0, export.last_event - NEWEST), limit=NEWEST)
    return [*states, *stages, *newest]


def _events(export: Export, rows: Iterable[EventRow]) -> list[dict[str, Any]]:
    """The events of the newest attempt, each once, in order."""
    found = {row.id: row for row in rows if row.attempt == export.attempt}
    return [json.loads(found[number].data) for number in sorted(found)]


def _manifest(store: ArtifactStore, export: Export) -> Manifest | None:
    """The manifest of an export that succeeded; None where the store does not give a small and valid one."""
    if export.state is not State.SUCCEEDED:
        return None
    try:
        stored = store.head(export.key)
        if stored is None or stored.size > MAX_SHOWN_MANIFEST:
            return None
        return parse_manifest(store.read(export.key, 0, stored.size))
    except WeightlessError:
        return None  # the page shows what the database knows; the manifest's own address shows the error


def _log_tail(source: LogSource, export: Export) -> str:
    """The end of the newest attempt's log; empty where there is none, or where it is too long to look for its end."""
    tail, offset = b"", 0
    try:
        while chunk := source.read(export.id, export.attempt, offset, MAX_LOG_READ // 8):
            offset += len(chunk)
            tail = (tail + chunk)[-LOG_TAIL:]
            if offset >= MAX_LOG_READ:
                return ""
    except WeightlessError:
        return ""
    return clean_text(tail.decode("utf-8", "replace"))


def _following(base: str, state: str, recipe: str, last: str) -> str:
    query = {"state": state, "recipe": recipe, "before": last}
    return f"{base}/?{urlencode({name: value for name, value in query.items() if value})}"


def _base(request: Request) -> str:
    return str(request.scope.get("root_path", "")).rstrip("/")


def _html(text: str, status: int = 200) -> HTMLResponse:
    return HTMLResponse(text, status, _HEADERS)


def _svg(data: bytes, export: Export) -> Response:
    headers = {
        "Content-Security-Policy": _picture_policy(data),
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "private, max-age=3600" if export.state.terminal else "private, no-cache",
    }
    return Response(data, headers=headers, media_type="image/svg+xml")


def _picture_policy(data: bytes) -> str:
    """Nothing but the style element that the picture itself carries."""
    hashes = chart.style_hash(data)
    return f"default-src 'none'; style-src {hashes}" if hashes else "default-src 'none'"
