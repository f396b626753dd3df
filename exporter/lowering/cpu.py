"""What the two CPU back ends share: ExecuTorch's ahead-of-time passes, with every constant in one data file.

ExecuTorch 1.5.1 loads a program with one `data_path`, so delegates' constants (keys are content hashes) and the
program's own (keys are FQNs) leave under one tag, `model`. Both CPU back ends pack or copy weights while they lower, so
nothing is known before: the plan is empty and every segment is appended, each backed by the bytes that the back end
made (host memory: once the weights of the program, until they are sent).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from exporter.contract.errors import InternalError, UnsupportedModel, WeightlessError, first_line
from exporter.contract.manifest import Method, TensorSpec
from exporter.contract.segments import MAX_CHUNK, Chunk, Segment, SegmentName, TensorLayout
from exporter.lowering.operators import missing_kernels, named_operators, unrunnable_dtypes, unrunnable_operators
from exporter.lowering.plain import copy_returned_weights, initial_state, views_a_constant, with_plain_weights
from exporter.lowering.ports import Lowered, Plan, Progress
from exporter.source.captured import Captured

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ExecuTorch 1.5.1 uses deprecated parts of the standard library at import
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
    from executorch.exir.passes import MemoryPlanningPass
    from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass
    from executorch.exir.schema import ScalarType, Tensor, TensorDataLocation

TAG = "model"
"""The external tag, and so the data file's name without its suffix."""

_DTYPES = {
    ScalarType.BYTE: "uint8",
    ScalarType.CHAR: "int8",
    ScalarType.SHORT: "int16",
    ScalarType.INT: "int32",
    ScalarType.LONG: "int64",
    ScalarType.HALF: "float16",
    ScalarType.FLOAT: "float32",
    ScalarType.DOUBLE: "float64",
    ScalarType.BOOL: "bool",
    ScalarType.BFLOAT16: "bfloat16",
    ScalarType.UINT16: "uint16",
    ScalarType.UINT32: "uint32",
    ScalarType.UINT64: "uint64",
}


@dataclass(frozen=True, slots=True)
class CpuBackend:
    """What tells one CPU back end from the other: its name, its data file's layout, and its partitioners."""

    name: str
    layout: str
    partitioners: Callable[[], Sequence[Any]]


