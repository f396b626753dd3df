"""Multipart uploads that nobody will finish: given back once their attempt no longer runs.

Only uploads whose key names an attempt of ours are looked at; whatever else lives in the bucket is not ours to judge.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from exporter.artifact.owners import Owner, check_deployment, owner_of
from exporter.artifact.ports import SweptStore
from exporter.contract.objects import Upload

UNKNOWN_AGE = 7 * 86_400
"""Seconds after which an upload is aborted whose export this database does not know."""


@dataclass(frozen=True, slots=True)
class Reaped:
    """Uploads that were given back (or would be, in a dry run), and those of ours that stay."""

    aborted: tuple[Upload, ...]
    kept: tuple[Upload, ...]


def reap(
    store: SweptStore,
    *,
    running: Collection[Owner],
    known: Collection[str],
    dead: Collection[Owner] = (),
    recorded: Iterable[Upload] = (),
    now: float,
    grace: float,
    deployment: str | None = None,
    dry_run: bool = False,
) -> Reaped:
    """Abort orphaned uploads below the store's prefix.

    `running`: attempts that may still be sending. `known`: ids of every export in the database. `dead`: attempts that
    have ended, whose uploads go at once. `recorded`: uploads that events named, which is all there is to go by in a
    store that cannot list them. An upload without a start time counts as old if its export is known, else as new.
    """
    check_deployment(store, deployment)
    found: dict[tuple[str, str], Upload] = {(upload.key, upload.id): upload for upload in recorded}
    if store.capabilities.list_uploads:
        found.update({(upload.key, upload.id): upload for upload in store.list_uploads("")})
    aborted, kept = [], []
    for upload in found.values():
        owner = owner_of(upload.key)
        if owner is None:
            continue
        if owner in dead or _orphaned(upload, owner, running, known, now, grace):
            if not dry_run:
                store.abort_upload(upload)
            aborted.append(upload)
        else:
            kept.append(upload)
    return Reaped(tuple(aborted), tuple(kept))


def _orphaned(
    upload: Upload, owner: Owner, running: Collection[Owner], known: Collection[str], now: float, grace: float
) -> bool:
    if owner in running:
        return False
    if owner.export in known:
        return upload.started is None or now - upload.started >= grace
    return upload.started is not None and now - upload.started >= UNKNOWN_AGE
