"""A killed attempt's upload is gone on with: only what the store lacks is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from exporter.contract.manifest import Data
from exporter.contract.objects import Upload
from exporter.contract.segments import Segment
from exporter.contract.spec import OpenUpload
from exporter.store.s3 import S3Store
from exporter.stream.crc import crc64nvme
from exporter.stream.reuse import ReusingStream
from tests.stores.conftest import StubFactory
from tests.stores.samples import Listener, content, segment
from tests.stores.stub.personality import CEPH, ENCRYPTED, STRICT, Personality

EXPORT = "exp_01ARZ3NDEKTSV4RRFFQ69G5FAV"
KEY = f"weights/{EXPORT}-1/model.ptd"
LAYOUT = "flat-tensor/fqn"


def layers(part: int, count: int = 6, changed: int = -1) -> list[Segment]:
    return [segment(f"l{n}", content(f"{n}{'!' if n == changed else ''}", part)) for n in range(count)]


class Dead(Listener):
    """The listener of an attempt that is killed: no abort is ever asked for."""


def killed(store: Any, planned: Sequence[Segment], part: int, sent: int) -> OpenUpload:
    """An attempt that sent the first `sent` segments and then vanished without a word."""
    listener = Dead()
    weights = ReusingStream(store, KEY, holder=EXPORT, part_size=part, max_buffer=3 * part, listener=listener)
    weights.open(planned)
    weights.send(planned[:sent])
    inner = weights._inner
    assert inner is not None
    assert inner._sender is not None
    inner._sender.wait()
    [upload] = listener.uploads
    return OpenUpload(key=KEY, upload_id=upload.id, part_size=part)


def again(
    store: Any, planned: Sequence[Segment], part: int | None, resume: OpenUpload, buffer: int
) -> tuple[Data, ReusingStream, Listener]:
    listener = Listener()
    with ReusingStream(
        store, KEY, holder=EXPORT, part_size=part, max_buffer=buffer, listener=listener, resume=resume
    ) as weights:
        weights.open(planned)
        weights.send(planned)
        data = weights.publish(weights.finish(name="model.ptd", layout=LAYOUT, used=None))
        weights.release()
    return data, weights, listener


def told(store: Any, resume: OpenUpload, planned: Sequence[Segment]) -> bool:
    """Whether the store tells what its parts hold: not where ETags of encrypted parts are all there is."""
    first = store.list_parts(Upload(KEY, resume.upload_id))[0]
    body = b"".join(bytes(chunk) for chunk in planned[0].read())
    return first.crc64nvme is not None or first.etag.strip('"') == hashlib.md5(body, usedforsecurity=False).hexdigest()


def check(store: Any, data: Data) -> None:
    body = store.read(KEY, 0, store.head(KEY).size)
    assert (len(body), crc64nvme(body)) == (data.size, data.crc64nvme)
    if store.capabilities.list_uploads:
        assert list(store.list_uploads("")) == []


def test_only_what_is_missing_is_sent(store: Any, part_size: int) -> None:
    resume = killed(store, layers(part_size), part_size, 4)
    kept = 4 * part_size if told(store, resume, layers(part_size)) else 0
    data, weights, listener = again(store, layers(part_size), None, resume, 4 * part_size)
    check(store, data)
    assert listener.uploads == [Upload(KEY, resume.upload_id)]
    assert listener.events == ["opened", "completed"]
    assert weights.bytes_sent == data.size - kept
    # What it made is found by the next export, digests of the kept parts included.
    follower = ReusingStream(
        store, "weights/x-1/model.ptd", holder="x", part_size=None, max_buffer=4 * part_size, listener=Listener()
    )
    with follower as third:
        third.open(layers(part_size))
        third.send(layers(part_size))
        third.finish(name="model.ptd", layout=LAYOUT, used=None)
    assert (third.bytes_sent, third.bytes_reused) == (0, data.size)


def test_changed_bytes_are_sent_again(store: Any, part_size: int) -> None:
    resume = killed(store, layers(part_size), part_size, 4)
    kept = 3 * part_size if told(store, resume, layers(part_size)) else 0
    data, weights, _ = again(store, layers(part_size, changed=2), part_size, resume, 4 * part_size)
    check(store, data)
    assert weights.bytes_sent == data.size - kept


def test_another_part_size_starts_anew(store: Any, part_size: int) -> None:
    resume = killed(store, layers(part_size), part_size, 4)
    data, weights, listener = again(store, layers(part_size), 2 * part_size, resume, 8 * part_size)
    check(store, data)
    assert listener.uploads[0].id != resume.upload_id
    assert weights.bytes_sent == data.size


def test_an_upload_that_is_gone_starts_anew(store: Any, part_size: int) -> None:
    resume = killed(store, layers(part_size), part_size, 4)
    store.abort_upload(Upload(KEY, resume.upload_id))
    data, weights, _ = again(store, layers(part_size), part_size, resume, 4 * part_size)
    check(store, data)
    assert weights.bytes_sent == data.size


def test_a_file_that_fits_one_part_gives_the_upload_back(store: Any, part_size: int) -> None:
    resume = killed(store, layers(part_size), part_size, 4)
    data, _, _ = again(store, [segment("s", b"small")], part_size, resume, 4 * part_size)
    check(store, data)


def test_weights_that_are_stored_already_give_the_upload_back(store: Any, part_size: int) -> None:
    resume = killed(store, layers(part_size), part_size, 4)
    other = ReusingStream(
        store, "weights/y-1/model.ptd", holder="y", part_size=part_size, max_buffer=4 * part_size, listener=Listener()
    )
    with other as winner:
        winner.open(layers(part_size))
        winner.send(layers(part_size))
        winner.publish(winner.finish(name="model.ptd", layout=LAYOUT, used=None))
    _, weights, _ = again(store, layers(part_size), None, resume, 4 * part_size)
    assert (weights.bytes_sent, weights.key) == (0, "weights/y-1/model.ptd")
    if store.capabilities.list_uploads:
        assert list(store.list_uploads("")) == []


SILENT_LISTS = replace(STRICT, name="lists no checksums", lists_checksums=False)


@pytest.mark.parametrize("personality", [STRICT, SILENT_LISTS, CEPH, ENCRYPTED], ids=lambda item: item.name)
def test_another_process_goes_on_with_an_upload_in_a_bucket(stub: StubFactory, personality: Personality) -> None:
    server, first = stub(personality)
    part = 6 * 2**20
    resume = killed(first, layers(part, 3), part, 2)
    second: S3Store = type(first)(first._spec)
    server.log.clear()
    data, weights, _ = again(second, layers(part, 3), part, resume, 4 * part)
    item = server.state.objects[f"p/{KEY}"]
    assert (len(item.body), crc64nvme(item.body)) == (data.size, data.crc64nvme)
    assert server.state.uploads == {}
    assert "ListParts" in server.log
    assert "CreateMultipartUpload" not in server.log
    # ETags of encrypted objects are no MD5s: nothing can be told of such parts, and they are sent again.
    kept = 0 if personality is ENCRYPTED else 2 * part
    assert weights.bytes_sent == data.size - kept
