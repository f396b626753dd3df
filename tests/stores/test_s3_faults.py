"""A fault at every request in turn: the outcome is the right object or a clean failure, never a wrong object.

`PLACES` counts the distinct places, (upload or pull, store, fault, request); the summary of the run says how many.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exporter.artifact.location import StoreOrigin
from exporter.artifact.pull import pull
from exporter.artifact.transfer import Limits
from exporter.contract.errors import WeightlessError
from exporter.store.s3_client import RetryPolicy
from exporter.stream.crc import crc64nvme
from exporter.stream.multipart import WeightStream
from tests.bench.store_sides import manifest_of
from tests.stores.conftest import StubFactory
from tests.stores.samples import PLACES, Listener, content, segment
from tests.stores.stub.personality import CEPH, STRICT, Fault, Personality
from tests.stores.stub.server import StubServer

TYPE = "application/octet-stream"
PART = 128 * 1024
SEGMENTS = [segment(f"s{n}", content(str(n), 60_000)) for n in range(6)]
KEY = "w/model.ptd"
PASSING = [item for item in Fault if item not in (Fault.DENIED, Fault.SILENT)]
"""Faults that must not be noticed when they happen once."""


def send(store: Any) -> Any:
    # One part in flight, so that request numbers mean the same in every run.
    with WeightStream(store, KEY, part_size=PART, max_buffer=3 * PART, listener=Listener()) as weights:
        weights.open(SEGMENTS)
        weights.send(SEGMENTS)
        data = weights.finish(name="model.ptd", layout="flat-tensor/fqn", used=None)
    store.put("manifest.json", b"{}", media_type=TYPE, if_absent=True)
    return data


def check(server: StubServer, data: Any) -> None:
    body = server.state.objects[f"p/{KEY}"].body
    assert (len(body), crc64nvme(body)) == (data.size, data.crc64nvme)
    assert server.state.objects["p/manifest.json"].body == b"{}"
    assert set(server.state.objects) == {f"p/{KEY}", "p/manifest.json"}


def reset(server: StubServer) -> None:
    server.log.clear()
    server.headers.clear()
    server.state.objects.clear()
    server.state.uploads.clear()
    server.faults = {}
    server.fault_for = lambda number, operation: None


def reset_log(server: StubServer) -> None:
    server.log.clear()
    server.headers.clear()
    server.faults = {}


@pytest.mark.parametrize("personality", [STRICT, CEPH], ids=lambda item: item.name)
@pytest.mark.parametrize("fault", PASSING, ids=lambda item: item.name)
def test_one_fault_at_each_request_is_not_noticed(stub: StubFactory, fault: Fault, personality: Personality) -> None:
    if fault is Fault.EXPIRED and personality is not STRICT:
        pytest.skip("a new session for each is slow, and the same on every kind of store")
    server, store = stub(personality)
    server.pause = 0.01
    send(store)  # finds out about checksums
    reset(server)
    send(store)
    requests = list(server.log)
    assert len(requests) >= 7
    for number, operation in enumerate(requests, 1):
        reset(server)
        server.faults = {number: fault}
        PLACES.add(("upload", personality.name, fault.name, number))
        data = send(store)
        check(server, data)
        created = operation == "CreateMultipartUpload" and fault in (Fault.LOST_REPLY, Fault.TRUNCATED)
        # An upload whose id never arrived stays until the reaper lists uploads.
        assert len(server.state.uploads) == (1 if created else 0), operation


@pytest.mark.parametrize("fault", [item for item in Fault if item is not Fault.SILENT], ids=lambda item: item.name)
def test_a_fault_that_stays_at_one_operation_is_a_clean_failure(stub: StubFactory, fault: Fault) -> None:
    server, store = stub(STRICT, retry=RetryPolicy(attempts=3, base=0.0))
    server.pause = 0.01
    for operation in ("CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload", "HeadObject", "PutObject"):
        reset(server)
        server.fault_for = lambda number, name, at=operation: fault if name == at else None  # type: ignore[misc]
        try:
            data = send(store)
        except WeightlessError as error:
            failure = error.as_dict()
            clean = failure["code"] in ("store-unavailable", "store-rejected") and "secret" not in str(failure)
        else:
            check(server, data)
            clean = True
        assert clean, operation
        body = server.state.objects.get(f"p/{KEY}")
        if body is not None:
            assert len(body.body) == 4 * PART or len(body.body) > 3 * PART
        known = operation != "CreateMultipartUpload" or fault not in (Fault.LOST_REPLY, Fault.TRUNCATED)
        if known:
            assert server.state.uploads == {}, operation


@pytest.mark.parametrize("number", range(1, 9))
def test_one_silence_at_any_request_is_not_noticed(stub: StubFactory, number: int) -> None:
    server, store = stub(CEPH, read_timeout=0.3, retry=RetryPolicy(attempts=3, base=0.0))
    server.faults = {number: Fault.SILENT}
    check(server, send(store))
    assert len(server.state.uploads) == 0


@pytest.mark.parametrize("personality", [STRICT, CEPH], ids=lambda item: item.name)
@pytest.mark.parametrize("fault", list(Fault), ids=lambda item: item.name)
def test_one_fault_at_each_request_of_a_pull(
    stub: StubFactory, fault: Fault, personality: Personality, tmp_path: Path
) -> None:
    """The file is right, or there is none: and right it must be where the fault is one that passes."""
    if fault is Fault.EXPIRED and personality is not STRICT:
        pytest.skip("a new session for each is slow, and the same on every kind of store")
    server, store = stub(personality, read_timeout=0.3, retry=RetryPolicy(attempts=3, base=0.0))
    server.pause = 0.01
    data = send(store)
    manifest = manifest_of(data)
    expected = server.state.objects[f"p/{KEY}"].body

    def fetch(folder: Path) -> None:
        # One block at a time, so that request numbers mean the same in every run.
        limits = Limits(parallel=1, block=PART // 2)
        pull(manifest, StoreOrigin(store, ""), folder, only=("model.ptd",), limits=limits)

    reset_log(server)
    fetch(tmp_path / "0")
    requests = len(server.log)
    assert requests >= 8
    for number in range(1, requests + 1):
        reset_log(server)
        server.faults = {number: fault}
        PLACES.add(("pull", personality.name, fault.name, number))
        folder = tmp_path / str(number)
        try:
            fetch(folder)
        except WeightlessError:
            assert fault in (Fault.DENIED, Fault.ERROR_200, Fault.GARBAGE), number
            assert not (folder / "model.ptd").exists()
            reset_log(server)
            fetch(folder)  # what the failed one left does no harm
        assert (folder / "model.ptd").read_bytes() == expected
        shutil.rmtree(folder)


def test_that_there_are_two_hundred_places_or_more() -> None:
    ways = {place[0] for place in PLACES}
    if ways != {"upload", "pull"}:
        pytest.skip("only a part of this file was run")
    assert len(PLACES) >= 200


READS: dict[str, Callable[[Any], object]] = {
    "read": lambda store: store.read("k", 100, 50_000),
    "head": lambda store: store.head("k").size,
    "list": lambda store: [item.key for item in store.list("")],
    "list_uploads": lambda store: [item.key for item in store.list_uploads("")],
}


@pytest.mark.parametrize("name", READS)
def test_a_fault_at_each_read_is_not_noticed(stub: StubFactory, name: str) -> None:
    server, store = stub(Personality(page_size=2))
    server.pause = 0.01
    for key in ("k", "l", "m"):
        store.put(key, content(key, 60_000), media_type=TYPE)
    for _ in range(3):
        store.create_upload("u", media_type=TYPE, metadata={}, part_size=PART)
    server.log.clear()
    expected = READS[name](store)
    requests = len(server.log)
    for fault in PASSING:
        if name in ("read", "head") and fault in (Fault.ERROR_200, Fault.GARBAGE):
            continue  # a 200 with other bytes in it: the next test
        for number in range(1, requests + 1):
            server.log.clear()
            server.faults = {number: fault}
            assert READS[name](store) == expected, (fault, number)


def test_a_proxy_page_is_never_taken_for_data(stub: StubFactory) -> None:
    server, store = stub(STRICT, retry=RetryPolicy(attempts=2, base=0.0))
    store.put("k", content("k", 60_000), media_type=TYPE)
    server.fault_for = lambda number, operation: Fault.GARBAGE
    with pytest.raises(WeightlessError):
        store.read("k", 0, 1000)


def test_a_read_of_an_object_replaced_by_a_shorter_one(stub: StubFactory) -> None:
    _, store = stub(STRICT)
    store.put("k", b"short", media_type=TYPE)
    with pytest.raises(WeightlessError):
        store.read("k", 0, 1000)


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.EXPIRED, Fault.DENIED], ids=lambda item: item.name)
def test_retries_are_capped_and_counted(stub: StubFactory, fault: Fault) -> None:
    waits: list[float] = []
    policy = RetryPolicy(attempts=5, base=0.5, cap=1.0)
    server, store = stub(STRICT, retry=policy, sleep=waits.append)
    server.fault_for = lambda number, operation: fault
    with pytest.raises(WeightlessError):
        store.delete("k")
    tries = 1 if fault is Fault.DENIED else 5
    assert len(server.log) == tries
    assert store.retries == len(waits) == tries - 1
    assert all(0 <= wait <= 1.0 for wait in waits)


def test_a_wait_that_the_store_asks_for_is_kept(stub: StubFactory) -> None:
    waits: list[float] = []
    server, store = stub(STRICT, retry=RetryPolicy(attempts=3, base=0.0), sleep=waits.append)
    server.faults = {1: Fault.UNAVAILABLE, 2: Fault.UNAVAILABLE}
    server.retry_after = "7"
    store.delete("k")
    assert waits == [7.0, 7.0]
    for told, expected in (("86400", 60.0), ("Fri, 31 Dec 1999 23:59:59 GMT", 0.0), ("-1", 0.0), ("1e9", 0.0)):
        waits.clear()
        server.log.clear()
        server.retry_after = told
        store.delete("k")
        assert waits == [expected, expected], told
