"""What the store or the source decides is refused before torch is imported: in a second, not in ten."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MAIN = """
import sys
from exporter.__main__ import main
status = main(["run"])
print("torch" in sys.modules, file=sys.stderr)
sys.exit(status)
"""


@pytest.mark.parametrize(
    ("source", "store", "code"),
    [
        ("file:///etc/passwd", "memory://early", "source-access-denied"),
        ("http://169.254.169.254/latest", "memory://early", "source-access-denied"),
        ("{root}/../outside.pt2", "memory://early", "source-access-denied"),
        ("{root}/missing.pt2", "memory://early", "source-not-found"),
        ("{root}/missing.pt2", "ftp://host/store", "invalid-request"),
    ],
)
def test_a_refusal_needs_no_torch(tmp_path: Path, source: str, store: str, code: str) -> None:
    root = tmp_path / "sources"
    root.mkdir()
    spec: dict[str, Any] = {
        "id": "exp_01JABCDEFGHJKMNPQRSTVWXYZ0",
        "attempt": 1,
        "createdAt": "2026-11-30T15:00:00Z",
        "request": {
            "recipe": "exported-program",
            "source": source.format(root=root),
            "target": {"backend": "portable"},
        },
        "store": {"uri": store},
        "sources": {"roots": [str(root)]},
    }
    done = subprocess.run(
        [sys.executable, "-c", MAIN], input=json.dumps(spec).encode(), capture_output=True, timeout=60, check=False
    )
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, events[-1]["error"]["code"]) == (1, code)
    assert events[-1]["error"]["hint"]
    assert done.stderr.split()[-1] == b"False", "torch was imported"
