"""How figures are written for people: sizes, durations, ages, times. Pure functions; templates use them as filters."""

from __future__ import annotations

from datetime import UTC, datetime

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(value: int | float | None) -> str:
    """Bytes with three significant digits: ``1.42 GiB``; an en dash where there is no figure."""
    if value is None:
        return "–"
    amount = float(value)
    for unit in _UNITS:
        if abs(amount) < 999.5 or unit == _UNITS[-1]:
            break
        amount /= 1024
    if unit == "B":
        return f"{int(amount)} B"
    digits = 2 if abs(amount) < 9.995 else 1 if abs(amount) < 99.95 else 0
    return f"{amount:.{digits}f} {unit}"


def duration(seconds: float | None) -> str:
    """``0.8 s``, ``42 s``, ``3 min 12 s``, ``2 h 05 min``; an en dash where there is no figure."""
    if seconds is None:
        return "–"
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def age(then: str | None, now: datetime) -> str:
    """``just now``, ``5 min ago``, ``3 h ago``, ``12 d ago``."""
    moment = parse_time(then)
    if moment is None:
        return "–"
    seconds = (now - moment).total_seconds()
    if seconds < 45:
        return "just now"
    if seconds < 3570:
        return f"{max(1, round(seconds / 60))} min ago"
    if seconds < 86_400:
        return f"{round(seconds / 3600)} h ago"
    return f"{round(seconds / 86_400)} d ago"


def parse_time(text: str | None) -> datetime | None:
    """The moment of an RFC 3339 time in UTC, None where it is none."""
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def between(start: str | None, end: str | None, now: datetime) -> float | None:
    """Seconds from `start` to `end`, or to `now` while there is no end; None before the start."""
    first = parse_time(start)
    if first is None:
        return None
    return max(0.0, ((parse_time(end) or now) - first).total_seconds())
