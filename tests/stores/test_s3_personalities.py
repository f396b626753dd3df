"""The known differences between S3 stores, each against the scripted server over TLS."""

from __future__ import annotations

from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from exporter.contract.errors import StoreRejected, StoreUnavailable
from exporter.contract.objects import Capabilities
from exporter.contract.segments import Segment
from exporter.contract.spec import StoreSpec
from exporter.store.s3 import S3Store
from exporter.store.s3_client import RetryPolicy
from exporter.store.s3_profiles import PROFILES, profile_for
from exporter.stream.crc import crc64nvme
from exporter.stream.multipart import WeightStream
from tests.stores.conftest import StubFactory
from tests.stores.samples import Listener, content, segment
from tests.stores.stub.personality import (
    CEPH,
    COMPLETE_ONES,
    FORBIDS_CHECKSUMS,
    GCS,
    IN_ORDER,
    NO_CHECKSUMS,
    NO_CONDITION,
    R2,
    SCALEWAY,
    STRICT,
    Fault,
    Personality,
)

TYPE = "application/octet-stream"
PART = 128 * 1024
SEGMENTS = [segment(f"s{n}", content(str(n), 50_000 + n)) for n in range(9)]
KEY = "weights/exp-1/model.ptd"


def send(store: Any, segments: list[Segment] = SEGMENTS) -> Any:
    with WeightStream(store, KEY, part_size=PART, max_buffer=4 * PART, listener=Listener()) as weights:
        weights.open(segments)
        weights.send(segments)
        return weights.finish(name="model.ptd", layout="flat-tensor/fqn", used=None)


@pytest.mark.parametrize("personality", COMPLETE_ONES, ids=lambda item: item.name)
def test_a_stream_and_a_put_work_on_every_kind_of_store(stub: StubFactory, personality: Personality) -> None:
    server, store = stub(personality)
    data = send(store)
    item = server.state.objects[f"p/{KEY}"]
    assert (len(item.body), item.crc64nvme) == (data.size, data.crc64nvme)
    assert crc64nvme(item.body) == data.crc64nvme
    assert store.put("manifest.json", b"{}", media_type=TYPE, if_absent=True) is not None
    assert server.state.uploads == {}
    for headers in server.headers:
        assert "x-amz-trailer" not in headers
        assert "aws-chunked" not in headers.get("content-encoding", "")


def test_every_body_has_a_checksum_in_a_plain_header(stub: StubFactory) -> None:
    for personality in (STRICT, CEPH, GCS):
        server, store = stub(personality)
        send(store)
        store.put("m", b"x", media_type=TYPE)
        seen = zip(server.log, server.headers, strict=True)
        bodies = [headers for operation, headers in seen if operation in ("UploadPart", "PutObject")]
        assert bodies
        assert all("x-amz-checksum-crc64nvme" in headers or "content-md5" in headers for headers in bodies)


@pytest.mark.parametrize("personality", [NO_CHECKSUMS, FORBIDS_CHECKSUMS, GCS, SCALEWAY], ids=lambda item: item.name)
def test_auto_finds_out_once_that_checksums_are_refused_and_remembers(
    stub: StubFactory, personality: Personality
) -> None:
    server, store = stub(personality)
    assert store.capabilities.crc64nvme
    send(store)
    assert server.log[:3] == ["CreateMultipartUpload", "CreateMultipartUpload", "UploadPart"]
    assert not store.capabilities.crc64nvme
    for _ in range(3):
        store.put("m", b"x", media_type=TYPE)
    assert server.log.count("PutObject") == 3
    assert server.log.count("CreateMultipartUpload") == 2


def test_a_store_that_knows_crc64nvme_gets_it_for_each_part_and_the_whole(stub: StubFactory) -> None:
    server, store = stub(STRICT)
    data = send(store)
    assert store.capabilities.crc64nvme
    seen = list(zip(server.log, server.headers, strict=True))
    assert all("x-amz-checksum-crc64nvme" in headers for operation, headers in seen if operation == "UploadPart")
    [complete] = [headers for operation, headers in seen if operation == "CompleteMultipartUpload"]
    assert complete["x-amz-checksum-crc64nvme"] == data.crc64nvme
    assert complete["x-amz-checksum-type"] == "FULL_OBJECT"
    assert store.head(KEY).crc64nvme == data.crc64nvme


