"""What every route needs: who is calling, what they may do, and the export that they named."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import Depends, Path, Request
from starlette.concurrency import run_in_threadpool

from exporter.contract.errors import NotFound
from exporter.contract.spec import EXPORT_ID
from service.auth import Authenticator
from service.executor_table import ExecutorTable
from service.job_store import JobStore
from service.jobs import Export
from service.policy import Access, Policy
from service.schemas import export_view

FIRST_REPORT_SECONDS = 60.0
"""How long a request waits for the very first description of an executor, on a fresh installation."""


async def access(request: Request) -> Access:
    """The caller's rights, or `Unauthenticated`."""
    authenticator: Authenticator = request.app.state.authenticator
    policy: Policy = request.app.state.policy
    header = request.headers.get("authorization")
    if authenticator.anonymous:
        return policy.access(authenticator.caller(header))
    return policy.access(await run_in_threadpool(authenticator.caller, header))


Allowed = Annotated[Access, Depends(access)]
ExportId = Annotated[str, Path(description="`exp_` and a ULID", max_length=64)]


async def described(request: Request) -> None:
    """Wait for the first description of an executor, where there never was one."""
    if request.app.state.described:
        return
    table: ExecutorTable = request.app.state.executors
    for _ in range(int(FIRST_REPORT_SECONDS / 0.1)):
        if request.app.state.feed.stopping or await run_in_threadpool(table.described):
            request.app.state.described = not request.app.state.feed.stopping
            return
        await asyncio.sleep(0.1)


def find(request: Request, allowed: Access, export_id: str) -> Export:
    """The export, or `NotFound` where there is none or it is somebody else's."""
    allowed.require("read")
    jobs: JobStore = request.app.state.jobs
    if EXPORT_ID.fullmatch(export_id) is None:
        raise NotFound("there is no such export")
    export = jobs.get(export_id)
    if not allowed.may_see(export):
        raise NotFound(f"there is no export {export_id}")
    return export


def view(request: Request, export: Export) -> dict[str, Any]:
    """One export as the API returns it."""
    jobs: JobStore = request.app.state.jobs
    attempts = jobs.attempts([export.id])[export.id] if export.attempt else []
    return export_view(export, attempts, request.app.state.settings.base_url, position=jobs.position(export))
