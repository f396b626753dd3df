"""The weights of captured programs as a CUDA export sees them: which become phantoms, their segments, and their order.

A tensor of at least `PHANTOM_BYTES` is a `Weight`: its bytes come from the source (by FQN) or from the program itself
(buffers and constants that no source has). Smaller tensors stay real, because Inductor reads lifted scalars.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from exporter.contract.errors import SourceNotFound, SourceUnsafe, UnsupportedModel
from exporter.contract.segments import Chunk, Segment, SegmentName
from exporter.lowering.canonical import (
    Layout,
    any_nonzero,
    canonical_chunks,
    canonical_layout,
    is_zero,
    strided_layout,
    zero_chunks,
)
from exporter.source.captured import Captured
from exporter.source.ports import TensorInfo, WeightSource

PHANTOM_BYTES = 1024
"""Tensors of at least this many bytes become phantoms."""


Place = tuple[int, Layout, int]
"""Where a tensor lies: its storage, its own dtype, shape and strides, and its offset there."""


@dataclass(eq=False, slots=True)
class Weight:
    """One tensor whose bytes do not take part in the compile. Two methods that name it share it."""

    fqn: str
    layout: Layout
    read: Callable[[], Iterator[Chunk]]
    zeros: bool
    parameter: bool
    identity: object
    from_source: bool
    real: torch.Tensor | None = None
    """The tensor that `read` reads, where the program itself holds it."""
    segment: str = ""
    """First key of the planned segment that holds its bytes."""


@dataclass(slots=True)
class WeightSet:
    """All weights of an export, in first-use order over the methods."""

    by_fqn: dict[str, Weight] = field(default_factory=dict)
    by_place: dict[Place, list[Weight]] = field(default_factory=dict)
    small_bytes: int = 0
    """Bytes of the tensors that stay real."""
    held: list[torch.Tensor] = field(default_factory=list)
    """Keeps the storages behind `by_place` alive, so that their addresses stay theirs."""

    def largest(self) -> Weight | None:
        """The weight with most bytes."""
        return max(self.by_fqn.values(), key=lambda weight: weight.layout.nbytes, default=None)

    def segments(self, key_of: Callable[[str], str]) -> list[Segment]:
        """The planned segments: ties and known zeros of one size share one. Sets each weight's `segment`."""
        groups: dict[object, list[Weight]] = {}
        for weight in self.by_fqn.values():
            groups.setdefault(weight.identity, []).append(weight)
        return [_segment(group, key_of) for group in groups.values()]

    def find(self, fqn: str, tensor: torch.Tensor) -> Weight | None:
        """The weight that `tensor`, now called `fqn`, is; None if a pass has made it."""
        here = self.by_place.get(_place_of(tensor), [])
        if here:
            return next((weight for weight in here if weight.fqn == fqn), here[0])
        # A pass may have copied a constant that the program holds; it must then hold the same bytes.
        candidates = [self.by_fqn[fqn]] if fqn in self.by_fqn else list(self.by_fqn.values())
        return next((weight for weight in candidates if _same_bytes(weight, tensor)), None)


def _segment(group: list[Weight], key_of: Callable[[str], str]) -> Segment:
    first = group[0]
    names = []
    for weight in group:
        names.append(
            SegmentName(
                key=key_of(weight.fqn),
                fqn=weight.fqn,
                dtype=weight.layout.dtype_name,
                shape=weight.layout.shape,
                strides=weight.layout.strides,
            )
        )
        weight.segment = names[0].key
    return Segment(names=tuple(names), size=first.layout.nbytes, read=first.read, zeros=first.zeros)


def _place_of(tensor: torch.Tensor) -> Place:
    own = Layout(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), 0)
    return tensor.untyped_storage()._cdata, own, int(tensor.storage_offset())


def _same_bytes(weight: Weight, tensor: torch.Tensor) -> bool:
    if weight.real is None or canonical_layout(tensor) != canonical_layout(weight.real):
        return False
    pieces = zip(canonical_chunks(weight.real), canonical_chunks(tensor), strict=True)
    return all(memoryview(one) == memoryview(other) for one, other in pieces)


def collect_weights(captured: Captured) -> WeightSet:
    """The weights of all methods. Small source tensors are read now and put into the programs, which may hold nothing.

    `UnsupportedModel` where two methods give one name different contents, `SourceNotFound` where nothing has a tensor's
    values, `SourceUnsafe` where the source's tensor is not the program's.
    """
    found = WeightSet()
    infos = dict(captured.weights.tensors())
    reader = _Aliased(captured.weights, _alias_ties(captured, infos))
    for method, program in captured.programs.items():
        for fqn in first_use_order(program):
            table = next((table for table in state_tables(program) if fqn in table), None)
            for name, tensor in [] if table is None else inner_tensors(fqn, table[fqn]):
                kept = _admit(found, reader, infos, method, name, tensor)
                if name == fqn and table is not None:
                    table[fqn] = kept
    return found


