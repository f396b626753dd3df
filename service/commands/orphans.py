"""Uploads that nobody will finish, in every prefix of the store: what the service looks for while it runs."""

from __future__ import annotations

import json
from collections.abc import Iterator

from exporter.artifact.owners import DEPLOYMENT, owner_of
from exporter.artifact.ports import SweptStore
from exporter.artifact.reap import Reaped, reap
from exporter.contract.errors import NotFound
from exporter.contract.objects import Upload
from exporter.store.open import open_store
from service.commands.uploads import recorded_uploads
from service.job_store import JobStore, ListFilter
from service.jobs import Export
from service.settings import Settings

RECENT = 200
"""Newest exports whose recorded uploads are looked at in a store that cannot list any; `weightless gc` looks at all."""


class Orphans:
    """Finds and aborts them. Stores are opened once; each prefix is marked as this deployment's own at first sight."""

    def __init__(self, jobs: JobStore, settings: Settings, deployment: str) -> None:
        self._jobs = jobs
        self._settings = settings
        self._deployment = deployment
        self._stores: dict[str, SweptStore] = {}

    def abort(self, now: float) -> list[Upload]:
        """One round; the uploads that were given back. `IllegalState` where a prefix is another deployment's."""
        found: list[Upload] = []
        for prefix in sorted({"", *self._jobs.prefixes()}):
            found += self._reap(self._store(prefix), prefix, now).aborted
        return found

    def _store(self, prefix: str) -> SweptStore:
        if prefix not in self._stores:
            store: SweptStore = open_store(self._settings.store_spec(prefix))
            body = json.dumps({"deployment": self._deployment}).encode()
            store.put(DEPLOYMENT, body, media_type="application/json", if_absent=True)
            self._stores[prefix] = store
        return self._stores[prefix]

    def _reap(self, store: SweptStore, prefix: str, now: float) -> Reaped:
        # Uploads first, their exports after: what is seen open and belongs to an ended attempt will not be finished.
        uploads = list(self._uploads(store, prefix))
        owners = {owner for upload in uploads if (owner := owner_of(upload.key)) is not None}
        exports = {owner: export for owner in owners if (export := self._export(owner.export)) is not None}
        # An attempt may go on with the upload of an earlier one, so all of them live until the export has ended.
        unfinished = {owner for owner, e in exports.items() if not e.state.terminal and owner.attempt <= e.attempt}
        return reap(
            store,
            running=unfinished,
            known={owner.export for owner in exports},
            dead=[owner for owner, export in exports.items() if export.state.terminal],
            recorded=uploads,
            now=now,
            grace=self._settings.reap_grace,
            deployment=self._deployment,
        )

    def _uploads(self, store: SweptStore, prefix: str) -> Iterator[Upload]:
        if store.capabilities.list_uploads:
            yield from store.list_uploads("")
            return
        exports = [item for item in self._jobs.list(ListFilter(), limit=RECENT) if item.prefix == prefix]
        yield from recorded_uploads(self._jobs, store, exports)

    def _export(self, export_id: str) -> Export | None:
        try:
            return self._jobs.get(export_id)
        except NotFound:
            return None
