"""The seam table: every private name of torch and ExecuTorch that the phantom path replaces or relies on.

`check_seams` compares the table with what is installed before anything is replaced: a missing name or other parameters
are a `ToolchainMismatch` that names both versions, never a silent fallback. tests/unit/lowering/test_phantom_seams.py
has a contract test for the behaviour behind each entry.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from exporter.contract.errors import ToolchainMismatch

_CUDA = "executorch.backends.cuda.cuda_backend"
_COLLECTOR = "executorch.backends.cuda.cuda_weight_collector"
_CORD = "executorch.exir._serialize._cord"
_INDUCTOR = "torch._inductor"

TESTED = {"torch": "2.11 to 2.13", "executorch": "1.5.1"}
"""Versions that the table was read from and that the contract tests ran on."""


@dataclass(frozen=True, slots=True)
class Seam:
    """One upstream name: `attribute` may be dotted (a method); `parameters` are its parameter names in order."""

    module: str
    attribute: str
    parameters: tuple[str, ...]
    use: Literal["replaced", "relied on"]
    why: str


TABLE: tuple[Seam, ...] = (
    Seam(
        _CUDA, "_move_to_device_resize_kv", ("ep", "location"), "replaced", "makes phantoms instead of moving weights"
    ),
    Seam(
        _CUDA,
        "_full_zeros_preserving_strides",
        ("x", "device"),
        "replaced",
        "stands in for an emptied tensor by a tensor without memory instead of real zeros",
    ),
    Seam(
        f"{_INDUCTOR}.runtime.triton_heuristics",
        "CachingAutotuner.run",
        ("self", "args", "stream", "benchmark_run", "kwargs"),
        "replaced",
        "wrapped to name the kernel that sets the GPU peak",
    ),
    Seam(
        f"{_INDUCTOR}.select_algorithm",
        "AlgorithmSelectorCache.benchmark_choice",
        ("choice", "autotune_args"),
        "replaced",
        "wrapped for the same reason, for matrix products",
    ),
    Seam(
        f"{_INDUCTOR}.async_compile",
        "SubprocPool",
        ("nprocs", "pickler", "kind", "quiesce"),
        "replaced",
        "its workers are forked after what they import is loaded (compile_workers.py)",
    ),
    Seam(
        f"{_INDUCTOR}.codecache",
        "AotCodeCompiler.compile",
        ("graph", "wrapper_code", "kernel_code", "serialized_extern_kernel_nodes", "device_type", "additional_files"),
        "replaced",
        "wrapped to stop the workers before the last C++ compile (compile_workers.py)",
    ),
    Seam(_CUDA, "_rehydrate_emptied_tensors", ("tensors",), "relied on", "gives emptied arguments memory while tuning"),
    Seam(_COLLECTOR, "_write_tensor_storage", ("tensor", "path"), "replaced", "hands storages over, no local file"),
    Seam(_COLLECTOR, "FileBackedData", ("path", "cleanup", "sha256"), "replaced", "data of known size, kept elsewhere"),
    Seam(_COLLECTOR, "FileBackedData.move_from", ("path", "sha256"), "replaced", "how the collector makes its data"),
    Seam(_COLLECTOR, "_storage_key", ("fqn", "device_type", "aoti_library_key"), "relied on", "keys of the segments"),
    Seam(
        _COLLECTOR,
        "CudaWeightCollector.materialize",
        ("self", "weights", "directory", "device_type_for_weight"),
        "relied on",
        "asks for a storage of every constant, with its view",
    ),
    Seam(_CUDA, "_compile_time_cpu_clones", ("target_device",), "relied on", "its context treats emptied tensors"),
    Seam(_CUDA, "_is_emptied", ("x",), "relied on", "what upstream takes for a phantom"),
    Seam(_CUDA, "_is_kv_buffer", ("name", "v"), "relied on", "which tensors keep their strides"),
    Seam(_CUDA, "_move_graph_nodes_to_device", ("graph_module", "location"), "relied on", "moves the graph's metadata"),
    Seam(
        _CUDA,
        "CudaBackend.copy_exported_program_for_preprocess",
        ("edge_program", "compile_specs"),
        "relied on",
        "shares tensor storage between the copies of a program",
    ),
    Seam(_CUDA, "CudaBackend._setup_cuda_environment_for_fatbin", (), "relied on", "says whether multi-arch is on"),
    Seam(_CUDA, "CudaBackend.get_supported_fallback_kernels", (), "relied on", "what preflight checks against"),
    Seam(_CORD, "FileBackedData.prefix", ("self", "size"), "relied on", "first level of upstream's deduplication"),
    Seam(_CORD, "FileBackedData.sha256", ("self",), "relied on", "second level of upstream's deduplication"),
    Seam(_CORD, "FileBackedData.write_to_file", ("self", "outfile"), "relied on", "must not be reached for a phantom"),
    Seam(_CORD, "Cord.append", ("self", "data"), "relied on", "takes data by its length alone"),
    Seam(
        f"{_INDUCTOR}.graph",
        "GraphLowering.get_original_value_of_constant",
        ("self", "name"),
        "relied on",
        "where AOTInductor reads a constant's size, strides and device",
    ),
    Seam(f"{_INDUCTOR}.graph", "is_same_tensor", ("data", "value"), "relied on", "upstream keeps emptied ones apart"),
    Seam(
        f"{_INDUCTOR}.compile_fx", "_unlift_graph", ("mod", "gm", "graph_signature"), "relied on", "clones the buffers"
    ),
    Seam(f"{_INDUCTOR}.compile_fx", "clone_preserve_strides", ("x",), "relied on", "upstream diverts it to the CPU"),
    Seam(f"{_INDUCTOR}.codecache", "TensorProperties", ("tensor",), "relied on", "None for an emptied tensor"),
    Seam(f"{_INDUCTOR}.codecache", "determine_aoti_mmap_flags", ("consts_size",), "relied on", "external weights"),
    Seam(
        f"{_INDUCTOR}.codecache",
        "_precompile_header",
        ("header", "hashable_cmd_line", "compile_command"),
        "relied on",
        "writes under the module's _HEADER_DIR, which scratch.py points at the compile's own folder",
    ),
    Seam(
        f"{_INDUCTOR}.codegen.cpp_wrapper_cpu",
        "CppWrapperCpu.codegen_device",
        ("self", "device"),
        "relied on",
        "records the target device for constants held on the CPU",
    ),
)


def versions() -> dict[str, str]:
    """Installed versions of torch, executorch and triton; ``absent`` where a package is not installed."""
    found = {}
    for name in ("torch", "executorch", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def resolve(module: ModuleType, attribute: str) -> Any:
    """The object behind a dotted attribute; ``AttributeError`` if there is none."""
    found: Any = module
    for part in attribute.split("."):
        # A static or class method is looked at as the function that it wraps, so that `cls` never counts.
        found = getattr(found, part)
    return found


def _parameters(found: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(found).parameters)


def find_mismatches(table: tuple[Seam, ...] = TABLE) -> list[str]:
    """One line for every entry of the table that the installed packages do not have as written."""
    wrong = []
    for seam in table:
        name = f"{seam.module}.{seam.attribute}"
        try:
            found = resolve(importlib.import_module(seam.module), seam.attribute)
        except ImportError as error:
            wrong.append(f"{name}: cannot be imported ({error})")
            continue
        except AttributeError:
            wrong.append(f"{name}: is not there")
            continue
        try:
            parameters = _parameters(found)
        except (TypeError, ValueError) as error:
            wrong.append(f"{name}: has no signature ({error})")
            continue
        if parameters != seam.parameters:
            wrong.append(f"{name}: takes ({', '.join(parameters)}), not ({', '.join(seam.parameters)})")
    return wrong


def check_seams(table: tuple[Seam, ...] = TABLE) -> None:
    """`ToolchainMismatch` unless every entry of the table is installed as written."""
    wrong = find_mismatches(table)
    if not wrong:
        return
    have = versions()
    raise ToolchainMismatch(
        f"torch {have['torch']} with executorch {have['executorch']} and triton {have['triton']} is not what the "
        f"low-memory CUDA path was written for: {wrong[0]}",
        hint=f"Install torch {TESTED['torch']} with executorch {TESTED['executorch']} and triton, "
        "or set target.lowMemoryMode to false.",
        torch=have["torch"],
        executorch=have["executorch"],
        triton=have["triton"],
        seams=wrong,
    )
