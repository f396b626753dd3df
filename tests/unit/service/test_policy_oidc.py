"""Which rule decides about a workflow's token, and why; then the same through HTTP, with a live issuer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from exporter.contract.errors import Forbidden, InvalidRequest
from exporter.contract.machine import BackendReport, MachineReport, RecipeReport
from exporter.contract.spec import ExportRequest
from service.__main__ import build
from service.app import create_app
from service.auth import github_caller
from service.commands.policies import app as policy_command
from service.policy import Policy, parse_policy
from service.settings import Settings
from tests.oidc_issuer import AUDIENCE, Issuer, running_issuer

POLICY = """
default: deny
rules:
  - who: {repositoryId: [123456], ref: ["refs/heads/main", "refs/tags/v*"]}
    may: [read, submit, cancel]
    recipes: ["exported-*"]
    sources: ["s3://models/*"]
    prefix: team-a
    budgets: {gpuMemory: 24GiB, wallTime: 4h}
    concurrent: 2
    presign: 1h
  - who: {repositoryId: [200], environment: ["production"], jobWorkflowRef: ["octo-org/*/export.yml@refs/heads/main"]}
    may: [read, submit]
  - who: {repositoryId: [300], eventName: ["pull_request"]}
    may: [read]
  - who: {repositoryId: [400], refProtected: true}
    may: [submit]
  - who: {repositoryOwnerId: [777]}
    may: [read, read-all]
  - who: {token: ["*"]}
    may: [read, read-all, submit]
