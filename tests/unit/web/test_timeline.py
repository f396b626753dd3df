"""Stages and samples from events."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from service.web.timeline import Sample, Span, thin, timeline_of


def at(second: int, kind: str, **fields: Any) -> dict[str, Any]:
    return {"time": f"2026-11-30T12:{second // 60:02d}:{second % 60:02d}Z", "type": kind, **fields}


def stage(second: int, name: str, state: str, method: str | None = None) -> dict[str, Any]:
    return at(second, "stage", name=name, state=state, method=method)


def sample(second: int, anon: int) -> dict[str, Any]:
    return at(second, "resources", hostAnonBytes=anon, hostRssBytes=anon, gpuBytes=0, diskWrittenBytes=0)


def test_stages_overlap_and_methods_are_one_span() -> None:
    timeline = timeline_of(
        [
            at(0, "state", to="starting"),
            stage(2, "compiling", "started"),
            stage(2, "compiling", "started", "prefill"),
            stage(5, "uploading", "started"),
            stage(6, "compiling", "finished", "prefill"),
            stage(8, "compiling", "finished"),
            sample(9, 7),
        ]
    )
    assert timeline.spans == (Span("compiling", 2, 8), Span("uploading", 5, None))
    assert timeline.length == 9
    assert not timeline.ended
    assert timeline.samples == (Sample(9, 7, 7, 0),)


def test_a_running_method_keeps_its_stage_open() -> None:
    timeline = timeline_of(
        [stage(0, "compiling", "started"), stage(1, "compiling", "started"), stage(2, "compiling", "finished")]
    )
    assert timeline.spans == (Span("compiling", 0, None),)


def test_the_end_closes_what_a_failure_left_open() -> None:
    timeline = timeline_of([stage(0, "compiling", "started"), at(4, "failed", error={})])
    assert timeline.ended
    assert timeline.spans == (Span("compiling", 0, 4),)


def test_a_new_attempt_starts_over() -> None:
    timeline = timeline_of(
        [
            at(0, "state", to="starting"),
            stage(1, "compiling", "started"),
            sample(2, 100),
            at(3, "state", to="queued"),
            at(60, "state", to="starting"),
            stage(61, "resolving", "started"),
        ]
    )
    assert timeline.spans == (Span("resolving", 1, None),)
    assert timeline.samples == ()


def test_what_is_not_understood_is_skipped() -> None:
    odd: list[dict[str, Any]] = [
        {},
        {"type": "stage", "time": "yesterday", "name": "compiling", "state": "started"},
        stage(0, "brewing", "started"),
        stage(0, "verifying", "finished"),
        at(1, "resources"),
    ]
    timeline = timeline_of(odd)
    assert timeline.spans == ()
    assert timeline.samples == (Sample(1, 0, 0, 0),)


@given(st.lists(st.integers(0, 2**40), max_size=300), st.integers(1, 50))
def test_thinning_keeps_every_peak_and_the_order(values: list[int], limit: int) -> None:
    samples = [Sample(index, value, value, value // 2) for index, value in enumerate(values)]
    kept = thin(samples, limit)
    assert len(kept) <= max(limit, 0) or len(kept) == len(samples)
    assert [item.at for item in kept] == sorted(item.at for item in kept)
    assert max((item.host_anon for item in kept), default=0) == max(values, default=0)
