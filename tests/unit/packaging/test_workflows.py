"""Workflows and actions of this repository: pinned, without standing permissions, and in step with the code."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ACTION_FOLDER = ROOT / ".github" / "actions" / "export"
ACTION: dict[str, Any] = yaml.safe_load((ACTION_FOLDER / "action.yml").read_text())
OUTPUTS = {"export-id", "manifest-uri", "manifest-digest", "program-uri", "data-uris", "subject-checksums", "state"}


def test_there_are_the_workflows_that_the_documents_name() -> None:
    assert [path.stem for path in WORKFLOWS] == ["check", "export-model-cuda-artifact", "gpu", "release"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_starts_without_permissions_and_is_pinned(path: Path) -> None:
    text = path.read_text()
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 360
        assert "permissions" in job
    for used in re.findall(r"^\s*(?:- )?uses: (\S+)", text, re.MULTILINE):
        assert used.startswith("$/.github/actions/") or re.search(r"@[0-9a-f]{40}$", used), used


def test_action_gives_the_outputs_that_others_rely_on() -> None:
    assert set(ACTION["outputs"]) >= OUTPUTS


def test_every_input_reaches_the_program_that_reads_it() -> None:
    export = next(step for step in ACTION["runs"]["steps"] if step.get("id") == "export")
    passed = {f"INPUT_{name.upper().replace('-', '_')}" for name in ACTION["inputs"]} - {"INPUT_PYTHON"}
    assert set(export["env"]) == passed
    sources = "".join(path.read_text() for path in (ACTION_FOLDER / "export_action").glob("*.py"))
    for name in passed:
        assert name.removeprefix("INPUT_") in sources, name


def test_no_expression_stands_in_a_script() -> None:
    for path in [*WORKFLOWS, *ROOT.glob(".github/actions/*/action.yml")]:
        document = yaml.safe_load(path.read_text())
        jobs = document["jobs"].values() if "jobs" in document else [document["runs"]]
        for job in jobs:
            for step in job.get("steps", []):
                assert "${{" not in step.get("run", ""), f"{path.name}: {step.get('name')}"


def test_gate_runs_what_the_readme_says() -> None:
    check = yaml.safe_load((ROOT / ".github" / "workflows" / "check.yml").read_text())
    commands = [step.get("run") for step in check["jobs"]["gate"]["steps"] if "run" in step]
    assert commands == ["make check", "make test"]
    assert list(check["jobs"]) == ["gate"]


def test_reusable_workflow_passes_inputs_that_the_action_has() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "export-model-cuda-artifact.yml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    for step in steps:
        if str(step.get("uses", "")).startswith("$/"):
            action = yaml.safe_load((ROOT / step["uses"].removeprefix("$/") / "action.yml").read_text())
            assert set(step["with"]) <= set(action["inputs"])


def test_install_script_needs_a_python_that_the_package_supports() -> None:
    text = (ACTION_FOLDER / "install.sh").read_text()
    assert "(3, 11) <= sys.version_info[:2] <= (3, 12)" in text
    assert sys.version_info[:2] >= (3, 11)
