"""Pull against real stores and real faults: a killed process, an S3 server over TLS, a fault at every request."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from exporter.artifact.links import LinkOrigin, SignedLinks, tls_context
from exporter.artifact.location import StoreOrigin, locate_manifest
from exporter.artifact.pull import pull
from exporter.artifact.transfer import Limits
from exporter.artifact.verify import verify
from exporter.contract.errors import Forbidden, WeightlessError
from exporter.contract.spec import StoreSpec
from exporter.store.open import open_store
from exporter.store.s3 import S3Store
from exporter.store.s3_client import RetryPolicy
from tests.stores.stub.personality import Fault
from tests.stores.stub.server import BUCKET, StubServer, serving, write_certificate
from tests.unit.artifact.conftest import EXPORT, Export, make_export

ROOT = Path(__file__).parents[2]
SMALL = Limits(parallel=3, block=32 * 1024)


def put_into(store: Any, export: Export) -> Any:
    """The export's files and manifest in a real store, its absolute URLs changed to that store's; the manifest."""
    raw = export.manifest.model_dump(mode="json", by_alias=True, exclude_none=True)
    raw["data"][0]["urls"] = [store.uri(export.keys["model.ptd"])]
    for name, key in export.keys.items():
        store.put(key, export.bytes_of(name), media_type="application/octet-stream")
    key = f"exports/{EXPORT}/manifest.json"
    store.put(key, json.dumps(raw).encode(), media_type="application/json")
    return store.uri(key)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} if folder.exists() else {}


def expected(export: Export) -> dict[str, bytes]:
    return {name: export.bytes_of(name) for name in export.keys}


def weightless(*arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "service.cli", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_a_killed_pull_fetches_only_what_is_missing(tmp_path: Path) -> None:
    export = make_export([4_000_000, 100, 9_000_000])
    uri = put_into(open_store(StoreSpec(uri=f"file://{tmp_path}/store")), export)
    out = tmp_path / "out"
    slow = weightless(
        "pull", uri, "-o", str(out), "--only", "data", "--block", "64KiB", "--parallel", "2", "--limit-rate", "3MiB"
    )
    for _ in range(600):
        if any(path.stat().st_size > 200 for path in (out / ".weightless-pull").glob("*.journal")):
            break
        time.sleep(0.05)
    slow.send_signal(signal.SIGKILL)
    slow.communicate()
    assert contents(out) == {}
    again = weightless("pull", uri, "-o", str(out), "--block", "64KiB", "--json")
    printed, _ = again.communicate(timeout=60)
    assert again.returncode == 0
    report = json.loads(printed)
    assert report["bytesReused"] > 0
    assert report["bytesFetched"] + report["bytesReused"] == sum(map(len, expected(export).values()))
    assert contents(out) == expected(export)
    assert not (out / ".weightless-pull").exists()


@pytest.fixture
def rgw(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[S3Store, StoreSpec]]:
    """A store in a fresh bucket of the Ceph gateway, over TLS."""
    endpoint, bundle = os.environ.get("S3_ENDPOINT_TLS"), os.environ.get("S3_CA_BUNDLE")
    if not endpoint or not bundle:
        pytest.skip("no Ceph gateway: S3_ENDPOINT_TLS is not set")
    import boto3

    bucket = f"pull-{uuid.uuid4().hex[:12]}"
    client = boto3.client("s3", endpoint_url=endpoint, verify=bundle, region_name="us-east-1")
    client.create_bucket(Bucket=bucket)
    spec = StoreSpec(uri=f"s3://{bucket}/team", endpoint=endpoint, ca_bundle=bundle, region="us-east-1")
    store = open_store(spec)
    assert isinstance(store, S3Store)
    yield store, spec
    for item in client.list_objects_v2(Bucket=bucket).get("Contents", []):
        client.delete_object(Bucket=bucket, Key=item["Key"])
    client.delete_bucket(Bucket=bucket)


@pytest.mark.rgw
def test_pull_and_verify_from_ceph_over_tls(rgw: tuple[S3Store, StoreSpec], tmp_path: Path) -> None:
    store, spec = rgw
    export = make_export([300_000, 5, 700_000])
    uri = put_into(store, export)
    found = locate_manifest(uri, lambda root: open_store(spec.model_copy(update={"uri": root})))
    pull(found.manifest, found.origin, tmp_path / "out", limits=SMALL)
    assert contents(tmp_path / "out") == expected(export)
    assert all(check.ok for check in verify(found.manifest, found.origin, limits=SMALL))
    settings = {
        "WEIGHTLESS_S3_ENDPOINT": str(spec.endpoint), "WEIGHTLESS_S3_CA_BUNDLE": str(spec.ca_bundle),
        "WEIGHTLESS_S3_REGION": "us-east-1",
    }  # fmt: skip
    process = weightless("pull", uri, "-o", str(tmp_path / "cli"), **settings)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert contents(tmp_path / "cli") == expected(export)


@pytest.mark.rgw
def test_pull_by_presigned_links_of_ceph(rgw: tuple[S3Store, StoreSpec], tmp_path: Path) -> None:
    store, spec = rgw
    export = make_export([300_000, 5, 700_000])
    put_into(store, export)
    links = {name: store.presign(key, 300) for name, key in export.keys.items()}
    with httpx2.Client(verify=tls_context(spec.ca_bundle)) as http:
        pull(export.manifest, LinkOrigin(SignedLinks(lambda: links), http), tmp_path / "out", limits=SMALL)
    assert contents(tmp_path / "out") == expected(export)


@pytest.mark.rgw
def test_another_bucket_is_another_origin(rgw: tuple[S3Store, StoreSpec], tmp_path: Path) -> None:
    store, spec = rgw
    export = make_export([64])
    raw = export.manifest.model_dump(mode="json", by_alias=True, exclude_none=True)
    raw["data"][0]["urls"] = ["s3://elsewhere/model.ptd"]
    store.put(f"exports/{EXPORT}/manifest.json", json.dumps(raw).encode(), media_type="application/json")
    uri = store.uri(f"exports/{EXPORT}/manifest.json")
    found = locate_manifest(uri, lambda root: open_store(spec.model_copy(update={"uri": root})))
    with pytest.raises(Forbidden):
        pull(found.manifest, found.origin, tmp_path / "out")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture
def stub(certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[StubServer, S3Store]]:
    """A scripted S3 server over TLS that serves nothing but what the test puts into it; retries do not wait."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with serving(certificate[0]) as server:
        spec = StoreSpec(uri=f"s3://{BUCKET}/p", endpoint=server.endpoint, ca_bundle=str(certificate[1]))
        yield server, S3Store(spec, retry=RetryPolicy(attempts=4, base=0, cap=0), read_timeout=2)


