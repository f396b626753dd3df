"""Figures as people read them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from service.web import words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1024, "1.00 KiB"),
        (10 * 1024, "10.0 KiB"),
        (999 * 1024, "999 KiB"),
        (1023 * 1024, "1.00 MiB"),
        (11_358_449_184, "10.6 GiB"),
        (2**60, "1048576 TiB"),
    ],
)
def test_size(value: int | None, text: str) -> None:
    assert words.size(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (-1, "0.0 s"),
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (3599.6, "1 h 00 min"),
        (7500, "2 h 05 min"),
    ],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert words.duration(seconds) == text


@pytest.mark.parametrize(
    ("then", "text"),
    [
        (None, "–"),
        ("not a time", "–"),
        ("2026-11-30T12:00:00Z", "just now"),
        ("2026-11-30T11:55:00.250Z", "5 min ago"),
        ("2026-11-30T09:00:00", "3 h ago"),
        ("2026-11-18T12:00:00+00:00", "12 d ago"),
    ],
)
def test_age(then: str | None, text: str) -> None:
    assert words.age(then, datetime(2026, 11, 30, 12, 0, 10, tzinfo=UTC)) == text


def test_time_between_two_moments_or_until_now() -> None:
    now = datetime(2026, 11, 30, 12, 0, 10, tzinfo=UTC)
    assert words.between(None, None, now) is None
    assert words.between("2026-11-30T12:00:00Z", None, now) == 10
    assert words.between("2026-11-30T12:00:00Z", "2026-11-30T12:00:04Z", now) == 4
    assert words.between("2026-11-30T12:00:00Z", "2026-11-30T11:00:00Z", now) == 0
