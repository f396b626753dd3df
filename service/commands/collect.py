"""What `weightless gc` does: the database says what lives, and each prefix of the store is swept by that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from exporter.artifact.gc import Sweep, Swept
from exporter.artifact.owners import Owner
from exporter.artifact.ports import SweptStore
from exporter.artifact.reap import reap
from exporter.store.open import open_store
from service.commands.uploads import recorded_uploads
from service.database import Database
from service.deployment import deployment_id
from service.job_store import JobStore, ListFilter
from service.jobs import Export
from service.settings import Settings

LONGEST_DEADLINE = 86_400
"""Seconds that an export without a `wallTime` is taken to run at most."""
PAGE = 1000


def collect(
    settings: Settings, *, older_than: int | None, wait: int | None, now: float, dry_run: bool
) -> dict[str, Any]:
    """Sweep the store and the database; the JSON object that `gc --json` prints."""
    database = Database(settings.sqlalchemy_url)
    try:
        database.migrate()
        deployment = deployment_id(database)
        return _collect(JobStore(database), settings, deployment, older_than, wait, now, dry_run)
    finally:
        database.dispose()


def _collect(
    jobs: JobStore,
    settings: Settings,
    deployment: str,
    older_than: int | None,
    wait: int | None,
    now: float,
    dry_run: bool,
) -> dict[str, Any]:
    exports = list(_all(jobs))
    cutoff = None if older_than is None else now - older_than
    due = {export.id for export in exports if _due(export, cutoff, now)}
    active = {export.id for export in exports if not export.state.terminal}
    known = {export.id for export in exports}
    # An attempt may go on with the upload of an earlier one, so all of them live until the export has ended.
    running = {
        Owner(export.id, attempt)
        for export in exports
        if not export.state.terminal
        for attempt in range(1, export.attempt + 1)
    }
    longest = max((_deadline(export) for export in exports if export.id in active), default=LONGEST_DEADLINE)
    total, aborted = Swept(), []
    for prefix in sorted({export.prefix for export in exports} | {""}):
        store: SweptStore = open_store(settings.store_spec(prefix))
        swept = Sweep(
            store,
            active=active,
            known=known,
            due=due,
            cutoff=cutoff,
            now=now,
            wait=max(longest, LONGEST_DEADLINE) + settings.reap_grace if wait is None else wait,
            grace=settings.reap_grace,
            deployment=deployment,
            dry_run=dry_run,
        ).run()
        _add(total, swept, prefix)
        mine = [export for export in exports if export.prefix == prefix]
        recorded = [] if store.capabilities.list_uploads else list(recorded_uploads(jobs, store, mine))
        reaped = reap(
            store,
            running=running,
            known=known,
            recorded=recorded,
            now=now,
            grace=settings.reap_grace,
            deployment=deployment,
            dry_run=dry_run,
        )
        aborted += [{"key": _join(prefix, upload.key), "uploadId": upload.id} for upload in reaped.aborted]
    expired = sorted(due | set(total.expired))
    if not dry_run:
        for export_id in due:
            jobs.delete(export_id)
    return {
        "dryRun": dry_run,
        "expired": expired,
        "deleted": total.deleted,
        "marked": total.marked,
        "waiting": total.waiting,
        "freedBytes": total.freed_bytes,
        "abortedUploads": aborted,
        "problems": total.problems,
    }


def _all(jobs: JobStore) -> Iterator[Export]:
    before: str | None = None
    while page := jobs.list(ListFilter(), limit=PAGE, before=before):
        yield from page
        before = page[-1].id


def _due(export: Export, cutoff: float | None, now: float) -> bool:
    if not export.state.terminal or export.finished_at is None:
        return False
    old = cutoff is not None and export.finished_at < cutoff
    return old or (export.expires_at is not None and export.expires_at <= now)


def _deadline(export: Export) -> int:
    return export.body.budgets.wall_time or LONGEST_DEADLINE


def _add(total: Swept, swept: Swept, prefix: str) -> None:
    total.expired += swept.expired
    total.deleted += [_join(prefix, key) for key in swept.deleted]
    total.marked += [_join(prefix, key) for key in swept.marked]
    total.waiting += [_join(prefix, key) for key in swept.waiting]
    total.problems += [_join(prefix, text) for text in swept.problems]
    total.freed_bytes += swept.freed_bytes


def _join(prefix: str, key: str) -> str:
    return f"{prefix}/{key}" if prefix else key
