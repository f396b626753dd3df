"""A stored artifact read back: every way of being wrong has its own message."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from exporter.check.ports import StoredArtifact
from exporter.check.readback import read_back, read_data
from exporter.contract.errors import VerificationFailed
from exporter.contract.manifest import Data, Program
from exporter.contract.segments import Chunk, Segment, SegmentName
from exporter.store.memory import MemoryStore
from exporter.stream.multipart import WeightStream

KEY = "weights/x-1/model.ptd"


class Silent:
    """A stream listener that does nothing."""

    def opened(self, *_: object) -> None: ...
    def completed(self, *_: object) -> None: ...
    def aborted(self, *_: object) -> None: ...
    def sent(self, *_: object) -> None: ...


def weights(seed: int, sizes: tuple[int, ...] = (4000, 1200, 80, 9000)) -> list[Segment]:
    """Segments of bytes that depend on the seed, without runs of zeros; the same keys for each seed."""

    def content(index: int, size: int) -> bytes:
        return b"".join(hashlib.sha256(f"{seed}/{index}/{at}".encode()).digest() for at in range(-(-size // 32)))[:size]

    def reader(content: bytes) -> Iterator[Chunk]:
        yield content

    return [
        Segment((SegmentName(f"layer{index}.weight"),), size, partial(reader, content(index, size)))
        for index, size in enumerate(sizes)
    ]


def stored(store: MemoryStore, key: str, segments: list[Segment]) -> Data:
    """The data file as the stream writes it."""
    stream = WeightStream(store, key, part_size=None, max_buffer=192 * 2**20, listener=Silent())
    stream.open(segments)
    stream.send(segments)
    return stream.finish(name="model.ptd", layout="flat-tensor/fqn", used=None)


@pytest.fixture
def store(tmp_path: Path) -> MemoryStore:
    return MemoryStore(f"memory://readback-{tmp_path.name}")


@pytest.fixture
def data(store: MemoryStore) -> Data:
    return stored(store, KEY, weights(1))


def spoil(store: MemoryStore, content: bytes) -> None:
    """Replace the stored file."""
    store.put(KEY, content, media_type="application/octet-stream")


def failure(store: MemoryStore, data: Data, folder: Path) -> VerificationFailed:
    with pytest.raises(VerificationFailed) as caught:
        read_data(store, KEY, data, folder / "copy.ptd")
    return caught.value


def test_what_is_right_passes_and_is_copied(store: MemoryStore, data: Data, tmp_path: Path) -> None:
    read_data(store, KEY, data, tmp_path / "copy.ptd")
    assert (tmp_path / "copy.ptd").read_bytes() == store.read(KEY, 0, data.size)


def test_six_cases_have_six_messages(store: MemoryStore, data: Data, tmp_path: Path) -> None:
    good = store.read(KEY, 0, data.size)
    middle = data.segment_base_offset + data.segments[3].offset
    third = len(good) // 3
    other = MemoryStore(f"memory://other-{tmp_path.name}")
    assert stored(other, KEY, weights(2)).size == data.size
    cases = {
        "empty": b"",
        "truncated": good[:-1],
        "zeroed": good[:third] + bytes(third) + good[2 * third :],
        "changed": good[: middle + 100]
        + bytes(byte ^ 0xFF for byte in good[middle + 100 : middle + 164])
        + good[middle + 164 :],
        "replaced": other.read(KEY, 0, data.size),
    }
    found = {}
    for kind, content in cases.items():
        spoil(store, content)
        error = failure(store, data, tmp_path)
        assert error.details["kind"] == kind, error.message
        assert "model.ptd" in error.message
        found[kind] = error.message
    store.delete(KEY)
    error = failure(store, data, tmp_path)
    assert error.details["kind"] == "absent"
    assert len({*found.values(), error.message}) == 6


@pytest.mark.parametrize("position", ["first", "last"])
def test_one_flipped_bit_names_its_segment(store: MemoryStore, data: Data, tmp_path: Path, position: str) -> None:
    good = bytearray(store.read(KEY, 0, data.size))
    at = data.segment_base_offset if position == "first" else len(good) - 1
    good[at] ^= 1
    spoil(store, bytes(good))
    error = failure(store, data, tmp_path)
    assert error.details["segments"] == ["layer0.weight" if position == "first" else "layer3.weight"]


def test_header_and_padding_are_covered(store: MemoryStore, data: Data, tmp_path: Path) -> None:
    good = store.read(KEY, 0, data.size)
    end = data.segments[0].offset + data.segments[0].size + data.segment_base_offset
    assert data.segments[1].offset + data.segment_base_offset > end
    for at in (20, end):
        spoil(store, good[:at] + bytes([good[at] ^ 255]) + good[at + 1 :])
        assert failure(store, data, tmp_path).details["kind"] == "header"


def test_a_longer_file_is_refused(store: MemoryStore, data: Data, tmp_path: Path) -> None:
    spoil(store, store.read(KEY, 0, data.size) + b"x")
    assert failure(store, data, tmp_path).details["kind"] == "longer"


def test_the_program_is_compared_too(store: MemoryStore, data: Data, tmp_path: Path) -> None:
    body = b"program" * 100
    store.put("model.pte", body, media_type="x")
    digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
    program = Program(name="model.pte", media_type="x", digest=digest, size=len(body), urls=("1/model.pte",))
    artifact = StoredArtifact(program, "model.pte", [(KEY, data)])
    paths = read_back(store, artifact, tmp_path)
    assert paths == (tmp_path / "model.pte", (tmp_path / "model.ptd",))
    store.put("model.pte", b"program" * 99 + b"pr0gram", media_type="x")
    with pytest.raises(VerificationFailed, match=r"model\.pte differs"):
        read_back(store, artifact, tmp_path)