class CpuLowering:
    """Lowers with ExecuTorch's CPU tool chain to one program and the segments of one `model.ptd`."""

    def __init__(self, backend: CpuBackend) -> None:
        self._backend = backend

    def preflight(self, captured: Captured) -> None:
        """Refuse operators and dtypes that the CPU runtime has no kernel for: `UnsupportedModel`."""
        for method, program in captured.programs.items():
            missing = unrunnable_operators(program.graph_module)
            if missing:
                raise unsupported(self._backend.name, method, missing)
            for dtype, operators in unrunnable_dtypes(program.graph_module).items():
                raise UnsupportedModel(
                    f"the {self._backend.name} back end does not compute with {dtype}: {', '.join(operators[:5])} "
                    f"(method {method})",
                    hint=f"Store {dtype} tensors in another dtype, such as float16 or int32, before the capture.",
                    method=method,
                    operators=operators[:50],
                    dtype=dtype,
                )

    def plan(self, captured: Captured) -> Plan:
        """An empty plan: packed weights are known only when the compile is through."""
        return Plan(name=f"{TAG}.ptd", layout=self._backend.layout)

    def lower(self, captured: Captured, progress: Progress) -> Lowered:
        """Compile all methods together. `UnsupportedModel` names the method and operators without a kernel."""
        methods = list(captured.programs)
        for done, method in enumerate(methods):
            progress.step("compiling", method, done, len(methods))
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # upstream's own deprecations
                manager, described = self._compile(captured)
        except (WeightlessError, MemoryError):
            raise
        except Exception as error:
            operators = named_operators(str(error))
            if operators:
                raise unsupported(self._backend.name, ", ".join(methods), operators) from error
            raise InternalError(f"the {self._backend.name} back end failed: {first_line(error)}") from error
        plans = manager.executorch_program.execution_plan
        for plan in plans:
            missing = missing_kernels({_operator(item.name, item.overload) for item in plan.operators})
            if missing:
                raise unsupported(self._backend.name, plan.name, missing)
        program = _Collected()
        manager.write_to_file(program)
        segments = _segments(_entries(manager, _layouts(plans)))
        progress.step("compiling", methods[-1], len(methods), len(methods))
        return Lowered(
            program=program.chunks,
            program_size=program.size,
            methods=[_with_delegates(method, plans) for method in described],
            appended=segments,
            needs_data=bool(segments),
        )

    def _compile(self, captured: Captured) -> tuple[Any, list[Method]]:
        """ExecuTorch's program manager, and the methods as they are after functionalisation."""
        for program in captured.programs.values():
            copy_returned_weights(program)
        programs = {name: with_plain_weights(program) for name, program in captured.programs.items()}
        edge = to_edge_transform_and_lower(
            programs,
            partitioner={name: list(self._backend.partitioners()) for name in programs},
            # Which operators are allowed is decided by the runtime's kernels, after the compile, not by core ATen.
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )
        # Constants that a delegate's own passes made (a batch norm folded into a convolution) carry no tag, so the
        # store is told itself: whatever a delegate keeps goes to the data file.
        store = edge._named_data_store
        store.external_data.setdefault(TAG, {}).update(store.pte_data)
        store.pte_data.clear()
        lowered = [edge.exported_program(name) for name in programs]
        state = [name for program in lowered for name in initial_state(program)]
        methods = [_method(name, edge.exported_program(name)) for name in programs]
        manager = edge.to_executorch(
            ExecutorchBackendConfig(
                external_constants=lambda node: TAG,
                passes=[InitializedMutableBufferPass(state)] if state else [],
                remove_view_copy=not any(views_a_constant(program) for program in lowered),
                memory_planning_pass=MemoryPlanningPass(share_mutable_buffers=captured.share_buffers),
            )
        )
        return manager, methods


def unsupported(backend: str, method: str, operators: Iterable[str]) -> UnsupportedModel:
    """The error for operators that `backend` cannot run, sorted, at most 50 of them named."""
    names = sorted(set(operators))
    return UnsupportedModel(
        f"the {backend} back end has no kernel for {', '.join(names[:5])}"
        + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        + f" (method {method})",
        method=method,
        operators=names[:50],
    )


class _Collected:
    """A writable that keeps references to the buffers it is given: nothing is joined or copied."""

    def __init__(self) -> None:
        self._buffers: list[bytes] = []
        self.size = 0

    def write(self, data: bytes) -> int:
        self._buffers.append(bytes(data))  # `bytes` of a bytes object is the object itself
        self.size += len(data)
        return len(data)

    def chunks(self) -> Iterator[Chunk]:
        for buffer in self._buffers:
            yield from _pieces(buffer)


@dataclass(frozen=True, slots=True)
class _Entry:
    name: SegmentName
    buffer: bytes
    alignment: int


def _entries(manager: Any, layouts: Mapping[str, TensorLayout]) -> Iterator[_Entry]:
    """Every external constant: the emitter's by FQN first, in emission order, then the delegates' by content hash."""
    emitted = manager._emitter_output
    for fqn, index in emitted.external_constant_map.get(TAG, {}).items():
        yield _Entry(_named(fqn, layouts.get(fqn)), emitted.external_constant_buffer[index], 1)
    named = manager._named_data
    for key, entry in (named.external_data.get(TAG, {}) if named else {}).items():
        yield _Entry(SegmentName(key=key), named.buffers[entry.buffer_index], entry.alignment)
    stray = {*emitted.external_constant_map, *(named.external_data if named else ())} - {TAG}
    if stray or (named and named.pte_data):
        raise InternalError(f"constants left outside of {TAG}.ptd: {sorted(stray) or sorted(named.pte_data)[:5]}")


