"""Pull: whole and exact, or nothing in place and a sentence that says what is wrong."""

from __future__ import annotations

import io
import os
import threading
import time
import tracemalloc
from pathlib import Path

import pytest

from exporter.artifact.cache import WeightCache
from exporter.artifact.folder import WORK, Folder
from exporter.artifact.location import StoreOrigin, locate_manifest
from exporter.artifact.pull import pull, select
from exporter.artifact.stdout import stream_file
from exporter.artifact.transfer import Limits, Throttle
from exporter.artifact.verify import verify
from exporter.contract.errors import (
    Forbidden,
    IllegalState,
    InvalidRequest,
    NotFound,
    StoreUnavailable,
    VerificationFailed,
)
from exporter.contract.manifest import Manifest
from exporter.store.local import LocalStore

from .conftest import EXPORT, Export, make_export

SMALL = Limits(parallel=3, block=16 * 1024)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("base", [4096, None])
@pytest.mark.parametrize("header_size", [True, False])
@pytest.mark.parametrize("limits", [SMALL, Limits(parallel=1, block=1000), Limits()])
def test_files_arrive_byte_for_byte(tmp_path: Path, base: int | None, header_size: bool, limits: Limits) -> None:
    export = make_export(base=base, header_size=header_size)
    report = pull(export.manifest, export.origin, tmp_path / "out", limits=limits)
    assert contents(tmp_path / "out") == {name: export.bytes_of(name) for name in export.keys}
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(export.keys)
    assert report.bytes_fetched == sum(len(export.bytes_of(name)) for name in export.keys)


def test_empty_files_and_a_file_without_segments(tmp_path: Path) -> None:
    export = make_export([])
    pull(export.manifest, export.origin, tmp_path / "out", limits=SMALL)
    assert (tmp_path / "out/model.ptd").read_bytes() == export.bytes_of("model.ptd")


def spoilt(export: Export, kind: str) -> bytes:
    data = bytearray(export.bytes_of("model.ptd"))
    if kind == "empty":
        return b""
    if kind == "truncated":
        return bytes(data[:-1])
    if kind == "longer":
        return bytes(data) + b"\0"
    if kind == "zeroed":
        third = len(data) // 3
        data[third : 2 * third] = bytes(third)
    elif kind == "flipped":
        for at in range(9000, 9064):
            data[at] ^= 0xFF
    elif kind == "gap":
        data[4095] = 1
    elif kind == "header":
        data[12] ^= 1
    elif kind == "other":
        return make_export(seed=5).bytes_of("model.ptd")
    return bytes(data)


KINDS = {
    "absent": "is not stored",
    "empty": "is empty",
    "truncated": "is cut short",
    "longer": "is too long",
    "zeroed": "was zeroed",
    "flipped": "was altered",
    "gap": "is not zeros",
    "header": "the header",
    "other": "segment 0",
}


@pytest.mark.parametrize("kind", KINDS)
def test_spoilt_bytes_never_come_into_place(tmp_path: Path, export: Export, kind: str) -> None:
    if kind == "absent":
        export.store.delete(export.keys["model.ptd"])
    else:
        export.spoil("model.ptd", spoilt(export, kind))
    expected = NotFound if kind == "absent" else VerificationFailed
    with pytest.raises(expected, match=KINDS[kind]):
        pull(export.manifest, export.origin, tmp_path / "out", limits=SMALL)
    assert not (tmp_path / "out").exists() or contents(tmp_path / "out") == {}


