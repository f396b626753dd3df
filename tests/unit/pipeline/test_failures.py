"""One error for whatever stopped an export."""

from __future__ import annotations

import errno
import logging

import pytest

from exporter.contract.errors import InternalError, UnsupportedModel
from exporter.failures import classify


def wrapped(cause: BaseException) -> BaseException:
    """`cause` as a back end hands it on."""
    try:
        try:
            raise cause
        except BaseException as error:
            raise InternalError("the back end failed") from error
    except InternalError as error:
        return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError(), "host-out-of-memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "host-out-of-memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "host-out-of-memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB"), "gpu-out-of-memory"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk-full"),
        (UnsupportedModel("no kernel"), "unsupported-model"),
        (ValueError("anything"), "internal"),
    ],
)
def test_the_code(error: BaseException, code: str) -> None:
    found = classify(error, "compiling")
    assert (found.code, found.stage) == (code, "compiling")
    if code not in ("unsupported-model",):
        assert classify(wrapped(error), "compiling").code == code


def test_a_stage_that_is_known_stays() -> None:
    assert classify(UnsupportedModel("x", stage="capturing"), "compiling").stage == "capturing"


def test_a_foreign_error_is_in_the_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        found = classify(ValueError("secret path /srv/models"), "capturing")
    assert "secret" not in str(found.as_dict())
    incident = found.details["incident"]
    assert isinstance(incident, str)
    assert f"incident {incident}" in caplog.text
    assert "secret path" in caplog.text
