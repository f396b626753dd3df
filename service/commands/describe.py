"""What `inspect` found, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from service.commands.output import Output, size_text

ROWS = 40
"""Segments that are listed; `--json` has all."""


def print_description(output: Output, found: Mapping[str, Any]) -> None:
    """Print what `exporter.artifact.inspect` returned."""
    output.fields([("file", found["uri"]), ("kind", found["kind"]), ("size", f"{size_text(found['size'])}")])
    {"program": _program, "data": _data, "manifest": _manifest}[found["kind"]](output, found)


def _program(output: Output, found: Mapping[str, Any]) -> None:
    output.fields(
        [
            ("program", size_text(found["headerSize"])),
            ("segments", f"{len(found['segments'])}, {size_text(sum(s['size'] for s in found['segments']))}"),
            ("data keys", str(len(found["namedData"])) if found["namedData"] else None),
        ]
    )
    for method in found["methods"]:
        output.line()
        output.line(f"method {method['name']}", "bold")
        output.fields(
            [
                ("  inputs", ", ".join(map(_spec, method["inputs"])) or "none"),
                ("  outputs", ", ".join(map(_spec, method["outputs"])) or "none"),
                ("  delegates", ", ".join(method["delegates"]) or "none"),
                ("  operators", ", ".join(method["operators"]) or None),
                ("  memory", size_text(sum(method["plannedMemoryBytes"]))),
                ("  external", f"{len(method['externalTensors'])} tensors" if method["externalTensors"] else None),
            ]
        )


def _spec(value: Any) -> str:
    if isinstance(value, str):
        return value
    dynamic = " (dynamic)" if value.get("dynamic") or -1 in value["shape"] else ""
    return f"{value['dtype']}[{', '.join(map(str, value['shape']))}]{dynamic}"


def _data(output: Output, found: Mapping[str, Any]) -> None:
    output.fields([("header", size_text(found["headerSize"])), ("base", str(found["segmentBaseOffset"]))])
    _segments(output, found["segments"])


def _segments(output: Output, segments: list[Any]) -> None:
    rows = []
    for number, segment in enumerate(segments[:ROWS]):
        first = segment["names"][0] if segment["names"] else {"key": ""}
        shape = f"{first['dtype']}{first['shape']}" if "dtype" in first and "shape" in first else ""
        more = f" and {len(segment['names']) - 1} more" if len(segment["names"]) > 1 else ""
        name = str(first.get("fqn") or first["key"]) + more
        rows.append([str(number), str(segment["offset"]), size_text(segment["size"]), shape, name])
    output.table(["segment", "offset", "size", "tensor", "name"], rows)
    if len(segments) > ROWS:
        output.line(f"and {len(segments) - ROWS} more; --json lists all")


def _manifest(output: Output, found: Mapping[str, Any]) -> None:
    manifest = found["manifest"]
    export, toolchain = manifest["export"], manifest["toolchain"]
    output.fields(
        [
            ("digest", found["digest"]),
            ("export", f"{export['id']}, attempt {export['attempt']}, {export['createdAt']}"),
            ("recipe", f"{export['recipe']} from {export['source']['uri']}"),
            ("backend", str(export["target"].get("backend"))),
            ("made with", ", ".join(f"{name} {version}" for name, version in sorted(toolchain.items()))),
        ]
    )
    output.line()
    rows = [["program", manifest["program"]["name"], size_text(manifest["program"]["size"]), ""]]
    for data in manifest.get("data", []):
        rows.append(["data", data["name"], size_text(data["size"]), f"{len(data['segments'])} segments"])
    for file in manifest.get("files", []):
        rows.append(["file", file["name"], size_text(file["size"]), ""])
    output.table(["what", "name", "size", "holds"], rows)
    for method in manifest["program"].get("methods", []):
        inputs = ", ".join(map(_spec, method["inputs"]))
        output.line(f"method {method['name']}({inputs}) on {', '.join(method['delegates']) or 'portable kernels'}")
    for check in manifest.get("verification", []):
        error = f", relative error {check['maxRelativeError']}" if "maxRelativeError" in check else ""
        output.line(f"verified {check['method']}: {check['status']}{error}")
