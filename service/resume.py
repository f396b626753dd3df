"""Uploads of killed attempts that the next attempt of the same export may go on with."""

from __future__ import annotations

from exporter.contract.errors import Cancelled, ExecutorLost, WeightlessError
from exporter.contract.events import UploadEvent
from exporter.contract.spec import OpenUpload
from service.executors.base import Fate
from service.jobs import Export
from service.ports import ArtifactStore
from service.running import Running


def may_go_on(running: Running, error: WeightlessError) -> bool:
    """Whether a dead attempt's uploads are kept: another attempt is due, and this one surely sends no more.

    One whose process may still live somewhere could complete or abort the upload under its successor's hands.
    """
    if running.ended is None or running.ended.fate is not Fate.EXITED or isinstance(running.stop_reason, Cancelled):
        return False
    return running.export.may_retry(error.retryable, lost=isinstance(error, ExecutorLost))


def open_upload(export: Export, uploads: list[UploadEvent], store: ArtifactStore) -> OpenUpload | None:
    """The newest of `uploads`, those that events of earlier attempts left open, if it is one of weights in a bucket.

    A directory's store writes as fast as it could compare, and after a power cut its parts may be torn.
    """
    for line in reversed(uploads):
        key = store.key_of(line.uri) if line.uri.startswith("s3://") else None
        key = None if key is None else key.removeprefix(f"{export.prefix}/" if export.prefix else "")
        if key is not None and line.part_size and key.startswith(f"weights/{export.id}-") and key.count("/") == 2:
            return OpenUpload(key=key, upload_id=line.upload_id, part_size=line.part_size)
    return None
