"""What the action prints and writes, against a reader that obeys as GitHub's runner does."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from export_action.runner import MAX_SUMMARY, Runner
from hypothesis import given
from hypothesis import strategies as st

from tests.e2e.github_runner import Commands, Result, read_outputs

TEXTS = st.one_of(
    st.text(),
    st.sampled_from(
        ["::error::x", "##[add-mask]x", "\r::set-output name=a::b", "::stop-commands::x\n::x::", "%0A::error::"]
    ),
    st.text(alphabet=":#[]%\r\n =,abc"),
)


def heard(out: io.StringIO) -> Result:
    """What a runner makes of the output."""
    result = Result()
    commands = Commands(result)
    for line in out.getvalue().split("\n"):
        commands.line(line)
    assert commands.listening
    return result


@given(st.lists(TEXTS, max_size=5))
def test_action_text_is_never_obeyed(texts: list[str]) -> None:
    out = io.StringIO()
    runner = Runner({}, out)
    for text in texts:
        runner.say(text)
    runner.close()
    result = heard(out)
    assert result.annotations == []
    assert result.surprises == []
    assert result.masked == set()


@given(TEXTS, TEXTS)
def test_action_annotation_arrives_whole_and_alone(title: str, text: str) -> None:
    out = io.StringIO()
    runner = Runner({}, out)
    runner.say("before")
    runner.error(title, text)
    runner.close()
    result = heard(out)
    assert [item["command"] for item in result.annotations] == ["error"]
    assert result.surprises == []


def test_action_annotation_keeps_percent_signs_colons_and_line_ends() -> None:
    out = io.StringIO()
    Runner({}, out).error("a: 100%, b", "line one\n50% of %0A")
    assert heard(out).annotations == [{"command": "error", "title": "a: 100%, b", "message": "line one\n50% of %0A"}]


@given(st.text(alphabet="ab<\n_weightless", max_size=60))
def test_action_output_is_read_back_whatever_it_holds(value: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "output"
        runner = Runner({"GITHUB_OUTPUT": str(path)}, io.StringIO())
        runner.output("first", value)
        runner.output("second", "2")
        assert read_outputs(path.read_text()) == {"first": value, "second": "2"}


def test_action_summary_never_exceeds_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "summary"
    Runner({"GITHUB_STEP_SUMMARY": str(path)}, io.StringIO()).summary("| é | row |\n" * 200_000)
    data = path.read_bytes()
    assert len(data) <= MAX_SUMMARY
    assert data.endswith(b"row |\n")


def test_action_writes_nothing_where_there_is_no_file() -> None:
    runner = Runner({}, io.StringIO())
    runner.output("name", "value")
    runner.summary("text")


@pytest.mark.parametrize("secret", ["", "wl_secret"])
def test_action_masks_only_what_is_a_secret(secret: str) -> None:
    out = io.StringIO()
    Runner({}, out).mask(secret)
    assert heard(out).masked == ({secret} if secret else set())
