"""What a Ray cluster can export: one `doctor` job for each kind of node, and their reports made into one."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import structlog

from exporter.contract.errors import ExecutorLost, WeightlessError
from exporter.contract.machine import BackendReport, MachineReport, RecipeReport
from service.executors.ray_entrypoint import doctor_job
from service.executors.ray_jobs import Node, RayJobs

log = structlog.get_logger(__name__)

DOCTOR_SECONDS = 300.0
"""How long a node may take to describe itself."""
POLL_SECONDS = 1.0
MAX_KINDS = 16
"""Kinds of nodes that are described."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The merged report and how many exports fit at once."""

    report: MachineReport
    slots: int


async def describe_cluster(jobs: RayJobs) -> Cluster:
    """Describe every kind of node; `ExecutorLost` where none answers."""
    nodes = await jobs.nodes()
    kinds = list({(node.gpus > 0, node.features): node for node in nodes}.values())[:MAX_KINDS]
    answers = await asyncio.gather(*(_describe(jobs, node) for node in kinds), return_exceptions=True)
    for node, answer in zip(kinds, answers, strict=True):
        if isinstance(answer, WeightlessError):
            log.warning("a Ray node did not describe itself", node=node.name, error=answer.message, hint=answer.hint)
    reports = [answer for answer in answers if isinstance(answer, MachineReport)]
    if not reports:
        failure = next((answer for answer in answers if isinstance(answer, BaseException)), None)
        raise failure or ExecutorLost("the Ray cluster has no nodes")
    return Cluster(merge(reports), slots(nodes))


def slots(nodes: Sequence[Node]) -> int:
    """One export per GPU; without GPUs one per node. Ray itself makes those wait that do not fit."""
    return max(1, sum(node.gpus for node in nodes) or len(nodes))


def merge(reports: Sequence[MachineReport]) -> MachineReport:
    """One report: a recipe or back end is there where any node has it; each CUDA version is a back end of its own."""
    return MachineReport(
        versions={name: version for report in reversed(reports) for name, version in report.versions.items()},
        recipes=tuple(_recipes(recipe for report in reports for recipe in report.recipes)),
        backends=tuple(_backends(backend for report in reports for backend in report.backends)),
        gpus=tuple(gpu for report in reports for gpu in report.gpus),
        checks=tuple({check.name: check for report in reports for check in report.checks}.values()),
    )


def with_features(report: MachineReport, features: frozenset[str]) -> MachineReport:
    """The report of a node: a CUDA version that Ray does not know of the node is not available through Ray."""
    return report.model_copy(update={"backends": tuple(_known(backend, features) for backend in report.backends)})


def _known(backend: BackendReport, features: frozenset[str]) -> BackendReport:
    resource = f"cuda-{backend.cuda_version}"
    if backend.name != "cuda" or not backend.available or backend.cuda_version is None or resource in features:
        return backend
    reason = f"""Ray does not know of it: start the node with --resources '{{"{resource}": 1}}'"""
    return backend.model_copy(update={"available": False, "reason": reason})


def _recipes(found: Iterable[RecipeReport]) -> list[RecipeReport]:
    best: dict[str, RecipeReport] = {}
    for recipe in found:
        if recipe.name not in best or (recipe.available and not best[recipe.name].available):
            best[recipe.name] = recipe
    return list(best.values())


def _backends(found: Iterable[BackendReport]) -> list[BackendReport]:
    best: dict[tuple[str, str | None], BackendReport] = {}
    for backend in found:
        key = (backend.name, backend.cuda_version if backend.available else None)
        best.setdefault(key, backend)
    there = {name for (name, _), backend in best.items() if backend.available}
    return [backend for (name, _), backend in best.items() if backend.available or name not in there]


async def _describe(jobs: RayJobs, node: Node) -> MachineReport:
    submission = f"weightless-doctor-{uuid.uuid4().hex[:16]}"
    await jobs.submit(doctor_job(submission, node.id))
    ends = time.monotonic() + DOCTOR_SECONDS
    while True:
        await asyncio.sleep(POLL_SECONDS)
        job = await jobs.find(submission)
        if job is None or job.terminal:
            break
        if time.monotonic() > ends:
            await jobs.stop(submission)
            raise ExecutorLost(f"the node {node.name} did not describe itself within {DOCTOR_SECONDS:.0f} seconds")
    text = await jobs.logs(submission)
    if job is not None:
        await jobs.delete(submission)
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                return with_features(MachineReport.model_validate_json(line), node.features)
            except ValueError:
                continue
    tail = " ".join(text.strip().splitlines()[-3:])[-300:]
    raise ExecutorLost(f"doctor gave no report on the node {node.name}", hint=f"Its last words: {tail}")
