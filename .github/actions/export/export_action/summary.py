"""The job summary: what a reviewer wants to know of an export, in Markdown of at most `runner.MAX_SUMMARY` bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exporter.contract.errors import error_class
from exporter.contract.manifest import Manifest
from service.web.timeline import Sample, Timeline, thin
from service.web.words import duration, size

from .changes import Changes
from .markdown import code, link, table, text
from .runner import MAX_SUMMARY

POINTS = 60
"""Points of a curve in the memory chart."""
MAX_NAMES = 100
"""Changed segments that are listed by name."""
_MARKS = {"succeeded": "✅", "failed": "❌", "cancelled": "⚪"}
_FIX = {
    "user": "To be fixed by whoever submitted the export.",
    "operator": "To be fixed by the operator of the service; the model is not at fault.",
    "service": "A fault of the service or of Weightless itself; the model is not at fault.",
    "nobody": "",
}
_PEAKS = (
    ("host memory", "hostAnonBytes", "hostMemory"),
    ("host RSS", "hostRssBytes", None),
    ("GPU memory", "gpuBytes", "gpuMemory"),
    ("written to disk", "diskWrittenBytes", "scratchDisk"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that a summary is made from; what is not known is None."""

    export: Mapping[str, Any]
    manifest: Manifest | None = None
    timeline: Timeline | None = None
    changes: Changes | None = None
    compared: str = ""


def summary_of(outcome: Outcome) -> str:
    """The Markdown of an export that has ended, or that nobody waits for any more."""
    export = outcome.export
    lines = _head(export)
    if export.get("error"):
        lines += _error(export["error"])
    if outcome.manifest is not None:
        lines += _sizes(outcome.manifest)
    lines += _peaks(export)
    if outcome.timeline is not None and outcome.timeline.spans:
        lines += _stages(outcome.timeline)
    if outcome.changes is not None:
        lines += _changes(outcome.changes, outcome.compared)
    if outcome.timeline is not None and len(outcome.timeline.samples) > 1:
        lines += _chart(outcome.timeline.samples)
    if outcome.manifest is not None:
        lines += _segments(outcome.manifest)
    return _fit(lines, str(export.get("links", {}).get("page", "")))


def refusal(title: str, message: str, hint: str) -> str:
    """The summary of a step that got no export at all."""
    lines = [f"### ❌ {text(title)}", "", text(message, 2000), ""]
    return "\n".join([*lines, text(hint, 2000), ""] if hint else lines)


def _head(export: Mapping[str, Any]) -> list[str]:
    state = str(export["state"])
    what = f"{text(export['recipe'])} for {text(export['target'].get('backend', ''))}"
    title = f"### {_MARKS.get(state, '⏳')} {what}: {text(state)}"
    page = str(export.get("links", {}).get("page", ""))
    about = [code(export["source"]), link(code(export["id"]), page)]
    return [title, "", " · ".join(about), ""]


def _error(error: Mapping[str, Any]) -> list[str]:
    stage = f" in stage {code(error['stage'])}" if error.get("stage") else ""
    lines = [f"**{text(error['message'], 2000)}**", ""]
    if error.get("hint"):
        lines += [text(error["hint"], 2000), ""]
    fix = _FIX[error_class(str(error["code"])).actor]
    again = " A retry may help." if error.get("retryable") else ""
    lines += [f"{code(error['code'])}{stage}. {fix}{again}".strip(), ""]
    details = error.get("details") or {}
    if details:
        rows = [[text(key), code(_plain(value), 1000)] for key, value in list(details.items())[:30]]
        lines += table(["detail", "value"], rows)
    return lines


def _plain(value: Any) -> str:
    return ", ".join(str(item) for item in value) if isinstance(value, list) else str(value)


def _sizes(manifest: Manifest) -> list[str]:
    rows = [
        [
            code(manifest.program.name),
            size(manifest.program.size),
            ", ".join(text(m.name) for m in manifest.program.methods[:20]),
        ]
    ]
    rows += [[code(item.name), size(item.size), f"{len(item.segments):,} segments"] for item in manifest.data]
    rows += [[code(item.name), size(item.size), text(item.media_type)] for item in manifest.files[:50]]
    used = manifest.resources
    sent = f"**{size(used.bytes_uploaded)} sent, {size(used.bytes_reused)} reused.**"
    checks = [
        f"{code(item.method)} {item.status}"
        + (
            f" ({text(item.max_relative_error)} from {text(item.against or 'eager')})"
            if item.max_relative_error
            else ""
        )
        for item in manifest.verification[:20]
    ]
    verified = f" Verified: {', '.join(checks)}." if checks else ""
    return [*table(["file", "size", "contents"], rows, [1]), sent + verified, ""]


