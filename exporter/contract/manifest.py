"""The PTE manifest: pydantic models, canonical bytes (RFC 8785) and its digest.

Integers, strings and booleans only: durations are milliseconds, relative errors decimal strings, so that canonical JSON
needs no rule for floats. Descriptors follow the OCI convention (`mediaType`, `digest`, `size`, `urls`).
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any, Literal

import rfc8785
from pydantic import Field, StringConstraints, ValidationError, field_validator, model_validator

from exporter.contract.base import Lenient
from exporter.contract.errors import VerificationFailed

MEDIA_TYPE = "application/vnd.weightless.pte.manifest.v1+json"
PTE_MEDIA_TYPE = "application/vnd.pytorch.executorch.pte"
PTD_MEDIA_TYPE = "application/vnd.pytorch.executorch.ptd"
SCHEMA_VERSION = 1
MAX_MANIFEST = 256 * 2**20
"""Bytes that a reader accepts for a manifest."""

Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
Crc = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9+/]{11}=$")]
Bytes = Annotated[int, Field(ge=0, le=2**60)]
_NAME = re.compile(r"[^\x00-\x1f\x7f/\\:]{1,255}")
_RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?")


def check_file_name(name: str) -> str:
    """`name` if it is safe as one path component on any system, else ``ValueError``."""
    if (
        not _NAME.fullmatch(name)
        or name in (".", "..")
        or name != name.strip()
        or name.endswith(".")
        or _RESERVED.fullmatch(name)
    ):
        raise ValueError("a file name is one path component, without separators, control characters or reserved names")
    return name


class Source(Lenient):
    """Where the weights came from, pinned: `revision` for hubs, `digest` and `size` for single files."""

    uri: str
    revision: str | None = None
    digest: Digest | None = None
    size: Bytes | None = None


class ExportInfo(Lenient):
    """Which export wrote this."""

    id: str
    attempt: int = Field(ge=1)
    recipe: str
    created_at: str
    source: Source
    target: dict[str, Any]
    options: dict[str, Any] = Field(default_factory=dict)


class TensorSpec(Lenient):
    """One tensor input or output of a method; a dynamic dimension is -1."""

    dtype: str
    shape: tuple[int, ...]


class Method(Lenient):
    """A method of the program; inputs that are not tensors are given as their type's name."""

    name: str
    inputs: tuple[TensorSpec | str, ...] = ()
    outputs: tuple[TensorSpec | str, ...] = ()
    delegates: tuple[str, ...] = ()


class File(Lenient):
    """An OCI-style descriptor of a file. `urls` may be relative to the manifest's own URI."""

    name: str
    media_type: str
    digest: Digest
    size: Bytes
    urls: tuple[str, ...] = Field(min_length=1)

    @field_validator("name")
    @classmethod
    def _safe(cls, value: str) -> str:
        return check_file_name(value)


class Program(File):
    """The `.pte` file."""

    methods: tuple[Method, ...] = ()


class SegmentKey(Lenient):
    """One name of a segment; what follows `key` is absent where keys are content hashes."""

    key: str
    fqn: str | None = None
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    storage_offset: int | None = None


class SegmentInfo(Lenient):
    """A segment of a data file: `offset` is relative to `segmentBaseOffset`."""

    offset: Bytes
    size: Bytes
    digest: Digest
    names: tuple[SegmentKey, ...] = Field(min_length=1)


class Data(Lenient):
    """A `.ptd` file. Its header, its segments and zeros between them are all of its bytes."""

    name: str
    media_type: str = PTD_MEDIA_TYPE
    layout: Literal["flat-tensor/fqn", "flat-tensor/content"]
    size: Bytes
    header_digest: Digest
    header_size: Bytes | None = None
    """Bytes that `headerDigest` covers, from 0 to the end of the flatbuffer (the header says it too)."""
    crc64nvme: Crc | None = Field(default=None, alias="crc64nvme")
    weight_set: Digest | None = None
    urls: tuple[str, ...] = Field(min_length=1)
    segment_base_offset: Bytes
    segments: tuple[SegmentInfo, ...] = ()

    @field_validator("name")
    @classmethod
    def _safe(cls, value: str) -> str:
        return check_file_name(value)

    @model_validator(mode="after")
    def _inside(self) -> Data:
        end = 0
        for segment in self.segments:
            if segment.offset < end:
                raise ValueError("segments overlap or are not in order")
            end = segment.offset + segment.size
        if self.segments and self.segment_base_offset + end > self.size:
            raise ValueError("a segment lies past the end of its file")
        header = self.header_size or 0
        if header > self.size or (self.segments and header > self.segment_base_offset):
            raise ValueError("the header overlaps the segments")
        return self


