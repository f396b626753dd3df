"""The README is checked like code: its tables are generated, its links and commands exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from service.cli import app

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_tables_are_the_generated_ones() -> None:
    path = ROOT / "tests" / "bench" / "report.py"
    spec = importlib.util.spec_from_file_location("bench_report", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.render(README) == README, "run `make bench-report`"


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((?!https?://|#)([^)#]+)", README))))
def test_relative_links_exist(target: str) -> None:
    assert (ROOT / target).exists()


@pytest.mark.parametrize("command", sorted(set(re.findall(r"weightless ([a-z]+)\b(?= )", README)) - {"exports"}))
def test_every_command_of_the_readme_exists(command: str) -> None:
    if command in {"service", "is", "and", "without"}:
        return
    assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0


def test_the_first_commands_stand_before_line_40() -> None:
    head = "\n".join(README.splitlines()[:40])
    for words in ("make demo", "weightless serve", "weightless submit", "weightless pull"):
        assert words in head
