"""Phantom weights: the compile sees tensors of the right shape, strides, dtype and device that own no memory.

`phantom_weights` replaces the names of `seams.TABLE` inside one context and puts them back at its end. Upstream already
compiles with emptied KV caches (low_memory_mode); here every weight is emptied, and what upstream would fill with zeros
or read becomes a stand-in without memory that remembers its weight. A read of an emptied tensor that nobody knows fails
the export: it is never zeros.
"""

from __future__ import annotations

import hashlib
import importlib
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram

from exporter.contract.errors import InternalError, UnsupportedModel
from exporter.contract.segments import Chunk
from exporter.lowering.canonical import Layout
from exporter.lowering.seams import check_seams
from exporter.lowering.weights import PHANTOM_BYTES, Weight, WeightSet, state_tables

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ExecuTorch 1.5.1 uses deprecated parts of the standard library at import
    from executorch.exir._serialize._cord import FileBackedData

_CUDA = "executorch.backends.cuda.cuda_backend"
_COLLECTOR = "executorch.backends.cuda.cuda_weight_collector"
_HEURISTICS = "torch._inductor.runtime.triton_heuristics"
_SELECT = "torch._inductor.select_algorithm"
_ACTIVE = threading.Lock()


class ElsewhereData(FileBackedData):  # type: ignore[misc]
    """Named data whose size is known and whose bytes are a planned segment of the stream.

    Upstream deduplicates named data by (size, first 32 bytes), then SHA-256. The real digest is not known while the
    compile runs, so both answers are derived from the planned segment's key: equal exactly where the plan merged.
    """

    def __init__(self, weight: Weight) -> None:
        self.weight = weight
        self._token = hashlib.sha256(f"weightless:{weight.segment}".encode()).digest()

    def __len__(self) -> int:
        return self.weight.layout.nbytes

    def prefix(self, size: int) -> bytes:
        return self._token[:size]

    def sha256(self) -> bytes:
        return self._token

    def _refuse(self) -> NoReturn:
        raise InternalError(f"the bytes of {self.weight.fqn} were asked for during the compile")

    def to_bytes(self) -> bytes:
        self._refuse()

    def write_to_file(self, outfile: Any) -> None:
        self._refuse()

    def close(self) -> None:
        """Nothing is held."""


class HeldData(FileBackedData):  # type: ignore[misc]
    """Named data of a constant that the compiler made or that stayed real: held in host memory, small as a rule."""

    def __init__(self, data: bytes, layout: Layout) -> None:
        self.data = data
        self.layout = layout

    def __len__(self) -> int:
        return len(self.data)

    def prefix(self, size: int) -> bytes:
        return self.data[:size]

    def sha256(self) -> bytes:
        return hashlib.sha256(self.data).digest()

    def to_bytes(self) -> bytes:
        return self.data

    def write_to_file(self, outfile: Any) -> None:
        outfile.write(self.data)

    def chunks(self) -> Iterator[Chunk]:
        """The bytes, for a segment's reader."""
        yield memoryview(self.data)

    def close(self) -> None:
        """Nothing is held but memory."""


@dataclass(slots=True)
class KernelUse:
    """The kernel whose tuning raised the GPU peak last, and that peak in bytes: it bounds the memory of a compile."""

    name: str = ""
    gpu_bytes: int = 0


