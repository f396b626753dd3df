"""The machine's report, and the program's command line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from exporter.contract.machine import MachineReport
from exporter.doctor import describe_machine, readable


@pytest.fixture(scope="module")
def report() -> MachineReport:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # imports of the back ends
        return describe_machine()


def test_everything_that_an_export_needs_is_named(report: MachineReport) -> None:
    assert {recipe.name for recipe in report.recipes} == {"huggingface", "exported-program"}
    assert all(recipe.available and recipe.options_schema["properties"] for recipe in report.recipes)
    backends = {backend.name: backend for backend in report.backends}
    assert backends["xnnpack"].available
    assert backends["portable"].available
    assert backends["cuda"].available == (backends["cuda"].reason is None)
    assert {"openssl", "g++", "ld", "objcopy", "ptxas", "python headers"} <= {check.name for check in report.checks}
    assert all(check.message for check in report.checks)
    assert report.versions["executorch"]


def test_a_person_can_read_it(report: MachineReport) -> None:
    text = readable(report)
    assert "back end xnnpack" in text
    assert "recipe huggingface" in text


def test_the_output_is_one_json_object_whatever_libraries_print() -> None:
    done = subprocess.run([sys.executable, "-m", "exporter", "doctor", "--json"], capture_output=True, check=True)
    assert MachineReport.model_validate_json(done.stdout).backends
    assert done.stdout.count(b"\n") == 1


def test_an_unknown_command_is_a_usage_error() -> None:
    done = subprocess.run([sys.executable, "-m", "exporter", "fly"], capture_output=True, check=False)
    assert done.returncode == 2
    assert done.stdout == b""