def _segments(entries: Iterable[_Entry]) -> list[Segment]:
    """Segments in order, equal content merged; hashed only where another buffer has the same length."""
    groups: list[tuple[list[SegmentName], bytes, int]] = []
    by_length: dict[int, list[int]] = {}
    digests: dict[int, bytes] = {}
    for entry in entries:
        for index in by_length.get(len(entry.buffer), ()):
            names, buffer, alignment = groups[index]
            if buffer is entry.buffer or _same(index, buffer, entry.buffer, digests):
                names.append(entry.name)
                groups[index] = (names, buffer, max(alignment, entry.alignment))
                break
        else:
            by_length.setdefault(len(entry.buffer), []).append(len(groups))
            groups.append(([entry.name], entry.buffer, entry.alignment))
    return [
        Segment(tuple(names), len(buffer), lambda buffer=buffer: _pieces(buffer), alignment)  # type: ignore[misc]
        for names, buffer, alignment in groups
    ]


def _same(index: int, buffer: bytes, other: bytes, digests: dict[int, bytes]) -> bool:
    if buffer[:32] != other[:32]:
        return False
    if index not in digests:
        digests[index] = sha256(buffer).digest()
    return digests[index] == sha256(other).digest()


def _pieces(buffer: bytes) -> Iterator[Chunk]:
    view = memoryview(buffer)
    for start in range(0, len(view), MAX_CHUNK):
        yield view[start : start + MAX_CHUNK]


def _layouts(plans: Iterable[Any]) -> dict[str, TensorLayout]:
    layouts = {}
    for plan in plans:
        for value in plan.values:
            tensor = value.val
            if not isinstance(tensor, Tensor) or tensor.extra_tensor_info is None:
                continue
            if tensor.extra_tensor_info.location is TensorDataLocation.EXTERNAL:
                layout = TensorLayout(int(tensor.scalar_type), tuple(tensor.sizes), tuple(tensor.dim_order))
                layouts[tensor.extra_tensor_info.fully_qualified_name] = layout
    return layouts


def _named(fqn: str, layout: TensorLayout | None) -> SegmentName:
    if layout is None:
        return SegmentName(key=fqn, fqn=fqn)
    strides = [0] * len(layout.sizes)
    step = 1
    for dimension in reversed(layout.dim_order):
        strides[dimension] = step
        step *= max(1, layout.sizes[dimension])
    dtype = _DTYPES.get(ScalarType(layout.scalar_type))
    return SegmentName(fqn, layout, fqn, dtype, layout.sizes, tuple(strides))


def _operator(name: str, overload: str) -> str:
    return f"{name}.{overload}" if overload else name


def _method(name: str, program: ExportedProgram) -> Method:
    inputs, outputs = program_values(program)
    return Method(name=name, inputs=inputs, outputs=outputs)


def _with_delegates(method: Method, plans: Iterable[Any]) -> Method:
    delegates = {delegate.id for plan in plans if plan.name == method.name for delegate in plan.delegates}
    return method.model_copy(update={"delegates": tuple(sorted(delegates))})


def program_values(program: ExportedProgram) -> tuple[tuple[TensorSpec | str, ...], tuple[TensorSpec | str, ...]]:
    """A program's user inputs and outputs for the manifest, in order; a symbolic dimension is -1."""
    nodes = {node.name: node for node in program.graph.nodes}

    def described(items: Iterable[object]) -> tuple[TensorSpec | str, ...]:
        return tuple(
            _described(nodes[item].meta.get("val")) if item in nodes else type(item).__name__ for item in items
        )

    shown = (OutputKind.USER_OUTPUT, OutputKind.USER_INPUT_MUTATION)
    outputs = [
        getattr(spec.arg, "name", None) or getattr(spec.arg, "value", None)
        for spec in program.graph_signature.output_specs
        if spec.kind in shown
    ]
    return described(program.graph_signature.user_inputs), described(outputs)


def _described(value: object) -> TensorSpec | str:
    if isinstance(value, torch.Tensor):
        shape = tuple(size if isinstance(size, int) else -1 for size in value.shape)
        return TensorSpec(dtype=str(value.dtype).removeprefix("torch."), shape=shape)
    return re.sub(r"^Sym", "", type(value).__name__).lower()
