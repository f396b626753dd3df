"""HTML of the status pages. In: exports as the API returns them, and their events. Out: text, fully escaped.

Autoescaping is on for every template and nothing is marked safe; `CSP` forbids inline scripts and styles.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from exporter.contract.errors import error_class
from exporter.contract.events import STAGES, clean_text
from exporter.contract.manifest import Manifest
from service.jobs import State
from service.web import words
from service.web.timeline import Timeline

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
MAX_SEGMENTS = 200
"""Segments of a data file that a page lists."""
STATIC = {"weightless.css": "text/css", "live.js": "text/javascript", "icon.svg": "image/svg+xml"}
_ACTORS = {
    "user": "whoever submitted the export",
    "operator": "the operator of this service",
    "service": "the developers of this software",
    "nobody": "nobody",
}


_OPTIONAL = (
    "startedAt",
    "finishedAt",
    "expiresAt",
    "queuePosition",
    "error",
    "manifest",
    "parent",
    "progress",
    "stage",
)
_CALLER = ("repository", "ref", "runUrl", "actor")
_PEAKS = ("hostAnonBytes", "hostRssBytes", "gpuBytes", "diskWrittenBytes")


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of the stage chart: offset and width in per mille of the attempt, the text beside it."""

    name: str
    left: float
    width: float
    text: str
    state: str


@dataclass(frozen=True, slots=True)
class Figure:
    """A peak, against its budget where there is one; `share` is in per cent, at most 100."""

    name: str
    value: str
    limit: str | None
    share: float
    over: bool


@dataclass(frozen=True, slots=True)
class ListPage:
    """What the list shows. `following` is the address of the next page, None on the last."""

    exports: Sequence[Mapping[str, Any]]
    recipes: Sequence[str]
    state: str
    recipe: str
    following: str | None
    first: bool
    now: datetime


@dataclass(frozen=True, slots=True)
class ExportPage:
    """What the page of one export shows.

    `manifest` is None before the end, or where it is too large for a page; `sampled` says whether there is a memory
    chart, and `picture` changes whenever it does. `last_event` is the number of the newest event.
    """

    export: Mapping[str, Any]
    timeline: Timeline
    sampled: bool
    warnings: Sequence[Mapping[str, Any]]
    manifest: Manifest | None
    log: str
    picture: int
    last_event: int
    now: datetime


def list_html(page: ListPage, base: str = "") -> str:
    """The list of exports. `base` is the path below which the service is mounted."""
    exports = [_whole(export) for export in page.exports]
    return _render("list.html", base, page=page, exports=exports, states=[state.value for state in State], now=page.now)


def export_html(page: ExportPage, base: str = "") -> str:
    """The page of one export."""
    export = _whole(page.export)
    return _render(
        "export.html",
        base,
        page=page,
        export=export,
        bars=stage_bars(page.timeline, str(export["state"])),
        figures=figures(export),
        run_url=https_only(export["caller"].get("runUrl")),
        actor=_ACTORS[error_class(str(export["error"]["code"])).actor] if export["error"] else None,
        request=json.dumps(_request_of(export), indent=2, ensure_ascii=False),
        finished=export["state"] in ("succeeded", "failed", "cancelled"),
        max_segments=MAX_SEGMENTS,
        now=page.now,
    )


def error_html(status: int, title: str, detail: str, hint: str, base: str = "") -> str:
    """A page for a request that cannot be answered."""
    return _render("error.html", base, status=status, title=title, detail=detail, hint=hint)


def login_html(*, refused: bool, base: str = "") -> str:
    """The form that asks for a token; `refused` says that one was given and not accepted."""
    return _render("login.html", base, refused=refused)


def stage_bars(timeline: Timeline, state: str) -> list[Bar]:
    """A bar for every stage, in order; those that have not begun have no width."""
    spans = {span.name: span for span in timeline.spans}
    length = max(timeline.length, 0.001)
    bars = []
    for name in STAGES:
        span = spans.get(name)
        if span is None:
            bars.append(Bar(name, 0, 0, "waiting" if state in ("queued", "starting", "running") else "–", "waiting"))
            continue
        end = timeline.closed(span)
        width = max(4.0, (end - span.start) / length * 1000)
        left = min(span.start / length * 1000, 1000 - width)
        text = words.duration(end - span.start)
        bars.append(Bar(name, left, width, text, "running" if span.end is None else "done"))
    return bars


def figures(export: Mapping[str, Any]) -> list[Figure]:
    """Peaks against budgets, in the order in which people ask for them."""
    peaks, budgets = {**dict.fromkeys(_PEAKS), **export["resources"]["peaks"]}, export["budgets"]
    rows = (
        ("Host memory", "hostAnonBytes", "hostMemory"),
        ("Host RSS", "hostRssBytes", None),
        ("GPU memory", "gpuBytes", "gpuMemory"),
        ("Written to disk", "diskWrittenBytes", "scratchDisk"),
    )
    found = []
    for name, key, budget in rows:
        value = peaks[key]
        limit = budgets.get(budget) if budget else None
        share = 0.0 if not limit or value is None else min(100.0, 100.0 * value / limit)
        shown = words.size(limit) if limit else None
        found.append(Figure(name, words.size(value), shown, share, bool(limit and value and value > limit)))
    return found


def https_only(url: object) -> str | None:
    """`url` if it is an https address, which alone may become a link."""
    if isinstance(url, str) and url.isprintable():
        try:
            parts = urlsplit(url)
        except ValueError:
            return None
        if parts.scheme == "https" and parts.hostname:
            return url
    return None


def static_file(name: str) -> tuple[bytes, str] | None:
    """Bytes and media type of a file that pages use, None for any other name."""
    media_type = STATIC.get(name)
    return None if media_type is None else (_static(name), media_type)


def _whole(export: Mapping[str, Any]) -> dict[str, Any]:
    """The export with every optional field, None where it is absent: templates then fail on a misspelt name only."""
    whole = {**dict.fromkeys(_OPTIONAL), **export}
    whole["caller"] = {**dict.fromkeys(_CALLER), **export["caller"]}
    whole["resources"] = {"peaks": {**dict.fromkeys(_PEAKS), **export["resources"]["peaks"]}}
    if whole["error"]:
        whole["error"] = {"hint": "", "stage": None, "retryable": False, "details": {}, **whole["error"]}
    if whole["progress"]:
        whole["progress"] = {"rate": None, **whole["progress"]}
    if whole["manifest"]:
        whole["manifest"] = {"digest": None, **whole["manifest"]}
    whole["attempts"] = [{"error": None, **attempt} for attempt in export["attempts"]]
    return whole


def _request_of(export: Mapping[str, Any]) -> dict[str, Any]:
    return {key: export[key] for key in ("recipe", "source", "options", "target", "budgets", "labels", "priority")}


@cache
def _static(name: str) -> bytes:
    return (files("service.web") / "static" / name).read_bytes()


@cache
def _version() -> str:
    return hashlib.sha256(b"".join(_static(name) for name in sorted(STATIC))).hexdigest()[:12]


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("service.web", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(size=words.size, duration=words.duration, age=words.age)
    environment.globals.update(between=words.between)
    return environment


def _shown(value: Any) -> Any:
    """What a template prints: text without control characters and direction overrides, which escaping leaves alone."""
    return clean_text(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _render(name: str, base: str, **values: Any) -> str:
    return _environment().get_template(name).render(base=base, version=_version(), **values)
