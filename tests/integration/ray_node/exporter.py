"""Stands in front of the exporter on a test's Ray nodes, whose PYTHONPATH starts here.

The recipe `fake` is the tiny exporter of the service's tests, in its first attempt as slow as it is told; any other
recipe is the real exporter. `doctor` answers at once.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


class Framed(io.TextIOBase):
    """Marks each event line, behind an unfinished line of somebody else."""

    def write(self, text: str) -> int:
        os.write(1, f"half a line\x1e{text}".encode() if text.startswith("{") else text.encode())
        return len(text)


def doctor() -> None:
    recipes = [
        {"name": name, "description": "", "optionsSchema": {}, "example": {}, "available": True}
        for name in ("fake", "exported-program")
    ]
    backends = [{"name": name, "available": True} for name in ("xnnpack", "portable")]
    backends += [{"name": "cuda", "available": True, "cudaVersion": "13.0"}]
    print("a warning of some library")
    print(json.dumps({"v": 1, "recipes": recipes, "backends": backends}))


def fake(spec: dict[str, object]) -> None:
    place = importlib.util.spec_from_file_location("child", ROOT / "tests" / "unit" / "service" / "child.py")
    assert place is not None
    assert place.loader is not None
    child = importlib.util.module_from_spec(place)
    place.loader.exec_module(child)
    if spec["attempt"] != 1:
        spec["request"]["options"]["seconds"] = 0  # type: ignore[index]
    sys.stdin = io.StringIO(json.dumps(spec))
    sys.stdout = Framed()
    child.run()


if sys.argv[1] == "doctor":
    doctor()
elif '"recipe":"fake"' in os.environ["WEIGHTLESS_SPEC"]:
    fake(json.loads(os.environ["WEIGHTLESS_SPEC"]))
else:
    os.environ["PYTHONPATH"] = str(ROOT)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "exporter", *sys.argv[1:]])
