"""The CUDA back end: AOTInductor through ExecuTorch's CudaBackend, with phantom weights (low-memory-cuda.md).

`plan` names the segments, `lower` compiles while they are sent, and at the end every constant that AOTInductor kept is
matched with a planned segment by the identity of its stand-in. What it made itself is small and is appended. With
`lowMemoryMode: false` nothing of upstream is replaced or configured: weights are loaded, all segments come at the end.
"""

from __future__ import annotations

import gc
import logging
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from exporter.contract.errors import (
    DiskFull,
    GpuOutOfMemory,
    HostOutOfMemory,
    InternalError,
    ToolchainMismatch,
    UnsupportedModel,
    WeightlessError,
)
from exporter.contract.manifest import Method
from exporter.contract.segments import MAX_CHUNK, Chunk, Segment, SegmentName
from exporter.contract.spec import Target
from exporter.lowering.compile_workers import return_freed_memory, small_workers
from exporter.lowering.cpu import program_values
from exporter.lowering.cuda_target import check_target, compile_specs, shared_memory_limit
from exporter.lowering.phantom import ElsewhereData, HeldData, Phantoms, phantom_weights
from exporter.lowering.ports import Lowered, Plan, Progress
from exporter.lowering.preflight import check_operators
from exporter.lowering.scratch import compile_folder
from exporter.lowering.seams import check_seams
from exporter.lowering.weights import WeightSet, collect_weights, fill_from_source, fill_outside
from exporter.source.captured import Captured
from exporter.source.program_copy import copy_program

_log = logging.getLogger(__name__)

DATA_NAME = "aoti_cuda_blob.ptd"
"""Upstream's name for the external data of a CUDA program, with the suffix that its writer adds."""
_TAG = "aoti_cuda_blob"
RESERVE_BYTES = 64 * 2**20
"""Room in the part plan for constants that the compiler makes, beyond the tensors that stay real."""

COMPILE_THREADS = 3
"""Compile workers of Inductor. Its default is one per core, each of about 150 MiB: more than the export itself."""


def storage_key(fqn: str) -> str:
    """Upstream's key of a weight on the GPU (cuda_weight_collector._storage_key)."""
    return f"cuda_fqn_weight:cuda:{fqn}"


class CudaLowering:
    """Lowers one export; `plan` and `lower` are called once each, with the same captured programs."""

    def __init__(self, target: Target, *, compile_threads: int = COMPILE_THREADS) -> None:
        self._target = target
        self._threads = compile_threads
        self._weights: WeightSet | None = None

    def preflight(self, captured: Captured) -> None:
        """`ToolchainMismatch` for a target that this machine cannot serve, `UnsupportedModel` for missing operators."""
        check_target(self._target)
        if self._target.low_memory_mode:
            check_seams()
        for method, program in captured.programs.items():
            check_operators(method, program, triton=self._target.triton_kernel_mode == "on")

    def plan(self, captured: Captured) -> Plan:
        """Every tensor of at least `PHANTOM_BYTES` that a graph uses; nothing with `lowMemoryMode: false`."""
        if not self._target.low_memory_mode:
            return Plan(DATA_NAME, "flat-tensor/fqn")
        self._weights = collect_weights(captured)
        segments = self._weights.segments(storage_key)
        return Plan(DATA_NAME, "flat-tensor/fqn", segments, self._weights.small_bytes + RESERVE_BYTES)

    def lower(self, captured: Captured, progress: Progress) -> Lowered:
        """Compile copies of the programs that share their tensors; only small tensors of the source were filled in."""
        with _wrapped_errors(self._target):
            if not self._target.low_memory_mode:
                return self._lower_as_upstream(captured, progress)
            if self._weights is None:
                self.plan(captured)
            assert self._weights is not None
            return self._lower_with_phantoms(captured, self._weights, progress)

    def _lower_with_phantoms(self, captured: Captured, weights: WeightSet, progress: Progress) -> Lowered:
        return_freed_memory()
        methods = _Methods(list(captured.programs), progress)
        phantoms = Phantoms(weights, on_method=methods.begin)
        with ExitStack() as stack:
            # The seams are checked first, while every name is still upstream's.
            stack.enter_context(phantom_weights(phantoms))
            stack.enter_context(small_workers(self._threads, methods.at_last))
            stack.enter_context(compile_folder())
            stack.enter_context(shared_memory_limit(self._target))
            stack.enter_context(inductor_settings())
            manager = self._compile(captured, lambda programs: fill_outside(programs, weights))
        methods.end()
        used, appended = _match(_external_entries(manager))
        largest = weights.largest()
        details: dict[str, str | int] = {
            "appendedBytes": sum(segment.size for segment in appended),
            "largestKernel": phantoms.largest_kernel.name,
            "largestWeight": largest.fqn if largest else "",
            "largestWeightBytes": largest.layout.nbytes if largest else 0,
            "gpuPeakAllocatedBytes": _gpu_peak(),
        }
        _log.info("GPU peak %(gpuPeakAllocatedBytes)d bytes, set by kernel %(largestKernel)s", details)
        return _lowered(manager, captured, appended, used, details)

    def _lower_as_upstream(self, captured: Captured, progress: Progress) -> Lowered:
        fill_from_source(captured)
        methods = list(captured.programs)
        progress.step("compiling", methods[0], 0, len(methods))
        outside = tempfile.gettempdir()
        with compile_folder(), shared_memory_limit(self._target):
            manager = self._compile(captured, lambda programs: None)
            # Upstream keeps each storage in a file of the compile's folder: they move out before it is removed.
            entries = [(keys, _kept(data, outside), alignment) for keys, data, alignment in _external_entries(manager)]
            manager._pte_data._buffers = [_kept(piece, outside) for piece in manager._pte_data._buffers]
        progress.step("compiling", methods[-1], len(methods), len(methods))
        segments = [_appended(index, keys, data, alignment) for index, (keys, data, alignment) in enumerate(entries)]
        return _lowered(manager, captured, segments, {}, {"gpuPeakAllocatedBytes": _gpu_peak()})

    def _compile(self, captured: Captured, between: Callable[[Mapping[str, ExportedProgram]], None]) -> Any:
        from executorch.backends.cuda.cuda_partitioner import CudaPartitioner
        from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
        from executorch.exir.passes import MemoryPlanningPass

        programs = {name: copy_program(program) for name, program in captured.programs.items()}
        partitioner = {name: [CudaPartitioner(compile_specs(self._target, name))] for name in programs}
        edge = to_edge_transform_and_lower(
            programs,
            partitioner=partitioner,
            compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
        )
        between({name: edge.exported_program(name) for name in programs})
        gc.collect()
        # Mutable buffers live in the delegates, which share them by storage key: nothing is planned for them here.
        return edge.to_executorch(
            ExecutorchBackendConfig(
                extract_delegate_segments=True,
                memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False),
                emit_mutable_buffer_names=True,
            )
        )


