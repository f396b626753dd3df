"""The child process of a check: loads a program on ExecuTorch's runtime, runs it, compares with the expected outputs.

`python -m exporter.check.runtime FOLDER` reads what `exporter.check.smoke.write_cases` wrote and answers with JSON
lines on standard output: `{"doing": …}` before each step, `{"method": …, "error": …}` after each method that agrees,
`{"failure": …}` at the first that does not (status 1).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from exporter.contract.errors import first_line

TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest relative error that passes, by the output's type; others below. Half types keep 11 and 8 bits."""
TOLERANCE = 1e-4


class Mismatch(Exception):
    """The outputs differ; the text is for a person."""


def main(folder: Path) -> int:
    """Run all cases of `folder`; the exit status."""
    spec = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / "cases.safetensors")
    try:
        _run(folder, spec, tensors)
    except Mismatch as mismatch:
        _say(failure=str(mismatch))
        return 1
    except Exception as error:
        _say(failure=f"the runtime refused the stored artifact: {first_line(error)}")
        return 1
    return 0


def _run(folder: Path, spec: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    from executorch.runtime import Runtime

    def decode(item: dict[str, Any]) -> object:
        return tensors[item["tensor"]] if "tensor" in item else item["value"]

    _say(doing=f"loading {spec['program']}")
    data = folder / spec["data"] if spec["data"] else None
    program = Runtime.get().load_program(folder / spec["program"], data_path=data)
    for case in spec["cases"]:
        name = case["method"]
        _say(doing=f"loading method {name}")
        method = program.load_method(name)
        if method is None:
            raise Mismatch(f"the program has no method {name}")
        _say(doing=f"running method {name}")
        outputs = method.execute([decode(item) for item in case["inputs"]])
        _say(method=name, error=compare(name, list(outputs), [decode(item) for item in case["outputs"]]))


def compare(method: str, outputs: Sequence[object], expected: Sequence[object]) -> str:
    """The largest relative error over a method's outputs, as a decimal string. `Mismatch` where it is too large.

    Relative to the largest magnitude of each expected output; values that are not finite must be equal.
    """
    found = [value for value in outputs if value is not None]
    wanted = [value for value in expected if value is not None]
    if len(found) != len(wanted):
        raise Mismatch(f"method {method} gave {len(found)} outputs, eager gives {len(wanted)}")
    worst = 0.0
    for index, (value, reference) in enumerate(zip(found, wanted, strict=True)):
        error = _error(value, reference)
        tolerance = TOLERANCES.get(reference.dtype, TOLERANCE) if isinstance(reference, torch.Tensor) else TOLERANCE
        if not error <= tolerance:
            raise Mismatch(
                f"output {index} of method {method} differs from eager: relative error {error:.3g}, not {tolerance:g}"
            )
        worst = max(worst, error)
    return decimal_string(worst)


def _error(value: object, reference: object) -> float:
    if not isinstance(reference, torch.Tensor):
        return 0.0 if value == reference else math.inf
    if not isinstance(value, torch.Tensor) or value.shape != reference.shape:
        return math.inf
    if reference.numel() == 0:
        return 0.0
    if not reference.dtype.is_floating_point:
        return 0.0 if torch.equal(value.to(reference.dtype), reference) else math.inf
    a, b = value.double(), reference.double()
    finite = torch.isfinite(b)
    if not torch.equal(torch.nan_to_num(a[~finite], nan=1.5), torch.nan_to_num(b[~finite], nan=1.5)):
        return math.inf
    a, b = a[finite], b[finite]
    if b.numel() == 0:
        return 0.0
    scale = max(float(b.abs().max()), 1e-6)
    difference = float((a - b).abs().max())
    return difference / scale if math.isfinite(difference) else math.inf


def decimal_string(value: float) -> str:
    """A non-negative number as the manifest writes it: digits, at most three after the point, a negative exponent."""
    if value == 0:
        return "0"
    return f"{value:.3f}" if value >= 1 else f"{value:.3e}"


def _say(**record: object) -> None:
    sys.stdout.write("\n" + json.dumps(record) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
