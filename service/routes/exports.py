"""Submit, read, list, cancel, retry and delete exports."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BeforeValidator

from exporter.contract.errors import IllegalState, InvalidRequest, QueueFull
from exporter.contract.spec import EXPORT_ID, ExportRequest
from service import schemas
from service.executor_table import ExecutorTable
from service.job_store import IdempotencyKey, JobStore, ListFilter
from service.jobs import Export, State, new_id
from service.policy import Access
from service.recipe_check import check_recipe, check_target, dry_run
from service.routes.access import Allowed, ExportId, described, find, view
from service.settings import Settings
from service.source_rules import check_source
from service.webhooks import check_url

router = APIRouter(tags=["exports"])
QUEUE_LIMIT = 1000
"""Queued exports that one authenticated caller may have."""
Plain = Annotated[str, Query(max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")]
EmptyIsAny = BeforeValidator(lambda value: None if value == "" else value)
"""A filter without a value, as a form sends it, is none."""
_LIST_ITEM: dict[int | str, dict[str, Any]] = {200: {"model": schemas.ExportList}}


@router.post(
    "/exports",
    status_code=202,
    dependencies=[Depends(described)],
    response_model=schemas.ExportView,
    responses={200: {"description": "The same key and body made this before; or a dry run's answer."}},
)
def submit(
    request: Request,
    body: schemas.Submission,
    allowed: Allowed,
    dry: Annotated[bool, Query(alias="dryRun", description="Check only; store nothing.")] = False,
    idempotency_key: Annotated[str | None, Header(max_length=256, pattern=r"^[\x21-\x7e]+$")] = None,
) -> Response:
    """Queue an export: 202 with its address in Location. The request ends here; the export goes on."""
    _refuse_unknown(request, "dryRun")
    asked = canonical(body)
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
    merged = allowed.authorise(body)
    able = _check(request, allowed, body)
    jobs: JobStore = request.app.state.jobs
    if dry:
        owner = None if "read-all" in allowed.actions else allowed.caller.owner
        return JSONResponse(dry_run(body, able, jobs.previous(owner, body.recipe, body.source)))
    key = None if idempotency_key is None else IdempotencyKey(idempotency_key, digest)
    return _queue(request, allowed, canonical(merged), key=key)


@router.get("/exports", response_model=schemas.ExportList)
def list_exports(
    request: Request,
    allowed: Allowed,
    state: Annotated[State | None, EmptyIsAny] = None,
    recipe: Annotated[Plain | None, EmptyIsAny] = None,
    repository: Annotated[Plain | None, EmptyIsAny] = None,
    label: Annotated[list[Plain] | None, Query(description="`key` or `key=value`; all must hold", max_length=8)] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Annotated[str | None, Query(max_length=128), EmptyIsAny] = None,
) -> Response:
    """Exports, newest first."""
    allowed.require("read")
    jobs: JobStore = request.app.state.jobs
    where = ListFilter(
        owner=None if {"read-all", "admin"} & allowed.actions else allowed.caller.owner,
        state=state,
        recipe=recipe,
        repository=repository,
        labels=tuple(_label(item) for item in label or () if item),
    )
    found = jobs.list(where, limit=limit + 1, before=None if cursor is None else _decode(cursor))
    page = found[:limit]
    attempts = jobs.attempts([export.id for export in page])
    base = request.app.state.settings.base_url
    items = [schemas.export_view(export, attempts[export.id], base) for export in page]
    following = _encode(page[-1].id) if len(found) > limit else None
    return JSONResponse({"items": items, "nextCursor": following})


@router.get("/exports/{export_id}", response_model=schemas.ExportView)
def get_export(request: Request, export_id: ExportId, allowed: Allowed) -> Response:
    """The export; the page about it where text/html is asked for."""
    export = find(request, allowed, export_id)
    page = request.app.state.export_page
    if page is not None and _wants_html(request.headers.get("accept", "")):
        answer: Response = page(request, export)
    else:
        answer = JSONResponse(view(request, export))
    answer.headers["Vary"] = "Accept"
    return answer


@router.post("/exports/{export_id}/cancel", status_code=202, response_model=schemas.ExportView)
def cancel(request: Request, export_id: ExportId, allowed: Allowed) -> Response:
    """Ask for an end. Idempotent; a finished export stays as it is."""
    export = find(request, allowed, export_id)
    _require_change(allowed, export, "cancel")
    jobs: JobStore = request.app.state.jobs
    return JSONResponse(view(request, jobs.cancel(export.id)), 202)


@router.post("/exports/{export_id}/retry", status_code=202, response_model=schemas.ExportView)
def retry(request: Request, export_id: ExportId, allowed: Allowed) -> Response:
    """A new export with the same body, which names this one as its parent."""
    export = find(request, allowed, export_id)
    if not export.state.terminal:
        raise IllegalState(f"the export is {export.state}; only a finished one can be retried")
    body = export.body
    merged = allowed.authorise(body)
    _check(request, allowed, body)
    return _queue(request, allowed, canonical(merged), parent=export.id)


@router.delete("/exports/{export_id}", status_code=204)
def delete(request: Request, export_id: ExportId, allowed: Allowed) -> Response:
    """Remove a finished export: its manifest first, then the rest. Shared weights are left to `weightless gc`."""
    export = find(request, allowed, export_id)
    _require_change(allowed, export, "delete")
    if not export.state.terminal:
        raise IllegalState(f"the export is {export.state}; only a finished one can be deleted")
    store = request.app.state.store
    store.delete(export.key)
    for item in list(store.list(export.key.removesuffix("manifest.json"))):
        store.delete(item.key)
    request.app.state.jobs.delete(export.id)
    request.app.state.logs.remove(export.id)
    return Response(status_code=204)


def canonical(body: ExportRequest) -> dict[str, Any]:
    """The request as it is stored: every field, but a target's only where they mean something."""
    data: dict[str, Any] = body.model_dump(mode="json", by_alias=True)
    if body.target.backend != "cuda":
        data["target"] = {"backend": body.target.backend, "platform": body.target.platform}
    data["budgets"] = {name: value for name, value in data["budgets"].items() if value is not None}
    return data