_Entry = tuple[list[str], Any, int]
"""Keys, data (bytes or FileBackedData) and alignment of one buffer of upstream's named data."""


def _external_entries(manager: Any) -> list[_Entry]:
    """The buffers of the program's external data, in the order in which upstream would write them."""
    external: Mapping[str, Mapping[str, Any]] = manager._named_data.external_data if manager._named_data else {}
    if set(external) - {_TAG}:
        raise InternalError(f"the program has external data under other names: {sorted(set(external) - {_TAG})}")
    found: dict[int, _Entry] = {}
    for key, entry in external.get(_TAG, {}).items():
        keys, data, alignment = found.get(entry.buffer_index, ([], manager._named_data.buffers[entry.buffer_index], 1))
        keys.append(key)
        found[entry.buffer_index] = (keys, data, max(alignment, entry.alignment))
    return list(found.values())


def _kept(data: Any, outside: str) -> Any:
    """`data`, its file moved below `outside` if it has one; the file goes when the object does."""
    from executorch.exir._serialize._cord import FileBackedData

    if isinstance(data, FileBackedData) and Path(data._path).exists():
        folder = Path(tempfile.mkdtemp(prefix="weightless-segment-", dir=outside))
        target = folder / "data"
        shutil.move(data._path, target)
        data._path = str(target)
        weakref.finalize(data, shutil.rmtree, folder, ignore_errors=True)
    return data


def _match(entries: list[_Entry]) -> tuple[dict[str, list[str]], list[Segment]]:
    used: dict[str, list[str]] = {}
    appended = []
    for index, (keys, data, alignment) in enumerate(entries):
        if isinstance(data, ElsewhereData):
            used.setdefault(data.weight.segment, []).extend(keys)
        else:
            appended.append(_appended(index, keys, data, alignment))
    return used, appended


def _appended(index: int, keys: list[str], data: Any, alignment: int) -> Segment:
    layout = data.layout if isinstance(data, HeldData) else None
    names = tuple(
        SegmentName(
            key=key,
            fqn=_fqn_of(key),
            dtype=layout.dtype_name if layout else None,
            shape=layout.shape if layout else None,
            strides=layout.strides if layout else None,
        )
        for key in keys
    )
    return Segment(names=names, size=len(data), read=lambda: _data_chunks(data), alignment=alignment)


