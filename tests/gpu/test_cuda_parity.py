"""On a GPU: small exports have upstream's segments, run as close to eager as upstream's, and refusals leave nothing.

Each case runs in a process of its own (one export per process) and prints its figures as one JSON line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.models import HELD, SOURCED

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
HALF_STEP = 2**-8
"""One step of bfloat16, relative: two tunings of one model may round differently by it."""


def run(module: str, mark: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(mark)]
    assert lines, done.stderr[-2000:]
    print(lines[-1])
    report: dict[str, Any] = json.loads(lines[-1].removeprefix(mark))
    return report


@pytest.mark.parametrize("case", [*SOURCED, *HELD])
def test_segments_equal_upstreams(case: str) -> None:
    report = run("tests.gpu.parity", "PARITY ", case)
    assert report["equal"], report["differing"]
    assert {image.rstrip("a") for image in report["images"]["cuobjdump"]} == set(report["images"]["ours"])
    for method, error in report.get("errors", {}).get("ours", {}).items():
        theirs = report["errors"]["upstream"][method]
        assert float(error) <= max(float(theirs), 1.2 * HALF_STEP)


def test_without_low_memory_mode_everything_is_upstreams() -> None:
    report = run("tests.gpu.parity", "PARITY ", "plain", "as-upstream")
    assert report["equal"]
    assert report["data_file_equal"]
    assert report["program_equal"] or not report["upstream_program_equals_itself"]


@pytest.mark.parametrize(
    ("case", "code"),
    [
        ("operator", "unsupported-model"),
        ("gpu-budget", "budget-exceeded"),
        ("shared-memory", "toolchain-mismatch"),
        ("old-arch", "toolchain-mismatch"),
    ],
)
def test_refused_exports_leave_nothing(case: str, code: str, tmp_path: Path) -> None:
    report = run("tests.gpu.refusals", "REFUSAL ", case, str(tmp_path / "case"))
    assert report["error"]["code"] == code
    assert report["seconds"] < 60
    assert report["left"] == []
    assert report["scratch"] == []
