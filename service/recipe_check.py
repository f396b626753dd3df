"""Whether some executor can do what a request asks: recipe, options, back end; and what a dry run says about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from exporter.contract.errors import InvalidRequest, ToolchainMismatch
from exporter.contract.machine import MachineReport, RecipeReport
from exporter.contract.spec import ExportRequest
from service.executor_table import ExecutorRow
from service.jobs import Export, requirement


def capabilities(report: MachineReport) -> frozenset[str]:
    """What a machine can serve: `xnnpack`, `portable`, `cuda` and `cuda-{version}`."""
    found: set[str] = set()
    for backend in report.backends:
        if backend.available:
            found.add(backend.name)
            if backend.name == "cuda" and backend.cuda_version:
                found.add(f"cuda-{backend.cuda_version}")
    return frozenset(found)


def check_recipe(request: ExportRequest, recipes: Mapping[str, RecipeReport]) -> None:
    """`InvalidRequest` with the field, for a recipe or an option that no executor knows."""
    recipe = recipes.get(request.recipe)
    if recipe is None:
        known = ", ".join(recipes) or "none yet"
        raise InvalidRequest(
            f"there is no recipe {request.recipe}", hint=f"Recipes here: {known}. See GET /recipes.", field="recipe"
        )
    error = best_match(Draft202012Validator(recipe.options_schema).iter_errors(request.options))
    if error is not None:
        where = ".".join(["options", *(str(part) for part in error.absolute_path)])
        unknown = sorted(set(request.options) - set(recipe.options_schema.get("properties", {})))
        if error.validator == "additionalProperties" and where == "options" and unknown:
            where = f"options.{unknown[0]}"
            message = f"the recipe {request.recipe} has no option {unknown[0]}"
        else:
            message = f"{where}: {error.message[:300]}"
        raise InvalidRequest(message, hint=f"GET /recipes/{request.recipe} has the options' schema.", field=where)


def check_target(request: ExportRequest, rows: Sequence[ExecutorRow]) -> list[ExecutorRow]:
    """The executors that can serve the request; `ToolchainMismatch` where none can."""
    needed = requirement(request)
    reasons: list[str] = []
    able: list[ExecutorRow] = []
    for row in rows:
        if row.report is None:
            continue
        recipe = next((item for item in row.report.recipes if item.name == request.recipe), None)
        backend = next((item for item in row.report.backends if item.name == request.target.backend), None)
        if recipe is not None and not recipe.available:
            reasons.append(f"{row.host}: {recipe.reason or 'the recipe is not available'}")
        elif needed not in capabilities(row.report):
            lacking = backend.reason if backend is not None and backend.reason else f"no {needed}"
            reasons.append(f"{row.host}: {lacking}")
        elif recipe is not None:
            able.append(row)
    if not able:
        raise ToolchainMismatch(
            f"no known executor can serve the recipe {request.recipe} with the target {needed}",
            field="target",
            executors=reasons[:20],
        )
    return able


def dry_run(request: ExportRequest, able: Sequence[ExecutorRow], previous: Export | None) -> dict[str, Any]:
    """What is known before an export runs. Figures come from the newest success of the same recipe and source."""
    peaks, size = None, None
    if previous is not None:
        peaks = dict(previous.peaks)
        size = previous.bytes_uploaded + previous.bytes_reused
    reusable = previous is not None and request.reuse_weights
    return {
        "preflight": {
            "ok": True,
            "requirement": requirement(request),
            "executors": [
                {"host": row.host, "kind": row.kind, "slots": row.slots, "busy": row.busy, "alive": row.alive}
                for row in able
            ],
        },
        "estimate": {
            "peaks": peaks or None,
            "bytes": size,
            "basis": None if previous is None else previous.id,
        },
        "reuse": {
            "possible": reusable,
            "export": previous.id if previous is not None and reusable else None,
            "bytes": size if reusable else None,
        },
    }