def _peaks(export: Mapping[str, Any]) -> list[str]:
    peaks, budgets = export.get("resources", {}).get("peaks", {}), export.get("budgets", {})
    rows = []
    for name, key, budget in _PEAKS:
        if key in peaks:
            limit = budgets.get(budget) if budget else None
            share = f"{100 * peaks[key] / limit:.0f} %" if limit else ""
            rows.append([name, size(peaks[key]), size(limit) if limit else "–", share])
    return table(["peak of", "used", "budget", ""], rows, [1, 2, 3]) if rows else []


def _stages(timeline: Timeline) -> list[str]:
    rows = [[span.name, duration(timeline.closed(span) - span.start)] for span in timeline.spans]
    return table(["stage", "time"], [*rows, ["**all** (stages overlap)", f"**{duration(timeline.length)}**"]], [1])


def _changes(changes: Changes, compared: str) -> list[str]:
    counts = {"changed": changes.changed, "added": changes.added, "removed": changes.removed}
    weights = ", ".join(f"{len(names):,} {word}" for word, names in counts.items()) + f", {changes.same:,} the same"
    rows = [
        ["segments", weights],
        ["program", "the same" if changes.program_is_same else _delta(changes.program)],
        ["weights", _delta(changes.data)],
        ["peak of host memory", _delta(changes.host_peak)],
        ["peak of GPU memory", _delta(changes.gpu_peak)],
        ["time", f"{'+' if changes.milliseconds > 0 else '−'}{duration(abs(changes.milliseconds) / 1000)}"],
    ]
    lines = [f"#### Since {code(compared)}", "", *table(["what", "change"], rows)]
    names = [*changes.changed, *changes.added, *changes.removed]
    if names:
        shown = names[:MAX_NAMES]
        more = f" (the first {MAX_NAMES})" if len(names) > MAX_NAMES else ""
        lines += [f"<details><summary>Segments that differ{more}</summary>", ""]
        lines += [f"* {code(name, 200)}" for name in shown]
        lines += ["", "</details>", ""]
    return lines


def _delta(value: int) -> str:
    if value == 0:
        return "±0"
    return f"{'+' if value > 0 else '−'}{size(abs(value))}"


def _chart(samples: Sequence[Sample]) -> list[str]:
    """A Mermaid chart, which GitHub draws without fetching anything from the service."""
    points = thin(samples, POINTS)
    curves = [[item.host_anon / 2**30 for item in points], [item.gpu / 2**30 for item in points]]
    named = [(name, curve) for name, curve in zip(("host anonymous", "GPU"), curves, strict=True) if any(curve)]
    if not named:
        return []
    highest = max(max(curve) for _, curve in named)
    lines = ["```mermaid", "xychart-beta", f'  title "Memory in GiB: {", ".join(name for name, _ in named)}"']
    lines += [
        f'  x-axis "seconds" {points[0].at:.0f} --> {max(points[-1].at, 1):.0f}',
        f'  y-axis "GiB" 0 --> {highest * 1.1:.3f}',
    ]
    lines += [f"  line [{', '.join(f'{value:.3f}' for value in curve)}]" for _, curve in named]
    return [*lines, "```", ""]


def _segments(manifest: Manifest) -> list[str]:
    """All segments, folded away; `_fit` cuts the list where it would be too long."""
    lines = []
    for data in manifest.data:
        rows = [
            [
                code(item.names[0].fqn or item.names[0].key, 200),
                text(item.names[0].dtype or ""),
                text("×".join(str(n) for n in item.names[0].shape or ())),
                size(item.size),
                item.digest[7:19],
            ]
            for item in data.segments
        ]
        lines += [f"<details><summary>Segments of {code(data.name)} ({len(rows):,})</summary>", ""]
        lines += table(["name", "type", "shape", "size", "SHA-256"], rows, [3])
        lines += ["</details>", ""]
    return lines


def _fit(lines: Sequence[str], page: str) -> str:
    """The lines that fit, cut between two of them, with what closes an open block and says where the rest is."""
    end = ["", "</details>", "", f"Cut here: a job summary holds 1 MiB. {link('The page', page)} has the rest.", ""]
    room = MAX_SUMMARY - len("\n".join(end).encode())
    kept: list[str] = []
    used, open_block = 0, False
    for line in lines:
        used += len(line.encode()) + 1
        if used > room:
            return "\n".join([*kept, *(end if open_block else end[2:])])
        kept.append(line)
        open_block = line.startswith("<details>") or (open_block and line != "</details>")
    return "\n".join(kept)
