"""Runs a stored CPU artifact: read back by range, executed in a child process, compared with eager.

The child is `python -m exporter.check.runtime FOLDER`. ExecuTorch's runtime ends the process with a signal on some bad
inputs; here that is an error with the signal's name and what the child was doing.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from exporter.check.eager import Case, eager_cases
from exporter.check.ports import Reads, StoredArtifact
from exporter.check.readback import read_back
from exporter.contract.errors import HostOutOfMemory, VerificationFailed
from exporter.contract.manifest import Verification
from exporter.source.captured import Captured

CASES = "cases.json"
TENSORS = "cases.safetensors"
MAX_REPLY = 2**20
"""Bytes that are read of a child's standard output."""


class SmokeCheck:
    """Checks artifacts of the CPU back ends against the eager outputs of the captured samples."""

    def __init__(self, reads: Reads, scratch: Path) -> None:
        self._reads = reads
        self._scratch = scratch
        self._cases: list[Case] = []

    def prepare(self, captured: Captured) -> None:
        """Run the samples eagerly, before a back end touches the programs. `InvalidRequest` if they do not run."""
        self._cases = eager_cases(captured)

    def verify(self, artifact: StoredArtifact) -> Sequence[Verification]:
        """The outcome per method. `VerificationFailed` where stored bytes or outputs differ."""
        folder = Path(tempfile.mkdtemp(prefix="verify-", dir=self._scratch))
        try:
            program, data = read_back(self._reads, artifact, folder)
            if not self._cases:
                return _skipped(artifact, "no sample inputs")
            if len(data) > 1:
                return _skipped(artifact, "ExecuTorch's Python runtime takes one data file")
            cases = [case for case in self._cases if not case.random]
            write_cases(folder, cases, program, data[0] if data else None)
            errors = run_child(folder) if cases else {}
            return [_verification(case, errors) for case in self._cases]
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _verification(case: Case, errors: Mapping[str, str]) -> Verification:
    if case.random:
        return Verification(method=case.method, status="skipped", reason="the method draws random numbers")
    if case.method not in errors:
        raise VerificationFailed(f"the check gave no outcome for method {case.method}", kind="runtime")
    return Verification(method=case.method, status="passed", max_relative_error=errors[case.method], against="eager")


def _skipped(artifact: StoredArtifact, reason: str) -> list[Verification]:
    return [Verification(method=item.name, status="skipped", reason=reason) for item in artifact.program.methods]


def write_cases(folder: Path, cases: Sequence[Case], program: Path, data: Path | None) -> None:
    """Write what the child reads: `cases.json`, tensors by name in `cases.safetensors`. Nothing pickled."""
    tensors: dict[str, torch.Tensor] = {}

    def encode(value: object) -> dict[str, Any]:
        if isinstance(value, torch.Tensor):
            name = str(len(tensors))
            tensors[name] = value.detach().clone(memory_format=torch.contiguous_format)
            return {"tensor": name}
        if value is None or isinstance(value, bool | int | float | str):
            return {"value": value}
        raise VerificationFailed(f"a sample has a value of type {type(value).__name__}, which no runtime takes")

    body = [
        {
            "method": case.method,
            "inputs": [encode(value) for value in case.inputs],
            "outputs": [encode(value) for value in case.outputs],
        }
        for case in cases
    ]
    save_file(tensors, folder / TENSORS)
    spec = {"program": program.name, "data": data.name if data else None, "cases": body}
    (folder / CASES).write_text(json.dumps(spec), encoding="utf-8")


def run_child(folder: Path) -> dict[str, str]:
    """Run the child on `folder`; the largest relative error per method. `VerificationFailed` says how it ended."""
    command = [sys.executable, "-m", "exporter.check.runtime", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        try:
            reply = child.stdout.read(MAX_REPLY)
            status = child.wait()
        except BaseException:
            child.kill()
            raise
    return read_outcome(reply.decode("utf-8", "replace").splitlines(), status)


def read_outcome(lines: Sequence[str], status: int) -> dict[str, str]:
    """The largest relative error per method from a child's output lines and exit status; raises what went wrong."""
    doing, failure = "starting", ""
    errors: dict[str, str] = {}
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the runtime's own output
        if not isinstance(record, dict):
            continue
        doing = record.get("doing", doing)
        failure = record.get("failure", failure)
        if "error" in record:
            errors[record["method"]] = record["error"]
    if status < 0:
        name = signal.Signals(-status).name
        if name == "SIGKILL":
            raise HostOutOfMemory(
                f"the check was killed (SIGKILL) while {doing}", hint="Give the exporter more memory."
            )
        raise VerificationFailed(f"the runtime died of {name} while {doing}", kind="crashed", signal=name)
    if failure:
        raise VerificationFailed(failure, kind="runtime")
    if status != 0:
        raise VerificationFailed(f"the check ended with status {status} while {doing}", kind="runtime")
    return errors