"""
MAIN: dict[str, Any] = {
    "repository_id": "123456",
    "repository_owner_id": "1",
    "ref": "refs/heads/main",
    "event_name": "push",
}
ACTIONS = "cancel read submit"

DECISIONS: dict[str, tuple[dict[str, Any], int | None, str]] = {
    "branch": ({}, 1, ACTIONS),
    "tag": ({"ref": "refs/tags/v1.2"}, 1, ACTIONS),
    "schedule": ({"event_name": "schedule"}, 1, ACTIONS),
    "merge-group": ({"event_name": "merge_group"}, 1, ACTIONS),
    "release": ({"event_name": "release"}, 1, ACTIONS),
    "dispatch": ({"event_name": "workflow_dispatch"}, 1, ACTIONS),
    "id-as-number": ({"repository_id": 123456}, 1, ACTIONS),
    "first-match-decides": ({"repository_owner_id": "777"}, 1, ACTIONS),
    "falls-to-the-owner": ({"repository_owner_id": "777", "ref": "refs/heads/x"}, 5, "read read-all"),
    "other-repository-of-owner": ({"repository_id": "9", "repository_owner_id": "777"}, 5, "read read-all"),
    "pull-request-by-name": ({"repository_id": "300", "event_name": "pull_request"}, 3, "read"),
    "protected": ({"repository_id": "400", "ref_protected": "true"}, 4, "submit"),
    "environment-and-workflow": (
        {
            "repository_id": "200",
            "environment": "production",
            "job_workflow_ref": "octo-org/x/.github/workflows/export.yml@refs/heads/main",
        },
        2,
        "read submit",
    ),
    "pull-request-target": ({"event_name": "pull_request_target"}, None, "event"),
    "pull-request": ({"event_name": "pull_request"}, None, "event"),
    "event-absent": ({"event_name": None}, None, "event"),
    "event-longer": ({"event_name": "push2"}, None, "event"),
    "event-only-as-named": ({"repository_id": "300", "event_name": "push"}, None, "event"),
    "branch-longer": ({"ref": "refs/heads/main2"}, None, "ref"),
    "branch-with-newline": ({"ref": "refs/heads/main\n"}, None, "ref"),
    "branch-in-capitals": ({"ref": "refs/heads/Main"}, None, "ref"),
    "branch-behind-a-prefix": ({"ref": "x/refs/heads/main"}, None, "ref"),
    "branch-named-like-a-tag": ({"ref": "refs/heads/refs/tags/v1"}, None, "ref"),
    "ref-absent": ({"ref": None}, None, "ref"),
    "unprotected": ({"repository_id": "400", "ref_protected": "false"}, None, "ref"),
    "protection-absent": ({"repository_id": "400"}, None, "ref"),
    "environment-absent": ({"repository_id": "200"}, None, "environment"),
    "environment-other": ({"repository_id": "200", "environment": "staging"}, None, "environment"),
    "workflow-absent": ({"repository_id": "200", "environment": "production"}, None, "workflow"),
    "workflow-of-a-branch": (
        {"repository_id": "200", "environment": "production", "job_workflow_ref": "octo-org/x/export.yml@refs/heads/f"},
        None,
        "workflow",
    ),
    "unknown-repository": ({"repository_id": "1"}, None, "repository"),
    "right-name-wrong-id": ({"repository_id": "5", "repository": "octo-org/models"}, None, "repository"),
}


@pytest.mark.parametrize(("changes", "rule", "said"), DECISIONS.values(), ids=[f"oidc-{name}" for name in DECISIONS])
def test_the_deciding_rule(changes: dict[str, Any], rule: int | None, said: str) -> None:
    claims = {name: value for name, value in {**MAIN, **changes}.items() if value is not None}
    access = Policy(parse_policy(POLICY.encode())).access(github_caller(claims))
    matched = [finding.rule + 1 for finding in access.findings if finding.matched]
    assert (matched[0] if matched else None) == rule
    if rule is None:
        assert not access.actions
        with pytest.raises(Forbidden) as caught:
            access.require("read")
        assert caught.value.details["reason"] == said
    else:
        assert " ".join(sorted(access.actions)) == said


def test_oidc_an_owner_rule_does_not_need_names() -> None:
    text = b"rules: [{who: {repositoryOwnerId: [777]}, may: [read]}]"
    access = Policy(parse_policy(text)).access(github_caller({**MAIN, "repository_owner_id": "778"}))
    assert (access.reason, access.actions) == ("owner", frozenset())


@pytest.mark.parametrize(
    "text",
    [
        "rules: [{who: {ref: ['*']}, may: [read]}]",
        "rules: [{who: {repository: ['octo-org/models']}, may: [read]}]",
        "rules: [{who: {repositoryId: ['123456']}, may: [read]}]",
        "rules: [{who: {repositoryId: [1], token: ['*']}, may: [read]}]",
        "rules: [{who: {repositoryId: []}, may: [read]}]",
        "rules: [{who: {repositoryId: [1]}, may: [everything]}]",
        "rules: [{who: {repositoryId: [1]}, may: [read], prefix: ../x}]",
        "rules: [{who: {repositoryId: [1]}, may: [read], extra: 1}]",
        "rules: [{who: {repositoryId: [1]}, who: {repositoryId: [2]}, may: [read]}]",
        "rules: !!python/object/apply:os.system ['true']",
        "default: maybe",
        "- 1",
        "a: &a [1]\nb: *a",
    ],
)
def test_oidc_a_policy_that_is_wrong_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_policy(text.encode())


def request(**changes: Any) -> dict[str, Any]:
    return {"recipe": "exported-program", "source": "s3://models/m.pt2", "target": {"backend": "portable"}, **changes}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"recipe": "huggingface"}, "recipe"),
        ({"source": "s3://models-2/m.pt2"}, "source"),
        ({"source": "s3://other/models/m.pt2"}, "source"),
        ({"source": "hf://models/m"}, "source"),
        ({"budgets": {"gpuMemory": "25GiB"}}, "budget"),
        ({"budgets": {"wallTime": "4h1s"}}, "budget"),
    ],
)
def test_oidc_what_a_rule_does_not_allow(changes: dict[str, Any], reason: str) -> None:
    access = Policy(parse_policy(POLICY.encode())).access(github_caller(MAIN))
    with pytest.raises(Forbidden) as caught:
        access.authorise(ExportRequest.model_validate(request(**changes)))
    assert caught.value.details["reason"] == reason


def test_oidc_a_rules_budgets_hold_for_requests_without() -> None:
    access = Policy(parse_policy(POLICY.encode())).access(github_caller(MAIN))
    got = access.authorise(ExportRequest.model_validate(request(budgets={"wallTime": "1h", "hostMemory": "1GiB"})))
    assert got.budgets.wall_time == 3600
    assert got.budgets.gpu_memory == 24 * 2**30
    assert got.budgets.host_memory == 2**30


# Through HTTP.


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    with running_issuer() as running:
        yield running


@pytest.fixture(scope="module")
def client(issuer: Issuer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A service whose executor never takes anything; one that could serve has described itself."""
    tmp_path = tmp_path_factory.mktemp("service")
    (tmp_path / "policy.yaml").write_text(POLICY, encoding="utf-8")
    settings = Settings(
        data_dir=tmp_path / "data",
        auth=("token", "github-oidc"),
        oidc_issuer=issuer.url,
        oidc_audience=AUDIENCE,
        policy=tmp_path / "policy.yaml",
        source_roots=("s3://models", "s3://models-2"),
        public_url="https://weightless.example",
    )
    parts, scheduler, database = build(settings, command=("false",))
    recipes = tuple(
        RecipeReport(name=name, description="", options_schema={}, example={}, available=True)
        for name in ("exported-program", "huggingface")
    )
    report = MachineReport(recipes=recipes, backends=(BackendReport(name="portable", available=True),))
    parts.executors.register("x", "local", "host", 1)
    parts.executors.report("x", report, 1)
    with TestClient(create_app(parts), base_url="https://weightless.example") as running:
        yield running
    scheduler.stop()
    database.dispose()


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_oidc_submits_and_owns(client: TestClient, issuer: Issuer) -> None:
    ours, theirs = bearer(issuer.token()), bearer(issuer.token(repository_id="200", repository_owner_id="2",
                                                               environment="production", job_workflow_ref=
                                                               "octo-org/x/export.yml@refs/heads/main"))  # fmt: skip
    made = client.post("/exports", json=request(), headers=ours)
    assert made.status_code == 202, made.text
    body = made.json()
    assert body["owner"] == "repository:123456"
    assert body["caller"]["repository"] == "octo-org/models"
    assert body["budgets"] == {"gpuMemory": 24 * 2**30, "wallTime": 4 * 3600}
    path = f"/exports/{body['id']}"
    assert client.get(path, headers=ours).status_code == 200
    for method, where in [("GET", ""), ("GET", "/events"), ("GET", "/logs"), ("GET", "/manifest"), ("POST", "/cancel"),
                          ("POST", "/retry"), ("POST", "/downloads"), ("DELETE", "")]:  # fmt: skip
        answer = client.request(method, path + where, headers=theirs)
        assert (answer.status_code, answer.json()["code"]) == (404, "not-found"), (method, where)
    assert client.get("/exports", headers=theirs).json()["items"] == []
    assert len(client.get("/exports", headers=ours).json()["items"]) == 1
    assert client.post(f"{path}/cancel", headers=ours).status_code == 202