def test_a_lying_size_costs_no_disk(tmp_path: Path, export: Export) -> None:
    raw = export.manifest.model_dump(mode="json", by_alias=True, exclude_none=True)
    raw["data"][0]["size"] = 2**59
    with pytest.raises(VerificationFailed, match="cut short"):
        pull(Manifest.model_validate(raw), export.origin, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "url",
    [
        "s3://elsewhere/model.ptd",
        "file:///etc/passwd",
        "http://169.254.169.254/latest",
        "memory://other/x",
        "memory://shelfish/x",
        "../../../secret",
        "1/../../../../x",
        "/etc/passwd",
        "%2e%2e/%2e%2e/%2e%2e/secret",
        "1//x",
        "1\\x",
    ],
)
def test_a_manifest_cannot_lead_elsewhere(tmp_path: Path, export: Export, url: str) -> None:
    raw = export.manifest.model_dump(mode="json", by_alias=True, exclude_none=True)
    raw["data"][0]["urls"] = [url]
    with pytest.raises(Forbidden):
        pull(Manifest.model_validate(raw), export.origin, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert export.store.reads == []


def test_a_foreign_url_is_shown_without_its_secrets(tmp_path: Path, export: Export) -> None:
    raw = export.manifest.model_dump(mode="json", by_alias=True, exclude_none=True)
    raw["program"]["urls"] = ["https://me:secret@host/x?X-Amz-Signature=secret"]
    with pytest.raises(Forbidden) as caught:
        pull(Manifest.model_validate(raw), export.origin, tmp_path / "out")
    assert "secret" not in str(caught.value.as_dict())
    assert "https://host/x" in caught.value.message


def test_an_origin_may_be_allowed_by_the_user(tmp_path: Path, export: Export) -> None:
    other = make_export().store
    other.root = "memory://other"
    raw = export.manifest.model_dump(mode="json", by_alias=True, exclude_none=True)
    raw["data"][0]["urls"] = ["memory://other/" + export.keys["model.ptd"]]
    export.store.delete(export.keys["model.ptd"])
    origin = StoreOrigin(export.store, f"exports/{EXPORT}", allowed=[other])
    pull(Manifest.model_validate(raw), origin, tmp_path / "out")
    assert (tmp_path / "out/model.ptd").read_bytes() == other.objects[export.keys["model.ptd"]]


def test_a_relative_url_may_go_up_inside_the_store(tmp_path: Path, export: Export) -> None:
    raw = export.manifest.model_dump(mode="json", by_alias=True, exclude_none=True)
    raw["data"][0]["urls"] = ["../../" + export.keys["model.ptd"]]
    pull(Manifest.model_validate(raw), export.origin, tmp_path / "out")
    assert (tmp_path / "out/model.ptd").read_bytes() == export.bytes_of("model.ptd")


@pytest.mark.parametrize("name", ["..", "a/b", "a\\b", "MODEL.PTE", "con", "x\n", ".weightless-pull", "ｍodel.pte"])
def test_names_are_one_component_and_distinct(tmp_path: Path, export: Export, name: str) -> None:
    raw = export.manifest.model_dump(mode="json", by_alias=True, exclude_none=True)
    raw["files"][0]["name"] = name
    with pytest.raises((ValueError, VerificationFailed)):
        pull(Manifest.model_validate(raw), export.origin, tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Killed(Exception):
    pass


def test_a_killed_pull_goes_on_where_it_was(tmp_path: Path, export: Export) -> None:
    seen = []

    def die(key: str, offset: int) -> None:
        seen.append(offset)
        if len(seen) > 12:
            raise Killed

    export.store.before_read = die
    with pytest.raises(Killed):
        pull(export.manifest, export.origin, tmp_path / "out", limits=SMALL)
    assert contents(tmp_path / "out") == {}
    export.store.before_read = None
    report = pull(export.manifest, export.origin, tmp_path / "out", limits=SMALL)
    assert contents(tmp_path / "out") == {name: export.bytes_of(name) for name in export.keys}
    assert report.bytes_reused >= 8 * SMALL.block
    assert report.bytes_fetched + report.bytes_reused == sum(len(export.bytes_of(name)) for name in export.keys)
    assert not (tmp_path / "out" / WORK).exists()


def test_what_an_earlier_run_left_is_not_believed(tmp_path: Path, export: Export) -> None:
    def die(key: str, offset: int) -> None:
        if offset > 10 * SMALL.block:
            raise Killed

    export.store.before_read = die
    with pytest.raises(Killed):
        pull(export.manifest, export.origin, tmp_path / "out", limits=SMALL)
    parts = sorted((tmp_path / "out" / WORK).glob("*.part"), key=lambda path: path.stat().st_size)
    with parts[-1].open("r+b") as file:
        file.seek(9000)
        file.write(b"\xff" * 100)
    export.store.before_read = None
    pull(export.manifest, export.origin, tmp_path / "out", limits=SMALL)
    assert contents(tmp_path / "out") == {name: export.bytes_of(name) for name in export.keys}


def test_a_second_pull_fetches_nothing(tmp_path: Path, export: Export) -> None:
    pull(export.manifest, export.origin, tmp_path / "out", limits=SMALL)
    export.store.reads.clear()
    report = pull(export.manifest, export.origin, tmp_path / "out", limits=SMALL)
    assert report.bytes_fetched == 0
    assert export.store.reads == []
    (tmp_path / "out/model.ptd").write_bytes(b"x" * len(export.bytes_of("model.ptd")))
    assert pull(export.manifest, export.origin, tmp_path / "out", limits=SMALL).bytes_fetched > 0
    assert contents(tmp_path / "out") == {name: export.bytes_of(name) for name in export.keys}


def test_the_journal_of_another_file_is_not_used(tmp_path: Path, export: Export) -> None:
    def die(key: str, offset: int) -> None:
        if offset > 10 * SMALL.block:
            raise Killed

    export.store.before_read = die
    with pytest.raises(Killed):
        pull(export.manifest, export.origin, tmp_path / "out", limits=SMALL)
    other = make_export(seed=7)
    report = pull(other.manifest, other.origin, tmp_path / "out", limits=SMALL)
    assert (tmp_path / "out/model.ptd").read_bytes() == other.bytes_of("model.ptd")
    assert report.bytes_reused == 0


def test_links_are_not_followed(tmp_path: Path, export: Export) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (tmp_path / "out").symlink_to(victim)
    with pytest.raises(InvalidRequest):
        pull(export.manifest, export.origin, tmp_path / "out")
    assert list(victim.iterdir()) == []
    (tmp_path / "out").unlink()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/model.pte").symlink_to(victim / "stolen")
    pull(export.manifest, export.origin, tmp_path / "out", limits=SMALL)
    assert list(victim.iterdir()) == []
    assert not (tmp_path / "out/model.pte").is_symlink()


def test_one_pull_at_a_time_in_a_folder(tmp_path: Path, export: Export) -> None:
    with Folder(tmp_path / "out"), pytest.raises(IllegalState):
        pull(export.manifest, export.origin, tmp_path / "out")


def test_the_manifest_is_kept_where_it_is_asked_for(tmp_path: Path, export: Export) -> None:
    pull(export.manifest, export.origin, tmp_path / "out", save=export.content)
    assert (tmp_path / "out/manifest.json").read_bytes() == export.content
    found = locate_manifest(str(tmp_path / "out"), lambda uri: LocalStore(uri))
    assert all(check.ok for check in verify(found.manifest, found.origin))
    (tmp_path / "out/model.pte").write_bytes(b"x")
    assert not all(check.ok for check in verify(found.manifest, found.origin))


def test_only_what_is_asked_for(tmp_path: Path, export: Export) -> None:
    pull(export.manifest, export.origin, tmp_path / "out", only=["program"])
    assert list(contents(tmp_path / "out")) == ["model.pte"]
    assert [entry.name for entry in select(export.manifest, ["files", "model.ptd"])] == ["model.ptd", "tokenizer.json"]
    with pytest.raises(InvalidRequest, match="no file 'nothing'"):
        select(export.manifest, ["nothing"])


@pytest.mark.parametrize("at", range(28))
def test_a_fault_at_any_read_leaves_nothing_wrong(tmp_path: Path, export: Export, at: int) -> None:
    calls = iter(range(10_000))
    lock = threading.Lock()

    def fault(key: str, offset: int) -> None:
        with lock:
            number = next(calls)
        if number == at:
            raise StoreUnavailable("503")

    export.store.before_read = fault
    try:
        pull(export.manifest, export.origin, tmp_path / "out", limits=SMALL)
    except StoreUnavailable:
        assert contents(tmp_path / "out") == {}
    else:
        assert contents(tmp_path / "out") == {name: export.bytes_of(name) for name in export.keys}


def test_buffers_stay_within_their_bound(tmp_path: Path) -> None:
    limits = Limits(parallel=4, block=256 * 1024)
    export = make_export([24 * 2**20])
    pull(export.manifest, export.origin, tmp_path / "warm", limits=limits)
    tracemalloc.start()
    pull(export.manifest, export.origin, tmp_path / "out", limits=limits)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The shelf itself copies each block that it is asked for, so a block counts twice here.
    assert peak < 2 * limits.buffer_bytes + 2**20


def test_cached_weights_are_not_fetched_again(tmp_path: Path, export: Export) -> None:
    cache = WeightCache(tmp_path / "cache", 2**20)
    pull(export.manifest, export.origin, tmp_path / "one", limits=SMALL, cache=cache)
    export.store.reads.clear()
    report = pull(export.manifest, export.origin, tmp_path / "two", limits=SMALL, cache=cache)
    assert contents(tmp_path / "two") == {name: export.bytes_of(name) for name in export.keys}
    assert export.keys["model.ptd"] not in {key for key, _, _ in export.store.reads}
    assert {file.name: file.fetched for file in report.files}["model.ptd"] == 0


def test_a_spoilt_cache_costs_a_download_and_nothing_else(tmp_path: Path, export: Export) -> None:
    cache = WeightCache(tmp_path / "cache", 2**20)
    pull(export.manifest, export.origin, tmp_path / "one", limits=SMALL, cache=cache)
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_bytes(b"x" * kept.stat().st_size)
    pull(export.manifest, export.origin, tmp_path / "two", limits=SMALL, cache=cache)
    assert contents(tmp_path / "two") == {name: export.bytes_of(name) for name in export.keys}
    assert kept.read_bytes() == export.bytes_of("model.ptd")


def test_the_cache_keeps_to_its_size(tmp_path: Path) -> None:
    exports = [make_export([9000], seed=seed) for seed in range(3)]
    size = len(exports[0].bytes_of("model.ptd"))
    cache = WeightCache(tmp_path / "cache", 2 * size)
    for number, export in enumerate(exports):
        pull(export.manifest, export.origin, tmp_path / str(number), cache=cache)
        for path in (tmp_path / "cache").iterdir():
            os.utime(path, (path.stat().st_mtime - 100,) * 2)
    kept = {path.read_bytes() for path in (tmp_path / "cache").iterdir()}
    assert kept == {export.bytes_of("model.ptd") for export in exports[1:]}
    tiny = WeightCache(tmp_path / "tiny", size - 1)
    pull(exports[0].manifest, exports[0].origin, tmp_path / "out", cache=tiny)
    assert list((tmp_path / "tiny").iterdir()) == []


def test_a_single_file_as_a_stream(export: Export) -> None:
    stream = io.BytesIO()
    stream_file(export.manifest.data[0], export.origin, stream, SMALL)
    assert stream.getvalue() == export.bytes_of("model.ptd")


def test_a_stream_of_wrong_bytes_stays_short(export: Export) -> None:
    export.spoil("model.ptd", spoilt(export, "zeroed"))
    stream = io.BytesIO()
    with pytest.raises(VerificationFailed):
        stream_file(export.manifest.data[0], export.origin, stream, SMALL)
    assert len(stream.getvalue()) < len(export.bytes_of("model.ptd"))


def test_the_rate_is_limited() -> None:
    throttle = Throttle(10_000_000)
    before = time.monotonic()
    for _ in range(5):
        throttle.wait(200_000)
    assert time.monotonic() - before >= 0.08
