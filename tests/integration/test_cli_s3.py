"""The whole way through a real S3 server over TLS: export, pull by signed links without credentials, the reaper."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exporter.artifact.owners import Owner
from exporter.artifact.reap import reap
from exporter.contract.spec import StoreSpec
from exporter.store.open import open_store
from tests.e2e.conftest import save_tiny_program
from tests.e2e.live_service import REAL, ROOT, running

pytestmark = pytest.mark.rgw
IDS = [f"exp_{'0' * 25}{letter}" for letter in "AB"]


@pytest.fixture
def bucket() -> Iterator[tuple[Any, str]]:
    """A boto3 client of the Ceph gateway and a fresh bucket."""
    endpoint, bundle = os.environ.get("S3_ENDPOINT_TLS"), os.environ.get("S3_CA_BUNDLE")
    if not endpoint or not bundle:
        pytest.skip("no Ceph gateway: S3_ENDPOINT_TLS is not set")
    import boto3

    name = f"cli-{uuid.uuid4().hex[:12]}"
    client = boto3.client("s3", endpoint_url=endpoint, verify=bundle, region_name="us-east-1")
    client.create_bucket(Bucket=name)
    yield client, name
    for upload in client.list_multipart_uploads(Bucket=name).get("Uploads", []):
        client.abort_multipart_upload(Bucket=name, Key=upload["Key"], UploadId=upload["UploadId"])
    for item in client.list_objects_v2(Bucket=name).get("Contents", []):
        client.delete_object(Bucket=name, Key=item["Key"])
    client.delete_bucket(Bucket=name)


def settings(bucket: str) -> dict[str, str]:
    return {
        "WEIGHTLESS_STORE": f"s3://{bucket}/team",
        "WEIGHTLESS_S3_ENDPOINT": os.environ["S3_ENDPOINT_TLS"],
        "WEIGHTLESS_S3_CA_BUNDLE": os.environ["S3_CA_BUNDLE"],
        "WEIGHTLESS_S3_REGION": "us-east-1",
    }


def weightless(environment: dict[str, str], *arguments: str, status: int = 0) -> dict[str, Any]:
    command = [sys.executable, "-m", "service.cli", *arguments, "--json"]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, env=env, capture_output=True, check=False, timeout=300)
    assert done.returncode == status, done.stderr.decode()[-3000:]
    assert b"Signature" not in done.stdout + done.stderr
    value = json.loads(done.stdout)
    assert isinstance(value, dict)
    return value


@pytest.mark.slow
def test_a_consumer_without_credentials_pulls_by_links(bucket: tuple[Any, str], tmp_path: Path) -> None:
    pytest.importorskip("executorch", reason="the exporter's packages are not installed")
    (tmp_path / "models").mkdir()
    save_tiny_program(tmp_path / "models" / "model.pt2")
    with running(tmp_path, REAL, WEIGHTLESS_SLOTS="1", **settings(bucket[1])) as service:
        consumer = {
            "WEIGHTLESS_URL": service.url,
            "WEIGHTLESS_S3_CA_BUNDLE": os.environ["S3_CA_BUNDLE"],
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        export = weightless(
            consumer, "submit", "exported-program", "--source", service.source, "--target", "backend=xnnpack", "--wait"
        )
        assert export["manifest"]["uri"].startswith(f"s3://{bucket[1]}/team/exports/")
        cached = ("--cache", str(tmp_path / "cache"))
        first = weightless(consumer, "pull", export["id"], "-o", str(tmp_path / "one"), *cached)
        assert {file["name"] for file in first["files"]} == {"model.pte", "model.ptd"}
        second = weightless(consumer, "pull", export["id"], "-o", str(tmp_path / "two"), *cached)
        assert {file["name"]: file["fetched"] for file in second["files"]}["model.ptd"] == 0
        assert (tmp_path / "one/model.ptd").read_bytes() == (tmp_path / "two/model.ptd").read_bytes()
        assert weightless(consumer, "verify", export["id"])["ok"] is True
        error = weightless(consumer, "pull", export["manifest"]["uri"], "-o", str(tmp_path / "three"), status=3)
        assert error["error"]["code"] in {"store-rejected", "store-unavailable"}


def test_the_reaper_leaves_foreign_uploads_alone(bucket: tuple[Any, str]) -> None:
    client, name = bucket
    spec = StoreSpec(
        uri=f"s3://{name}/team",
        endpoint=os.environ["S3_ENDPOINT_TLS"],
        ca_bundle=os.environ["S3_CA_BUNDLE"],
        region="us-east-1",
    )
    store = open_store(spec)
    for owner in IDS:
        store.create_upload(f"weights/{owner}-1/a b/ü.ptd", media_type="x/y", metadata={}, part_size=5 * 2**20)
    for key in ("other/backup.tar", f"weights/{IDS[0]}-1/model.ptd", "team/notes.txt"):
        client.create_multipart_upload(Bucket=name, Key=key)
    arguments: dict[str, Any] = {"running": {Owner(IDS[1], 1)}, "known": set(IDS), "grace": 60.0}
    assert reap(store, now=time.time(), **arguments).aborted == ()
    reaped = reap(store, now=time.time() + 120, **arguments)
    assert [upload.key for upload in reaped.aborted] == [f"weights/{IDS[0]}-1/a b/ü.ptd"]
    left = {item["Key"] for item in client.list_multipart_uploads(Bucket=name)["Uploads"]}
    assert left == {
        f"team/weights/{IDS[1]}-1/a b/ü.ptd", "other/backup.tar", f"weights/{IDS[0]}-1/model.ptd", "team/notes.txt",
    }  # fmt: skip
