"""Which uploads of killed attempts are kept, and which one the next attempt gets."""

from __future__ import annotations

import pytest

from exporter.contract.errors import Cancelled, ExecutorLost, StoreUnavailable, UnsupportedModel, WeightlessError
from exporter.contract.events import UploadEvent
from exporter.store.memory import MemoryStore
from service.executors.base import Ended, Fate
from service.resume import may_go_on, open_upload
from service.running import Gone, Running
from tests.unit.service.conftest import MakeExport


class Bucket(MemoryStore):
    """Keys as a bucket has them."""

    def key_of(self, uri: str) -> str | None:
        start = "s3://b/p/"
        return uri.removeprefix(start) if uri.startswith(start) else None


def opened(uri: str, upload: str = "u", part_size: int = 5) -> UploadEvent:
    return UploadEvent(seq=1, time="t", upload_id=upload, uri=uri, part_size=part_size, state="opened")


def test_the_newest_upload_of_weights_in_a_bucket_is_gone_on_with(make_export: MakeExport) -> None:
    export, store = make_export(prefix="team-a"), Bucket("memory://resume")
    place = f"s3://b/p/team-a/weights/{export.id}-1/model.ptd"
    found = open_upload(export, [opened(place, "old"), opened(place, "new")], store)
    assert found is not None
    assert (found.key, found.upload_id, found.part_size) == (f"weights/{export.id}-1/model.ptd", "new", 5)
    for uri in (
        f"s3://other/weights/{export.id}-1/model.ptd",
        f"file:///store/weights/{export.id}-1/model.ptd",
        "s3://b/p/team-a/weights/exp_01ARZ3NDEKTSV4RRFFQ69G5FAV-1/model.ptd",
        f"s3://b/p/team-a/weights/{export.id}-1/leases/x",
    ):
        assert open_upload(export, [opened(uri)], store) is None
    assert open_upload(export, [opened(place, part_size=0)], store) is None


@pytest.mark.parametrize(
    ("fate", "error", "stop", "kept"),
    [
        (Fate.EXITED, ExecutorLost("killed"), None, True),
        (Fate.EXITED, StoreUnavailable("away"), None, True),
        (Fate.EXITED, UnsupportedModel("no"), None, False),
        (Fate.EXITED, Cancelled("enough"), Cancelled("enough"), False),
        (Fate.VANISHED, ExecutorLost("perhaps it still runs"), None, False),
    ],
)
def test_an_upload_is_kept_for_a_retry_of_what_surely_ended(
    make_export: MakeExport, fate: Fate, error: WeightlessError, stop: WeightlessError | None, kept: bool
) -> None:
    running = Running(make_export(), Gone(), 0, 0.0)
    running.ended, running.stop_reason = Ended(fate, 137), stop
    assert may_go_on(running, error) is kept
