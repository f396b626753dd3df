"""The checked pass: whatever the blocks, threads and damage, it finds exactly the regions that differ."""

from __future__ import annotations

import io
import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.artifact.location import StoredBlob
from exporter.artifact.regions import Region
from exporter.artifact.transfer import CheckedPass, Limits, all_zero
from exporter.contract.errors import StoreUnavailable
from exporter.contract.manifest import digest
from exporter.stream.crc import crc64nvme

from .conftest import Shelf

PIECES = st.lists(st.tuples(st.integers(1, 700), st.booleans()), min_size=1, max_size=30)


def laid_out(pieces: list[tuple[int, bool]], rng: random.Random) -> tuple[bytes, list[Region]]:
    data, regions = b"", []
    for number, (size, zeros) in enumerate(pieces):
        body = bytes(size) if zeros else rng.randbytes(size)
        regions.append(Region(len(data), size, None if zeros else digest(body), str(number)))
        data += body
    return data, regions


class Collector:
    """Takes blocks in order and joins them."""

    ordered = True

    def __init__(self) -> None:
        self.joined = io.BytesIO()

    def write(self, index: int, offset: int, data: memoryview) -> None:
        assert self.joined.tell() == offset
        self.joined.write(data)


@given(
    PIECES, st.integers(1, 900), st.integers(1, 6), st.integers(0, 2**32), st.lists(st.integers(0, 10**6), max_size=4)
)
def test_exactly_the_damaged_regions_are_found(
    pieces: list[tuple[int, bool]], block: int, parallel: int, seed: int, flips: list[int]
) -> None:
    data, regions = laid_out(pieces, random.Random(seed))
    damaged = bytearray(data)
    for flip in flips:
        damaged[flip % len(data)] ^= 0x5A
    shelf = Shelf(objects={"x": bytes(damaged)})
    found = CheckedPass(
        StoredBlob(shelf, "x", len(data)), regions, Limits(parallel=parallel, block=block), stop_early=False
    ).run()
    wrong = [r for r in regions if damaged[r.offset : r.end] != data[r.offset : r.end]]
    assert found.bad == wrong
    assert found.crc64nvme == crc64nvme(bytes(damaged))
    assert sum(length for _, _, length in shelf.reads) == len(data)


@given(PIECES, st.integers(1, 900), st.integers(1, 6), st.integers(0, 2**32))
def test_an_ordered_sink_gets_everything_in_order(
    pieces: list[tuple[int, bool]], block: int, parallel: int, seed: int
) -> None:
    data, regions = laid_out(pieces, random.Random(seed))
    shelf, sink = Shelf(objects={"x": data}), Collector()
    blob = StoredBlob(shelf, "x", len(data))
    assert CheckedPass(blob, regions, Limits(parallel=parallel, block=block), sink=sink).run().bad == []
    assert sink.joined.getvalue() == data


@pytest.mark.parametrize("parallel", [1, 2, 8])
def test_a_fault_ends_every_thread(parallel: int) -> None:
    data, regions = laid_out([(50_000, False)], random.Random(1))

    def fault(key: str, offset: int) -> None:
        if offset >= 20_000:
            raise StoreUnavailable("503")

    shelf = Shelf(objects={"x": data}, before_read=fault)
    before = threading.active_count()
    with pytest.raises(StoreUnavailable):
        CheckedPass(StoredBlob(shelf, "x", len(data)), regions, Limits(parallel=parallel, block=1000)).run()
    assert threading.active_count() == before


def test_an_early_stop_reads_little_more() -> None:
    data, regions = laid_out([(1000, False)] * 200, random.Random(1))
    shelf = Shelf(objects={"x": b"\xff" + data[1:]})
    found = CheckedPass(StoredBlob(shelf, "x", len(data)), regions, Limits(parallel=4, block=1000)).run()
    assert [region.label for region in found.bad] == ["0"]
    assert len(shelf.reads) < 100


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (1, 200_000), (70_000, 70_001), (65_535, 131_073)])
def test_zeros(start: int, stop: int) -> None:
    data = bytearray(200_000)
    assert all_zero(data, start, stop)
    if stop > start:
        data[stop - 1] = 1
        assert not all_zero(data, start, stop)
        assert all_zero(data, start, stop - 1)