def inner_tensors(fqn: str, value: object) -> list[tuple[str, torch.Tensor]]:
    """The plain tensors of one entry of a program's state, under the names that they have after decomposition.

    torch.export keeps wrapper subclasses (torchao's quantised tensors); its decompositions then replace a parameter `w`
    by `parametrizations.w.original0`, `original1`, … in the order of `__tensor_flatten__`.
    """
    if not isinstance(value, torch.Tensor):
        return []
    plain = _flatten(value)
    if not _is_wrapper(value):
        return [(fqn, value)]
    owner, _, leaf = fqn.rpartition(".")
    prefix = f"{owner}.parametrizations.{leaf}" if owner else f"parametrizations.{leaf}"
    return [(f"{prefix}.original{index}", tensor) for index, tensor in enumerate(plain)]


def _flatten(value: torch.Tensor) -> list[torch.Tensor]:
    if not _is_wrapper(value):
        return [value]
    names: list[str] = value.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    return [plain for name in names for plain in _flatten(getattr(value, name))]


def _is_wrapper(value: torch.Tensor) -> bool:
    return is_traceable_wrapper_subclass(value)


@dataclass(slots=True)
class _Aliased:
    """A source whose tied names are read under the one name that the source has."""

    source: WeightSource
    aliases: Mapping[str, str]

    def chunks(self, name: str) -> Iterator[Chunk]:
        return self.source.chunks(self.aliases.get(name, name))


def _alias_ties(captured: Captured, infos: dict[str, TensorInfo]) -> dict[str, str]:
    """Names that the source lacks but that the program ties to one that it has; adds them to `infos`.

    Their own memory may be untouched: to read it would give zeros.
    """
    aliases: dict[str, str] = {}
    for program in captured.programs.values():
        tensors = {
            fqn: tensor
            for table in state_tables(program)
            for fqn, tensor in table.items()
            if isinstance(tensor, torch.Tensor) and tensor.numel() and not _is_wrapper(tensor)
        }
        given = {_place_of(tensor): fqn for fqn, tensor in tensors.items() if fqn in infos}
        storages = {place[0] for place in given}
        for fqn, tensor in tensors.items():
            place = _place_of(tensor)
            if fqn in infos or place[0] not in storages:
                continue
            if place not in given:
                raise UnsupportedModel(
                    f"{fqn} is another view of a weight's memory, and the source does not have it",
                    hint="Clone it in the model before the export, or save it with the weights.",
                    operators=[],
                    tensor=fqn,
                )
            first = given[place]
            info = infos[first]
            aliases[fqn] = first
            infos[fqn] = replace(info, name=fqn, identity=info.identity or ("tie", first))
            infos[first] = replace(info, identity=info.identity or ("tie", first))
    return aliases


def first_use_order(program: ExportedProgram) -> list[str]:
    """FQNs of parameters, buffers and constants that have a user, in the order in which the graph first uses them."""
    signature = program.graph_signature
    targets = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    order: dict[str, None] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            continue
        for argument in node.all_input_nodes:
            if argument.name in targets:
                order.setdefault(targets[argument.name])
    return list(order)


def state_tables(program: ExportedProgram) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The program's own tables of tensors, to be changed in place: the public properties are the same objects."""
    return program.state_dict, program.constants


def _admit(
    found: WeightSet,
    source: _Aliased,
    infos: Mapping[str, TensorInfo],
    method: str,
    fqn: str,
    tensor: torch.Tensor,
) -> torch.Tensor:
    """Take one tensor of a method in; the tensor that the program is to hold from now on."""
    info = infos.get(fqn)
    if tensor.numel() == 0:
        return tensor
    empty = tensor.is_meta or isinstance(tensor, FakeTensor)
    if info is None and empty:
        raise SourceNotFound(
            f"nothing holds the values of {fqn} of method {method}",
            hint="The recipe must give buffers and constants that the source lacks as real tensors.",
            method=method,
            tensor=fqn,
        )
    weight = _from_program(fqn, tensor) if info is None else _from_source(fqn, tensor, source, info)
    if tensor.numel() * tensor.element_size() < PHANTOM_BYTES:
        found.small_bytes += weight.layout.nbytes
        return tensor if info is None else _like(tensor, _load(weight))
    if empty:
        # Untouched memory is not resident, and the passes before the device move expect a tensor of the host.
        tensor = _like(tensor, torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype))
    known = found.by_fqn.setdefault(fqn, weight)
    if known is not weight and not _agree(known, weight):
        raise UnsupportedModel(
            f"{fqn} has different contents in method {method} than in another method",
            hint="Constants of the methods share one name space in the .ptd; give them different names.",
            method=method,
            operators=[],
            tensor=fqn,
        )
    # copy.deepcopy asks the object first: no pass may copy what it must not read.
    tensor.__dict__["__deepcopy__"] = partial(_itself, tensor)
    here = found.by_place.setdefault(_place_of(tensor), [])
    if known not in here:
        here.append(known)
    found.held.append(tensor)
    return tensor


def _itself(tensor: torch.Tensor, memo: dict[int, object]) -> torch.Tensor:
    memo[id(tensor)] = tensor
    return tensor


