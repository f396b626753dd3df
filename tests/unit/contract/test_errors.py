"""The error tree: every code of the API's documentation exists, says what to do, and survives a round trip."""

from __future__ import annotations

import pytest

from exporter.contract import errors

EXPORT_CODES = {
    "invalid-request", "source-not-found", "source-access-denied", "source-unsafe", "unsupported-model",
    "host-out-of-memory", "gpu-out-of-memory", "budget-exceeded", "disk-full", "store-unavailable", "store-rejected",
    "deadline-exceeded", "cancelled", "executor-lost", "verification-failed", "toolchain-mismatch", "internal",
}  # fmt: skip
HTTP_CODES = {
    "not-found", "not-finished", "idempotency-conflict", "illegal-state", "body-too-large", "unsupported-media-type",
    "queue-full", "rate-limited", "unauthenticated", "forbidden",
}  # fmt: skip


def classes() -> list[type[errors.WeightlessError]]:
    return [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.WeightlessError)
    ]


def test_codes_are_exactly_the_documented_ones() -> None:
    assert {kind.code for kind in classes()} == EXPORT_CODES | HTTP_CODES


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_every_error_has_a_hint_and_an_actor(kind: type[errors.WeightlessError]) -> None:
    if kind is not errors.WeightlessError:
        assert len(kind.default_hint) > 20
    assert kind.actor in ("user", "operator", "service", "nobody")
    assert kind.__doc__


@pytest.mark.parametrize("code", sorted(EXPORT_CODES | HTTP_CODES))
def test_round_trip(code: str) -> None:
    kind = errors.error_class(code)
    made = kind("the bucket is gone", stage="uploading", bucket="b", tries=3)
    read = errors.error_from_dict(made.as_dict())
    assert type(read) is kind
    assert read.as_dict() == made.as_dict()


def test_an_unknown_code_is_internal() -> None:
    assert errors.error_class("from-the-future") is errors.InternalError


def test_retryable_codes() -> None:
    assert {kind.code for kind in classes() if kind.retryable} == {
        "disk-full", "store-unavailable", "executor-lost", "queue-full", "rate-limited",
    }  # fmt: skip
