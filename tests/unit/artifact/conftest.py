"""A stored export to pull, check and spoil, and a store that counts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from exporter.artifact.location import StoreOrigin
from exporter.contract.errors import NotFound, StoreUnavailable
from exporter.contract.manifest import Manifest, digest, parse_manifest
from exporter.contract.objects import Capabilities, StoredObject, Upload
from exporter.contract.segments import SegmentName
from exporter.stream.crc import crc64nvme
from exporter.stream.layout import aligned
from exporter.stream.ptd import build_header

EXPORT = "exp_01JZZZZZZZZZZZZZZZZZZZZZZZ"


@dataclass
class Shelf:
    """Objects in a dict behind the ports of `exporter.artifact`; `before_read` may raise or wait."""

    root: str = "memory://shelf"
    objects: dict[str, bytes] = field(default_factory=dict)
    modified: dict[str, float] = field(default_factory=dict)
    uploads: list[Upload] = field(default_factory=list)
    capabilities: Capabilities = field(default_factory=Capabilities)
    reads: list[tuple[str, int, int]] = field(default_factory=list)
    before_read: Callable[[str, int], None] | None = None
    crcs: dict[str, str] = field(default_factory=dict)

    def uri(self, key: str) -> str:
        return f"{self.root}/{key}"

    def key_of(self, uri: str) -> str | None:
        prefix = self.root + "/"
        return uri.removeprefix(prefix) if uri.startswith(prefix) else None

    def head(self, key: str) -> StoredObject | None:
        if key not in self.objects:
            return None
        return StoredObject(
            key, len(self.objects[key]), crc64nvme=self.crcs.get(key), modified=self.modified.get(key, 0.0)
        )

    def read(self, key: str, offset: int, length: int) -> bytes:
        if key not in self.objects:
            raise NotFound(f"nothing at {key}")
        if self.before_read is not None:
            self.before_read(key, offset)
        self.reads.append((key, offset, length))
        data = self.objects[key][offset : offset + length]
        if len(data) != length:
            raise StoreUnavailable("short read")
        return data

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.read(key, offset, len(buffer))

    def list(self, prefix: str) -> Iterator[StoredObject]:
        for key in sorted(self.objects):
            if key.startswith(prefix) and (found := self.head(key)) is not None:
                yield found

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)

    def list_uploads(self, prefix: str) -> Iterator[Upload]:
        yield from [upload for upload in self.uploads if upload.key.startswith(prefix)]

    def abort_upload(self, upload: Upload) -> None:
        self.uploads = [other for other in self.uploads if other.id != upload.id]

    def put(
        self, key: str, body: bytes, *, media_type: str, metadata: object = None, if_absent: bool = False
    ) -> StoredObject | None:
        if if_absent and key in self.objects:
            return None
        self.objects[key] = bytes(body)
        return self.head(key)


@dataclass
class Export:
    """A stored export: its store, manifest, and the key of each file."""

    store: Shelf
    manifest: Manifest
    content: bytes
    keys: dict[str, str]
    origin: StoreOrigin

    def bytes_of(self, name: str) -> bytes:
        return self.store.objects[self.keys[name]]

    def spoil(self, name: str, data: bytes) -> None:
        self.store.objects[self.keys[name]] = data


def ptd(
    sizes: list[int], seed: int = 0, base: int | None = 4096, zeros: int | None = None
) -> tuple[bytes, list[dict], int, int]:
    """A `.ptd`, its manifest segments, its header's size and its base offset."""
    rng = random.Random(seed)
    blobs = [bytes(size) if index == zeros else rng.randbytes(size) for index, size in enumerate(sizes)]
    placed, end = [], 0
    for blob in blobs:
        offset = aligned(end, 128)
        placed.append((offset, len(blob)))
        end = offset + len(blob)
    header = build_header(placed, [(SegmentName(f"k{i}"), i) for i in range(len(sizes))], base)
    start = base if base is not None else aligned(len(header), 128)
    data = bytearray(start + end)
    data[: len(header)] = header
    segments = []
    for index, ((offset, size), blob) in enumerate(zip(placed, blobs, strict=True)):
        data[start + offset : start + offset + size] = blob
        segments.append(
            {
                "offset": offset,
                "size": size,
                "digest": digest(blob),
                "names": [{"key": f"k{index}", "fqn": f"w.{index}"}],
            }
        )
    return bytes(data), segments, len(header), start


def make_export(
    sizes: list[int] | None = None, *, seed: int = 0, base: int | None = 4096, header_size: bool = True
) -> Export:
    store = Shelf()
    data, segments, header, start = ptd([300, 5000, 0, 70_001, 64, 200_000] if sizes is None else sizes, seed, base)
    program = random.Random(99).randbytes(33_333)
    tokenizer = b'{"a": 1}'
    folder = f"exports/{EXPORT}"
    weights = f"weights/{EXPORT}-1/model.ptd"
    entry = {
        "name": "model.ptd",
        "layout": "flat-tensor/fqn",
        "size": len(data),
        "headerDigest": digest(data[:header]),
        "crc64nvme": crc64nvme(data),
        "urls": [store.uri(weights)],
        "segmentBaseOffset": start,
        "segments": segments,
    }
    if header_size:
        entry["headerSize"] = header
    manifest = Manifest.model_validate(
        {
            "export": {
                "id": EXPORT,
                "attempt": 1,
                "recipe": "exported-program",
                "createdAt": "2026-11-30T15:00:00Z",
                "source": {"uri": "file:///m.pt2"},
                "target": {"backend": "xnnpack"},
            },
            "program": {
                "name": "model.pte",
                "mediaType": "application/vnd.pytorch.executorch.pte",
                "digest": digest(program),
                "size": len(program),
                "urls": ["1/model.pte"],
            },
            "data": [entry],
            "files": [
                {
                    "name": "tokenizer.json",
                    "mediaType": "application/json",
                    "digest": digest(tokenizer),
                    "size": len(tokenizer),
                    "urls": ["1/files/tokenizer.json"],
                }
            ],
            "toolchain": {"weightless": "0.1.0"},
        }
    )
    keys = {
        "model.pte": f"{folder}/1/model.pte",
        "model.ptd": weights,
        "tokenizer.json": f"{folder}/1/files/tokenizer.json",
    }
    store.objects = {keys["model.pte"]: program, keys["model.ptd"]: data, keys["tokenizer.json"]: tokenizer}
    content = manifest.canonical()
    store.objects[f"{folder}/manifest.json"] = content
    return Export(store, parse_manifest(content), content, keys, StoreOrigin(store, folder))


@pytest.fixture
def export() -> Export:
    return make_export()
