"""Stored weights are sent once: the index, leases, part-level copies, races."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

import pytest

from exporter.contract.errors import InternalError, StoreUnavailable
from exporter.contract.manifest import Data
from exporter.contract.objects import Capabilities
from exporter.contract.segments import Segment
from exporter.store.memory import MemoryStore
from exporter.stream.crc import crc64nvme
from exporter.stream.reuse import ReusingStream
from exporter.stream.table import layout_digest
from tests.stores.samples import Listener, content, segment

FIRST, SECOND, THIRD = "exp_1", "exp_2", "exp_3"


def memory() -> MemoryStore:
    return MemoryStore(f"memory://{uuid.uuid4().hex}", capabilities=Capabilities(min_part=1024))


def key_of(export: str) -> str:
    return f"weights/{export}-1/model.ptd"


def stream(store: Any, export: str, part: int, buffer: int | None = None) -> ReusingStream:
    return ReusingStream(
        store, key_of(export), holder=export, part_size=part, max_buffer=buffer or 4 * part, listener=Listener()
    )


def entries(store: Any) -> list[str]:
    return [item.key for item in store.list("weights/by-layout/")]


def export(
    store: Any, name: str, planned: Sequence[Segment], part: int, later: Sequence[Segment] = (), used: Any = None
) -> tuple[Data, ReusingStream]:
    with stream(store, name, part) as weights:
        weights.open(planned)
        weights.send(planned)
        weights.send(later)
        data = weights.finish(name="model.ptd", layout="flat-tensor/fqn", used=used)
        data = weights.publish(data)
        weights.release()
    return data, weights


def layers(part: int, changed: int = -1) -> list[Segment]:
    """Six layers of a bit over half a part each."""
    size = part // 2 + 1000
    return [segment(f"layer{n}", content(f"{n}{'!' if n == changed else ''}", size)) for n in range(6)]


def check(store: Any, data: Data, weights: ReusingStream) -> None:
    body = store.read(weights.key, 0, store.head(weights.key).size)
    assert (len(body), crc64nvme(body)) == (data.size, data.crc64nvme)
    assert data.urls == (store.uri(weights.key),)


def leases(store: Any) -> list[str]:
    return [item.key for item in store.list("weights/") if "/leases/" in item.key]


def test_unchanged_weights_are_not_sent_again(store: Any, part_size: int) -> None:
    data, first = export(store, FIRST, layers(part_size), part_size)
    assert (first.bytes_sent, first.bytes_reused) == (data.size, 0)
    again, second = export(store, SECOND, layers(part_size), part_size)
    assert (second.bytes_sent, second.bytes_reused) == (0, data.size)
    assert again == data
    assert second.key == key_of(FIRST)
    assert store.head(key_of(SECOND)) is None
    check(store, again, second)
    assert leases(store) == []
    if store.capabilities.list_uploads:
        assert list(store.list_uploads("")) == []


def test_a_changed_layer_sends_only_its_parts(store: Any, part_size: int) -> None:
    if not store.capabilities.copy_part:
        pytest.skip("the store declares no copy_part")
    export(store, FIRST, layers(part_size), part_size)
    data, second = export(store, SECOND, layers(part_size, changed=2), part_size)
    check(store, data, second)
    assert second.key == key_of(SECOND)
    # Layer 2 lies in one part; the header with its keys and sizes is the same.
    assert second.bytes_sent == part_size
    assert second.bytes_reused == data.size - second.bytes_sent


def test_a_store_that_cannot_copy_gets_everything() -> None:
    part = 128 * 1024
    store = MemoryStore(f"memory://{uuid.uuid4().hex}", capabilities=Capabilities(min_part=1024, copy_part=False))

    def refuse(*_: object, **__: object) -> None:
        from exporter.contract.errors import StoreRejected

        raise StoreRejected("no copies here")

    store.copy_part = refuse  # type: ignore[method-assign, assignment]
    export(store, FIRST, layers(part), part)
    data, second = export(store, SECOND, layers(part, changed=2), part)
    check(store, data, second)
    assert (second.bytes_sent, second.bytes_reused) == (data.size, 0)


def test_small_files_and_compiler_made_constants() -> None:
    part, store = 1 << 20, memory()
    planned, constant = [segment("w", b"w" * 1000)], segment("constant", b"c" * 10)
    export(store, FIRST, planned, part, [constant])
    same, second = export(store, SECOND, planned, part, [constant])
    assert second.bytes_sent == 0
    check(store, same, second)
    other, third = export(store, THIRD, planned, part, [segment("constant", b"C" * 10)])
    assert third.bytes_sent == other.size
    check(store, other, third)


def test_other_keys_for_the_program_are_another_file() -> None:
    part, store = 128 * 1024, memory()
    export(store, FIRST, layers(part), part, used={f"layer{n}": [f"a{n}"] for n in range(6)})
    data, second = export(store, SECOND, layers(part), part, used={f"layer{n}": [f"b{n}"] for n in range(6)})
    check(store, data, second)
    assert second.key == key_of(SECOND)
    assert second.bytes_sent == part  # the header


def test_a_stored_file_that_went_away_or_was_changed_is_not_used() -> None:
    part = 128 * 1024
    for damage in ("gone", "truncated", "changed"):
        store = memory()
        data, _ = export(store, FIRST, layers(part), part)
        body = store.read(key_of(FIRST), 0, data.size)
        store.delete(key_of(FIRST))
        if damage == "truncated":
            store.put(key_of(FIRST), body[:-1], media_type="x")
        if damage == "changed":
            store.put(key_of(FIRST), body[:-1] + bytes([body[-1] ^ 1]), media_type="x")
        again, second = export(store, SECOND, layers(part), part)
        assert second.bytes_sent == again.size
        check(store, again, second)


def test_nonsense_in_the_index_is_passed_over() -> None:
    part, store = 128 * 1024, memory()
    folder = f"weights/by-layout/{layout_digest(layers(part)).removeprefix('sha256:')}/"
    _, first = export(store, FIRST, layers(part), part)
    [entry] = list(store.list(folder))
    good = json.loads(store.read(entry.key, 0, entry.size))
    for number, body in enumerate(
        (b"", b"{", b"[]", b'{"key": 1}', *(json.dumps({**good, "key": k}).encode() for k in ("../x", "/etc", "a//b")))
    ):
        store.put(f"{folder}{number:064}.json", body, media_type="x")
    _, second = export(store, SECOND, layers(part), part)
    assert second.key == first.key


def test_two_exports_race_and_both_have_a_good_manifest() -> None:
    part, store = 128 * 1024, memory()
    racers = [stream(store, name, part) for name in (FIRST, SECOND)]
    for racer in racers:
        racer.open(layers(part))
        racer.send(layers(part))
    datas = [racer.finish(name="model.ptd", layout="flat-tensor/fqn", used=None) for racer in racers]
    datas = [racer.publish(data) for racer, data in zip(racers, datas, strict=True)]
    assert [racer.key for racer in racers] == [key_of(FIRST)] * 2
    assert datas[0] == datas[1]
    assert [item.key for item in store.list("weights/") if item.key.endswith(".ptd")] == [key_of(FIRST)]
    assert leases(store) == [f"weights/{FIRST}-1/leases/{SECOND}"]
    racers[1].release()
    assert leases(store) == []
    check(store, datas[1], racers[1])


def test_a_lease_is_held_from_the_decision_to_the_manifest() -> None:
    part, store = 128 * 1024, memory()
    export(store, FIRST, layers(part), part)
    weights = stream(store, SECOND, part)
    weights.open(layers(part))
    weights.send(layers(part))
    data = weights.finish(name="model.ptd", layout="flat-tensor/fqn", used=None)
    assert leases(store) == [f"weights/{FIRST}-1/leases/{SECOND}"]
    store.delete(key_of(FIRST))
    with pytest.raises(StoreUnavailable, match="went away"):
        weights.publish(data)
    weights.abort()
    assert leases(store) == []


def test_another_part_size_or_a_small_buffer_makes_no_candidate() -> None:
    part, store = 128 * 1024, memory()
    export(store, FIRST, layers(part), part)
    data, second = export(store, SECOND, layers(part), 2 * part)
    assert second.bytes_sent == data.size


def test_memory_keeps_its_bound_over_both_passes() -> None:
    part, store = 128 * 1024, memory()
    export(store, FIRST, layers(part), part)
    _, second = export(store, SECOND, layers(part, changed=0), part)
    assert part < second.peak_buffer <= 4 * part


def test_reuse_stays_within_a_prefix() -> None:
    part, name = 128 * 1024, uuid.uuid4().hex
    one, two = (MemoryStore(f"memory://{name}/{team}", capabilities=Capabilities(min_part=1024)) for team in ("a", "b"))
    export(one, FIRST, layers(part), part)
    data, other = export(two, SECOND, layers(part), part)
    assert other.bytes_sent == data.size


def test_an_abort_before_and_after_finish_leaves_nothing() -> None:
    part, store = 128 * 1024, memory()
    weights = stream(store, FIRST, part)
    with pytest.raises(InternalError):
        weights.send([])
    weights.open(layers(part))
    weights.send(layers(part))
    weights.abort()
    assert list(store.list_uploads("")) == []
    assert list(store.list("")) == []


def test_an_export_that_fails_after_publishing_takes_its_entry_back() -> None:
    part, store = 128 * 1024, memory()
    weights = stream(store, FIRST, part)
    weights.open(layers(part))
    weights.send(layers(part))
    weights.publish(weights.finish(name="model.ptd", layout="flat-tensor/fqn", used=None))
    assert len(entries(store)) == 1
    weights.abort()
    assert entries(store) == []


def test_an_entry_whose_file_is_gone_is_replaced() -> None:
    part, store = 128 * 1024, memory()
    export(store, FIRST, layers(part), part)
    store.delete(key_of(FIRST))
    export(store, SECOND, layers(part), part)
    assert len(entries(store)) == 1
    _, third = export(store, THIRD, layers(part), part)
    assert third.key == key_of(SECOND)


def test_without_reuse_everything_is_sent() -> None:
    part, store = 128 * 1024, memory()
    export(store, FIRST, layers(part), part)
    weights = ReusingStream(
        store, key_of(SECOND), holder=SECOND, part_size=part, max_buffer=4 * part, listener=Listener(), reuse=False
    )
    weights.open(layers(part))
    weights.send(layers(part))
    data = weights.publish(weights.finish(name="model.ptd", layout="flat-tensor/fqn", used=None))
    assert (weights.key, weights.bytes_sent) == (key_of(SECOND), data.size)
    check(store, data, weights)
