"""Uploads that events named, for stores that cannot list them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from exporter.artifact.ports import SweptStore
from exporter.contract.objects import Upload
from service.job_store import JobStore
from service.jobs import Export


def recorded_uploads(jobs: JobStore, store: SweptStore, exports: Iterable[Export]) -> Iterator[Upload]:
    """Uploads of `exports` that were opened and, as far as their events say, not ended."""
    for export in exports:
        opened: dict[str, Upload] = {}
        for row in jobs.events(export.id, kind="upload", limit=10_000):
            event = _upload_event(row.data)
            key = store.key_of(str(event.get("uri", "")))
            if event.get("state") != "opened":
                opened.pop(str(event.get("uploadId")), None)
            elif key is not None:
                opened[str(event["uploadId"])] = Upload(key, str(event["uploadId"]))
        yield from opened.values()


def _upload_event(text: str) -> dict[str, Any]:
    event = json.loads(text)
    return event if isinstance(event, dict) else {}