def _fqn_of(key: str) -> str | None:
    prefix = storage_key("")
    return key.removeprefix(prefix) if key.startswith(prefix) else None


def _data_chunks(data: Any) -> Iterator[Chunk]:
    """Pieces of bytes or of upstream's file-backed data, never the whole of a file."""
    if isinstance(data, bytes):
        yield from (memoryview(data)[start : start + MAX_CHUNK] for start in range(0, len(data), MAX_CHUNK))
    elif isinstance(data, HeldData):
        yield from _data_chunks(data.data)
    else:
        with open(data._path, "rb") as file:
            while chunk := file.read(MAX_CHUNK):
                yield chunk


def _lowered(
    manager: Any,
    captured: Captured,
    appended: list[Segment],
    used: dict[str, list[str]],
    details: dict[str, str | int],
) -> Lowered:
    cord = manager._pte_data

    def program() -> Iterator[Chunk]:
        for piece in cord._buffers:
            yield from _data_chunks(piece)

    return Lowered(
        program=program,
        program_size=len(cord),
        methods=[_method(name, program) for name, program in captured.programs.items()],
        appended=appended,
        used=used,
        needs_data=bool(appended or used),
        details=details,
    )


def _method(name: str, program: ExportedProgram) -> Method:
    inputs, outputs = program_values(program)
    return Method(name=name, inputs=inputs, outputs=outputs, delegates=("CudaBackend",))


class _Methods:
    """Reports each method as it begins: the back end moves one program to the device after the other."""

    def __init__(self, names: list[str], progress: Progress) -> None:
        self._names = names
        self._progress = progress
        self._begun = 0

    def begin(self) -> None:
        """The next method's program is moved. A method in several delegates is moved several times."""
        done = min(self._begun, len(self._names) - 1)
        self._progress.step("compiling", self._names[done], done, len(self._names))
        self._begun += 1

    def at_last(self) -> bool:
        """Whether the last method has begun."""
        return self._begun >= len(self._names)

    def end(self) -> None:
        """All are compiled."""
        self._progress.step("compiling", self._names[-1], len(self._names), len(self._names))


@contextmanager
def inductor_settings() -> Iterator[None]:
    """What upstream's own exporters set: the wrapper only launches kernels and need not be optimised."""
    from torch._inductor import config

    with config.patch({"aot_inductor.compile_wrapper_opt_level": "O0"}):
        yield


def _gpu_peak() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


@contextmanager
def _wrapped_errors(target: Target) -> Iterator[None]:
    """Foreign exceptions of a compile as errors of ours; what they said is kept as the cause."""
    try:
        yield
    except WeightlessError:
        raise
    except torch.OutOfMemoryError as error:
        raise GpuOutOfMemory(
            f"the GPU ran out of memory while compiling: {_first_line(error)}",
            stage="compiling",
            peakBytes=_gpu_peak(),
        ) from error
    except MemoryError as error:
        raise HostOutOfMemory("the host ran out of memory while compiling", stage="compiling") from error
    except OSError as error:
        if error.errno == 28:
            raise DiskFull("no space is left for the compiler's files", stage="compiling") from error
        raise InternalError(f"compiling failed: {_first_line(error)}", stage="compiling") from error
    except Exception as error:
        raise _classified(error, target) from error


def _classified(error: Exception, target: Target) -> WeightlessError:
    text = str(error)
    if "missing fallback kernels" in text:
        operators = sorted(line.strip(" -") for line in text.splitlines() if line.lstrip().startswith("- "))
        method = text.partition("Method ")[2].partition(" ")[0]
        return UnsupportedModel(
            f"method {method} needs {len(operators)} kernels that the CUDA runtime lacks: {', '.join(operators[:8])}",
            stage="compiling",
            method=method,
            operators=operators,
        )
    no_candidate = "No valid triton configs" in text or "No choices to select" in text or "out of resource" in text
    if no_candidate and target.shared_memory_bytes is not None:
        return ToolchainMismatch(
            f"no kernel candidate fits the shared memory of the target: {_first_line(error)}",
            hint="Raise target.sharedMemoryBytes, or leave it out.",
            stage="compiling",
        )
    if no_candidate:
        return UnsupportedModel(
            f"no Triton kernel can be built for an operator of the model: {_first_line(error)}",
            stage="compiling",
            operators=[],
        )
    if "out of memory" in text and "CUDA" in text:
        return GpuOutOfMemory(f"the GPU ran out of memory while compiling: {_first_line(error)}", stage="compiling")
    return InternalError(f"compiling failed: {_first_line(error)}", stage="compiling")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
