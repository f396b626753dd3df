"""How a machine describes itself: the output of ``python -m exporter doctor --json``, stored by the service."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from exporter.contract.base import Lenient


class RecipeReport(Lenient):
    """A recipe as `GET /recipes` shows it. `reason` says why it is not available."""

    name: str
    description: str
    options_schema: dict[str, Any]
    example: dict[str, Any]
    available: bool
    reason: str | None = None


class BackendReport(Lenient):
    """A back end that this machine has or lacks."""

    name: Literal["cuda", "xnnpack", "portable"]
    available: bool
    reason: str | None = None
    cuda_version: str | None = None
    arch: tuple[str, ...] = ()


class GpuReport(Lenient):
    """One GPU: index, product name, memory in bytes, architecture such as ``sm_90``."""

    index: int
    name: str
    memory_bytes: int
    arch: str


class Check(Lenient):
    """One thing that an export needs (a program, a header, a library), found or named as missing."""

    name: str
    ok: bool
    message: str
    needed_for: tuple[str, ...] = ()


class MachineReport(Lenient):
    """Everything that a scheduler needs to know about one executor's machine."""

    v: Literal[1] = 1
    versions: dict[str, str] = Field(default_factory=dict)
    recipes: tuple[RecipeReport, ...] = ()
    backends: tuple[BackendReport, ...] = ()
    gpus: tuple[GpuReport, ...] = ()
    checks: tuple[Check, ...] = ()
