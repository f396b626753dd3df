"""`WeightStream` into memory: the file's bytes, the bound on buffers, names, duplicates, and every way to fail."""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.contract.errors import (
    Cancelled,
    DiskFull,
    InternalError,
    StoreRejected,
    StoreUnavailable,
    VerificationFailed,
)
from exporter.contract.manifest import Data
from exporter.contract.objects import Capabilities, Part, Upload
from exporter.contract.segments import Chunk, Segment
from exporter.store.memory import Fault, MemoryStore
from exporter.stream.crc import crc64nvme
from exporter.stream.layout import aligned, segment_alignment
from exporter.stream.multipart import HEADER_SLACK, WeightStream
from exporter.stream.ptd import read_header
from tests.stores.samples import Listener, content, reference, segment

PART = 128 * 1024
BUFFER = 5 * PART
KEY = "weights/exp-1/model.ptd"


def memory(*, faults: dict[int, Fault] | None = None, **limits: Any) -> MemoryStore:
    capabilities = Capabilities(**{"min_part": 1024, "equal_parts": True, **limits})
    return MemoryStore(f"memory://{uuid.uuid4().hex}", capabilities=capabilities, faults=faults)


def stream(store: Any, listener: Listener | None = None, part: int = PART, buffer: int = BUFFER) -> WeightStream:
    return WeightStream(store, KEY, part_size=part, max_buffer=buffer, listener=listener or Listener())


def run(store: Any, segments: Sequence[Segment], part: int = PART, buffer: int = BUFFER) -> tuple[Data, WeightStream]:
    with stream(store, part=part, buffer=buffer) as weights:
        weights.open(segments)
        weights.send(segments)
        return weights.finish(name="model.ptd", layout="flat-tensor/fqn", used=None), weights


def send_only(store: Any, segments: Sequence[Segment], listener: Listener | None = None) -> None:
    """Without a plan and without an end."""
    with stream(store, listener) as weights:
        weights.open([])
        weights.send(segments)


def stored(store: Any) -> bytes:
    body: bytes = store.read(KEY, 0, store.head(KEY).size)
    return body


def check_file(store: Any, data: Data) -> None:
    """Everything that the manifest says of the file is true of its bytes."""
    body = stored(store)
    assert data.size == len(body)
    assert data.crc64nvme == crc64nvme(body)
    header = read_header(lambda offset, length: body[offset : offset + length], len(body))
    assert (header.segment_base_offset, header.header_size) == (data.segment_base_offset, data.header_size)
    assert data.header_digest == "sha256:" + hashlib.sha256(body[: header.header_size]).hexdigest()
    assert [(s.offset, s.size) for s in header.segments] == [(s.offset, s.size) for s in data.segments]
    covered = header.header_size
    for index, info in enumerate(data.segments):
        start = data.segment_base_offset + info.offset
        assert not any(body[covered:start])
        assert info.digest == "sha256:" + hashlib.sha256(body[start : start + info.size]).hexdigest()
        keys = [name.key for name in header.names if name.segment == index]
        assert keys == [name.key for name in info.names]
        covered = start + info.size
    assert covered == len(body) or not data.segments


