"""Bodies of requests and answers. `export_view` is the one place that decides what an export looks like outside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WrapValidator
from pydantic.alias_generators import to_camel

from exporter.contract.base import Duration, Strict
from exporter.contract.spec import ExportRequest
from service.jobs import Attempt, Export
from service.rows import rfc3339


def as_documented(kind: type[BaseModel]) -> WrapValidator:
    """Read a body by its JSON names and JSON types alone.

    Python may build our models by their field names, and pydantic would take `"5"` for 5 and `"no"` for false: a caller
    may not, or the same request would mean two things.
    """
    return WrapValidator(lambda value, _: kind.model_validate_json(json.dumps(value), strict=True, by_name=False))


Submission = Annotated[ExportRequest, as_documented(ExportRequest)]
"""The body of POST /exports."""


class View(BaseModel):
    """An answer: camelCase, absent fields left out."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)


class ErrorView(View):
    """What went wrong with an attempt or an export."""

    code: str
    message: str
    hint: str = ""
    retryable: bool = False
    stage: str | None = None
    details: dict[str, Any] = Field(default_factory=dict)


class Problem(View):
    """An error answer (RFC 9457)."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: str
    hint: str = ""
    retryable: bool = False
    field: str | None = None
    reason: str | None = None
    errors: list[dict[str, str]] | None = None
    details: dict[str, Any] | None = None
    instance: str | None = None


class CallerView(View):
    """Who asked."""

    kind: str
    repository: str | None = None
    ref: str | None = None
    run_url: str | None = None
    actor: str | None = None


class AttemptView(View):
    """One try."""

    number: int
    executor: str
    started_at: str
    finished_at: str | None = None
    error: ErrorView | None = None


class ProgressView(View):
    """How far a stage is."""

    stage: str
    done: int
    total: int
    unit: str
    rate: int | None = None


class ResourcesView(View):
    """The highest figure of each resource so far, in bytes."""

    peaks: dict[str, int]


class ManifestRef(View):
    """Where the manifest is, and its digest."""

    uri: str
    digest: str | None = None


class Links(View):
    """URLs of what belongs to an export. `page` is the same address as `self`, asked for as text/html."""

    self: str
    events: str
    logs: str
    manifest: str
    page: str


class ExportView(View):
    """An export as the API returns it."""

    id: str
    state: str
    stage: str | None
    recipe: str
    source: str
    options: dict[str, Any]
    target: dict[str, Any]
    budgets: dict[str, Any]
    labels: dict[str, str]
    priority: int
    owner: str
    caller: CallerView
    attempt: int
    attempts: list[AttemptView]
    created_at: str
    started_at: str | None = None
    finished_at: str | None = None
    expires_at: str | None = None
    queue_position: int | None = None
    progress: ProgressView | None
    resources: ResourcesView
    error: ErrorView | None = None
    manifest: ManifestRef | None = None
    parent: str | None = None
    links: Links


class ExportList(View):
    """A page of exports, newest first; `nextCursor` is null at the end."""

    items: list[ExportView]
    next_cursor: str | None


class DownloadRequest(Strict):
    """The body of POST /exports/{id}/downloads; seconds, or a string such as "30m"."""

    expires_in: Duration = Field(default=3600)


DownloadBody = Annotated[DownloadRequest, as_documented(DownloadRequest)]


class Downloads(View):
    """Links that need no login until `expiresAt`; `urls` maps file names to them."""

    expires_at: str
    urls: dict[str, str]


class DryRun(View):
    """What an export would meet: nothing is stored and no slot is used."""

    preflight: dict[str, Any]
    estimate: dict[str, Any]
    reuse: dict[str, Any]


class RecipeView(View):
    """A recipe: what it takes, an example, and whether some executor can run it."""

    name: str
    description: str
    options_schema: dict[str, Any]
    example: dict[str, Any]
    available: bool
    reason: str | None = None


class RecipeList(View):
    """Every recipe that an executor has described."""

    items: list[RecipeView]


def export_view(
    export: Export, attempts: Sequence[Attempt], base_url: str, *, position: int | None = None
) -> dict[str, Any]:
    """The export as the API returns it; fields that contract.md marks `?` are left out where they are not known."""
    request = export.request
    url = f"{base_url}/exports/{export.id}"
    optional = {
        "startedAt": _time(export.started_at),
        "finishedAt": _time(export.finished_at),
        "expiresAt": _time(export.expires_at),
        "queuePosition": position,
        "error": None if export.error is None else dict(export.error),
        "manifest": _without_none({"uri": export.manifest_uri, "digest": export.manifest_digest}) or None,
        "parent": export.parent,
    }
    return {
        "id": export.id,
        "state": export.state.value,
        "stage": export.stage,
        "recipe": request["recipe"],
        "source": request["source"],
        "options": request["options"],
        "target": request["target"],
        "budgets": request["budgets"],
        "labels": request["labels"],
        "priority": export.priority,
        "owner": export.owner,
        "caller": _without_none(export.caller),
        "attempt": export.attempt,
        "attempts": [_attempt_view(item) for item in attempts],
        "createdAt": rfc3339(export.created_at),
        "progress": None if export.progress is None else dict(export.progress),
        "resources": {"peaks": dict(export.peaks)},
        "links": {
            "self": url,
            "events": f"{url}/events",
            "logs": f"{url}/logs",
            "manifest": f"{url}/manifest",
            "page": url,
        },
        **_without_none(optional),
    }


def _attempt_view(attempt: Attempt) -> dict[str, Any]:
    view = {
        "number": attempt.number,
        "executor": attempt.executor,
        "startedAt": rfc3339(attempt.started_at),
        "finishedAt": _time(attempt.finished_at),
        "error": None if attempt.error is None else dict(attempt.error),
    }
    return _without_none(view)


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else rfc3339(seconds)


def _without_none(values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
