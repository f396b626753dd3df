"""What only a directory can get wrong: permissions, symlinks, a full disk, two writers, kills."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from exporter.contract.errors import InvalidRequest, NotFound, StoreRejected, WeightlessError
from exporter.contract.spec import StoreSpec
from exporter.store.local import UPLOADS, LocalStore
from exporter.store.open import open_store
from exporter.stream.crc import crc64nvme

TYPE = "application/octet-stream"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(f"file://{tmp_path}/root")


def test_files_are_private_whatever_the_umask(store: LocalStore) -> None:
    old = os.umask(0)
    try:
        store.put("a/b/c", b"x", media_type=TYPE)
        upload = store.create_upload("d/e", media_type=TYPE, metadata={}, part_size=10)
        part = store.upload_part(upload, 1, memoryview(b"y"), crc64nvme=None)
        store.complete_upload(upload, [part], crc64nvme=None)
    finally:
        os.umask(old)
    for path in store.root.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_nothing_is_made_before_the_first_write(store: LocalStore) -> None:
    assert store.head("x") is None
    assert list(store.list("")) == []
    assert list(store.list_uploads("")) == []
    assert not store.root.exists()


def test_symlinks_below_the_root_are_not_followed(store: LocalStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    store.put("here", b"x", media_type=TYPE)
    (store.root / "dir").symlink_to(outside)
    (store.root / "file").symlink_to(outside / "secret")
    for key in ("dir/secret", "file"):
        assert store.head(key) is None
        with pytest.raises((NotFound, StoreRejected)):
            store.read(key, 0, 6)
    with pytest.raises(StoreRejected):
        store.put("dir/new", b"x", media_type=TYPE)
    store.put("file", b"mine", media_type=TYPE)
    assert (outside / "secret").read_bytes() == b"secret"
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert [item.key for item in store.list("")] == ["file", "here"]


def test_a_root_reached_over_a_symlink_is_fine(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    store = LocalStore(f"file://{tmp_path}/link")
    store.put("k", b"x", media_type=TYPE)
    assert (tmp_path / "real/k").read_bytes() == b"x"


def test_a_pipe_or_directory_is_no_object(store: LocalStore) -> None:
    store.put("d/x", b"x", media_type=TYPE)
    os.mkfifo(store.root / "pipe")
    for key in ("pipe", "d"):
        assert store.head(key) is None
        with pytest.raises((NotFound, StoreRejected)):
            store.read(key, 0, 1)
    assert [item.key for item in store.list("")] == ["d/x"]


def test_the_uploads_folder_is_out_of_reach(store: LocalStore) -> None:
    upload = store.create_upload("k", media_type=TYPE, metadata={}, part_size=10)
    for key in (UPLOADS, f"{UPLOADS}/{upload.id}/data"):
        with pytest.raises(InvalidRequest):
            store.read(key, 0, 0)
        assert store.key_of(f"file://{store.root}/{key}") is None
    assert list(store.list("")) == []


@pytest.mark.parametrize("identifier", ["", ".", "..", "../..", "x" * 32, "A" * 32])
def test_an_upload_id_is_never_a_path(store: LocalStore, identifier: str) -> None:
    from exporter.contract.objects import Upload

    store.put("precious", b"x", media_type=TYPE)
    with pytest.raises(WeightlessError):
        store.abort_upload(Upload("k", identifier))
    with pytest.raises(StoreRejected):
        store.upload_part(Upload("k", identifier), 1, memoryview(b"x"), crc64nvme=None)
    assert store.read("precious", 0, 1) == b"x"


def test_a_wrong_crc_is_refused(store: LocalStore) -> None:
    upload = store.create_upload("k", media_type=TYPE, metadata={}, part_size=10)
    with pytest.raises(StoreRejected, match="CRC"):
        store.upload_part(upload, 1, memoryview(b"x"), crc64nvme=crc64nvme(b"y"))
    part = store.upload_part(upload, 1, memoryview(b"x"), crc64nvme=None)
    with pytest.raises(StoreRejected, match="CRC"):
        store.complete_upload(upload, [part], crc64nvme=crc64nvme(b"y"))


def test_a_part_larger_than_agreed_is_refused(store: LocalStore) -> None:
    upload = store.create_upload("k", media_type=TYPE, metadata={}, part_size=4)
    with pytest.raises(StoreRejected):
        store.upload_part(upload, 1, memoryview(b"12345"), crc64nvme=None)
    for number in (0, -1, 10_001):
        with pytest.raises(StoreRejected):
            store.upload_part(upload, number, memoryview(b"1"), crc64nvme=None)


FULL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
from exporter.store.local import LocalStore
from exporter.contract.errors import DiskFull
store = LocalStore(sys.argv[1])
try:
    store.put("big", bytes(400_000), media_type="x")
except DiskFull as error:
    print("put", error.code, error.retryable)
upload = store.create_upload("multi", media_type="x", metadata={}, part_size=200_000)
store.upload_part(upload, 1, memoryview(bytes(200_000)), crc64nvme=None)
try:
    store.upload_part(upload, 2, memoryview(bytes(200_000)), crc64nvme=None)
except DiskFull as error:
    print("part", error.code, error.retryable)
store.abort_upload(upload)
"""


def test_a_full_disk_is_disk_full_and_leaves_nothing(store: LocalStore) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, f"file://{store.root}"], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines() == ["put disk-full True", "part disk-full True"]
    assert [path for path in store.root.rglob("*") if path.is_file()] == []


WRITER = """
import sys
from exporter.store.local import LocalStore
store = LocalStore(sys.argv[1])
print("ready", flush=True)
while True:
    store.put("hot", b"A" * 200_000, media_type="x")
    store.put("hot", b"B" * 100_000, media_type="x")
"""


def test_a_killed_writer_leaves_a_whole_object(store: LocalStore) -> None:
    for turn in range(5):
        with subprocess.Popen([sys.executable, "-c", WRITER, f"file://{store.root}"], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            time.sleep(0.01 + 0.013 * turn)
            writer.send_signal(signal.SIGKILL)
        found = store.head("hot")
        if found is not None:
            body = store.read("hot", 0, found.size)
            assert body in (b"A" * 200_000, b"B" * 100_000)
        assert [item.key for item in store.list("")] == (["hot"] if found else [])


@pytest.mark.parametrize(
    "uri",
    ["file://", "file://host/x", "file:relative", "file:///a/../etc", "file:///x?q", "file:///x#f", "file:///%00"],
)
def test_uris_that_are_no_directory_are_refused(uri: str) -> None:
    with pytest.raises(InvalidRequest):
        LocalStore(uri)


def test_an_unknown_kind_of_store_is_refused() -> None:
    for uri in ("ftp://x", "http://169.254.169.254/", "", "/plain/path", "S4://x"):
        with pytest.raises(InvalidRequest):
            open_store(StoreSpec(uri=uri))


def test_what_killed_writers_left_is_swept_when_it_is_old(store: LocalStore) -> None:
    store.put("k", b"x", media_type=TYPE)
    old, new = (store.root / UPLOADS / name for name in ("old.put", "new.put"))
    for path in (old, new):
        path.write_bytes(b"x")
    os.utime(old, (1, 1))
    LocalStore(f"file://{store.root}").put("k2", b"x", media_type=TYPE)
    assert [old.exists(), new.exists()] == [False, True]
