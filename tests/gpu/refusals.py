"""Exports that have to be refused or stopped on a GPU host: how fast, with what error, and that nothing is left.

python -m tests.gpu.refusals CASE FOLDER       # one JSON line on standard output
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

CASES = ("operator", "gpu-budget", "shared-memory", "old-arch")


class Unsupported(nn.Module):
    """Needs a kernel that the CUDA runtime does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svdvals(self.linear(x)) + torch.histc(x, bins=64)


class Supported(nn.Module):
    """Compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 512)
        self.second = nn.Linear(512, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def request(case: str, folder: Path) -> dict[str, Any]:
    """The body of the export of one case; its program is saved under `folder`."""
    model, width = (Unsupported(), 64) if case == "operator" else (Supported(), 256)
    program = torch.export.export(model.eval(), (torch.randn(64, width),))
    folder.mkdir(parents=True, exist_ok=True)
    torch.export.save(program, folder / "model.pt2")
    target: dict[str, Any] = {"backend": "cuda", "maxAutotune": True}
    budgets = {}
    if case == "gpu-budget":
        budgets = {"gpuMemory": 214748364}
    elif case == "shared-memory":
        target["sharedMemoryBytes"] = 64
    elif case == "old-arch":
        target["arch"] = ["sm_80"]
    return {
        "recipe": "exported-program",
        "source": (folder / "model.pt2").as_uri(),
        "target": target,
        "budgets": budgets,
        "verify": False,
    }


def refuse(case: str, folder: Path) -> dict[str, Any]:
    """Run the export; what it ended with, after how long, and which files are left."""
    from exporter.__main__ import run
    from exporter.contract.events import EventLog
    from exporter.contract.spec import ExportSpec

    body = request(case, folder)
    scratch = folder / "tmp"
    scratch.mkdir()
    spec = ExportSpec.model_validate(
        {
            "id": "exp_01J00000000000000000000000",
            "attempt": 1,
            "createdAt": "2026-01-01T00:00:00Z",
            "request": body,
            "store": {"uri": (folder / "store").as_uri()},
            "sources": {"roots": [str(folder)]},
        }
    )
    import tempfile

    tempfile.tempdir = str(scratch)
    started = time.monotonic()
    lines: list[bytes] = []
    report: dict[str, Any] = {"case": case}

    def note(data: bytes) -> None:
        lines.append(bytes(data))
        event = json.loads(data)
        if event["type"] in ("failed", "finished"):
            report["seconds"] = round(time.monotonic() - started, 1)
            report["error"] = event.get("error")
            store = folder / "store"
            report["left"] = sorted(str(path.relative_to(folder)) for path in store.rglob("*") if path.is_file())
            print("REFUSAL " + json.dumps(report), flush=True)

    report["status"] = run(spec, EventLog(note))
    report["scratch"] = sorted(str(path.relative_to(folder)) for path in scratch.rglob("*") if path.is_file())
    return report


if __name__ == "__main__":
    print("REFUSAL " + json.dumps(refuse(sys.argv[1], Path(sys.argv[2]).absolute())), flush=True)
