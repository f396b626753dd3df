"""What is in a `.pte`, a `.ptd` or a manifest, local or remote: only its head is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from exporter.artifact.headers import header_of
from exporter.artifact.location import read_whole
from exporter.artifact.ports import Blob
from exporter.artifact.pte import FILE_IDENTIFIERS, PteTensor, read_pte
from exporter.contract.errors import VerificationFailed
from exporter.contract.manifest import MAX_MANIFEST, digest, parse_manifest
from exporter.contract.segments import SCALAR_TYPES
from exporter.stream.ptd import FILE_IDENTIFIER

_HINT = "Programs start with a flatbuffer of type ET12, data files with FT01, manifests with a brace."


def inspect(blob: Blob) -> dict[str, Any]:
    """A JSON-ready description: `kind` is ``program``, ``data`` or ``manifest``; sizes and offsets in bytes.

    `VerificationFailed` where the file is none of these or is damaged.
    """
    if blob.size < 8:
        raise VerificationFailed(f"{blob.uri} has {blob.size} bytes: it is no .pte, .ptd or manifest", hint=_HINT)
    head = bytearray(8)
    blob.read_into(0, memoryview(head))
    if head[4:8] in FILE_IDENTIFIERS:
        found = _program(blob)
    elif head[4:8] == FILE_IDENTIFIER:
        found = _data(blob)
    elif head.lstrip()[:1] == b"{":
        found = _manifest(blob)
    else:
        start = bytes(head).hex(" ")
        raise VerificationFailed(f"{blob.uri} is no .pte, .ptd or manifest: it starts with {start}", hint=_HINT)
    return {"kind": found.pop("kind"), "uri": blob.uri, "size": blob.size, **found}


def _program(blob: Blob) -> dict[str, Any]:
    def read(offset: int, length: int) -> bytes:
        buffer = bytearray(length)
        blob.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    header = read_pte(read, blob.size)
    return {
        "kind": "program",
        "version": header.version,
        "headerSize": header.program_size,
        "segmentBaseOffset": header.segment_base_offset,
        "methods": [
            {
                "name": method.name,
                "inputs": _specs(method.inputs),
                "outputs": _specs(method.outputs),
                "delegates": list(method.delegates),
                "operators": list(method.operators),
                "plannedMemoryBytes": list(method.planned_memory),
                "externalTensors": list(method.external),
            }
            for method in header.methods
        ],
        "segments": [{"offset": offset, "size": size} for offset, size in header.segments],
        "namedData": list(header.named_data),
    }


def _specs(values: Sequence[PteTensor | str]) -> list[Any]:
    return [
        {"dtype": value.dtype, "shape": list(value.shape), **({"dynamic": True} if value.dynamic else {})}
        if isinstance(value, PteTensor)
        else value
        for value in values
    ]


def _data(blob: Blob) -> dict[str, Any]:
    header = header_of(blob)
    names: list[list[dict[str, Any]]] = [[] for _ in header.segments]
    for name in header.names:
        entry: dict[str, Any] = {"key": name.key}
        if name.layout is not None:
            entry["dtype"] = SCALAR_TYPES.get(name.layout.scalar_type, f"type {name.layout.scalar_type}")
            entry["shape"] = list(name.layout.sizes)
        names[name.segment].append(entry)
    return {
        "kind": "data",
        "headerSize": header.header_size,
        "segmentBaseOffset": header.segment_base_offset,
        "segments": [
            {"offset": segment.offset, "size": segment.size, "names": names[index]}
            for index, segment in enumerate(header.segments)
        ],
    }


def _manifest(blob: Blob) -> dict[str, Any]:
    content = read_whole(blob, MAX_MANIFEST)
    manifest = parse_manifest(content)
    return {
        "kind": "manifest",
        "digest": digest(content),
        "manifest": manifest.model_dump(mode="json", by_alias=True, exclude_none=True),
    }