def test_oidc_concurrency_is_checked_at_post(client: TestClient, issuer: Issuer) -> None:
    headers = bearer(issuer.token())
    first = client.post("/exports", json=request(), headers={**headers, "Idempotency-Key": "a"})
    assert client.post("/exports", json=request(), headers=headers).status_code == 202
    refused = client.post("/exports", json=request(), headers=headers)
    assert (refused.status_code, refused.json()["code"], refused.json()["reason"]) == (403, "forbidden", "concurrency")
    again = client.post("/exports", json=request(), headers={**headers, "Idempotency-Key": "a"})
    assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])
    client.post(f"/exports/{first.json()['id']}/cancel", headers=headers)
    assert client.post("/exports", json=request(), headers=headers).status_code == 202


@pytest.mark.parametrize(
    ("changes", "status", "code", "reason"),
    [
        ({"exp": 1}, 401, "unauthenticated", "expired"),
        ({"aud": "x"}, 401, "unauthenticated", "audience"),
        ({"event_name": "pull_request_target"}, 403, "forbidden", "event"),
        ({"ref": "refs/pull/1/merge"}, 403, "forbidden", "ref"),
        ({"repository_id": "1"}, 403, "forbidden", "repository"),
        ({"repository_id": "300", "event_name": "pull_request"}, 403, "forbidden", "scope"),
    ],
)
def test_oidc_refusals(
    client: TestClient, issuer: Issuer, changes: dict[str, Any], status: int, code: str, reason: str
) -> None:
    token = issuer.token(**{"repository_owner_id": "1", **changes})
    answer = client.post("/exports", json=request(), headers=bearer(token))
    assert (answer.status_code, answer.json()["code"], answer.json()["reason"]) == (status, code, reason)
    assert answer.headers["content-type"] == "application/problem+json"
    assert ("WWW-Authenticate" in answer.headers) == (status == 401)
    for part in token.split("."):
        assert part not in answer.text
        assert all(part not in value for value in answer.headers.values())


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({}, "missing"),
        ({"Authorization": ""}, "missing"),
        ({"Authorization": "Basic dXNlcjpwYXNz"}, "malformed"),
        ({"Authorization": "Bearer"}, "malformed"),
        ({"Authorization": "Bearer a b"}, "malformed"),
        ({"Authorization": "Bearer " + "a" * 17_000}, "malformed"),
        ({"Authorization": "Bearer wl_0123456789abcdef_" + "x" * 43}, "unknown-key"),
    ],
)
def test_oidc_headers_that_hold_no_token(client: TestClient, headers: dict[str, str], reason: str) -> None:
    answer = client.get("/exports", headers=headers)
    assert (answer.status_code, answer.json()["reason"]) == (401, reason)


