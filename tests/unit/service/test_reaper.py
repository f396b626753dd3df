"""The deployment's id, and orphaned uploads that a running service finds."""

from __future__ import annotations

import json
import time
import uuid
from pathlib import Path

import pytest

from exporter.contract.errors import Cancelled, ExecutorLost, IllegalState
from exporter.contract.objects import Upload
from exporter.store.open import open_store
from service.commands.collect import collect
from service.commands.orphans import Orphans
from service.database import Database
from service.deployment import deployment_id
from service.job_queue import Claimer, JobQueue
from service.job_store import JobStore
from service.jobs import Export, new_id
from service.reaper import Reaper
from service.settings import Settings
from tests.unit.service.conftest import MakeExport


class Room:
    """A service's parts around one database and one store."""

    def __init__(self, database: Database, folder: Path) -> None:
        self.settings = Settings(
            data_dir=folder, database_url=str(database.url), store=f"memory://{uuid.uuid4().hex}", reap_grace=3600
        )
        self.jobs, self.queue = JobStore(database), JobQueue(database)
        self.orphans = Orphans(self.jobs, self.settings, deployment_id(database))
        self.store = open_store(self.settings.store_spec())

    def upload(self, key: str, prefix: str = "") -> Upload:
        store = open_store(self.settings.store_spec(prefix))
        return store.create_upload(key, media_type="x", metadata={}, part_size=5 * 2**20)

    def of(self, export_id: str, attempt: int, prefix: str = "") -> Upload:
        return self.upload(f"weights/{export_id}-{attempt}/model.ptd", prefix)

    def running(self, export: Export) -> Export:
        self.jobs.submit(export)
        claimed = self.queue.claim(Claimer("me", "executor", frozenset({"xnnpack"})), "host/0", 60.0)
        assert claimed is not None
        assert claimed.id == export.id
        return claimed

    def ids(self, uploads: list[Upload]) -> set[str]:
        return {upload.id for upload in uploads}


@pytest.fixture
def room(sqlite: Database, tmp_path: Path) -> Room:
    return Room(sqlite, tmp_path)


def test_a_database_has_one_id(database: Database) -> None:
    first = deployment_id(database)
    assert len(first) == 32
    assert deployment_id(database) == first


def test_uploads_of_dead_attempts_go_at_once_and_no_others(room: Room, make_export: MakeExport) -> None:
    ended = room.running(make_export())
    room.queue.cancel(ended, Cancelled("on request"))
    waiting = room.running(make_export())
    room.queue.requeue(waiting, ExecutorLost("gone"), lost=True, delay=3600.0)
    alive = room.running(make_export(prefix="team-a"))
    dead = [room.of(ended.id, 1)]
    resumable = room.of(waiting.id, 1)  # the next attempt may go on with it
    kept = [
        room.of(alive.id, 1, "team-a"),
        room.of(waiting.id, 2),  # an attempt that began after the database was asked
        room.of(new_id(), 1),  # of an export that this database does not know
        room.upload("other/file"),
    ]
    now = time.time()
    assert room.ids(room.orphans.abort(now)) == room.ids(dead)
    assert room.orphans.abort(now) == []
    assert room.ids(room.orphans.abort(now + 3601)) == {kept[1].id}
    assert room.ids(room.orphans.abort(now + 8 * 86_400)) == {kept[2].id}
    assert room.ids(
        [*room.store.list_uploads(""), *open_store(room.settings.store_spec("team-a")).list_uploads("")]
    ) == {
        resumable.id,
        kept[0].id,
        kept[3].id,
    }


def test_a_prefix_of_another_deployment_is_left_alone(room: Room, make_export: MakeExport) -> None:
    theirs = json.dumps({"deployment": "theirs"}).encode()
    room.store.put(".weightless.json", theirs, media_type="application/json")
    ended = room.running(make_export())
    room.queue.cancel(ended, Cancelled("on request"))
    room.of(ended.id, 1)
    with pytest.raises(IllegalState, match="another deployment"):
        room.orphans.abort(time.time())
    with pytest.raises(IllegalState, match="another deployment"):
        collect(room.settings, older_than=None, wait=None, now=time.time(), dry_run=False)
    Reaper(room.orphans.abort).round()  # says so in the log, and does not end the thread
    assert len(list(room.store.list_uploads(""))) == 1
    assert room.store.read(".weightless.json", 0, len(theirs)) == theirs


def test_the_store_names_the_deployment_and_gc_agrees(room: Room) -> None:
    assert room.orphans.abort(time.time()) == []
    found = room.store.head(".weightless.json")
    assert found is not None
    named = json.loads(room.store.read(".weightless.json", 0, found.size))
    assert named == {"deployment": deployment_id(Database(room.settings.sqlalchemy_url))}
    assert collect(room.settings, older_than=None, wait=None, now=time.time(), dry_run=False)["abortedUploads"] == []
