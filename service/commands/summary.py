"""An export in words and numbers, for the end of `submit --wait` and for `status`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exporter.contract.manifest import Manifest
from service.commands.output import Output, size_text

_PEAKS = (
    ("hostPeakAnonBytes", "hostAnonBytes", "host (anonymous)"),
    ("hostPeakRssBytes", "hostRssBytes", "host (resident)"),
    ("gpuPeakBytes", "gpuBytes", "GPU"),
    ("diskWrittenBytes", "diskWrittenBytes", "disk written"),
)


def summarise(manifest: Manifest) -> dict[str, Any]:
    """The figures of a finished export; sizes in bytes, stages in milliseconds."""
    resources = manifest.resources
    return {
        "segments": sum(len(data.segments) for data in manifest.data),
        "programBytes": manifest.program.size,
        "dataBytes": sum(data.size for data in manifest.data),
        "bytesUploaded": resources.bytes_uploaded,
        "bytesReused": resources.bytes_reused,
        "peaks": {
            "hostPeakAnonBytes": resources.host_peak_anon_bytes,
            "hostPeakRssBytes": resources.host_peak_rss_bytes,
            "gpuPeakBytes": resources.gpu_peak_bytes,
            "diskWrittenBytes": resources.disk_written_bytes,
        },
        "stages": {stage.name: stage.milliseconds for stage in resources.stages},
    }


def print_export(output: Output, export: Mapping[str, Any], summary: Mapping[str, Any] | None = None) -> None:
    """The export for people."""
    manifest, error = export.get("manifest") or {}, export.get("error") or {}
    progress = export.get("progress")
    state = str(export.get("state"))
    stage = f" ({export['stage']})" if export.get("stage") else ""
    queue = export.get("queuePosition")
    output.fields(
        [
            ("export", str(export.get("id"))),
            ("state", f"{state}{stage}" + (f", position {queue} in the queue" if queue is not None else "")),
            ("recipe", f"{export.get('recipe')} from {export.get('source')}"),
            ("progress", _progress(progress) if progress and state == "running" else None),
            ("attempt", str(export["attempt"]) if export.get("attempt", 0) > 1 else None),
            ("error", f"{error['code']}: {error['message']}" if error else None),
            ("hint", error.get("hint") or None),
            ("manifest", manifest.get("uri")),
            ("digest", manifest.get("digest")),
            ("page", (export.get("links") or {}).get("page")),
            *_figures(export, summary),
        ]
    )


def _figures(export: Mapping[str, Any], summary: Mapping[str, Any] | None) -> list[tuple[str, str | None]]:
    peaks = (summary or {}).get("peaks") or (export.get("resources") or {}).get("peaks") or {}
    shown = [f"{size_text(value)} {label}" for *keys, label in _PEAKS if (value := _first(peaks, keys))]
    rows: list[tuple[str, str | None]] = [("peaks", ", ".join(shown) or None)]
    if summary is not None:
        rows += [
            ("segments", str(summary["segments"])),
            ("bytes", f"{size_text(summary['programBytes'])} program, {size_text(summary['dataBytes'])} weights"),
            ("sent", f"{size_text(summary['bytesUploaded'])}, reused {size_text(summary['bytesReused'])}"),
            ("seconds", ", ".join(f"{name} {ms / 1000:.1f}" for name, ms in summary["stages"].items()) or None),
        ]
    return rows


def _first(peaks: Mapping[str, Any], keys: list[str]) -> int:
    return next((int(peaks[key]) for key in keys if peaks.get(key)), 0)


def _progress(progress: Mapping[str, Any]) -> str:
    done, total, unit = progress.get("done", 0), progress.get("total", 0), progress.get("unit")
    if unit == "bytes":
        return f"{progress.get('stage')} {size_text(done)} of {size_text(total)}"
    return f"{progress.get('stage')} {done} of {total} {unit}"
