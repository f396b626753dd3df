"""The pydantic base models and scalar types that every contract model is made of."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel

_SIZE = re.compile(r"(\d{1,18})(?:\.(\d{1,6}))? ?(B|KB|MB|GB|TB|KiB|MiB|GiB|TiB)?", re.ASCII)
_SIZE_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_DURATION = re.compile(r"(?:(\d{1,6})d)?(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,9})s)?", re.ASCII)
MAX_SIZE = 2**60
"""Largest size accepted anywhere, in bytes (1 EiB)."""
MAX_SECONDS = 10**8
"""Longest duration accepted anywhere, in seconds (about three years)."""


class Strict(BaseModel):
    """A model of something that we are given: camelCase in JSON, unknown keys refused, immutable."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
    )


class Lenient(BaseModel):
    """A model of something that a newer writer may have written: unknown keys are ignored."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="ignore",
        frozen=True,
        allow_inf_nan=False,
    )


def parse_size(value: Any) -> int:
    """Bytes from an integer or a string such as ``8GiB``; ``ValueError`` for anything else (floats, NaN, negatives)."""
    if isinstance(value, bool):
        raise ValueError("a size is an integer number of bytes or a string such as 8GiB")
    if isinstance(value, int):
        size = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        whole, fraction, unit = match.groups()
        factor = _SIZE_UNITS[unit or "B"]
        size = int(whole) * factor
        if fraction:
            size += int(fraction) * factor // 10 ** len(fraction)
    else:
        raise ValueError("a size is an integer number of bytes or a string such as 8GiB")
    if not 0 <= size <= MAX_SIZE:
        raise ValueError(f"a size is between 0 and {MAX_SIZE} bytes")
    return size


def parse_duration(value: Any) -> int:
    """Seconds from an integer or a string such as ``2h``, ``1h30m`` or ``45s``; ``ValueError`` for anything else."""
    if isinstance(value, bool):
        raise ValueError("a duration is an integer number of seconds or a string such as 1h30m")
    if isinstance(value, int):
        seconds = value
    elif isinstance(value, str) and value.strip() and (match := _DURATION.fullmatch(value.strip())):
        days, hours, minutes, rest = (int(group or 0) for group in match.groups())
        seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    elif isinstance(value, str) and re.fullmatch(r"\d{1,9}", value.strip(), re.ASCII):
        seconds = int(value)
    else:
        raise ValueError("a duration is an integer number of seconds or a string such as 1h30m")
    if not 0 <= seconds <= MAX_SECONDS:
        raise ValueError(f"a duration is between 0 and {MAX_SECONDS} seconds")
    return seconds


Size = Annotated[int, BeforeValidator(parse_size), Field(json_schema_extra={"examples": ["8GiB", 8589934592]})]
"""A number of bytes; requests may write it as ``"8GiB"``."""

Duration = Annotated[int, BeforeValidator(parse_duration), Field(json_schema_extra={"examples": ["2h", 7200]})]
"""A number of seconds; requests may write it as ``"1h30m"``."""
