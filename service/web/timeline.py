"""What one attempt's events say over time: when each stage ran, and what memory was held.

Seconds are relative to the attempt's start. Only plain data comes in (an event as the API sends it) and goes out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from exporter.contract.events import STAGES

MAX_SAMPLES = 400
"""Points that a chart shows; more are merged so that every peak stays."""
FIELDS = ("hostAnonBytes", "hostRssBytes", "gpuBytes")


@dataclass(frozen=True, slots=True)
class Span:
    """A stage from its first start to its last finish, in seconds; `end` is None while it runs."""

    name: str
    start: float
    end: float | None


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory of the process tree at `at` seconds, in bytes."""

    at: float
    host_anon: int
    host_rss: int
    gpu: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """Stages in their usual order, samples in order of time, and the length of both in seconds."""

    spans: tuple[Span, ...] = ()
    samples: tuple[Sample, ...] = ()
    length: float = 0.0
    ended: bool = False

    def closed(self, span: Span) -> float:
        """Where a span ends on a chart: at its end, or where the timeline does."""
        return self.length if span.end is None else span.end


def timeline_of(events: Iterable[Mapping[str, Any]]) -> Timeline:
    """The timeline of the newest attempt in `events`, which are in order. Events that it does not know are skipped.

    An attempt begins with the service's event of its start, or, where that is not given, with its own first event.
    """
    origin: float | None = None
    latest = 0.0
    open_stages: dict[str, int] = {}
    starts: dict[str, float] = {}
    ends: dict[str, float] = {}
    samples: list[Sample] = []
    ended = False
    for event in events:
        kind = event.get("type")
        moment = _seconds(event.get("time"))
        if moment is None:
            continue
        if kind == "state":
            if event.get("to") == "starting":
                origin, latest, ended = moment, 0.0, False
                open_stages, starts, ends, samples = {}, {}, {}, []
            continue
        origin = moment if origin is None else origin
        at = max(0.0, moment - origin)
        latest = max(latest, at)
        if kind == "stage" and event.get("name") in STAGES:
            _step(event, at, open_stages, starts, ends)
        elif kind == "resources":
            samples.append(_sample(event, at))
        elif kind in ("finished", "failed"):
            ended = True
    spans = tuple(
        Span(name, starts[name], ends.get(name, latest) if ended or not open_stages.get(name) else None)
        for name in STAGES
        if name in starts
    )
    return Timeline(spans, thin(samples), latest, ended)


def thin(samples: Sequence[Sample], limit: int = MAX_SAMPLES) -> tuple[Sample, ...]:
    """At most `limit` samples: neighbours are merged into one that holds the largest of each figure."""
    if len(samples) <= limit:
        return tuple(samples)
    merged = []
    for index in range(limit):
        group = samples[index * len(samples) // limit : (index + 1) * len(samples) // limit]
        merged.append(
            Sample(
                group[0].at,
                max(item.host_anon for item in group),
                max(item.host_rss for item in group),
                max(item.gpu for item in group),
            )
        )
    return tuple(merged)


def _step(
    event: Mapping[str, Any], at: float, running: dict[str, int], starts: dict[str, float], ends: dict[str, float]
) -> None:
    name = str(event["name"])
    if event.get("state") == "started":
        starts.setdefault(name, at)
        running[name] = running.get(name, 0) + 1
    elif name in starts:
        running[name] = max(0, running.get(name, 0) - 1)
        ends[name] = at


def _sample(event: Mapping[str, Any], at: float) -> Sample:
    anon, rss, gpu = (max(0, int(event.get(field) or 0)) for field in FIELDS)
    return Sample(at, anon, rss, gpu)


def _seconds(time: object) -> float | None:
    if not isinstance(time, str):
        return None
    try:
        return datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None
