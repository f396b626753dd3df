"""Ten minutes of load on a full table with 500 open streams: no error, and memory stays where it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench" / "service.py"
GROWTH_MIB = 64
"""What the server may grow by: its own pools and caches fill; a leak of 1 KiB a request would be more."""


@pytest.mark.soak
@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def test_ten_minutes_of_load(tmp_path: Path, database: str) -> None:
    output = tmp_path / "service.json"
    command = [sys.executable, str(BENCH), "--seconds", "600", "--database", database, "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    if "skipped" in done.stderr:
        pytest.skip(done.stderr.strip())
    [row] = json.loads(output.read_text())["rows"]
    assert row["figures"]["server_rss_growth_mib"] < GROWTH_MIB
