"""Events and text out of one stream, however it is cut into pieces and however often it is read anew."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.executors import ray_log
from service.executors.ray_log import FramedLog

TIME = "2026-01-01T00:00:00.000Z"


def event(seq: int, name: str = "capturing") -> str:
    return "\x1e" + json.dumps({"v": 1, "seq": seq, "time": TIME, "type": "stage", "name": name, "state": "started"})


TEXT = f"Running entrypoint\n{event(1)}\nhello\nhalf{event(2)}\n of a line\n{event(3)}\nthe end"


def test_ray_events_and_text_are_told_apart(tmp_path: Path) -> None:
    framed = FramedLog(tmp_path / "1" / "log.txt")
    assert framed.empty
    assert [line.seq for line in framed.feed(TEXT + "\n")] == [1, 2, 3]
    assert (tmp_path / "1" / "log.txt").read_text() == "Running entrypoint\nhello\nhalf of a line\nthe end\n"
    assert (tmp_path / "1" / "log.txt").stat().st_mode & 0o777 == 0o600
    assert not framed.empty


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, len(TEXT)), max_size=8), st.integers(0, len(TEXT)))
def test_ray_a_log_may_come_in_any_pieces_and_again(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], broken: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "log.txt"
    framed = FramedLog(path)
    found = framed.feed(TEXT[:broken])
    framed.restart()
    edges = [0, *sorted(cuts), len(TEXT)]
    for start, end in itertools.pairwise(edges):
        found += framed.feed(TEXT[start:end])
    found += framed.feed("\n")
    assert [line.seq for line in found] == [1, 2, 3]
    assert path.read_text() == "Running entrypoint\nhello\nhalf of a line\nthe end\n"


def test_ray_another_process_goes_on_with_the_text(tmp_path: Path) -> None:
    FramedLog(tmp_path / "log.txt").feed(TEXT)
    again = FramedLog(tmp_path / "log.txt")
    assert [line.seq for line in again.feed(TEXT + "\n")] == [1, 2, 3]
    assert (tmp_path / "log.txt").read_text() == "Running entrypoint\nhello\nhalf of a line\nthe end\n"


@pytest.mark.parametrize("line", ["\x1e", "\x1e{}", "\x1enot json", '\x1e{"v": 1, "seq": 1}', "\x1e" + "[" * 10_000])
def test_ray_a_marked_line_that_is_no_event_is_text(tmp_path: Path, line: str) -> None:
    framed = FramedLog(tmp_path / "log.txt")
    assert framed.feed(f"{line}\n{event(1)}\n")[0].seq == 1
    assert (tmp_path / "log.txt").read_text() == f"{line}\n"


def test_ray_a_line_without_end_is_not_held(tmp_path: Path) -> None:
    framed = FramedLog(tmp_path / "log.txt")
    for _ in range(20):
        assert framed.feed("x" * 50_000) == []
        assert len(framed._pending) <= ray_log.MAX_PENDING
    assert (tmp_path / "log.txt").stat().st_size >= 20 * 50_000 - ray_log.MAX_PENDING


def test_ray_the_text_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_log, "MAX_LOG", 1000)
    framed = FramedLog(tmp_path / "log.txt")
    framed.feed("0123456789\n" * 200)
    assert [line.seq for line in framed.feed(event(1) + "\n")] == [1]
    assert (tmp_path / "log.txt").stat().st_size == 1000
