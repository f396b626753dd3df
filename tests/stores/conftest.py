"""Stores for the conformance suite: memory, file, and S3 against moto, a real Ceph gateway, and the scripted stub."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from exporter.contract.objects import Capabilities
from exporter.contract.spec import StoreSpec
from exporter.store.open import open_store
from exporter.store.s3 import S3Store
from exporter.store.s3_client import RetryPolicy
from exporter.store.s3_profiles import Profile
from tests.stores.samples import PLACES
from tests.stores.stub.personality import CEPH, COMPLETE_ONES, ENCRYPTED, GCS, STRICT, Personality
from tests.stores.stub.server import BUCKET, StubServer, serving, write_certificate

KINDS = ["memory", "file", "moto", "rgw", *(f"stub-{item.name}" for item in (STRICT, CEPH, GCS, ENCRYPTED))]
_RGW = {
    name: os.environ.get(name, "")
    for name in ("S3_ENDPOINT_TLS", "S3_CA_BUNDLE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
}
"""Read before any test changes the environment."""
SMALL_PART = 128 * 1024
"""Part size of stores whose minimum is small, so that tests are quick."""


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(what the stub serves with, what clients trust)."""
    return write_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials that the stub and moto take, and no proxy in between."""
    for name in list(os.environ):
        if name.startswith("AWS_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI-SECRET")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)


StubFactory = Callable[..., tuple[StubServer, S3Store]]


@pytest.fixture
def stub(certificate: tuple[Path, Path], credentials: None) -> Iterator[StubFactory]:
    """Makes a scripted server and a store on it: parts may be small, and retries do not wait."""
    server_pem, trust_pem = certificate
    with pytest.MonkeyPatch.context(), _Servers() as servers:

        def make(
            personality: Personality = STRICT, *, min_part: int = 1024, **options: Any
        ) -> tuple[StubServer, S3Store]:
            server = servers.start(server_pem, replace(personality, min_part=min_part))
            spec = {"uri": f"s3://{BUCKET}/p", "endpoint": server.endpoint, "ca_bundle": str(trust_pem)}
            capabilities = Capabilities(
                min_part=min_part,
                max_parts=personality.max_parts,
                equal_parts=personality.equal_parts,
                copy_part=personality.copy_part,
                list_uploads=personality.list_uploads,
                metadata=personality.keeps_metadata,
                conditional_put=personality.conditional == "honour",
            )
            store = S3Store(
                StoreSpec(**spec, **options.pop("spec", {})),
                profile=Profile("stub", capabilities),
                retry=options.pop("retry", RetryPolicy(base=0.0)),
                **options,
            )
            return server, store

        yield make


class _Servers:
    def __enter__(self) -> _Servers:
        self._open: list[Any] = []
        return self

    def start(self, certificate: Path, personality: Personality) -> StubServer:
        context = serving(certificate, personality)
        self._open.append(context)
        return context.__enter__()

    def __exit__(self, *_: object) -> None:
        for context in self._open:
            context.__exit__(None, None, None)


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a moto server in a process of its own. It shows compatibility, not checksums and not rates."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("moto") / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=out, stderr=out
        )
        try:
            for _ in range(300):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setenv("no_proxy", "127.0.0.1")
                    try:
                        urlopen(f"http://127.0.0.1:{port}/moto-api/", timeout=2).close()
                        break
                    except OSError:
                        time.sleep(0.1)
            else:
                pytest.fail(f"moto did not start: {log.read_text()}")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(10)


@pytest.fixture(scope="session")
def rgw() -> dict[str, str]:
    """The environment of a running Ceph gateway."""
    if not _RGW.get("S3_ENDPOINT_TLS"):
        pytest.skip("no Ceph RADOS gateway here: S3_ENDPOINT_TLS is not set (see CONTRIBUTING)")
    return _RGW


def make_bucket(spec: StoreSpec, name: str) -> None:
    """Create a bucket with plain boto3."""
    import boto3

    client = boto3.Session().client(
        "s3", endpoint_url=spec.endpoint, region_name="us-east-1", verify=spec.ca_bundle if spec.ca_bundle else None
    )
    client.create_bucket(Bucket=name)
    client.close()


@pytest.fixture
def rgw_spec(rgw: dict[str, str], credentials: None, monkeypatch: pytest.MonkeyPatch) -> StoreSpec:
    """A place of its own in a bucket of the gateway, over TLS."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, rgw[name])
    spec = StoreSpec(
        uri=f"s3://conformance/{uuid.uuid4().hex}", endpoint=rgw["S3_ENDPOINT_TLS"], ca_bundle=rgw["S3_CA_BUNDLE"]
    )
    make_bucket(spec, "conformance")
    return spec


@pytest.fixture
def moto_spec(moto: str, credentials: None) -> StoreSpec:
    """A place of its own in a bucket of moto's server."""
    spec = StoreSpec(uri=f"s3://conformance/{uuid.uuid4().hex}", endpoint=moto)
    make_bucket(spec, "conformance")
    return spec


def _kinds() -> list[Any]:
    return [pytest.param(kind, marks=pytest.mark.rgw) if kind == "rgw" else kind for kind in KINDS]


@pytest.fixture(params=_kinds())
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Every store in turn."""
    kind = request.param
    if kind == "memory":
        return open_store(StoreSpec(uri=f"memory://{uuid.uuid4().hex}/prefix"))
    if kind == "file":
        return open_store(StoreSpec(uri=f"file://{tmp_path}/the%20store"))
    if kind in ("moto", "rgw"):
        return S3Store(request.getfixturevalue(f"{kind}_spec"), retry=RetryPolicy(attempts=4, base=0.05))
    personality = next(item for item in COMPLETE_ONES if f"stub-{item.name}" == kind)
    return request.getfixturevalue("stub")(personality, min_part=personality.min_part)[1]


@pytest.fixture
def part_size(store: Any) -> int:
    """The smallest part that the store takes, at least 128 KiB."""
    return max(SMALL_PART, store.capabilities.min_part)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in how many places the fault suite let something go wrong."""
    if PLACES:
        counts = ", ".join(f"{way} {sum(place[0] == way for place in PLACES)}" for way in ("upload", "pull"))
        terminalreporter.write_line(f"fault places: {len(PLACES)} distinct ({counts})")
