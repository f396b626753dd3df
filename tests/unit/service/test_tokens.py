"""Bearer tokens: stored as digests, revocable, expiring; and what their scopes and a policy allow."""

from __future__ import annotations

import pytest
from sqlalchemy import select

from exporter.contract.errors import Forbidden, InvalidRequest, NotFound, Unauthenticated
from exporter.contract.spec import ExportRequest
from service.auth import Authenticator
from service.database import Database
from service.policy import ALL_ACTIONS, Action, Caller, Policy, parse_policy
from service.tables import tokens
from service.tokens import TokenTable


class Clock:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def reason(authenticator: Authenticator, header: str | None) -> str:
    with pytest.raises(Unauthenticated) as caught:
        authenticator.caller(header)
    if header is not None and len(header) > 20:
        assert header[-12:] not in str(caught.value.as_dict())
    return str(caught.value.details["reason"])


def test_a_token_from_birth_to_death(sqlite: Database) -> None:
    clock = Clock()
    table = TokenTable(sqlite, clock=clock)
    authenticator = Authenticator(tokens=table, clock=clock)
    row, token = table.create("ci", ["read", "submit"], expires_in=100)
    with sqlite.read() as connection:
        assert token not in str(connection.execute(select(tokens)).all())
    caller = authenticator.caller(f"Bearer {token}")
    assert (caller.owner, caller.scopes) == (f"token:{row.id}", {"read", "submit"})
    assert authenticator.caller(f"bearer  {token}").owner == caller.owner
    assert reason(authenticator, f"Bearer {token[:-1]}x") == "unknown-key"
    clock.now += 100
    assert reason(authenticator, f"Bearer {token}") == "expired"
    clock.now -= 1
    table.revoke(row.id)
    table.revoke(row.id)
    assert reason(authenticator, f"Bearer {token}") == "revoked"
    with pytest.raises(NotFound):
        table.revoke("0" * 16)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, "missing"),
        ("", "missing"),
        ("Bearer", "malformed"),
        ("Basic dXNlcjpwYXNzd29yZA==", "malformed"),
        ("Bearer wl_short", "unknown-key"),
        ("Bearer " + "a" * 20_000, "malformed"),
        ("Bearer eyJhbGciOiJSUzI1NiJ9.e30.c2ln", "malformed"),
        ("Bearer wl_" + "0" * 16 + "_" + "A" * 43, "unknown-key"),
    ],
)
def test_refusals(sqlite: Database, header: str | None, expected: str) -> None:
    assert reason(Authenticator(tokens=TokenTable(sqlite)), header) == expected


def test_unknown_scopes_are_refused(sqlite: Database) -> None:
    for scopes in ([], ["root"]):
        with pytest.raises(InvalidRequest):
            TokenTable(sqlite).create("x", scopes)


def test_scopes_and_rules_must_both_allow(sqlite: Database) -> None:
    table = TokenTable(sqlite)
    row, token = table.create("ci", ["read", "submit"])
    caller = Authenticator(tokens=table).caller(f"Bearer {token}")
    alone = Policy(None).access(caller)
    assert alone.actions == {"read", "submit"}
    text = f"rules: [{{who: {{token: ['{row.id}']}}, may: [submit, cancel], recipes: [a], prefix: team}}]"
    access = Policy(parse_policy(text.encode())).access(caller)
    assert access.actions == {"submit"}
    assert access.rule is not None
    assert access.rule.prefix == "team"
    body = {"recipe": "b", "source": "file:///m", "target": {"backend": "xnnpack"}}
    with pytest.raises(Forbidden) as caught:
        access.authorise(ExportRequest.model_validate(body))
    assert caught.value.details["reason"] == "recipe"
    assert access.authorise(ExportRequest.model_validate({**body, "recipe": "a"})).recipe == "a"
    nobody = Policy(parse_policy(b"rules: []")).access(caller)
    assert nobody.actions == frozenset()


@pytest.mark.parametrize(
    ("scopes", "actions"),
    [
        (("admin",), ALL_ACTIONS),
        (("read-all",), {"read", "read-all"}),
        (("submit",), {"submit"}),
        (("read", "cancel"), {"read", "cancel"}),
    ],
)
def test_what_a_scope_implies(scopes: tuple[Action, ...], actions: set[Action]) -> None:
    caller = Caller(kind="token", owner="token:1", view={}, token_id="1", scopes=frozenset(scopes))
    assert Policy(None).access(caller).actions == actions
    rule = b"rules:\n  - {who: {token: ['1']}, may: [read, submit]}\n"
    assert Policy(parse_policy(rule)).access(caller).actions == actions & {"read", "submit"}