class Bounded:
    """A store that measures what the stream hands it at once, and remembers the order of the parts."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.order: list[int] = []
        self.sizes: list[int] = []
        self.held = 0
        self.peak = 0
        self._lock = threading.Lock()
        self.capabilities = store.capabilities

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def upload_part(self, upload: Upload, number: int, body: memoryview, *, crc64nvme: str | None) -> Part:
        with self._lock:
            self.order.append(number)
            self.sizes.append(len(body))
            self.held += len(body)
            self.peak = max(self.peak, self.held)
        try:
            return self._store.upload_part(upload, number, body, crc64nvme=crc64nvme)
        finally:
            with self._lock:
                self.held -= len(body)


def test_the_header_is_part_1_and_goes_last_and_parts_are_equal() -> None:
    store = Bounded(memory())
    data, weights = run(store, [segment(f"s{n}", content(str(n), 100_000), alignment=64) for n in range(10)])
    assert sorted(store.order) == list(range(1, len(store.order) + 1))
    assert store.order[-1] == 1
    sizes = dict(zip(store.order, store.sizes, strict=True))
    assert {sizes[number] for number in range(1, len(sizes))} == {PART}
    assert data.segment_base_offset == PART
    assert weights.bytes_sent == data.size
    check_file(store, data)


def test_the_buffer_stays_within_its_bound() -> None:
    for buffer in (3 * PART, 4 * PART, 7 * PART):
        store = Bounded(memory())
        segments = [segment(f"s{n}", content(str(n), PART - 1 - n)) for n in range(30)]
        _, weights = run(store, segments, buffer=buffer)
        assert 2 * PART <= weights.peak_buffer <= buffer
        assert store.peak <= buffer - 2 * PART


def test_a_file_that_fits_one_part_is_one_put_with_the_header_in_its_place() -> None:
    store, listener = memory(), Listener()
    segments = [segment("a", b"x" * 1000), segment("b", b"y" * 5)]
    with stream(store, listener) as weights:
        weights.open(segments)
        weights.send(segments)
        data = weights.finish(name="model.ptd", layout="flat-tensor/fqn", used=None)
    assert [call for call in store.calls if call != "head"] == ["put"]
    assert data.segment_base_offset == aligned(data.header_size or 0, 128)
    assert listener.events == []
    check_file(store, data)


def test_a_file_without_segments() -> None:
    store = memory()
    data, _ = run(store, [])
    assert data.segments == ()
    check_file(store, data)


def test_segments_that_fill_the_part_but_leave_no_room_for_the_header() -> None:
    for size in (PART - 1, PART, PART + 1, 2 * PART):
        store = memory()
        data, _ = run(store, [segment("a", content("a", size))])
        assert data.segment_base_offset == PART
        check_file(store, data)


def test_more_may_come_than_was_planned() -> None:
    store = memory()
    planned = [segment("planned", content("p", 1000))]
    later = [segment(f"constant{n}", content(f"c{n}", 50_000)) for n in range(5)]
    with stream(store) as weights:
        weights.open(planned)
        weights.send(planned)
        weights.send(later)
        data = weights.finish(name="model.ptd", layout="flat-tensor/fqn", used={"planned": ["cuda:planned"]})
    assert [name.key for info in data.segments for name in info.names] == [
        "cuda:planned",
        *(f"constant{n}" for n in range(5)),
    ]
    check_file(store, data)


def test_more_parts_than_the_store_takes_is_an_error_and_leaves_nothing() -> None:
    store = memory(max_parts=4)
    later = [segment(f"s{n}", content(str(n), PART)) for n in range(5)]
    with pytest.raises(StoreRejected, match="4 parts"):
        send_only(store, later)
    assert list(store.list_uploads("")) == []


def test_a_plan_that_the_store_cannot_take_is_refused_before_the_first_call() -> None:
    store = memory(max_parts=4)
    with pytest.raises(StoreRejected), stream(store) as weights:
        weights.open([segment("big", content("b", 10 * PART))])
    assert store.calls == []


def test_equal_small_segments_are_stored_once_under_all_their_names() -> None:
    store = memory()
    same = content("same", 10_000)
    segments = [segment("a", same), segment("b", content("other", 50)), segment("c", same), segment("d", same)]
    data, weights = run(store, segments)
    assert [[name.key for name in info.names] for info in data.segments] == [["a", "c", "d"], ["b"]]
    assert weights.duplicate_bytes == 0
    check_file(store, data)


def test_a_large_duplicate_is_kept_and_counted() -> None:
    store = memory()
    same = content("same", PART + 5)
    data, weights = run(store, [segment("a", same), segment("b", same)])
    assert weights.duplicate_bytes == PART + 5
    assert len(data.segments) == 2
    check_file(store, data)


def test_an_equal_segment_that_needs_more_alignment_gets_its_own_place() -> None:
    store = memory()
    same = content("same", 300)
    segments = [segment("x", b"1"), segment("a", same), segment("b", same, alignment=4096)]
    data, weights = run(store, segments)
    assert data.segments[2].offset % 4096 == 0
    assert weights.duplicate_bytes == 300
    check_file(store, data)


def test_known_zeros_are_not_read_and_are_merged() -> None:
    def forbidden() -> Iterator[Chunk]:
        raise AssertionError("zeros were read")

    size = PART + 77
    zeros = [replace(segment(key, bytes(size), zeros=True), read=forbidden) for key in ("k", "v")]
    store = memory()
    data, _ = run(store, [segment("w", b"1"), *zeros])
    assert [[name.key for name in info.names] for info in data.segments] == [["w"], ["k", "v"]]
    check_file(store, data)


def test_what_the_program_does_not_ask_for_stays_as_unused() -> None:
    store = memory()
    segments = [segment("w1", b"1" * 100), segment("w2", b"2" * 200), segment("w3", b"3" * 300)]
    with stream(store) as weights:
        weights.open(segments)
        weights.send(segments)
        data = weights.finish(
            name="model.ptd",
            layout="flat-tensor/fqn",
            used={"w1": ["prefill:w1", "decode:w1"], "w3": ["w3"]},
        )
    keys = [[name.key for name in info.names] for info in data.segments]
    assert keys == [["prefill:w1", "decode:w1"], ["unused:w2"], ["w3"]]
    assert data.segments[0].names[1].fqn == "w1"
    assert weights.unused_bytes == 200
    check_file(store, data)


def test_the_weight_set_is_of_the_planned_segments_only() -> None:
    planned = [segment("a", b"a" * 10), segment("b", b"b" * 10)]
    digests = []
    for later in ([], [segment("constant", b"c")]):
        with stream(memory()) as weights:
            weights.open(planned)
            weights.send([*planned, *later])
            digests.append(weights.finish(name="m.ptd", layout="flat-tensor/fqn", used=None).weight_set)
    assert digests[0] == digests[1]
    changed, _ = run(memory(), [planned[0], segment("b", b"B" * 10)])
    assert changed.weight_set != digests[0]


def test_one_key_for_two_contents_is_refused() -> None:
    with pytest.raises(InternalError, match="'a'"):
        run(memory(), [segment("a", b"1"), segment("a", b"2")])


@pytest.mark.parametrize("size", [10, PART, 3 * PART])
@pytest.mark.parametrize("given", [-1, 1])
def test_a_reader_that_gives_another_number_of_bytes_fails_the_stream(size: int, given: int) -> None:
    store = memory()
    wrong = replace(segment("w", content("w", size + given)), size=size)
    with pytest.raises(VerificationFailed, match="'w'"):
        run(store, [segment("first", content("f", 2 * PART)), wrong])
    assert list(store.list_uploads("")) == []
    assert store.head(KEY) is None


def test_a_view_that_is_overwritten_after_each_chunk() -> None:
    body = content("reused", 3 * PART)

    def read() -> Iterator[Chunk]:
        buffer = bytearray(1000)
        for start in range(0, len(body), 1000):
            piece = body[start : start + 1000]
            buffer[: len(piece)] = piece
            yield memoryview(buffer)[: len(piece)]
            buffer[:] = b"\xff" * 1000

    store = memory()
    data, _ = run(store, [replace(segment("w", body), read=read)])
    check_file(store, data)


def test_the_listener_hears_of_the_upload_before_its_first_part() -> None:
    store, listener = memory(), Listener()

    class Told(Listener):
        def opened(self, upload: Upload, uri: str, part_size: int) -> None:
            assert "upload_part" not in store.calls
            assert (uri, part_size) == (store.uri(KEY), PART)
            super().opened(upload, uri, part_size)

    listener = Told()
    segments = [segment("a", content("a", 3 * PART))]
    with stream(store, listener) as weights:
        weights.open(segments)
        weights.send(segments)
        weights.finish(name="model.ptd", layout="flat-tensor/fqn", used=None)
    assert listener.events == ["opened", "completed"]
    done = [item[0] for item in listener.progress]
    assert done == sorted(done)
    assert listener.progress[-1][0] == listener.progress[-1][1] == weights.bytes_sent


def test_a_listener_that_fails_leaves_no_upload() -> None:
    store = memory()

    class Broken(Listener):
        def opened(self, upload: Upload, uri: str, part_size: int) -> None:
            raise DiskFull("the event could not be written")

    with pytest.raises(DiskFull):
        send_only(store, [segment("a", content("a", 3 * PART))], Broken())
    assert list(store.list_uploads("")) == []


@pytest.mark.parametrize("fault", list(Fault))
def test_a_fault_at_any_call_is_an_error_and_leaves_nothing(fault: Fault) -> None:
    segments = [segment(f"s{n}", content(str(n), 60_000)) for n in range(8)]
    calls = memory()
    run(calls, segments, buffer=3 * PART)
    kinds = {Fault.UNAVAILABLE: StoreUnavailable, Fault.REJECTED: StoreRejected, Fault.FULL: DiskFull}
    for number in range(1, len(calls.calls) + 1):
        store = memory(faults={number: fault})
        with pytest.raises(kinds.get(fault, StoreUnavailable)):
            run(store, segments, buffer=3 * PART)
        left = list(store.list_uploads(""))
        # Only a reply to CreateMultipartUpload that got lost leaves an upload that nobody knows the id of.
        assert len(left) == (1 if fault is Fault.LOST_REPLY and calls.calls[number - 1] == "create_upload" else 0)


@pytest.mark.parametrize("size", [1000, 3 * PART])
@pytest.mark.parametrize("wrong", [{"size": 1}, {"crc64nvme": "AAAAAAAAAAA="}])
def test_a_store_that_has_something_else_than_was_sent_is_an_error(size: int, wrong: dict[str, Any]) -> None:
    class Lying(MemoryStore):
        def put(self, *args: Any, **options: Any) -> Any:
            stored = super().put(*args, **options)
            return stored and replace(stored, **wrong)

        def complete_upload(self, *args: Any, **options: Any) -> Any:
            return replace(super().complete_upload(*args, **options), **wrong)

    store = Lying(f"memory://{uuid.uuid4().hex}", capabilities=Capabilities(min_part=1024))
    with pytest.raises(VerificationFailed):
        run(store, [segment("w", content("w", size))])


def test_abort_from_another_thread_stops_the_stream() -> None:
    store, listener = memory(), Listener()
    reached, go_on = threading.Event(), threading.Event()

    def read() -> Iterator[Chunk]:
        yield content("a", 2 * PART)
        reached.set()
        go_on.wait(10)
        yield content("b", 2 * PART)

    weights = stream(store, listener)

    def cancel() -> None:
        reached.wait(10)
        weights.abort()
        go_on.set()

    thread = threading.Thread(target=cancel)
    thread.start()
    weights.open([])
    with pytest.raises(Cancelled), weights:
        weights.send([replace(segment("w", b""), size=4 * PART, read=read)])
    thread.join()
    assert listener.events == ["opened", "aborted"]
    assert list(store.list_uploads("")) == []
    assert store.head(KEY) is None


def test_leaving_without_finish_aborts() -> None:
    store, listener = memory(), Listener()
    send_only(store, [segment("a", content("a", 3 * PART))], listener)
    assert listener.events == ["opened", "aborted"]
    assert list(store.list_uploads("")) == []


def test_steps_out_of_order_are_refused() -> None:
    weights = stream(memory())
    for step in (lambda: weights.send([]), lambda: weights.finish(name="x", layout="flat-tensor/fqn", used=None)):
        with pytest.raises(InternalError):
            step()
    weights.open([])
    with pytest.raises(InternalError):
        weights.open([])
    weights.finish(name="x.ptd", layout="flat-tensor/fqn", used=None)
    with pytest.raises(InternalError):
        weights.send([segment("late", b"x")])
    weights.abort()


def test_two_thousand_small_segments_and_many_keys() -> None:
    store = memory()
    segments = [segment(f"layers.{n}.weight with a space ü", content(str(n), n % 700)) for n in range(2000)]
    data, _ = run(store, segments, part=1 << 20, buffer=4 << 20)
    assert sum(len(info.names) for info in data.segments) == 2000
    check_file(store, data)


SIZES = st.one_of(
    st.integers(0, 300),
    st.integers(0, 5 * HEADER_SLACK),
    st.sampled_from([0, 1, 127, 128, 129, PART - 1, PART, PART + 1, 2 * PART]),
)


@settings(max_examples=120, deadline=None)
@given(
    sizes=st.lists(st.tuples(SIZES, st.sampled_from([0, 1, 16, 64, 100, 4096]), st.integers(0, 3)), max_size=12),
    part=st.sampled_from([PART, PART + 128, 2 * PART, 5 * PART]),
    chunk=st.sampled_from([1000, 4096, 1 << 20]),
    split=st.integers(0, 12),
)
def test_the_file_equals_a_reference_writers(
    sizes: list[tuple[int, int, int]], part: int, chunk: int, split: int
) -> None:
    contents = [(content(str(seed), size), alignment) for size, alignment, seed in sizes]
    segments = [segment(f"k{n}", d, alignment=a, chunk=chunk) for n, (d, a) in enumerate(contents)]
    store = memory()
    with stream(store, part=part, buffer=4 * part) as weights:
        weights.open(segments[:split])
        weights.send(segments[:split])
        weights.send(segments[split:])
        data = weights.finish(name="model.ptd", layout="flat-tensor/fqn", used=None)
    assert weights.peak_buffer <= 4 * part
    check_file(store, data)
    body = stored(store)
    by_key = {
        name.key: body[data.segment_base_offset + s.offset :][: s.size] for s in data.segments for name in s.names
    }
    assert by_key == {f"k{n}": d for n, (d, _) in enumerate(contents)}
    places = {name.key: s.offset for s in data.segments for name in s.names}
    assert all(places[f"k{n}"] % segment_alignment(a) == 0 for n, (_, a) in enumerate(contents))
    kept = [next(n for n in range(len(contents)) if info.names[0].key == f"k{n}") for info in data.segments]
    header = body[: data.header_size]
    assert body == reference(header, data.segment_base_offset, [contents[n] for n in kept])