class Toolchain(Lenient):
    """Versions that the export was made with; `gpu` and what belongs to it only where there was one."""

    weightless: str
    torch: str | None = None
    executorch: str | None = None
    transformers: str | None = None
    triton: str | None = None
    cuda: str | None = None
    gpu: str | None = None
    driver: str | None = None
    python: str | None = None
    image: str | None = None


class StageUse(Lenient):
    """What one stage took."""

    name: str
    milliseconds: int = Field(ge=0)
    host_peak_anon_bytes: Bytes = 0
    gpu_peak_bytes: Bytes = 0


class Resources(Lenient):
    """Peaks over the process tree, and bytes moved."""

    host_peak_anon_bytes: Bytes = 0
    host_peak_rss_bytes: Bytes = 0
    gpu_peak_bytes: Bytes = 0
    disk_written_bytes: Bytes = 0
    bytes_uploaded: Bytes = 0
    bytes_reused: Bytes = 0
    unused_bytes: Bytes = 0
    duplicate_bytes: Bytes = 0
    stages: tuple[StageUse, ...] = ()


class Verification(Lenient):
    """The outcome for one method: relative error as a decimal string, `reason` where it was skipped."""

    method: str
    status: Literal["passed", "skipped"]
    max_relative_error: Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)?(e-?[0-9]+)?$")] | None = None
    against: str | None = None
    reason: str | None = None


class Manifest(Lenient):
    """The whole manifest."""

    schema_version: Literal[1] = 1
    media_type: Literal["application/vnd.weightless.pte.manifest.v1+json"] = (
        "application/vnd.weightless.pte.manifest.v1+json"
    )
    export: ExportInfo
    program: Program
    data: tuple[Data, ...] = ()
    files: tuple[File, ...] = ()
    toolchain: Toolchain
    resources: Resources = Resources()
    verification: tuple[Verification, ...] = ()

    @model_validator(mode="after")
    def _unique(self) -> Manifest:
        names = [self.program.name, *(item.name for item in self.data), *(item.name for item in self.files)]
        folded = [name.casefold() for name in names]
        if len(set(folded)) != len(folded):
            raise ValueError("two files of the manifest have the same name, case apart")
        return self

    def canonical(self) -> bytes:
        """The manifest's bytes as stored: RFC 8785, absent fields left out."""
        return canonical_json(self.model_dump(mode="json", by_alias=True, exclude_none=True))


def canonical_json(value: Any) -> bytes:
    """RFC 8785 bytes of JSON-ready data."""
    return rfc8785.dumps(value)


def digest(data: bytes) -> str:
    """``sha256:`` and 64 hex digits."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def parse_manifest(data: bytes) -> Manifest:
    """The manifest in `data`. `VerificationFailed` where it is none, is too large, or has an unknown major version."""
    if len(data) > MAX_MANIFEST:
        raise VerificationFailed(f"the manifest has {len(data)} bytes, more than {MAX_MANIFEST}")
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise VerificationFailed("the manifest is not JSON") from error
    version = raw.get("schemaVersion") if isinstance(raw, dict) else None
    if type(version) is not int or version != SCHEMA_VERSION:
        raise VerificationFailed(
            f"the manifest's schemaVersion is {version!r}; this version reads {SCHEMA_VERSION}",
            hint="Install a newer weightless.",
        )
    try:
        return Manifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise VerificationFailed(f"the manifest is not valid at {where or 'its root'}: {first['msg']}") from error


def manifest_schema() -> dict[str, Any]:
    """The JSON Schema of a manifest, as committed in `exporter/contract/manifest.schema.json`."""
    schema = Manifest.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": MEDIA_TYPE, **schema}
