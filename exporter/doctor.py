"""What this machine can export, and what it lacks, each thing named."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from exporter.contract.machine import BackendReport, Check, GpuReport, MachineReport, RecipeReport
from exporter.toolchain import PACKAGES, package_version

CUDA_PROGRAMS = ("openssl", "g++", "ld", "objcopy", "ptxas")
"""Programs that an ahead-of-time CUDA compile calls; a slim image lacks one or the other."""


def describe_machine() -> MachineReport:
    """Recipes with their options, back ends, GPUs, versions, and every thing that an export needs, found or missing."""
    gpus = _gpus()
    checks = _checks()
    return MachineReport(
        versions=_versions(),
        recipes=_recipes(),
        backends=(_cuda(gpus, checks), _cpu("xnnpack"), _cpu("portable")),
        gpus=gpus,
        checks=checks,
    )


def readable(report: MachineReport) -> str:
    """The report as lines for a person."""
    lines = [f"{name} {version}" for name, version in report.versions.items()]
    lines += [_line(f"recipe {item.name}", item.available, item.reason) for item in report.recipes]
    lines += [_line(f"back end {item.name}", item.available, item.reason) for item in report.backends]
    lines += [f"GPU {gpu.index}: {gpu.name}, {gpu.memory_bytes // 2**30} GiB, {gpu.arch}" for gpu in report.gpus]
    lines += [_line(item.name, item.ok, item.message) for item in report.checks]
    return "\n".join(lines)


def _line(name: str, ok: bool, reason: str | None) -> str:
    return f"{'ok     ' if ok else 'missing'} {name}" + (f": {reason}" if reason else "")


def _versions() -> dict[str, str]:
    found = {name: package_version(name) for name in PACKAGES}
    return {"python": platform.python_version(), **{name: version for name, version in found.items() if version}}


def _recipes() -> tuple[RecipeReport, ...]:
    from exporter.recipes.registry import RECIPES

    reports = []
    for recipe in RECIPES.values():
        reason = recipe.availability()
        reports.append(
            RecipeReport(
                name=recipe.name,
                description=recipe.description,
                options_schema=recipe.Options.model_json_schema(by_alias=True),
                example=dict(recipe.example),
                available=reason is None,
                reason=reason,
            )
        )
    return tuple(reports)


def _cpu(name: Literal["xnnpack", "portable"]) -> BackendReport:
    def load() -> None:
        importlib.import_module("executorch.runtime")
        importlib.import_module("executorch.backends.xnnpack.partition.xnnpack_partitioner")

    reason = _failure("ExecuTorch's CPU runtime does not load", load)
    return BackendReport(name=name, available=reason is None, reason=reason)


def _cuda(gpus: tuple[GpuReport, ...], checks: tuple[Check, ...]) -> BackendReport:
    import torch

    reason = None
    missing = [item.name for item in checks if not item.ok and "cuda" in item.needed_for]
    if not gpus:
        reason = "no GPU that torch can use"
    elif missing:
        reason = f"missing: {', '.join(missing)}"
    else:
        reason = _failure(
            "ExecuTorch's CUDA back end does not load",
            lambda: importlib.import_module("executorch.backends.cuda.cuda_backend"),
        )
    return BackendReport(
        name="cuda",
        available=reason is None,
        reason=reason,
        cuda_version=torch.version.cuda,
        arch=tuple(sorted({gpu.arch for gpu in gpus})),
    )


def _failure(what: str, action: Callable[[], object]) -> str | None:
    try:
        action()
    except Exception as error:
        return f"{what}: {type(error).__name__}"
    return None


def _gpus() -> tuple[GpuReport, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        arch = f"sm_{device.major}{device.minor}"
        found.append(GpuReport(index=index, name=device.name, memory_bytes=device.total_memory, arch=arch))
    return tuple(found)


def _checks() -> tuple[Check, ...]:
    return (*(_program(name) for name in CUDA_PROGRAMS), _python_headers(), _proc())


def _program(name: str) -> Check:
    place = shutil.which(name) or _bundled(name)
    message = "found" if place else f"{name} is not on PATH"
    return Check(name=name, ok=place is not None, message=message, needed_for=("cuda",))


def _bundled(name: str) -> str | None:
    """ptxas of the triton wheel, where PATH has none."""
    if name != "ptxas":
        return None
    spec = importlib.util.find_spec("triton")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        candidate = Path(folder) / "backends" / "nvidia" / "bin" / "ptxas"
        if candidate.is_file():
            return str(candidate)
    return None


def _python_headers() -> Check:
    ok = (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file()
    message = "found" if ok else "Python.h is missing; install the Python headers (python3-dev)"
    return Check(name="python headers", ok=ok, message=message, needed_for=("cuda",))


def _proc() -> Check:
    try:
        ok = "Pss_Anon" in Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        ok = False
    message = "found" if ok else "/proc/self/smaps_rollup has no Pss_Anon; memory is reported as 0"
    return Check(name="memory accounting", ok=ok, message=message)