def _like(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(new, requires_grad=False) if isinstance(old, torch.nn.Parameter) else new


def _agree(one: Weight, other: Weight) -> bool:
    if one.from_source != other.from_source or one.layout != other.layout:
        return False
    if one.from_source or one.identity == other.identity:
        return True
    return other.real is not None and _same_bytes(one, other.real)


def _from_source(fqn: str, tensor: torch.Tensor, source: _Aliased, info: TensorInfo) -> Weight:
    layout = canonical_layout(tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if info.dtype != dtype or info.shape != layout.shape or info.nbytes != layout.nbytes:
        raise SourceUnsafe(
            f"{fqn} is {info.dtype} {list(info.shape)} in the source, but {dtype} {list(layout.shape)} in the program",
            tensor=fqn,
        )
    given = canonical_layout(torch.empty_strided(info.shape, info.strides, dtype=tensor.dtype, device="meta"))
    if _byte_order(given) != _byte_order(layout):
        raise SourceUnsafe(f"{fqn} is laid out in another order of dimensions in the source", tensor=fqn)
    parameter = isinstance(tensor, torch.nn.Parameter)
    # A cache is zeros by content, whoever holds it; a buffer that is not ends the look at its first chunk.
    if not parameter and not any(any_nonzero(chunk) for chunk in source.chunks(fqn)):
        return _zeros(fqn, tensor, from_source=True)
    identity: object = ("fqn", fqn) if info.identity is None else ("source", info.identity, layout)
    return Weight(fqn, layout, partial(source.chunks, fqn), False, parameter, identity, from_source=True)


def _zeros(fqn: str, tensor: torch.Tensor, *, from_source: bool) -> Weight:
    parameter = isinstance(tensor, torch.nn.Parameter)
    # What upstream's _is_kv_buffer accepts keeps its own strides.
    kept = not parameter and "kv_cache" in fqn
    layout = strided_layout(tensor) if kept else canonical_layout(tensor)
    read = partial(zero_chunks, layout.nbytes)
    real = None if from_source else tensor.detach()
    return Weight(fqn, layout, read, True, parameter, ("zeros", layout.nbytes), from_source=from_source, real=real)


def _byte_order(layout: Layout) -> list[int]:
    wide = [dim for dim, size in enumerate(layout.shape) if size != 1]
    return sorted(wide, key=lambda dim: -layout.strides[dim])


def _from_program(fqn: str, tensor: torch.Tensor) -> Weight:
    if is_zero(tensor):
        return _zeros(fqn, tensor, from_source=False)
    layout, held = canonical_layout(tensor), tensor.detach()
    identity = ("content", layout.nbytes, _digest(held))
    parameter = isinstance(tensor, torch.nn.Parameter)
    return Weight(
        fqn, layout, partial(canonical_chunks, held), False, parameter, identity, from_source=False, real=held
    )


def _digest(tensor: torch.Tensor) -> bytes:
    digest = hashlib.sha256()
    for chunk in canonical_chunks(tensor):
        digest.update(chunk)
    return digest.digest()


def _load(weight: Weight) -> torch.Tensor:
    """A small weight's real tensor (below `PHANTOM_BYTES`)."""
    data = bytearray(b"".join(bytes(chunk) for chunk in weight.read()))
    layout = weight.layout
    if len(data) != layout.nbytes:
        raise SourceUnsafe(f"{weight.fqn} has {len(data)} bytes in the source, not {layout.nbytes}", tensor=weight.fqn)
    flat = torch.frombuffer(data, dtype=layout.dtype)
    return torch.as_strided(flat, layout.shape, layout.strides)


def fill_from_source(captured: Captured) -> None:
    """Load every source tensor into the programs: upstream's own path holds all weights in host memory."""
    infos = dict(captured.weights.tensors())
    reader = _Aliased(captured.weights, _alias_ties(captured, infos))
    loaded: dict[object, torch.Tensor] = {}
    for program in captured.programs.values():
        for table in state_tables(program):
            for fqn, tensor in list(table.items()):
                info = infos.get(fqn)
                if info is not None:
                    weight = _from_source(fqn, tensor, reader, info)
                    values = loaded.get(weight.identity)
                    if values is None:
                        loaded[weight.identity] = values = _load(weight)
                    table[fqn] = _like(tensor, values)


MAX_OUTSIDE = 64 * 2**20
"""Bytes of weights that a program may use outside its CUDA delegates; they are loaded into host memory."""


def fill_outside(programs: Mapping[str, ExportedProgram], weights: WeightSet) -> None:
    """Give values to weights that a lowered program still uses itself (a parameter returned as an output, say).

    They go into the `.pte`. `UnsupportedModel` where they are more than `MAX_OUTSIDE` bytes.
    """
    total = 0
    for method, program in programs.items():
        for fqn in first_use_order(program):
            weight = weights.by_fqn.get(fqn)
            if weight is None:
                continue
            total += weight.layout.nbytes
            if total > MAX_OUTSIDE:
                raise UnsupportedModel(
                    f"method {method} uses {fqn} outside of the CUDA delegate; such weights cannot be streamed",
                    method=method,
                    operators=[],
                    tensor=fqn,
                )
            for table in state_tables(program):
                if fqn in table:
                    table[fqn] = _like(table[fqn], _load(weight))
