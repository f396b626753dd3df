"""The child process of a CUDA check: loads the stored library with torch, binds the weights, runs, compares.

`python -m exporter.check.aoti_child FOLDER` reads `request.json`, libraries and tensors from FOLDER (what
`exporter.check.aoti_check` wrote) and the weights from standard input, storage after storage. It answers with JSON
lines: `{"doing": …}` before each step, `{"method": …, "error": …}` or `{"method": …, "skipped": …}` per method, and
`{"failure": …}`.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import load_file

from exporter.check.runtime import Mismatch, compare

CHUNK = 8 * 2**20
_LIBRARIES = ("libc10.so", "libtorch_cpu.so", "libc10_cuda.so", "libtorch_cuda.so", "libtorch.so")
"""The stored library is linked against none of them; it finds their symbols among the global ones."""


def main(folder: Path) -> int:
    """Run every method of the request; the exit status."""
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / "cases.safetensors")
    try:
        _promote_symbols()
        _say(doing="reading the weights")
        storages = _read_storages(request["storages"], sys.stdin.buffer)
        for case in request["methods"]:
            _run(folder, case, tensors, storages)
    except Mismatch as mismatch:
        _say(failure=str(mismatch))
        return 1
    except Exception as error:
        lines = str(error).strip().splitlines()
        _say(failure=f"the stored program failed on the GPU: {type(error).__name__}: {(lines or [''])[0][:300]}")
        return 1
    return 0


def _promote_symbols() -> None:
    for name in _LIBRARIES:
        ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    torch.zeros(1, device="cuda")


def _read_storages(wanted: list[dict[str, Any]], source: BinaryIO) -> dict[str, torch.Tensor]:
    found = {}
    buffer = torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True)
    view = memoryview(buffer.numpy())  # type: ignore[arg-type]
    for storage in wanted:
        made = torch.empty(storage["size"], dtype=torch.uint8, device="cuda")
        at = 0
        while at < storage["size"]:
            count = source.readinto(view[: min(CHUNK, storage["size"] - at)])  # type: ignore[attr-defined]
            if not count:
                raise Mismatch("the weights end before their size")
            made[at : at + count].copy_(buffer[:count])
            at += count
        found.update(dict.fromkeys(storage["keys"], made))
        found.update({key: made.clone() for key in storage["own"]})
    return found


def _run(
    folder: Path, case: dict[str, Any], tensors: dict[str, torch.Tensor], storages: dict[str, torch.Tensor]
) -> None:
    method = case["method"]
    _say(doing=f"loading method {method}")
    try:
        runner = torch._C._aoti.AOTIModelContainerRunnerCuda(str(folder / case["library"]), 1, "cuda", "")
    except RuntimeError as error:
        text = str(error)
        if "undefined symbol" in text or "dlopen" in text or "dynamic lib" in text.lower():
            _say(
                method=method,
                skipped=f"the library needs ExecuTorch's own kernels: {text.strip().splitlines()[0][:200]}",
            )
            return
        raise
    by_fqn = {constant["fqn"]: _view(constant, storages) for constant in case["constants"]}
    names = runner.get_constant_names_to_original_fqns()
    missing = sorted(set(names.values()) - set(by_fqn))
    if missing:
        raise Mismatch(f"method {method}: the library asks for {missing[0]}, which the program does not list")
    bound = {name: by_fqn[fqn] for name, fqn in names.items()}
    torch.cuda.synchronize()
    # Internal names and user_managed=True: with FQNs and a copy, the kernels read a null pointer (torch 2.11).
    runner.update_constant_buffer(bound, False, True, True)
    _say(doing=f"running method {method}")
    outputs = runner.run([tensors[name].to("cuda") for name in case["inputs"]])
    torch.cuda.synchronize()
    expected = [tensors[name] for name in case["outputs"]]
    _say(method=method, error=compare(method, [value.cpu() for value in outputs], expected))


def _view(constant: dict[str, Any], storages: dict[str, torch.Tensor]) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, constant["dtype"])
    storage = storages[constant["key"]].untyped_storage()
    empty = torch.empty(0, dtype=dtype, device="cuda")
    return empty.set_(storage, constant["offset"], tuple(constant["sizes"]), tuple(constant["strides"]))


def _say(**record: object) -> None:
    sys.stdout.write("\n" + json.dumps(record) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
