"""Charts, badges and what a page may link to."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from service.jobs import State
from service.web import chart
from service.web.render import https_only, static_file
from service.web.timeline import Sample, Span, Timeline

GiB = 2**30


@pytest.mark.parametrize("highest", [0, 1, 2**20, 700 * 2**20, GiB, 3 * GiB, 139 * GiB, 2**45])
def test_memory_axis_is_round_and_covers_the_highest(highest: int) -> None:
    ticks = chart.memory_ticks(highest)
    step = ticks[1]
    assert step & (step - 1) == 0
    assert ticks[-1] >= highest
    assert 2 <= len(ticks) <= 8


@pytest.mark.parametrize(("length", "last"), [(1, 1), (8, 8), (59, 50), (3600, 3600), (100_000, 86_400)])
def test_time_axis_has_few_round_values(length: float, last: int) -> None:
    ticks = chart.time_ticks(length)
    assert ticks[0] == 0
    assert ticks[-1] == last
    assert len(ticks) <= 9


def test_clock() -> None:
    assert [chart.clock(value) for value in (0, 61, 3600, 36_610)] == ["0:00", "1:01", "1:00:00", "10:10:10"]


def test_memory_chart_shows_stages_curves_and_budgets() -> None:
    timeline = Timeline(
        (Span("compiling", 0, 60), Span("uploading", 10, None)),
        (Sample(0, GiB, 2 * GiB, 0), Sample(60, GiB, 2 * GiB, GiB // 2)),
        60,
    )
    svg = chart.memory_svg(timeline, {"hostMemory": 4 * GiB, "gpuMemory": None})
    root = ElementTree.fromstring(svg)
    words = list(root.itertext())
    for expected in ("host anonymous", "host RSS", "GPU", "compiling", "uploading", "host budget 4.00 GiB"):
        assert expected in words
    assert not any("GPU budget" in word for word in words)
    assert b"<script" not in svg
    assert b" style=" not in svg
    assert chart.style_hash(svg).count("'sha256-") == 1


def test_memory_chart_without_samples_says_so() -> None:
    svg = chart.memory_svg(Timeline(), {})
    assert "no samples yet" in " ".join(ElementTree.fromstring(svg).itertext())


@pytest.mark.parametrize("state", [*State, "<script>"])
def test_badge_names_the_state_or_that_it_is_unknown(state: str) -> None:
    text = list(ElementTree.fromstring(chart.badge_svg(str(state))).itertext())
    assert text[-1] == (str(state) if state in set(State) else "unknown")


@pytest.mark.parametrize(
    ("url", "linked"),
    [
        ("https://github.com/octo/models/actions/runs/1", True),
        ("http://github.com/", False),
        ("javascript:alert(1)", False),
        ("https:", False),
        ("https://[", False),
        ("https://a\nb", False),
        (None, False),
        (7, False),
    ],
)
def test_only_https_addresses_become_links(url: object, linked: bool) -> None:
    assert https_only(url) == (url if linked else None)


@pytest.mark.parametrize("name", ["../render.py", "memory.css", "", "live.js/", "LIVE.JS"])
def test_no_other_file_is_served(name: str) -> None:
    assert static_file(name) is None
