"""Commands that run beside the database: tokens, policies, gc; and doctor's rendering."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exporter.contract.spec import StoreSpec
from exporter.store.open import open_store
from service.database import Database
from service.job_store import JobStore
from service.jobs import Export, new_id
from service.tokens import TokenTable

from .conftest import Ran

POLICY = """
default: deny
rules:
  - who: {repositoryId: [42], ref: ["refs/heads/main"]}
    may: [read, submit]
    recipes: ["exported-*"]
    sources: ["s3://models/*"]
  - who: {repositoryId: [42]}
    may: [read]
"""


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEIGHTLESS_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


def test_a_token_is_shown_once_and_kept_as_a_digest(weightless: Callable[..., Ran], data_dir: Path) -> None:
    made = weightless(
        "token", "create", "ci", "--scope", "read", "--scope", "submit", "--expires", "90d", "--json"
    ).json
    assert made["token"].startswith(f"wl_{made['id']}_")
    assert made["scopes"] == ["read", "submit"]
    table = TokenTable(Database(f"sqlite:///{data_dir}/weightless.db"))
    row = table.find(made["token"])
    assert row is not None
    assert row.expires_at == pytest.approx(time.time() + 90 * 86400, abs=100)
    raw = b"".join(path.read_bytes() for path in data_dir.iterdir())
    assert made["token"].rpartition("_")[2].encode() not in raw

    listed = weightless("token", "list", "--json")
    assert made["token"] not in listed.out
    assert [item["id"] for item in listed.json["items"]] == [made["id"]]
    assert weightless("token", "revoke", made["id"]).status == 0
    assert weightless("token", "list", "--json").json["items"][0]["revokedAt"]
    assert weightless("token", "revoke", "0" * 16).status == 1


def test_a_token_alone_on_standard_output(weightless: Callable[..., Ran], data_dir: Path) -> None:
    ran = weightless("token", "create", "ci")
    assert ran.out.startswith("wl_")
    assert len(ran.out.split()) == 1
    assert "not shown again" in ran.err


@pytest.mark.parametrize("arguments", [["--scope", "everything"], ["--expires", "soon"]])
def test_tokens_that_make_no_sense(weightless: Callable[..., Ran], data_dir: Path, arguments: list[str]) -> None:
    assert weightless("token", "create", "ci", *arguments).status == 2


def test_an_unknown_setting_is_named(weightless: Callable[..., Ran], data_dir: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("WEIGHTLESS_STROE", "x")
    ran = weightless("token", "list")
    assert ran.status == 2
    assert "WEIGHTLESS_STROE" in ran.err


@pytest.mark.parametrize(
    ("claims", "more", "status", "rule", "reason"),
    [
        ({"ref": "refs/heads/main"}, [], 0, 1, None),
        ({"ref": "refs/heads/other"}, [], 0, 2, None),
        ({"ref": "refs/heads/main"}, ["--recipe", "exported-program", "--source", "s3://models/m.pt2"], 0, 1, None),
        ({"ref": "refs/heads/main"}, ["--recipe", "huggingface"], 4, 1, "recipe"),
        ({"ref": "refs/heads/main"}, ["--source", "s3://private/m.pt2"], 4, 1, "source"),
        ({"ref": "refs/heads/other"}, ["--recipe", "exported-program"], 4, 2, "scope"),
        ({"repository_id": "7"}, [], 4, None, "repository"),
    ],
)
def test_a_policy_explains_its_decision(
    weightless: Callable[..., Ran],
    tmp_path: Path,
    claims: dict[str, str],
    more: list[str],
    status: int,
    rule: int | None,
    reason: str | None,
) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY)
    given = {"repository_id": "42", "repository": "o/r", "event_name": "push", "ref": "refs/heads/main", **claims}
    (tmp_path / "claims.json").write_text(json.dumps(given))
    arguments = ["--policy", str(tmp_path / "policy.yaml"), "--claims", str(tmp_path / "claims.json"), *more]
    ran = weightless("policy", "check", *arguments, "--json")
    assert ran.status == status, ran
    assert (ran.json["allowed"], ran.json["rule"], ran.json["reason"]) == (status == 0, rule, reason)
    assert [item["rule"] for item in ran.json["findings"]] == [1, 2]
    shown = weightless("policy", "check", *arguments).out
    assert ("allowed" if status == 0 else "denied") in shown


@pytest.mark.parametrize("claims", ["{", "[" * 100_000, "[]", '{"repository": "o/r"}'])
def test_claims_that_are_none(weightless: Callable[..., Ran], tmp_path: Path, claims: str) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY)
    (tmp_path / "claims.json").write_text(claims)
    ran = weightless(
        "policy", "check", "--policy", str(tmp_path / "policy.yaml"), "--claims", str(tmp_path / "claims.json")
    )
    assert ran.status in (2, 4)


@pytest.mark.parametrize(
    ("rule", "arguments", "status", "said"),
    [
        ("recipes: ['*']", ["--recipe", "Foo Bar"], 2, "--recipe"),
        ("recipes: ['*']", ["--source", "s3://a/\n"], 2, "--source"),
        ("sources: ['s3://abc/*']", ["--source", "x"], 4, "source-access-denied"),
        ("recipes: ['muse-?']", ["--source", "s3://abc/b"], 0, "allowed"),
        ("recipes: []", ["--source", "s3://abc/b"], 0, "allowed"),
        ("recipes: []", ["--recipe", "muse-1"], 4, "denied: recipe"),
    ],
)
def test_odd_questions_to_a_policy(
    weightless: Callable[..., Ran], tmp_path: Path, rule: str, arguments: list[str], status: int, said: str
) -> None:
    policy, claims = tmp_path / "p.yaml", tmp_path / "claims.json"
    policy.write_text(f"rules:\n  - who: {{repositoryId: [42]}}\n    may: [submit]\n    {rule}\n")
    claims.write_text('{"repository_id": "42", "event_name": "push"}')
    ran = weightless("policy", "check", "--policy", str(policy), "--claims", str(claims), *arguments)
    assert ran.status == status, ran
    assert said in ran.out + ran.err


def test_gc_of_a_store_with_prefixes(weightless: Callable[..., Ran], data_dir: Path, tmp_path: Path) -> None:
    database = Database(f"sqlite:///{data_dir}/weightless.db")
    database.migrate()
    jobs = JobStore(database, clock=lambda: time.time() - 100 * 86400)
    ids = {}
    for prefix in ("", "team-a"):
        export = Export(
            id=new_id(),
            owner="local",
            caller={"kind": "local"},
            request={
                "recipe": "r",
                "source": "s3://b/x",
                "options": {},
                "target": {"backend": "portable"},
                "budgets": {},
                "labels": {},
                "priority": 0,
                "verify": True,
                "reuseWeights": True,
                "webhook": None,
            },
            created_at=time.time() - 100 * 86400,
            prefix=prefix,
        )
        jobs.submit(export)
        jobs.cancel(export.id)
        ids[prefix] = export.id
        store = open_store(StoreSpec(uri=f"file://{data_dir}/store/{prefix}".rstrip("/")))
        store.put(f"exports/{export.id}/1/model.pte", b"left", media_type="x/y")
        store.create_upload(f"weights/{export.id}-1/a.ptd", media_type="x/y", metadata={}, part_size=4096)
    report = weightless("gc", "--older-than", "30d", "--dry-run", "--json").json
    assert report["dryRun"] is True
    assert sorted(report["expired"]) == sorted(ids.values())
    assert report["abortedUploads"] == []
    done = weightless("gc", "--older-than", "30d", "--json").json
    assert sorted(done["expired"]) == sorted(ids.values())
    assert len(done["deleted"]) == 2
    assert jobs.newest_events(list(ids.values())) == {}
    with sqlite3.connect(f"{data_dir}/weightless.db") as connection:
        assert connection.execute("SELECT count(*) FROM exports").fetchone() == (0,)
    connection.close()
    assert weightless("gc", "--json").json["expired"] == []


def test_doctor_on_a_machine_with_the_client_alone(weightless: Callable[..., Ran], monkeypatch: Any) -> None:
    monkeypatch.setattr("service.commands.operate.EXPORTER_PACKAGES", ("torch", "no_such_package"))
    ran = weightless("doctor", "--json")
    assert ran.status == 1
    assert [(check["name"], check["ok"]) for check in ran.json["checks"]] == [("no_such_package", False)]
    assert not any(backend["available"] for backend in ran.json["backends"])
    assert "pip install" in weightless("doctor").out
