"""schemathesis against the running service: no 500 and no undocumented status, whatever is sent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.service_process import ServiceProcess

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [60, pytest.param(600, marks=pytest.mark.soak)])
def test_fuzzing_finds_no_undocumented_answer(tmp_path: Path, seconds: int) -> None:
    service = ServiceProcess(tmp_path, slots="1")
    try:
        service.start()
        program = Path(sys.executable).with_name("schemathesis")
        done = subprocess.run(
            [
                *(str(program), "run", f"{service.url}/openapi.json", "--checks", CHECKS),
                *("--max-time", str(seconds), "--workers", "2", "--phases", "examples,coverage,fuzzing"),
                *("--exclude-path-regex", "/(events|logs)$", "--max-examples", "1000", "--no-color"),
                *("--suppress-health-check", "all", "--continue-on-failure", "--request-timeout", "20"),
            ],
            cwd=tmp_path,
            env={**os.environ, "HYPOTHESIS_STORAGE_DIRECTORY": str(tmp_path / "hypothesis")},
            capture_output=True,
            text=True,
            timeout=seconds * 3 + 120,
        )
        assert done.returncode == 0, done.stdout[-12_000:]
        assert service.client.get("/healthz").status_code == 200
        assert "unexpected error" not in service.log()
    finally:
        service.close()
