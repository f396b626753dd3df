"""Requests and specs: what is accepted, and what is refused with the field named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from exporter.contract.base import MAX_SIZE, parse_duration, parse_size
from exporter.contract.spec import ExportRequest, ExportSpec, StoreSpec

DOCUMENTED: dict[str, Any] = {
    "recipe": "exported-program", "source": "s3://models/m.pt2", "options": {},
    "target": {"backend": "cuda", "cudaVersion": "13.0", "arch": ["sm_90"], "lowMemoryMode": True, "maxAutotune": True,
               "sharedMemoryBytes": None, "tritonKernelMode": "on"},
    "budgets": {"hostMemory": "8GiB", "gpuMemory": "8GiB", "scratchDisk": "1GiB", "wallTime": "2h"},
    "priority": 0, "verify": True, "reuseWeights": True, "labels": {"pr": "123"},
    "webhook": {"url": "https://example.org/hook", "events": ["finished"]},
}  # fmt: skip


def nested(depth: int) -> dict[str, Any]:
    """Options with `depth` objects inside each other."""
    return {"a": nested(depth - 1)} if depth else {}


def test_the_documented_request() -> None:
    request = ExportRequest.model_validate_json(json.dumps(DOCUMENTED))
    assert request.budgets.host_memory == 8 * 2**30
    assert request.budgets.wall_time == 7200
    again = ExportRequest.model_validate(request.model_dump(mode="json", by_alias=True))
    assert again == request


@pytest.mark.parametrize(
    ("text", "size"),
    [(0, 0), (17, 17), ("17", 17), ("1KiB", 1024), ("1.5GiB", 3 * 2**29), ("2 MB", 2_000_000), ("192MiB", 192 * 2**20)],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [-1, "-1", "-1GiB", 1.5, float("nan"), float("inf"), "nan", "NaN", "1e9", "", "GiB", "8 gib", "8GiBs", True, None,
     [], {}, MAX_SIZE + 1, "9" * 30, "٣GiB", "1_000"],
)  # fmt: skip
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ValueError):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [(90, 90), ("90", 90), ("2h", 7200), ("1h30m", 5400), ("1d", 86400), ("45s", 45)]
)
def test_durations(text: object, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", [-1, "-1s", "", " ", "h", "1.5h", "1h 30m", "30m1h", float("nan"), True, None, "9" * 12]
)
def test_what_is_no_duration(text: object) -> None:
    with pytest.raises(ValueError):
        parse_duration(text)


@given(st.one_of(st.integers(), st.floats(), st.text(), st.booleans(), st.none(), st.lists(st.integers())))
def test_a_size_is_an_integer_in_bounds_or_a_value_error(value: object) -> None:
    try:
        size = parse_size(value)
    except ValueError:
        return
    assert isinstance(size, int)
    assert 0 <= size <= MAX_SIZE


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"recipe": ""}, "recipe"), ({"recipe": "../x"}, "recipe"), ({"source": ""}, "source"),
        ({"source": "s3://a\nb"}, "source"), ({"target": {"backend": "tpu"}}, "target.backend"),
        ({"target": {}}, "target.backend"), ({"target": {"backend": "cuda", "arch": ["90"]}}, "target.arch.0"),
        ({"target": {"backend": "xnnpack", "maxAutotune": True}}, "target"),
        ({"budgets": {"hostMemory": -1}}, "budgets.hostMemory"),
        ({"budgets": {"gpuMemory": 0}}, "budgets.gpuMemory"), ({"budgets": {"wallTime": "-2h"}}, "budgets.wallTime"),
        ({"budgets": {"memory": 1}}, "budgets.memory"), ({"priority": 1000}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"options": {"inputs": [{"high": 2**53}]}}, "options"), ({"options": {"low": -(2**53)}}, "options"),
        ({"options": {"scale": float("nan")}}, "options"), ({"options": nested(40)}, "options"),
        ({"target": {"backend": "cuda", "sharedMemoryBytes": 2**53}}, "target.sharedMemoryBytes"),
        ({"labels": {"": "x"}}, "labels"), ({"labels": {"a": ""}}, "labels.a"), ({"surprise": 1}, "surprise"),
        ({"webhook": {"url": "http://example.org"}}, "webhook.url"),
    ],
)  # fmt: skip
def test_what_a_request_refuses(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ExportRequest.model_validate({**DOCUMENTED, **change})
    places = {".".join(str(part) for part in error["loc"]) for error in caught.value.errors()}
    assert any(place == field or place.startswith(field + ".") for place in places), places


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400"])
def test_numbers_that_json_does_not_have(number: str) -> None:
    body = json.dumps(DOCUMENTED).replace('"8GiB"', number)
    with pytest.raises(ValidationError):
        ExportRequest.model_validate_json(body)


@pytest.mark.parametrize(
    ("field", "value"), [("attempt", 0), ("attempt", 2**53), ("created_at", "\x1b[31m"), ("id", "exp_1")]
)
def test_what_a_spec_refuses(field: str, value: object) -> None:
    good = {
        "id": "exp_01JABCDEFGHJKMNPQRSTVWXYZ0", "attempt": 1, "created_at": "2026-11-30T15:00:00Z",
        "request": DOCUMENTED, "store": {"uri": "s3://b/p"},
    }  # fmt: skip
    ExportSpec.model_validate(good)
    with pytest.raises(ValidationError):
        ExportSpec.model_validate({**good, field: value})


def test_a_spec_round_trips_and_has_no_credential_field() -> None:
    spec = ExportSpec(
        id="exp_01JABCDEFGHJKMNPQRSTVWXYZ0", attempt=1, created_at="2026-11-30T15:00:00Z",
        request=ExportRequest.model_validate(DOCUMENTED), store=StoreSpec(uri="s3://b/p"),
    )  # fmt: skip
    text = spec.model_dump_json(by_alias=True)
    assert ExportSpec.model_validate_json(text) == spec
    fields = set(StoreSpec.model_fields)
    assert not any(word in field for field in fields for word in ("secret", "token", "password", "access"))
