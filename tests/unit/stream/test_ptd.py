"""The `.ptd` header: bytes pinned, lies refused, and ExecuTorch reads what we write."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.contract.errors import VerificationFailed
from exporter.contract.segments import SegmentName, TensorLayout
from exporter.stream.ptd import (
    HEAD_BYTES,
    MAX_DIMENSIONS,
    PtdHeader,
    PtdName,
    PtdSegment,
    build_header,
    read_header,
    with_base,
)

SEGMENTS = [(0, 64), (128, 1000), (1152, 0)]
NAMES = [
    (SegmentName("a.weight", TensorLayout(6, (4, 4), (0, 1))), 0),
    (SegmentName("tied", TensorLayout(6, (4, 4), (1, 0))), 0),
    (SegmentName("opaque"), 1),
    (SegmentName("größe 模", TensorLayout(15, (), ())), 2),
]


def reader(data: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, length: data[offset : offset + length]


def parsed(data: bytes, size: int | None = None) -> PtdHeader:
    return read_header(reader(data), len(data) if size is None else size)


def test_a_header_comes_back() -> None:
    data = build_header(SEGMENTS, NAMES, 4096)
    header = parsed(data, 4096 + 1152)
    assert header == PtdHeader(
        4096,
        1152,
        len(data),
        tuple(PtdSegment(*segment) for segment in SEGMENTS),
        tuple(PtdName(name.key, index, name.layout) for name, index in NAMES),
    )


def test_the_natural_base_follows_the_header() -> None:
    data = build_header(SEGMENTS, NAMES)
    base = parsed(data, 10**6).segment_base_offset
    assert len(data) <= base < len(data) + 128
    assert base % 128 == 0


def test_a_header_moved_to_another_base_is_the_header_built_for_it() -> None:
    assert with_base(build_header(SEGMENTS, NAMES), 4096) == build_header(SEGMENTS, NAMES, 4096)


def test_the_bytes_are_pinned() -> None:
    data = build_header([(0, 5)], [(SegmentName("k", TensorLayout(0, (5,), (0,))), 0)], 1024)
    assert data[4:12] == b"FT01FH01"
    assert struct.unpack_from("<IQQQQ", data, 12) == (40, 48, len(data) - 48, 1024, 5)
    assert hashlib.sha256(data).hexdigest() == "11259547765a57c2134abe6ad44226387cd68990000b03acd0bd604d8e966854"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_executorch_reads_the_same() -> None:
    serialize = pytest.importorskip("executorch.extension.flat_tensor.serialize.serialize")
    cord = pytest.importorskip("executorch.exir._serialize._cord")
    data = build_header(SEGMENTS, NAMES, 4096).ljust(4096, b"\0") + bytes(range(128)) * 9
    payload = serialize.FlatTensorSerializer().deserialize(cord.Cord(data))
    assert [len(buffer) for buffer in payload.buffers] == [64, 1000, 0]
    assert payload.buffers[0] == bytes(range(64))
    assert list(payload.named_data) == [name.key for name, _ in NAMES]
    assert [entry.buffer_index for entry in payload.named_data.values()] == [0, 0, 1, 2]
    layout = payload.named_data["tied"].tensor_layout
    assert (int(layout.scalar_type), layout.sizes, layout.dim_order) == (6, [4, 4], [1, 0])
    assert payload.named_data["opaque"].tensor_layout is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_reader_reads_what_executorch_writes() -> None:
    serialize = pytest.importorskip("executorch.extension.flat_tensor.serialize.serialize")
    data_serializer = pytest.importorskip("executorch.exir._serialize.data_serializer")
    entry = data_serializer.DataEntry(0, 16, None)
    payload = data_serializer.DataPayload(buffers=[b"x" * 200], named_data={"one": entry, "two": entry})
    data = bytes(serialize.FlatTensorSerializer().serialize(payload))
    header = parsed(data)
    assert header.segments == (PtdSegment(0, 200),)
    assert [(name.key, name.segment) for name in header.names] == [("one", 0), ("two", 0)]
    assert data[header.segment_base_offset :][:200] == b"x" * 200


def test_other_files_and_lies_are_refused() -> None:
    good = build_header(SEGMENTS, NAMES, 4096)
    whole = 4096 + 1152

    def patched(offset: int, form: str, value: int) -> bytes:
        data = bytearray(good)
        struct.pack_into(form, data, offset, value)
        return bytes(data)

    cases = {
        "empty": (b"", 0),
        "short": (good[: HEAD_BYTES - 1], HEAD_BYTES - 1),
        "no extended header": (good[:8] + b"XX01" + good[12:], whole),
        "header length": (patched(12, "<I", 39), whole),
        "flatbuffer offset": (patched(16, "<Q", 2**63), whole),
        "flatbuffer size": (patched(24, "<Q", whole), whole),
        "huge flatbuffer": (patched(24, "<Q", 2**62), 2**63),
        "base past the end": (patched(32, "<Q", whole + 1), whole),
        "base over the header": (patched(32, "<Q", 64), whole),
        "data past the end": (patched(40, "<Q", 1153), whole),
        "less data than segments": (patched(40, "<Q", 1000), whole),
        "truncated": (good[:-1], whole),
        "root outside": (patched(0, "<I", 2**31), whole),
    }
    for data, size in cases.values():
        with pytest.raises(VerificationFailed):
            parsed(data, size)
    with pytest.raises(VerificationFailed):
        parsed(good[:4] + b"ET12" + good[8:], whole)


def test_bad_tables_are_refused() -> None:
    one = SegmentName("k")
    for segments, names in (
        ([(0, 5)], [(one, 1)]),
        ([(0, 5)], [(one, 0), (SegmentName("k"), 0)]),
        ([(0, 5)], [(SegmentName("k", TensorLayout(0, (1,) * (MAX_DIMENSIONS + 1), ())), 0)]),
    ):
        data = build_header(segments, names, 1024)
        with pytest.raises(VerificationFailed):
            parsed(data, 4096)


def test_a_newer_schema_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.stream.ptd.SCHEMA_VERSION", 1)
    data = build_header(SEGMENTS, NAMES, 4096)
    monkeypatch.undo()
    with pytest.raises(VerificationFailed, match="newer"):
        parsed(data, 4096 + 1152)


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32), flips=st.integers(1, 6))
def test_damaged_headers_never_do_more_than_fail(seed: int, flips: int) -> None:
    chance = random.Random(seed)
    data = bytearray(build_header(SEGMENTS, NAMES, 4096))
    for _ in range(flips):
        data[chance.randrange(len(data))] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
    try:
        header = parsed(bytes(data), 4096 + 1152)
    except VerificationFailed:
        return
    for segment in header.segments:
        assert header.segment_base_offset + segment.offset + segment.size <= 4096 + 1152
    assert all(name.segment < len(header.segments) for name in header.names)