@dataclass(slots=True)
class Phantoms:
    """The registry of one export: which storage stands for which weight. Storages are known by identity, never by
    address, and are kept alive here so that an identity is not given twice."""

    weights: WeightSet
    on_method: Callable[[], None] = lambda: None
    largest_kernel: KernelUse = field(default_factory=KernelUse)
    _by_storage: dict[int, Weight] = field(default_factory=dict)
    _kept: list[torch.Tensor] = field(default_factory=list)
    _data: dict[str, FileBackedData] = field(default_factory=dict)
    _fake: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(allow_non_fake_inputs=True))

    def place(self, program: ExportedProgram, location: str) -> ExportedProgram:
        """Move a program to the device `location` in place, its weights as phantoms; for upstream's move."""
        self.on_method()
        for table in state_tables(program):
            for fqn, value in list(table.items()):
                if isinstance(value, torch.Tensor):
                    table[fqn] = self._moved(fqn, value, location)
        if program.example_inputs is not None:
            program._example_inputs = pytree.tree_map_only(
                torch.Tensor, lambda tensor: tensor.to(location), program.example_inputs
            )
        importlib.import_module(_CUDA)._move_graph_nodes_to_device(program.graph_module, location)
        program.validate()  # type: ignore[no-untyped-call]
        return program

    def _moved(self, fqn: str, value: torch.Tensor, location: str) -> torch.Tensor:
        if value.numel() * value.element_size() < PHANTOM_BYTES:
            moved = value.to(location)
        else:
            weight = self.weights.find(fqn, value)
            if weight is None:
                raise UnsupportedModel(
                    f"a pass of the lowering replaced or computed {fqn}, whose values are not in memory",
                    hint="Fold it into the weights before the export, or set target.lowMemoryMode to false.",
                    operators=[],
                    tensor=fqn,
                )
            moved = self._phantom(weight, location)
        if isinstance(value, torch.nn.Parameter):
            return torch.nn.Parameter(moved, requires_grad=value.requires_grad)
        return moved

    def _phantom(self, weight: Weight, location: str) -> torch.Tensor:
        layout = weight.layout
        tensor = torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device=location)
        # One weight at a time lies on the device for a moment; its block goes back to the caching allocator.
        tensor.untyped_storage().resize_(0)
        self._remember(tensor, weight)
        return tensor

    def _remember(self, tensor: torch.Tensor, weight: Weight) -> None:
        self._by_storage[tensor.untyped_storage()._cdata] = weight
        self._kept.append(tensor)

    def stand_in(self, tensor: torch.Tensor, device: object) -> torch.Tensor:
        """For upstream's zeros: a fake tensor with the phantom's size and strides, on the device where upstream has it.

        AOTInductor writes the device class of its constants into the wrapper. Upstream's parameters are on the GPU and
        its cloned buffers on the CPU, so the stand-ins say the same.
        """
        weight = self._by_storage.get(tensor.untyped_storage()._cdata)
        if weight is None:
            raise InternalError(
                f"an emptied tensor of shape {list(tensor.shape)} was asked for, and no weight is known for it"
            )
        where = tensor.device if weight.parameter else torch.device(str(device))
        layout = weight.layout
        with self._fake:
            stand_in = torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device=where)
        self._remember(stand_in, weight)
        return stand_in

    def write(self, tensor: torch.Tensor, path: str) -> bytes:
        """For upstream's writer of a storage: remember what belongs to `path`, write nothing, answer with a digest."""
        storage = tensor.untyped_storage()
        weight = self._by_storage.get(storage._cdata)
        if weight is not None:
            data: FileBackedData = ElsewhereData(weight)
        elif tensor.numel() and storage.nbytes() == 0:
            raise InternalError(f"a constant of shape {list(tensor.shape)} has no bytes, and no weight is known for it")
        else:
            data = _held(tensor)
        self._data[path] = data
        digest: bytes = data.sha256()
        return digest

    def take(self, path: str) -> FileBackedData:
        """For upstream's `FileBackedData.move_from`: the data of `path`; the empty file there is removed."""
        Path(path).unlink(missing_ok=True)
        return self._data.pop(path)

    def saw_kernel(self, name: str) -> None:
        """`name` was just run for its tuning, on arguments of full size; keeps it if it raised the GPU peak."""
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        if peak > self.largest_kernel.gpu_bytes:
            self.largest_kernel = KernelUse(name, peak)


def _held(tensor: torch.Tensor) -> HeldData:
    storage = tensor.untyped_storage()
    layout = Layout(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), storage.nbytes())
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
    return HeldData(flat.cpu().numpy().tobytes(), layout)


@contextmanager
def phantom_weights(phantoms: Phantoms) -> Iterator[None]:
    """Compile with `phantoms` inside. One at a time per process: the replaced names are global.

    `ToolchainMismatch` at entry where an upstream name is not as the seam table says; then nothing was replaced.
    """
    if not _ACTIVE.acquire(blocking=False):
        raise InternalError("a second export with phantom weights was started in one process")
    try:
        check_seams()
        with _replaced(phantoms):
            yield
    finally:
        _ACTIVE.release()


@contextmanager
def _replaced(phantoms: Phantoms) -> Iterator[None]:
    cuda, collector = importlib.import_module(_CUDA), importlib.import_module(_COLLECTOR)
    tuner = importlib.import_module(_HEURISTICS).CachingAutotuner
    selector = importlib.import_module(_SELECT).AlgorithmSelectorCache

    class Moved(FileBackedData):  # type: ignore[misc]
        """What the collector builds its data with."""

        @classmethod
        def move_from(cls, path: str, sha256: bytes | None = None) -> FileBackedData:
            return phantoms.take(path)

    run, benchmark = tuner.run, selector.benchmark_choice

    def watched_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = run(self, *args, **kwargs)
        meta = getattr(self, "inductor_meta", None) or {}
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        phantoms.saw_kernel(_described(str(meta.get("kernel_name", "kernel")), tensors))
        return result

    def watched_benchmark(choice: Any, autotune_args: Any) -> Any:
        result = benchmark(choice, autotune_args)
        inputs = ", ".join(node.get_name() for node in getattr(choice, "input_nodes", ()))
        phantoms.saw_kernel(f"{choice.name}({inputs})")
        return result

    replacements: list[tuple[Any, str, object]] = [
        (cuda, "_move_to_device_resize_kv", phantoms.place),
        (cuda, "_full_zeros_preserving_strides", phantoms.stand_in),
        (collector, "_write_tensor_storage", phantoms.write),
        (collector, "FileBackedData", Moved),
        (tuner, "run", watched_run),
        (selector, "benchmark_choice", staticmethod(watched_benchmark)),
    ]
    # From the namespace itself: `getattr` would bind a class method to its class.
    originals = [(owner, name, vars(owner)[name]) for owner, name, _ in replacements]
    try:
        for owner, name, value in replacements:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _described(name: str, tensors: list[torch.Tensor]) -> str:
    """A kernel by its name and largest argument: while its fusion is tuned it has no name yet, only a placeholder."""
    known = "a fused kernel" if "Placeholder" in name else name
    largest = max(tensors, key=lambda tensor: tensor.numel() * tensor.element_size(), default=None)
    if largest is None:
        return known
    return f"{known} on {'x'.join(map(str, largest.shape))} {str(largest.dtype).removeprefix('torch.')}"
