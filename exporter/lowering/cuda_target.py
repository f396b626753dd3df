"""The target of a CUDA export: whether this machine can build for it, and upstream's compile specs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from exporter.contract.errors import ToolchainMismatch
from exporter.contract.spec import Target

_SHARED_MEMORY = "ET_CUDA_TARGET_SMEM_BYTES"
"""Read by executorch.backends.cuda.target_smem."""


def compile_specs(target: Target, method: str) -> list[Any]:
    """Upstream's compile specs of one method. Only what differs from upstream's defaults is written."""
    from executorch.backends.cuda.cuda_backend import CudaBackend
    from executorch.exir.backend.compile_spec_schema import CompileSpec

    specs = [CudaBackend.generate_method_name_compile_spec(method)]
    if target.low_memory_mode:
        specs.append(CompileSpec("low_memory_mode", b"ON"))
    if not target.max_autotune:
        specs.append(CompileSpec("max_autotune", b"OFF"))
    if target.triton_kernel_mode == "off":
        specs.append(CompileSpec("triton_kernel_mode", b"OFF"))
    if target.platform != "linux":
        specs.append(CompileSpec("platform", target.platform.encode()))
    return specs


def check_target(target: Target) -> None:
    """`ToolchainMismatch` unless this machine can build for `target`, with the reason."""
    if not torch.cuda.is_available():
        raise ToolchainMismatch(
            "this machine has no GPU that torch can use; a CUDA export compiles and tunes its kernels on one",
            hint="Send the export to an executor with a GPU; GET /recipes lists them.",
        )
    have = torch.version.cuda
    if target.cuda_version is not None and target.cuda_version != have:
        raise ToolchainMismatch(f"the target is CUDA {target.cuda_version}, this machine's torch is built for {have}")
    check_arch(target.arch, torch.cuda.get_device_capability())
    _check_options(target)


def check_arch(arch: tuple[str, ...], capability: tuple[int, int]) -> None:
    """`ToolchainMismatch` where kernels for `arch` cannot come from a GPU of `capability` (major, minor).

    Kernels are tuned and compiled on the local GPU. Up to sm_89 the fat binary carries PTX that newer GPUs compile at
    load; from Hopper on, Triton's code is architecture-specific (sm_90a), in PTX too, and runs on nothing else.
    """
    local = capability[0] * 10 + capability[1]
    for name in arch:
        number = int(name.removeprefix("sm_").rstrip("af"))
        if number < local or (number > local and (local >= 90 or not name[-1].isdigit())):
            raise ToolchainMismatch(
                f"{name} cannot be built on this machine's sm_{local}",
                hint=f"Ask for sm_{local}, or send the export to an executor with such a GPU.",
            )
    if arch and not multi_arch():
        raise ToolchainMismatch(
            f"target.arch asks for {', '.join(arch)}, but multi-arch kernels are off here: no ptxas of torch's CUDA "
            f"version {torch.version.cuda} was found, or detection failed",
            hint="Install the CUDA toolkit of torch's own version, or leave target.arch out.",
        )


def multi_arch() -> bool:
    """Whether upstream would embed multi-arch kernels. It switches them off silently when its detection throws."""
    from executorch.backends.cuda.cuda_backend import CudaBackend

    return bool(CudaBackend._setup_cuda_environment_for_fatbin())


def _check_options(target: Target) -> None:
    from executorch.backends.cuda.cuda_backend import CudaBackend

    try:
        CudaBackend.get_aoti_compile_options(compile_specs(target, "forward"))
    except RuntimeError as error:
        raise ToolchainMismatch(f"this machine cannot build for {target.platform}: {error}") from error


@contextmanager
def shared_memory_limit(target: Target) -> Iterator[None]:
    """Tell upstream the target's shared memory, which limits the kernel candidates."""
    before = os.environ.get(_SHARED_MEMORY)
    if target.shared_memory_bytes is not None:
        os.environ[_SHARED_MEMORY] = str(target.shared_memory_bytes)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_SHARED_MEMORY, None)
        else:
            os.environ[_SHARED_MEMORY] = before
