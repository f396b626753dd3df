"""From URIs to files, for local files and objects."""

from __future__ import annotations

from pathlib import Path

import pytest

from exporter.contract.errors import SourceAccessDenied, SourceNotFound, SourceUnsafe
from exporter.contract.spec import SourcePolicy
from exporter.source.remote import ObjectTree
from exporter.source.resolve import resolve
from tests.unit.source.files import Objects

POLICY = SourcePolicy(roots=("s3://models/team-a",))


def no_objects(bucket: str) -> Objects:
    raise AssertionError(f"bucket {bucket} was opened")


def test_a_folder_lists_its_regular_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.json").write_text("{}")
    (tmp_path / "b.bin").write_bytes(b"12345")
    tree = resolve(f"file://{tmp_path}", SourcePolicy(roots=(str(tmp_path),)), no_objects)
    assert tree.files() == {"b.bin": 5, "sub/a.json": 2}
    assert tree.open("b.bin").read(1, 3) == b"234"
    assert tree.local_path("sub/a.json") == str(tmp_path / "sub" / "a.json")
    assert tree.local_path("none") is None
    assert tree.revision is None


def test_a_single_file_is_listed_under_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "m.pt2").write_bytes(b"x")
    tree = resolve(str(tmp_path / "m.pt2"), SourcePolicy(roots=(str(tmp_path),)), no_objects)
    assert tree.files() == {"m.pt2": 1}


def test_an_empty_folder_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound):
        resolve(str(tmp_path), SourcePolicy(roots=(str(tmp_path),)), no_objects)


def test_a_denied_source_opens_no_bucket() -> None:
    with pytest.raises(SourceAccessDenied):
        resolve("s3://other/x", POLICY, no_objects)


def test_an_object_is_one_file_and_a_prefix_a_folder() -> None:
    objects = Objects(
        {"team-a/m.pt2": b"abc", "team-a/bert/a": b"1", "team-a/bert/sub/b": b"22", "team-a/bert2/c": b"3"}
    )
    single = resolve("s3://models/team-a/m.pt2", POLICY, lambda bucket: objects)
    assert single.files() == {"m.pt2": 3}
    assert single.open("m.pt2").read(1, 2) == b"bc"
    folder = resolve("s3://models/team-a/bert/", POLICY, lambda bucket: objects)
    assert folder.files() == {"a": 1, "sub/b": 2}
    assert folder.local_path("a") is None


def test_keys_that_are_no_paths_are_left_out() -> None:
    objects = Objects({"p/ok": b"1", "p/": b"", "p//x": b"1", "p/../y": b"1", "p/./z": b"1"})
    assert ObjectTree("s3://b/p", "p", objects).files() == {"ok": 1}


def test_nothing_under_a_prefix_is_not_found() -> None:
    with pytest.raises(SourceNotFound):
        resolve("s3://models/team-a/none", POLICY, lambda bucket: Objects())


def test_an_object_that_shrank_or_a_read_past_its_end_is_refused() -> None:
    objects = Objects({"k": b"0123456789"})
    reader = ObjectTree("s3://b/k", "k", objects).open("k")
    assert b"".join(reader.chunks(2, 7, 3)) == b"2345678"
    assert objects.largest == 3
    with pytest.raises(SourceUnsafe, match="ends at byte 10"):
        reader.read(8, 3)
    objects["k"] = b"012"
    with pytest.raises(SourceUnsafe, match="instead of 4"):
        reader.read(1, 4)