def test_an_endpoint_from_boto3s_own_variables_counts(
    stub: StubFactory, certificate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = stub(CEPH)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    store = S3Store(StoreSpec(uri="s3://bucket/p", ca_bundle=str(certificate[1])))
    assert store.put("k", b"x", media_type=TYPE) is not None
    assert not store.capabilities.crc64nvme  # asked, not taken for AWS
    assert server.log == ["PutObject"]


def test_checksums_asked_for_and_refused_name_the_setting(stub: StubFactory) -> None:
    for personality in (NO_CHECKSUMS, FORBIDS_CHECKSUMS):
        _, store = stub(personality, spec={"checksums": "crc64nvme"})
        with pytest.raises(StoreRejected) as caught:
            send(store)
        assert "WEIGHTLESS_S3_CHECKSUMS" in caught.value.hint
        assert "credential" not in caught.value.hint.lower()


def test_checksums_off_sends_content_md5_only(stub: StubFactory) -> None:
    server, store = stub(STRICT, spec={"checksums": "off"})
    send(store)
    assert not any("checksum" in name for headers in server.headers for name in headers)


def test_default_boto3_is_refused_where_we_are_not(
    stub: StubFactory, certificate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, store = stub(CEPH)
    client = boto3.Session().client(
        "s3", endpoint_url=server.endpoint, region_name="us-east-1", verify=str(certificate[1])
    )
    with pytest.raises(ClientError, match="MissingContentLength"):
        client.put_object(Bucket="bucket", Key="k", Body=b"x")
    client.close()
    assert store.put("k", b"x", media_type=TYPE) is not None


def test_a_wrong_crc_is_refused(stub: StubFactory) -> None:
    _, store = stub(STRICT, retry=RetryPolicy(attempts=3, base=0.0))
    upload = store.create_upload("k", media_type=TYPE, metadata={}, part_size=PART)
    body = content("body", PART)
    with pytest.raises(StoreUnavailable, match="BadDigest"):
        store.upload_part(upload, 1, memoryview(body), crc64nvme=crc64nvme(b"other"))
    assert store.retries == 2


@pytest.mark.parametrize("personality", [STRICT, CEPH, GCS], ids=lambda item: item.name)
def test_a_body_damaged_on_its_way_is_sent_again(stub: StubFactory, personality: Personality) -> None:
    server, store = stub(personality)
    # The first answers to a body of each kind are about a damaged one.
    hit: set[str] = set()

    def damage(number: int, operation: str) -> Fault | None:
        if operation in ("UploadPart", "PutObject") and operation not in hit:
            hit.add(operation)
            return Fault.CORRUPT
        return None

    server.fault_for = damage
    data = send(store)
    assert store.put("m", b"manifest", media_type=TYPE) is not None
    assert crc64nvme(server.state.objects[f"p/{KEY}"].body) == data.crc64nvme
    assert server.state.objects["p/m"].body == b"manifest"
    assert hit == {"UploadPart", "PutObject"}


def test_a_store_of_a_thousand_parts_is_planned_for(stub: StubFactory) -> None:
    _, store = stub(SCALEWAY)
    assert store.capabilities.max_parts == 1_000
    assert PROFILES["scaleway"].capabilities.max_parts == 1_000
    big = segment("big", b"")
    huge = Segment(big.names, 1_000 * PART, big.read)
    weights = WeightStream(store, KEY, part_size=PART, max_buffer=4 * PART, listener=Listener())
    with pytest.raises(StoreRejected, match="1000"):
        weights.open([huge])


def test_the_minimum_part_is_5_mib_to_the_byte(stub: StubFactory) -> None:
    server, store = stub(STRICT, min_part=5_242_880)
    weights = WeightStream(store, KEY, part_size=5_242_880 - 128, max_buffer=2**26, listener=Listener())
    with pytest.raises(StoreRejected, match="5242880"):
        weights.open([])
    assert server.log == []


def test_listings_go_on_over_pages(stub: StubFactory) -> None:
    server, store = stub(Personality(page_size=3))
    for number in range(8):
        store.put(f"list/{number:02} &<ü", b"x", media_type=TYPE)
    assert [item.key for item in store.list("list/")] == [f"list/{number:02} &<ü" for number in range(8)]
    uploads = [store.create_upload(f"u/{n % 3}", media_type=TYPE, metadata={}, part_size=PART) for n in range(8)]
    assert {item.id for item in store.list_uploads("u/")} == {upload.id for upload in uploads}
    for number in range(1, 9):
        store.upload_part(uploads[0], number, memoryview(b"x" * number), crc64nvme=None)
    assert [part.size for part in store.list_parts(uploads[0])] == list(range(1, 9))
    assert server.log.count("ListObjectsV2") == server.log.count("ListParts") == 3


def test_an_empty_etag_from_complete_is_looked_up(stub: StubFactory) -> None:
    server, store = stub(CEPH)
    upload = store.create_upload("k", media_type=TYPE, metadata={}, part_size=PART)
    part = store.upload_part(upload, 1, memoryview(b"body"), crc64nvme=None)
    stored = store.complete_upload(upload, [part], crc64nvme=None)
    assert stored.etag == f'"{server.state.objects["p/k"].etag}"'


def test_a_lost_reply_to_complete_is_a_success_only_if_the_object_is_ours(stub: StubFactory) -> None:
    for personality in COMPLETE_ONES:
        server, store = stub(personality)
        old = store.put("k", b"same size", media_type=TYPE)
        assert old is not None
        for fault, succeeds in ((Fault.LOST_REPLY, True), (Fault.DENIED, False)):
            upload = store.create_upload("k", media_type=TYPE, metadata={}, part_size=PART)
            part = store.upload_part(upload, 1, memoryview(b"SAME SIZE"), crc64nvme=None)
            server.faults = {len(server.log) + 1: fault}
            if succeeds:
                store.complete_upload(upload, [part], crc64nvme=part.crc64nvme)
                assert store.read("k", 0, 9) == b"SAME SIZE"
                store.put("k", b"same size", media_type=TYPE)
            else:
                with pytest.raises(StoreRejected):
                    store.complete_upload(upload, [part], crc64nvme=part.crc64nvme)
                assert store.read("k", 0, 9) == b"same size"


def test_an_older_object_of_the_same_size_is_not_taken_for_ours(stub: StubFactory) -> None:
    server, store = stub(STRICT, retry=RetryPolicy(attempts=3, base=0.0))
    store.put("k", b"same size", media_type=TYPE)
    upload = store.create_upload("k", media_type=TYPE, metadata={}, part_size=PART)
    part = store.upload_part(upload, 1, memoryview(b"SAME SIZE"), crc64nvme=None)
    server.fault_for = lambda number, op: Fault.RESET if op == "CompleteMultipartUpload" else None
    with pytest.raises(StoreUnavailable):
        store.complete_upload(upload, [part], crc64nvme=None)
    assert store.read("k", 0, 9) == b"same size"


def test_no_such_upload_after_a_complete_that_did_succeed(stub: StubFactory) -> None:
    server, store = stub(STRICT)
    upload = store.create_upload("k", media_type=TYPE, metadata={}, part_size=PART)
    part = store.upload_part(upload, 1, memoryview(b"body"), crc64nvme=None)
    first = len(server.log) + 1
    # The reply is lost, and the look that follows fails too, so that Complete is asked again.
    server.faults = {first: Fault.LOST_REPLY, **{first + n: Fault.UNAVAILABLE for n in range(1, 9)}}
    stored = store.complete_upload(upload, [part], crc64nvme=None)
    assert stored.size == 4


def test_a_lost_reply_to_a_conditional_put_is_told_from_a_loss(stub: StubFactory) -> None:
    server, store = stub(STRICT)
    server.faults = {1: Fault.LOST_REPLY}
    assert store.put("m", b"mine", media_type=TYPE, if_absent=True) is not None
    assert server.log[:2] == ["PutObject", "PutObject"]
    assert store.put("m", b"mine", media_type=TYPE, if_absent=True) is None


def test_without_conditional_writes_the_store_says_so_and_looks_first(stub: StubFactory) -> None:
    server, store = stub(NO_CONDITION)
    assert not store.capabilities.conditional_put
    assert store.put("m", b"mine", media_type=TYPE, if_absent=True) is not None
    assert store.put("m", b"theirs", media_type=TYPE, if_absent=True) is None
    assert server.state.objects["p/m"].body == b"mine"


def test_a_gateway_that_wants_part_1_first_gets_an_error_that_says_so(stub: StubFactory) -> None:
    server, store = stub(IN_ORDER, read_timeout=0.3)
    with pytest.raises(StoreRejected, match="in order"):
        send(store)
    assert server.state.uploads == {}
    assert store.retries <= 2  # one for each part in flight


def test_encryption_and_storage_class_are_asked_for(stub: StubFactory) -> None:
    server, store = stub(STRICT, spec={"kms_key_id": "key-1", "storage_class": "STANDARD_IA"})
    send(store)
    store.put("m", b"x", media_type=TYPE)
    for operation, headers in zip(server.log, server.headers, strict=True):
        if operation in ("PutObject", "CreateMultipartUpload"):
            assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "key-1"
            assert headers["x-amz-storage-class"] == "STANDARD_IA"


def test_expired_credentials_are_asked_for_again(stub: StubFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    server, store = stub(STRICT)
    store.put("a", b"x", media_type=TYPE)

    def expire(number: int, operation: str) -> Fault | None:
        if "NEWKEY" in server.headers[number - 1]["authorization"]:
            return None
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "NEWKEY")
        return Fault.EXPIRED

    server.fault_for = expire
    assert store.put("b", b"y", media_type=TYPE) is not None
    assert store.retries == 1


@pytest.mark.parametrize(
    ("endpoint", "profile"),
    [
        (None, "aws"),
        ("https://s3.eu-central-1.amazonaws.com", "aws"),
        ("https://abc.r2.cloudflarestorage.com", "r2"),
        ("https://storage.googleapis.com", "gcs"),
        ("https://s3.fr-par.scw.cloud", "scaleway"),
        ("https://evil-amazonaws.com", "auto"),
        ("https://minio.example.com:9000", "auto"),
    ],
)
def test_auto_knows_the_well_known_endpoints(endpoint: str | None, profile: str) -> None:
    assert profile_for("auto", endpoint).name == profile


def test_every_profile_of_the_spec_exists() -> None:
    names = StoreSpec.model_json_schema()["properties"]["profile"]["enum"]
    assert set(names) == set(PROFILES)
    assert R2.equal_parts
    assert PROFILES["r2"].capabilities.equal_parts
    assert PROFILES["aws"].capabilities == Capabilities()