@pytest.mark.parametrize(
    "fault",
    [Fault.UNAVAILABLE, Fault.RESET, Fault.TRUNCATED, Fault.ERROR_200, Fault.EXPIRED, Fault.GARBAGE, Fault.DENIED],
)
def test_a_fault_at_every_request_of_a_pull(stub: tuple[StubServer, S3Store], tmp_path: Path, fault: Fault) -> None:
    server, store = stub
    export = make_export([40_000, 90_000])
    uri = put_into(store, export)
    manifest = locate_manifest(uri, lambda root: store_at(store)).manifest
    origin = StoreOrigin(store, f"exports/{EXPORT}")
    server.log.clear()
    pull(manifest, origin, tmp_path / "clean", limits=SMALL)
    requests = len(server.log)
    assert requests >= 8
    good = 0
    for number, out in zip(range(1, requests + 1), (tmp_path / str(n) for n in itertools.count()), strict=False):
        server.log.clear()
        server.faults = {number: fault}
        try:
            pull(manifest, origin, out, limits=SMALL)
        except WeightlessError:
            assert contents(out) == {}
        else:
            assert contents(out) == expected(export)
            good += 1
    if fault in (Fault.UNAVAILABLE, Fault.RESET, Fault.TRUNCATED):
        assert good == requests


def store_at(store: S3Store) -> Any:
    """The whole bucket as a store, as the command line opens it."""
    bucket = StoreSpec(uri=f"s3://{BUCKET}", endpoint=store._spec.endpoint, ca_bundle=store._spec.ca_bundle)
    return S3Store(bucket, retry=RetryPolicy(attempts=4, base=0, cap=0))


def test_a_full_disk_is_said_and_leaves_nothing_in_place(tmp_path: Path) -> None:
    export = make_export([3_000_000])
    uri = put_into(open_store(StoreSpec(uri=f"file://{tmp_path}/store")), export)
    command = f"ulimit -f 1000; exec {sys.executable} -m service.cli pull {uri} -o {tmp_path}/out --json"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, check=False, timeout=60)
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["code"] == "disk-full"
    assert contents(tmp_path / "out") == {}


def test_a_pull_takes_little_memory_whatever_the_size(tmp_path: Path) -> None:
    export = make_export([96 * 2**20] * 2, base=16 * 2**20)
    uri = put_into(open_store(StoreSpec(uri=f"file://{tmp_path}/store")), export)
    size = len(export.bytes_of("model.ptd"))
    export.store.objects.clear()
    peaks = []
    for only in ("program", "data"):
        process = weightless(
            "pull", uri, "-o", str(tmp_path / only), "--only", only, "--parallel", "4", "--block", "1MiB"
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        process.communicate()
        assert process.returncode == 0
        peaks.append(used.ru_maxrss * 1024)
    # Buffers of 4 MiB, and what threads and the allocator cost; the file has 208 MiB.
    assert peaks[1] - peaks[0] < 24 * 2**20 < size // 8