def test_oidc_an_outage_of_the_issuer_is_503(client: TestClient, issuer: Issuer) -> None:
    issuer.status = 500
    try:
        answer = client.get("/exports", headers=bearer(issuer.token(header={"kid": "key-2"})))
    finally:
        issuer.status = 200
    assert (answer.status_code, answer.json()["retryable"]) == (503, True)
    assert int(answer.headers["Retry-After"]) > 0
    assert "WWW-Authenticate" not in answer.headers


@pytest.mark.parametrize(
    ("changes", "arguments", "status", "expected"),
    [
        ({}, [], 0, {"allowed": True, "rule": 1, "reason": None}),
        ({}, ["--recipe", "huggingface"], 4, {"allowed": False, "rule": 1, "reason": "recipe"}),
        ({}, ["--source", "s3://other/m"], 4, {"allowed": False, "rule": 1, "reason": "source"}),
        ({"event_name": "pull_request_target"}, [], 4, {"allowed": False, "rule": None, "reason": "event"}),
        ({"repository_id": "1"}, [], 4, {"allowed": False, "rule": None, "reason": "repository"}),
    ],
)
def test_oidc_policy_check_explains(
    tmp_path: Path, changes: dict[str, Any], arguments: list[str], status: int, expected: dict[str, Any]
) -> None:
    (tmp_path / "claims.json").write_text(json.dumps({**MAIN, **changes}), encoding="utf-8")
    (tmp_path / "policy.yaml").write_text(POLICY, encoding="utf-8")
    given = ["check", "--claims", f"{tmp_path}/claims.json", "--policy", f"{tmp_path}/policy.yaml", "--json"]
    done = CliRunner().invoke(policy_command, [*given, *arguments])
    assert done.exit_code == status
    got = json.loads(done.stdout)
    assert {name: got[name] for name in expected} == expected
    assert all(finding["sentence"].startswith(f"rule {finding['rule']} ") for finding in got["findings"])


def test_oidc_a_refusal_names_what_was_wanted_and_what_was_given() -> None:
    policy = Policy(parse_policy(POLICY.encode()))
    first, *_, owner, _ = policy.explain(github_caller({**MAIN, "event_name": "pull_request_target"}))
    assert first.sentence == (
        "rule 1 does not match: eventName must be push or workflow_dispatch or schedule or merge_group or release, "
        "and it is 'pull_request_target'"
    )
    assert owner.sentence == "rule 5 does not match: repositoryOwnerId must be 777, and it is '1'"
    second = policy.explain(github_caller({**MAIN, "repository_id": "200"}))[1]
    assert second.sentence == "rule 2 does not match: environment must be production, and there is none"