def _refuse_unknown(request: Request, *known: str) -> None:
    """A misspelt `?dryrun=1` must not queue an export."""
    unknown = sorted(set(request.query_params) - set(known))
    if unknown:
        name = unknown[0][:64]
        raise InvalidRequest(f"there is no parameter {name!r} here", hint=f"Known: {', '.join(known)}.", field=name)


def _check(request: Request, allowed: Access, body: ExportRequest) -> list[Any]:
    allowed.require("submit")
    settings: Settings = request.app.state.settings
    table: ExecutorTable = request.app.state.executors
    check_source(body.source, settings.source_roots, hf=settings.hf_allowed)
    check_recipe(body, table.recipes())
    able = check_target(body, table.all())
    if body.webhook is not None:
        if settings.webhook_key is None:
            hint = "Follow GET /exports/{id}/events instead."
            raise InvalidRequest("webhooks are not switched on here", hint=hint, field="webhook")
        check_url(body.webhook.url, settings.webhook_hosts)
    return able


def _queue(
    request: Request,
    allowed: Access,
    body: dict[str, Any],
    *,
    key: IdempotencyKey | None = None,
    parent: str | None = None,
) -> Response:
    if request.app.state.feed.stopping:
        raise QueueFull("the service is shutting down", httpStatus=503)
    rule, settings = allowed.rule, request.app.state.settings
    now = time.time()
    export = Export(
        id=new_id(),
        owner=allowed.caller.owner,
        caller=dict(allowed.caller.view),
        request=body,
        created_at=now,
        priority=body["priority"],
        prefix="" if rule is None else rule.prefix,
        concurrent=None if rule is None else rule.concurrent,
        parent=parent,
        expires_at=None if settings.retention is None else now + settings.retention,
    )
    limit = None if allowed.caller.kind == "local" else QUEUE_LIMIT
    stored, created = request.app.state.jobs.submit(
        export, key=key, queue_limit=limit, unfinished_limit=export.concurrent
    )
    answer = JSONResponse(view(request, stored), 202 if created else 200)
    answer.headers["Location"] = f"{settings.base_url}/exports/{stored.id}"
    return answer


def _require_change(allowed: Access, export: Export, action: Any) -> None:
    allowed.require(action)
    if not allowed.may_change(export):
        allowed.require("admin")


def _wants_html(accept: str) -> bool:
    """Whether text/html is preferred to JSON: a browser names it, curl and clients do not."""
    weights = {"text/html": 0.0, "application/json": 0.0}
    for item in accept.split(","):
        kind, *parameters = (part.strip().lower() for part in item.split(";"))
        quality = next((part[2:] for part in parameters if part.startswith("q=")), "1")
        if kind in weights:
            try:
                weights[kind] = float(quality)
            except ValueError:
                weights[kind] = 0.0
    return weights["text/html"] > weights["application/json"]


def _label(text: str) -> tuple[str, str | None]:
    key, separator, value = text.partition("=")
    return key, value if separator else None


def _encode(export_id: str) -> str:
    return base64.urlsafe_b64encode(export_id.encode()).decode().rstrip("=")


def _decode(cursor: str) -> str:
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode("ascii")
    except (ValueError, UnicodeDecodeError):
        text = ""
    if EXPORT_ID.fullmatch(text) is None:
        raise InvalidRequest(
            "the cursor is not one of ours", hint="Take nextCursor from the page before.", field="cursor"
        )
    return text
