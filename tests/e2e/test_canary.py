"""No credential, token or presigned URL is left in anything that a run writes: each is a canary, all is searched."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from tests.e2e.github_runner import Job
from tests.e2e.live_service import LiveService, free_port, running
from tests.e2e.oidc_issuer import Issuer, issuing

SECRET = "canary0secret0key0of0the0store0d41d8cd9"
SESSION = "canary0session0token0e3b0c442"
WEBHOOK = "canary0webhook0key0b14a7b80"
AUDIENCE = "weightless-tests"
POLICY = "rules: [{who: {repositoryId: [123456]}, may: [read, submit, cancel]}]"


@dataclass(frozen=True)
class Surroundings:
    """A service whose results go to an S3 server, and an issuer whose tokens it takes."""

    service: LiveService
    issuer: Issuer
    endpoint: str

    def objects(self) -> Iterator[bytes]:
        """The body and the metadata of every stored object."""
        s3 = boto3.client("s3", endpoint_url=self.endpoint, region_name="us-east-1")
        for item in s3.list_objects_v2(Bucket="results").get("Contents", []):
            found = s3.get_object(Bucket="results", Key=item["Key"])
            yield found["Body"].read()
            yield json.dumps(found["Metadata"]).encode()


@pytest.fixture
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Surroundings]:
    port = free_port()
    server = ThreadedMotoServer("127.0.0.1", port, verbose=False)
    server.start()
    endpoint = f"http://127.0.0.1:{port}"
    for name, value in {
        "AWS_ACCESS_KEY_ID": "canaryid",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": SESSION,
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket="results")
    folder = tmp_path / "service"
    folder.mkdir()
    (folder / "policy.yaml").write_text(POLICY)
    with issuing() as issuer:
        settings = {
            "WEIGHTLESS_STORE": "s3://results/team",
            "WEIGHTLESS_S3_ENDPOINT": endpoint,
            "WEIGHTLESS_AUTH": "github-oidc",
            "WEIGHTLESS_OIDC_ISSUER": issuer.url,
            "WEIGHTLESS_OIDC_AUDIENCE": AUDIENCE,
            "WEIGHTLESS_POLICY": str(folder / "policy.yaml"),
            "WEIGHTLESS_WEBHOOK_KEY": WEBHOOK,
            "WEIGHTLESS_LOG_LEVEL": "debug",
        }
        with running(folder, **settings) as service:
            yield Surroundings(service, issuer, endpoint)
    server.stop()


@pytest.mark.slow
def test_action_oidc_canaries_are_found_nowhere(surroundings: Surroundings, tmp_path: Path) -> None:
    service, issuer = surroundings.service, surroundings.issuer
    job = Job(tmp_path / "job", issuer.variables())
    job.folder.mkdir()
    given = {"service-url": service.url, "audience": AUDIENCE, "target": '{"backend": "portable"}'}
    asked = {**given, "recipe": "scripted", "source": service.source}
    good = job.run({**asked, "options": '{"segments": 3}'})
    assert good.status == 0, good.raw
    failure = {"code": "store-rejected", "message": "the store said no", "hint": "", "stage": "uploading"}
    bad = job.run({**asked, "options": json.dumps({"failure": failure})})
    assert bad.status == 1
    links = presigned(surroundings, good.outputs["export-id"])
    assert any("X-Amz-Signature" in link for link in links)

    found = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]
    found += [*surroundings.objects()]
    for result in (good, bad):
        found += ["\n".join(result.log).encode(), json.dumps([result.outputs, result.annotations]).encode()]
        found.append(result.summary.encode())
    everything = b"\n".join(found)
    assert good.outputs["export-id"].encode() in everything
    for secret in (SECRET, SESSION, WEBHOOK, issuer.request_token, "X-Amz-Signature", *issuer.issued):
        assert secret.encode() not in everything, secret[:20]


def presigned(surroundings: Surroundings, export_id: str) -> list[str]:
    """Download links of the export, asked for as a client of the API would."""
    token = surroundings.issuer.token(AUDIENCE)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    url = f"{surroundings.service.url}/exports/{export_id}/downloads"
    request = urllib.request.Request(url, data=b'{"expiresIn": 60}', headers=headers, method="POST")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return list(json.load(answer)["urls"].values())
