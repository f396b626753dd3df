"""Zip archives that say one thing in two ways: nothing but plain stored members is read."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from exporter.contract.errors import SourceNotFound, SourceUnsafe
from exporter.source.archive import Archive
from exporter.source.local import LocalTree
from exporter.source.pt2 import open_pt2
from tests.unit.attacks.archives import Members, read_members, write_members
from tests.unit.source.files import Buffer


def zipped(entries: list[tuple[str, bytes]], method: int = zipfile.ZIP_STORED, comment: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in entries:
            archive.writestr(name, data)
        archive.comment = comment
    return buffer.getvalue()


def patched(data: bytes, magic: bytes, field: int, code: str, value: int, which: int = 0) -> bytes:
    """`data` with one number of the `which`-th record that begins with `magic` replaced."""
    place = -1
    for _ in range(which + 1):
        place = data.index(magic, place + 1)
    changed = bytearray(data)
    struct.pack_into(code, changed, place + field, value)
    return bytes(changed)


CENTRAL, LOCAL, END = b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06"
GOOD = zipped([("m/a", b"aaaa"), ("m/b", b"bb")])


def test_a_stored_archive_is_read_in_place() -> None:
    archive = Archive(Buffer(GOOD), "x.pt2")
    assert {name: archive.read(name, 99) for name in archive.members()} == {"a": b"aaaa", "b": b"bb"}
    assert GOOD[archive.offset("a") :].startswith(b"aaaa")
    with pytest.raises(SourceNotFound):
        archive.read("none", 99)
    with pytest.raises(SourceUnsafe, match="more than the 3"):
        archive.read("a", 3)


def test_pytorchs_own_archives_are_read(tmp_path: Path) -> None:
    members = {"a": b"x" * 1000, "data/b": b"", "c": b"yy"}
    write_members(tmp_path / "m.pt2", members)
    assert read_members(tmp_path / "m.pt2").items() >= members.items()


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: b"", id="empty"),
        pytest.param(lambda: b"not a zip archive, but long enough for one", id="text"),
        pytest.param(lambda: GOOD[:-1], id="cut"),
        pytest.param(lambda: GOOD + b"more", id="trailing bytes"),
        pytest.param(lambda: b"before" + GOOD, id="leading bytes"),
        pytest.param(lambda: zipped([("m/a", b"a")], comment=b"hi"), id="comment"),
        pytest.param(lambda: zipped([("m/a", b"a" * 999)], zipfile.ZIP_DEFLATED), id="compressed"),
        pytest.param(lambda: zipped([("m/a", b"a"), ("m/a", b"b")]), id="one name twice"),
        pytest.param(lambda: zipped([("m/a", b"a"), ("n/b", b"b")]), id="two roots"),
        pytest.param(lambda: zipped([("a", b"a")]), id="no root"),
        pytest.param(lambda: zipped([("m/../../etc/x", b"a")]), id="dots"),
        pytest.param(lambda: zipped([("/m/a", b"a")]), id="absolute"),
        pytest.param(lambda: zipped([("m\\a", b"a")]), id="backslash"),
        pytest.param(lambda: patched(GOOD, CENTRAL, 8, "<H", 1), id="encrypted"),
        pytest.param(lambda: patched(GOOD, CENTRAL, 24, "<I", 5), id="size other than packed size"),
        pytest.param(lambda: patched(GOOD, CENTRAL, 42, "<I", 36, which=1), id="two members over the same bytes"),
        pytest.param(lambda: patched(GOOD, CENTRAL, 42, "<I", 2**31), id="header past the end"),
        pytest.param(lambda: patched(GOOD, CENTRAL, 28, "<H", 60_000), id="name past the directory"),
        pytest.param(lambda: patched(GOOD, CENTRAL, 20, "<I", 2**32 - 1), id="zip64 size without its field"),
        pytest.param(lambda: patched(GOOD, END, 10, "<H", 1), id="fewer entries than listed"),
        pytest.param(lambda: patched(GOOD, END, 12, "<I", 2**31), id="directory larger than the file"),
        pytest.param(lambda: patched(GOOD, END, 16, "<I", 0), id="directory elsewhere"),
    ],
)
def test_anything_else_is_refused(make: Callable[[], bytes]) -> None:
    data = make()
    reader = Buffer(data)
    with pytest.raises(SourceUnsafe, match=r"x\.pt2"):
        Archive(reader, "x.pt2")
    assert reader.largest <= max(len(data), 1)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(patched(GOOD, LOCAL, 8, "<H", 8), id="compressed"),
        pytest.param(patched(GOOD, LOCAL, 28, "<H", 60_000), id="data elsewhere"),
        pytest.param(patched(GOOD, LOCAL, 0, "<I", 0), id="no header"),
        pytest.param(GOOD.replace(b"m/a", b"m/c", 1), id="another name"),
    ],
)
def test_a_local_header_that_the_directory_contradicts_is_refused(data: bytes) -> None:
    archive = Archive(Buffer(data), "x.pt2")
    with pytest.raises(SourceUnsafe):
        archive.read("a", 99)


def test_a_large_directory_is_refused_before_it_is_read() -> None:
    reader = Buffer(struct.pack("<4s4H2IH", END, 0, 0, 9, 9, 2**31, 0, 0).rjust(22), size=2**31 + 22)
    reader.data = b""
    with pytest.raises(SourceUnsafe):
        Archive(reader, "x.pt2")
    assert reader.largest < 2**20


def test_sample_inputs_cannot_read_past_their_bytes(victim: Members, tmp_path: Path) -> None:
    """A pickle that claims a storage of more elements than its record has: torch maps memory behind it."""
    buffer = io.BytesIO()
    torch.save(((torch.zeros(4, dtype=torch.uint8),), {}), buffer)
    inner = tmp_path / "inner.pt"
    inner.write_bytes(buffer.getvalue())
    members = read_members(inner)
    members["data.pkl"] = members["data.pkl"].replace(b"K\x04", b"K\x7f")
    assert members["data.pkl"].count(b"K\x7f") >= 1
    write_members(inner, members)
    path = tmp_path / "m.pt2"
    write_members(path, {**victim, "data/sample_inputs/model.pt": inner.read_bytes()})
    with pytest.raises(SourceUnsafe):
        open_pt2(LocalTree("x", str(path), [str(tmp_path)]), "m.pt2")


def test_compressed_sample_inputs_are_not_unpacked(victim: Members, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(((torch.zeros(4),), {}), buffer)
    buffer.seek(0)
    with zipfile.ZipFile(buffer) as archive:
        entries = [(info.filename, archive.read(info)) for info in archive.infolist()]
    path = tmp_path / "m.pt2"
    bomb = zipped(entries, zipfile.ZIP_DEFLATED)
    write_members(path, {**victim, "data/sample_inputs/model.pt": bomb})
    with pytest.raises(SourceUnsafe, match="compressed"):
        open_pt2(LocalTree("x", str(path), [str(tmp_path)]), "m.pt2")
