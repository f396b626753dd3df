"""The action with a job's OIDC token as its login: an issuer of our own stands in for GitHub's."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.github_runner import Job, Result
from tests.e2e.live_service import LiveService, running
from tests.e2e.oidc_issuer import Issuer, issuing

AUDIENCE = "weightless-tests"
POLICY = """
default: deny
rules:
  - who: {repositoryId: [123456], ref: ["refs/heads/main"]}
    may: [read, submit, cancel]
    sources: ["file://*"]
    budgets: {gpuMemory: 8GiB}
"""


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    with issuing() as issuer:
        yield issuer


@pytest.fixture(scope="module")
def service(issuer: Issuer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    """A service that trusts the issuer, for one repository's main branch."""
    folder = tmp_path_factory.mktemp("oidc")
    (folder / "policy.yaml").write_text(POLICY)
    settings = {
        "WEIGHTLESS_AUTH": "github-oidc",
        "WEIGHTLESS_OIDC_ISSUER": issuer.url,
        "WEIGHTLESS_OIDC_AUDIENCE": AUDIENCE,
        "WEIGHTLESS_POLICY": str(folder / "policy.yaml"),
    }
    with running(folder, **settings) as service:
        yield service


@pytest.fixture
def job(issuer: Issuer, tmp_path: Path) -> Iterator[Job]:
    issuer.claims.clear()
    yield Job(tmp_path, issuer.variables())
    issuer.claims.clear()


def ask(service: LiveService, **inputs: str) -> dict[str, str]:
    given = {"service-url": service.url, "recipe": "scripted", "source": service.source, "audience": AUDIENCE}
    return {**given, "target": '{"backend": "portable"}', **inputs}


def everything(service: LiveService, result: Result, job: Job) -> bytes:
    """All that a run left: the log as shown, the job's files, and everything that the service wrote."""
    shown = ["\n".join(result.log), result.summary, json.dumps(result.outputs), json.dumps(result.annotations)]
    found = ["\n".join(shown).encode()]
    for folder in (service.folder, job.folder):
        found += [path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return b"\n".join(found)


def test_action_oidc_is_the_login_and_no_token_is_left_anywhere(service: LiveService, issuer: Issuer, job: Job) -> None:
    before = len(issuer.issued)
    result = job.run(ask(service))
    assert result.status == 0, result.raw
    assert result.outputs["state"] == "succeeded"
    issued = issuer.issued[before:]
    assert len(issued) > 3, "a fresh token for each call"
    assert result.masked == set(issued)
    left = everything(service, result, job)
    assert len(left) > 10_000
    for token in issued:
        assert token.encode() not in left
        assert token.rpartition(".")[2].encode() not in left
    assert issuer.request_token.encode() not in left


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"repository_id": "654321"}, "repository"),
        ({"ref": "refs/heads/feature"}, "ref"),
        ({"event_name": "pull_request_target"}, "event"),
        ({"exp": 1}, "expired"),
        ({"aud": "somebody-else"}, "audience"),
        ({"iss": "https://token.actions.githubusercontent.com"}, "issuer"),
    ],
)
def test_action_oidc_refusals_say_why(
    service: LiveService, issuer: Issuer, job: Job, claims: dict[str, object], reason: str
) -> None:
    issuer.claims.update(claims)
    result = job.run(ask(service))
    assert result.status == 4
    (shown,) = result.errors()
    assert f"(reason: {reason})" in shown["message"]
    assert result.outputs["export-id"] == ""


def test_action_oidc_budget_above_the_rule_is_refused(service: LiveService, job: Job) -> None:
    result = job.run(ask(service, **{"max-gpu-memory": "9GiB"}))
    assert result.status == 4
    assert "(reason: budget)" in result.errors()[0]["message"]


def test_action_oidc_cancelled_run_cancels_with_a_fresh_token(service: LiveService, issuer: Issuer, job: Job) -> None:
    result = job.run(ask(service, options='{"seconds": 120}'), interrupt=signal.SIGINT)
    assert result.status == 130
    assert result.outputs["export-id"].startswith("exp_")
    assert "cancelled" in result.summary


def test_action_oidc_endpoint_that_gives_no_token(service: LiveService, issuer: Issuer, tmp_path: Path) -> None:
    job = Job(tmp_path, {**issuer.variables(), "ACTIONS_ID_TOKEN_REQUEST_TOKEN": "wrong"})
    result = job.run(ask(service))
    assert result.status == 4
    assert "GitHub gave no OIDC token" in result.errors()[0]["message"]
