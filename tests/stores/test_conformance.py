"""What every store does alike. A test is skipped only by a capability that the store itself declares."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import urlopen

import pytest

from exporter.contract.errors import InvalidRequest, NotFound, StoreRejected, StoreUnavailable
from exporter.contract.objects import Part, Upload
from exporter.stream.crc import combine, crc64nvme
from tests.stores.samples import content

TYPE = "application/octet-stream"
ODD_KEYS = [
    "a b.ptd",
    "ünïcode/模型.ptd",
    "per%20cent+plus&and=is",
    "quote'\"(x)!*~",
    "dir/.hidden",
    "a/b/c/d/e",
    "#?;:@,$",
]
REFUSED = (StoreRejected, StoreUnavailable)
"""What a part for an unknown upload gets: a refusal, but moto and Ceph 16 answer 500 to some."""


def needs(store: Any, capability: str) -> None:
    if not getattr(store.capabilities, capability):
        pytest.skip(f"the store declares no {capability}")


def send(store: Any, upload: Upload, number: int, body: bytes) -> Part:
    part: Part = store.upload_part(upload, number, memoryview(body), crc64nvme=crc64nvme(body))
    return part


def create(store: Any, key: str, part_size: int) -> Upload:
    upload: Upload = store.create_upload(key, media_type=TYPE, metadata={}, part_size=part_size)
    return upload


def finish(store: Any, upload: Upload, parts: list[Part]) -> Any:
    whole = combine((part.crc64nvme or "", part.size) for part in parts)
    return store.complete_upload(upload, parts, crc64nvme=whole)


def test_an_object_comes_back(store: Any) -> None:
    stored = store.put("x/one.bin", b"0123456789", media_type=TYPE)
    assert (stored.key, stored.size) == ("x/one.bin", 10)
    found = store.head("x/one.bin")
    assert (found.key, found.size) == ("x/one.bin", 10)
    assert store.read("x/one.bin", 0, 10) == b"0123456789"
    assert store.read("x/one.bin", 3, 4) == b"3456"
    assert store.read("x/one.bin", 9, 1) == b"9"
    assert store.read("x/one.bin", 10, 0) == b""
    buffer = bytearray(5)
    store.read_into("x/one.bin", 5, memoryview(buffer))
    assert buffer == b"56789"


def test_a_body_may_be_a_part_of_a_buffer(store: Any) -> None:
    store.put("slice", memoryview(bytearray(b"..body.."))[2:6], media_type=TYPE)
    assert store.read("slice", 0, 4) == b"body"


def test_an_empty_object(store: Any) -> None:
    store.put("empty", b"", media_type=TYPE)
    assert store.head("empty").size == 0
    assert [item.size for item in store.list("empty")] == [0]


def test_a_second_put_replaces(store: Any) -> None:
    store.put("k", b"first", media_type=TYPE)
    store.put("k", b"second one", media_type=TYPE)
    assert store.read("k", 0, store.head("k").size) == b"second one"


def test_metadata_comes_back(store: Any) -> None:
    needs(store, "metadata")
    store.put("m", b"x", media_type=TYPE, metadata={"digest": "sha256:00", "export": "exp_1"})
    assert dict(store.head("m").metadata) == {"digest": "sha256:00", "export": "exp_1"}


def test_only_the_first_of_two_conditional_puts_writes(store: Any) -> None:
    assert store.put("c", b"mine", media_type=TYPE, if_absent=True).size == 4
    assert store.put("c", b"theirs", media_type=TYPE, if_absent=True) is None
    assert store.read("c", 0, 4) == b"mine"
    assert store.head("c").size == 4


def test_one_of_ten_racing_conditional_puts_wins(store: Any) -> None:
    needs(store, "conditional_put")
    with ThreadPoolExecutor(10) as pool:
        results = list(pool.map(lambda n: store.put("r", b"%d" % n, media_type=TYPE, if_absent=True), range(10)))
    winners = [number for number, result in enumerate(results) if result is not None]
    assert len(winners) == 1
    assert store.read("r", 0, 1) == b"%d" % winners[0]


def test_what_is_not_there(store: Any) -> None:
    assert store.head("no/such") is None
    assert list(store.list("no/")) == []
    store.delete("no/such")
    with pytest.raises(NotFound):
        store.read("no/such", 0, 1)


def test_reading_past_the_end_is_an_error(store: Any) -> None:
    store.put("short", b"0123456789", media_type=TYPE)
    for offset, length in ((0, 11), (10, 1), (9, 2), (100, 5)):
        with pytest.raises(StoreUnavailable):
            store.read("short", offset, length)


def test_listing_is_by_prefix_of_the_key_and_in_order(store: Any) -> None:
    for key in ("b/2", "a/10", "a/1/x", "ab", "c"):
        store.put(key, b"1", media_type=TYPE)
    assert [item.key for item in store.list("")] == ["a/1/x", "a/10", "ab", "b/2", "c"]
    assert [item.key for item in store.list("a")] == ["a/1/x", "a/10", "ab"]
    assert [item.key for item in store.list("a/")] == ["a/1/x", "a/10"]
    assert [item.key for item in store.list("a/10")] == ["a/10"]


def test_delete(store: Any) -> None:
    store.put("d/e/f", b"x", media_type=TYPE)
    store.delete("d/e/f")
    store.delete("d/e/f")
    assert store.head("d/e/f") is None
    store.put("d/e", b"now a file", media_type=TYPE)
    assert store.head("d/e").size == 10


def test_odd_keys(store: Any) -> None:
    for key in ODD_KEYS:
        store.put(key, b"odd", media_type=TYPE)
        assert store.read(key, 0, 3) == b"odd"
        assert [item.key for item in store.list(key)] == [key]
        assert store.key_of(store.uri(key)) == key
    assert sorted(item.key for item in store.list("")) == sorted(ODD_KEYS)
    for key in ODD_KEYS:
        store.delete(key)
        assert store.head(key) is None


BAD_KEYS = ["", "/", "/etc/passwd", "../x", "a/../../x", "a//b", "a/", "./a", "a/.", "..", "a\0b", "a\nb", "x" * 1025]


def test_keys_that_would_leave_the_store_are_refused(store: Any) -> None:
    acts: list[Callable[[str], object]] = [
        lambda key: store.put(key, b"x", media_type=TYPE),
        lambda key: store.read(key, 0, 1),
        lambda key: store.head(key),
        lambda key: store.delete(key),
        lambda key: store.uri(key),
        lambda key: store.create_upload(key, media_type=TYPE, metadata={}, part_size=5 << 20),
    ]
    for key in BAD_KEYS:
        for act in acts:
            with pytest.raises(InvalidRequest):
                act(key)


def test_uris_of_other_places_have_no_key(store: Any) -> None:
    base = store.uri("x")[:-1]
    for uri in (
        base,
        base.rstrip("/"),
        base + "../x",
        base + "a/../../x",
        base + "a//b",
        base.rstrip("/") + "-other/x",
        "https://example.com/x",
        "file:///etc/passwd",
        base.replace("://", ":///", 1) + "x",
        base + "%2e%2e/x" if base.startswith("file") else base + "./x",
        base + "a%2fb" if base.startswith("file") else base + "/b",
    ):
        assert store.key_of(uri) is None, uri


def test_parts_may_come_in_any_order(store: Any, part_size: int) -> None:
    bodies = [content(f"part {number}", part_size) for number in range(3)] + [b"the last"]
    upload = create(store, "multi/part.bin", part_size)
    parts = {number: send(store, upload, number, bodies[number - 1]) for number in (3, 2, 4, 1)}
    assert store.head("multi/part.bin") is None
    stored = finish(store, upload, [parts[number] for number in (1, 2, 3, 4)])
    assert stored.size == store.head("multi/part.bin").size == 3 * part_size + 8
    assert store.read("multi/part.bin", 0, stored.size) == b"".join(bodies)
    assert [item.key for item in store.list("multi")] == ["multi/part.bin"]


def test_parts_from_several_threads(store: Any, part_size: int) -> None:
    bodies = {number: content(str(number), part_size) for number in range(1, 5)}
    upload = create(store, "threads", part_size)
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda number: send(store, upload, number, bodies[number]), bodies))
    stored = finish(store, upload, parts)
    assert store.read("threads", 0, stored.size) == b"".join(bodies.values())


def test_a_part_sent_twice_counts_once(store: Any, part_size: int) -> None:
    upload = create(store, "twice", part_size)
    send(store, upload, 1, content("wrong", part_size))
    first = send(store, upload, 1, content("right", part_size))
    second = send(store, upload, 2, b"end")
    finish(store, upload, [first, second])
    assert store.read("twice", 0, part_size + 3) == content("right", part_size) + b"end"


def test_an_object_of_one_part(store: Any, part_size: int) -> None:
    upload = create(store, "single", part_size)
    stored = finish(store, upload, [send(store, upload, 1, b"all of it")])
    assert (stored.size, store.read("single", 0, 9)) == (9, b"all of it")


def test_complete_replaces_an_older_object(store: Any, part_size: int) -> None:
    store.put("old", b"older bytes", media_type=TYPE)
    upload = create(store, "old", part_size)
    finish(store, upload, [send(store, upload, 1, b"newer")])
    assert store.read("old", 0, store.head("old").size) == b"newer"


def test_parts_and_uploads_are_listed_until_aborted(store: Any, part_size: int) -> None:
    needs(store, "list_uploads")
    upload = create(store, "w/open", part_size)
    other = create(store, "v/open", part_size)
    send(store, upload, 2, b"tail")
    send(store, upload, 1, content("head", part_size))
    assert [(part.number, part.size) for part in store.list_parts(upload)] == [(1, part_size), (2, 4)]
    assert [(item.key, item.id) for item in store.list_uploads("w/")] == [("w/open", upload.id)]
    assert {item.key for item in store.list_uploads("")} == {"w/open", "v/open"}
    store.abort_upload(upload)
    store.abort_upload(upload)
    assert [item.key for item in store.list_uploads("")] == ["v/open"]
    store.abort_upload(other)
    assert list(store.list_uploads("")) == []
    assert store.head("w/open") is None
    with pytest.raises(REFUSED):
        send(store, upload, 3, b"late")
    with pytest.raises(StoreRejected):
        store.list_parts(upload)


def test_listed_parts_are_enough_to_complete(store: Any, part_size: int) -> None:
    upload = create(store, "resumed", part_size)
    bodies = [content("1", part_size), b"2"]
    for number, body in enumerate(bodies, 1):
        send(store, upload, number, body)
    again = Upload(upload.key, upload.id)
    stored = store.complete_upload(again, store.list_parts(again), crc64nvme=None)
    assert store.read("resumed", 0, stored.size) == b"".join(bodies)


def test_completing_with_a_part_that_was_not_sent_fails(store: Any, part_size: int) -> None:
    upload = create(store, "gap", part_size)
    part = send(store, upload, 1, b"x")
    with pytest.raises(StoreRejected):
        store.complete_upload(upload, [Part(1, 1, '"0123456789abcdef0123456789abcdef"')], crc64nvme=None)
    with pytest.raises(StoreRejected):
        store.complete_upload(upload, [part, Part(2, 1, part.etag)], crc64nvme=None)
    store.abort_upload(upload)
    assert store.head("gap") is None


def test_an_unknown_upload_is_refused(store: Any, part_size: int) -> None:
    ghost = Upload("ghost", "0" * 32)
    with pytest.raises(REFUSED):
        send(store, ghost, 1, b"x")
    with pytest.raises(REFUSED):
        store.complete_upload(ghost, [Part(1, 1, '"00"')], crc64nvme=None)
    store.abort_upload(ghost)


def test_a_part_copied_inside_the_store(store: Any, part_size: int) -> None:
    needs(store, "copy_part")
    source = content("source", part_size + 1000)
    store.put("copy/from here.bin", source, media_type=TYPE)
    upload = create(store, "copy/to", part_size)
    first = store.copy_part(upload, 1, "copy/from here.bin", 500, part_size)
    second = send(store, upload, 2, b"end")
    assert first.size == part_size
    stored = store.complete_upload(upload, [first, second], crc64nvme=None)
    assert store.read("copy/to", 0, stored.size) == source[500 : 500 + part_size] + b"end"


def test_a_presigned_url_reads_without_credentials(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("signed/ä b", b"for anyone", media_type=TYPE)
    if not store.capabilities.presign:
        with pytest.raises(StoreRejected):
            store.presign("signed/ä b", 60)
        return
    url = store.presign("signed/ä b", 60)
    trust = ssl._create_unverified_context() if url.startswith("https") else None
    with urlopen(url, context=trust) as reply:
        assert reply.read() == b"for anyone"
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in url
    for bad in (0, -1, 10**9):
        with pytest.raises(InvalidRequest):
            store.presign("signed/ä b", bad)
