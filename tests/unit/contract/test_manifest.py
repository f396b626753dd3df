"""The manifest: pinned bytes, the committed schema, and what a reader refuses."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from exporter.contract import manifest
from exporter.contract.errors import VerificationFailed

HERE = Path(__file__).parent
GOLDEN = HERE / "golden" / "manifest-v1.json"
SHA = "sha256:" + "0" * 64


def example() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(GOLDEN.read_bytes())
    return data


def test_golden_bytes_are_read_and_written_again_unchanged() -> None:
    golden = GOLDEN.read_bytes()
    assert manifest.parse_manifest(golden).canonical() == golden


def test_the_committed_schema_is_the_generated_one_and_accepts_the_golden_manifest() -> None:
    path = Path(manifest.__file__).with_name("manifest.schema.json")
    schema = json.loads(path.read_text())
    assert schema == json.loads(json.dumps(manifest.manifest_schema()))
    jsonschema.Draft202012Validator(schema).validate(example())


def test_a_newer_minor_writer_may_add_fields() -> None:
    data = example()
    data["novelty"] = {"x": 1}
    data["data"][0]["segments"][0]["novelty"] = 1
    assert manifest.parse_manifest(json.dumps(data).encode()).program.name == "model.pte"


@pytest.mark.parametrize("version", [0, 2, "1", None, 1.5, [], True])
def test_another_major_version_is_refused(version: object) -> None:
    data = example()
    data["schemaVersion"] = version
    with pytest.raises(VerificationFailed) as caught:
        manifest.parse_manifest(json.dumps(data).encode())
    assert "schemaVersion" in caught.value.message


def changed(*steps: Any) -> bytes:
    """The example with the value at a path replaced: ``changed("data", 0, "name", "x")``."""
    data = copy.deepcopy(example())
    place: Any = data
    for step in steps[:-2]:
        place = place[step]
    place[steps[-2]] = steps[-1]
    return json.dumps(data).encode()


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "a/b",
        "a\\b",
        "/etc/passwd",
        "C:x",
        "a\x00b",
        "a\nb",
        "CON",
        "nul.txt",
        "x.",
        " x",
        "x" * 256,
    ],
)
@pytest.mark.parametrize("where", [("program",), ("data", 0), ("files", 0)])
def test_names_are_one_path_component(name: str, where: tuple[Any, ...]) -> None:
    with pytest.raises(VerificationFailed):
        manifest.parse_manifest(changed(*where, "name", name))


@pytest.mark.parametrize(
    "steps",
    [
        ("files", 0, "name", "MODEL.pte"),
        ("data", 0, "segments", 0, "size", -1),
        ("data", 0, "segments", 0, "size", 2**61),
        ("data", 0, "segments", 0, "size", 1.5),
        ("data", 0, "segments", 0, "offset", 10**12),
        ("data", 0, "segments", 0, "digest", "sha256:zz"),
        ("data", 0, "segments", 0, "digest", "md5:" + "0" * 32),
        ("data", 0, "segments", 0, "names", []),
        ("data", 0, "size", 1),
        ("data", 0, "headerSize", 2**40),
        ("data", 0, "crc64nvme", "AAAA"),
        ("data", 0, "urls", []),
        ("program", "digest", "x"),
        ("verification", 0, "maxRelativeError", "NaN"),
        ("verification", 0, "status", "failed"),
    ],
)
def test_lies_are_refused(steps: tuple[Any, ...]) -> None:
    with pytest.raises(VerificationFailed):
        manifest.parse_manifest(changed(*steps))


def test_overlapping_segments_are_refused() -> None:
    data = example()
    data["data"][0]["segments"].append(dict(data["data"][0]["segments"][0]))
    with pytest.raises(VerificationFailed):
        manifest.parse_manifest(json.dumps(data).encode())


@pytest.mark.parametrize("raw", [b"", b"[]", b"null", b"\xff", b"{", b"[" * 100_000])
def test_what_is_no_manifest(raw: bytes) -> None:
    with pytest.raises(VerificationFailed):
        manifest.parse_manifest(raw)


def test_canonical_json_sorts_by_utf16_and_has_no_space() -> None:
    emoji, presentation_form = "\U0001f600", "\ufb33"
    written = manifest.canonical_json({presentation_form: 2, emoji: 1, "a": [1, "\u00e9"]})
    assert written == f'{{"a":[1,"\u00e9"],"{emoji}":1,"{presentation_form}":2}}'.encode()
