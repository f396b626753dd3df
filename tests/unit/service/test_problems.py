"""The one table from errors to HTTP is complete, and nothing secret or foreign gets out of it."""

from __future__ import annotations

import json

import pytest

from exporter.contract import errors
from service.body import check_json
from service.problems import STATUS, problem


def classes(root: type[errors.WeightlessError]) -> list[type[errors.WeightlessError]]:
    return [child for direct in root.__subclasses__() for child in (direct, *classes(direct))]


@pytest.mark.parametrize(
    "kind", [kind for kind in classes(errors.WeightlessError) if kind.__module__ == errors.__name__]
)
def test_every_error_has_a_status_and_a_problem(kind: type[errors.WeightlessError]) -> None:
    assert kind in STATUS
    answer = problem(kind("something is wrong", field="a.b"))
    body = json.loads(answer.body)
    assert answer.media_type == "application/problem+json"
    assert (body["code"], body["status"], body["field"]) == (kind.code, answer.status_code, "a.b")
    assert body["hint"]
    assert ("retry-after" in answer.headers) == (answer.status_code in (429, 503))


def test_a_missing_token_is_asked_for() -> None:
    assert problem(errors.Unauthenticated("no token", reason="missing")).headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("text", ['{"a": [1, 2.5, "x", null, true]}', "[]", '"\\ud83d\\ude00"', "1e10"])
def test_strict_json_passes(text: str) -> None:
    assert check_json(text.encode()) == json.loads(text)


@pytest.mark.parametrize(
    "text",
    ["", "{", "NaN", "-Infinity", "1e999", '{"a":1,"a":2}', '"\\u0000"', '"\\ud800"', str(2**63), "[" * 70 + "]" * 70],
)
def test_what_is_not_strict_json_is_refused(text: str) -> None:
    with pytest.raises(errors.InvalidRequest):
        check_json(text.encode())


def test_utf8_only() -> None:
    with pytest.raises(errors.InvalidRequest):
        check_json('{"a": 1}'.encode("utf-16"))
