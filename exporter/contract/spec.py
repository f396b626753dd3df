"""What an export is asked to do: the body of ``POST /exports`` and the spec that an exporter process reads."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from exporter.contract.base import Duration, Size, Strict

Backend = Literal["cuda", "xnnpack", "portable"]
Label = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Arch = Annotated[str, StringConstraints(pattern=r"^sm_[0-9]{2,3}[af]?$")]
EXPORT_ID = re.compile(r"exp_[0-9A-HJKMNP-TV-Z]{26}")
"""`exp_` and a ULID (Crockford base 32)."""

MAX_INTEGER = 2**53 - 1
"""Largest integer that the manifest's canonical JSON can hold (RFC 8785), and so the largest in options."""
MAX_NESTING = 32
"""Lists and objects inside each other in options."""

DEFAULT_MAX_BUFFER = 192 * 2**20
"""Bytes of part buffers that one stream may hold, whatever the model's size (`WEIGHTLESS_MAX_BUFFER`)."""


def check_canonical(value: object, depth: int = 0) -> None:
    """``ValueError`` unless `value` can stand in canonical JSON: the manifest repeats options, at the very end."""
    if depth > MAX_NESTING:
        raise ValueError(f"more than {MAX_NESTING} lists and objects inside each other")
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise ValueError(f"an integer is between -{MAX_INTEGER} and {MAX_INTEGER}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("NaN and infinity are no numbers in JSON")
    if isinstance(value, dict):
        for item in value.values():
            check_canonical(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            check_canonical(item, depth + 1)


class Target(Strict):
    """The back end and, for CUDA, the machine that the program will run on."""

    backend: Backend
    cuda_version: Annotated[str, StringConstraints(pattern=r"^[0-9]{1,2}\.[0-9]{1,2}$")] | None = None
    arch: tuple[Arch, ...] = Field(default=(), max_length=16)
    platform: Literal["linux", "windows"] = "linux"
    low_memory_mode: bool = True
    max_autotune: bool = True
    shared_memory_bytes: Annotated[Size, Field(le=MAX_INTEGER)] | None = None
    triton_kernel_mode: Literal["on", "off"] = "on"

    @model_validator(mode="after")
    def _cuda_only(self) -> Target:
        if self.backend != "cuda":
            given = self.model_fields_set - {"backend", "platform"}
            if given:
                raise ValueError(f"{', '.join(sorted(given))}: only for the cuda back end")
        return self


class Budgets(Strict):
    """Upper bounds; an export that goes over one is stopped with the stage named. Sizes in bytes, time in seconds."""

    host_memory: Size | None = None
    gpu_memory: Size | None = None
    scratch_disk: Size | None = None
    wall_time: Duration | None = None

    @field_validator("host_memory", "gpu_memory", "wall_time")
    @classmethod
    def _positive(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("a budget is more than zero")
        return value


class Webhook(Strict):
    """Where to send signed notifications of an export's events."""

    url: Annotated[str, StringConstraints(max_length=2048, pattern=r"^https://")]
    events: tuple[Literal["state", "stage", "finished", "failed"], ...] = ("finished", "failed")


class ExportRequest(Strict):
    """The body of ``POST /exports``."""

    recipe: Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[a-z0-9][a-z0-9-]*$")]
    source: Annotated[str, StringConstraints(min_length=1, max_length=2048)]
    options: dict[str, Any] = Field(default_factory=dict)
    target: Target
    budgets: Budgets = Budgets()
    priority: int = Field(default=0, ge=-100, le=100)
    verify_: bool = Field(default=True, alias="verify")
    reuse_weights: bool = True
    labels: dict[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,62}$")], Label] = Field(
        default_factory=dict, max_length=32
    )
    webhook: Webhook | None = None

    @field_validator("options")
    @classmethod
    def _canonical(cls, value: dict[str, Any]) -> dict[str, Any]:
        check_canonical(value)
        return value

    @field_validator("source")
    @classmethod
    def _printable(cls, value: str) -> str:
        if not value.isprintable():
            raise ValueError("a source has printable characters only")
        return value


class StoreSpec(Strict):
    """Where results go and how the store is spoken to. Holds no credential: those come from boto3's own chain."""

    uri: str
    endpoint: str | None = None
    region: str | None = None
    ca_bundle: str | None = None
    kms_key_id: str | None = None
    storage_class: str | None = None
    profile: Literal["auto", "aws", "minio", "r2", "gcs", "ceph", "scaleway"] = "auto"
    addressing: Literal["auto", "path", "virtual"] = "auto"
    checksums: Literal["auto", "crc64nvme", "off"] = "auto"
    part_size: Size | None = None
    max_buffer: Size = DEFAULT_MAX_BUFFER

    @field_validator("part_size", "max_buffer")
    @classmethod
    def _some(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("a part and a buffer have more than zero bytes")
        return value


class SourcePolicy(Strict):
    """What a source may name: directories and ``s3://`` prefixes, and whether ``hf://`` is allowed."""

    roots: tuple[str, ...] = ()
    hf: bool = False


class OpenUpload(Strict):
    """A multipart upload that an earlier attempt of the same export left open when it was killed."""

    key: Annotated[
        str, StringConstraints(max_length=1024, pattern=rf"^weights/{EXPORT_ID.pattern}-[0-9]{{1,6}}/[^/]+$")
    ]
    upload_id: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    part_size: int = Field(ge=1, le=MAX_INTEGER)


class ExportSpec(Strict):
    """Everything that one exporter process needs, as JSON on its standard input. Without secrets."""

    v: Literal[1] = 1
    id: Annotated[str, StringConstraints(pattern=f"^{EXPORT_ID.pattern}$")]
    attempt: int = Field(ge=1, le=MAX_INTEGER)
    created_at: Annotated[str, StringConstraints(max_length=64, pattern=r"^[ -~]*$")]
    request: ExportRequest
    store: StoreSpec
    sources: SourcePolicy = SourcePolicy()
    deployment: str = ""
    """The deployment id that stands in `{prefix}/.weightless.json`; empty: whatever stands there."""
    resume: OpenUpload | None = None
    """Parts that are in the store already and need not be sent again where their bytes are equal."""

    @model_validator(mode="after")
    def _own_upload(self) -> ExportSpec:
        if self.resume is not None and not self.resume.key.startswith(f"weights/{self.id}-"):
            raise ValueError("resume: the upload belongs to another export")
        return self
