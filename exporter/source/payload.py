"""The raw weights of a `.pt2` archive: which bytes of which member each tensor is, and tensors over them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._export.serde.serialize import _SERIALIZE_TO_TORCH_DTYPE

from exporter.contract.errors import SourceNotFound, SourceUnsafe
from exporter.contract.segments import MAX_CHUNK, Chunk
from exporter.source.archive import Archive
from exporter.source.local import LocalReader
from exporter.source.mapped import MappedFile, over
from exporter.source.ports import TensorInfo
from exporter.source.strided import extent, gather, is_dense

SMALL = 64 * 2**10
"""Storages of at most this many bytes are read at once from a remote archive; larger ones stay untouched."""
_ITEM_LIMIT = 2**62


@dataclass(frozen=True, slots=True)
class Payload:
    """One tensor of the archive: its member, and its geometry within the member's bytes, in elements."""

    member: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    parameter: bool
    requires_grad: bool


def read_payload(name: str, meta: Mapping[str, Any], folder: str, archive: Archive) -> Payload:
    """A checked entry of a payload configuration; `SourceUnsafe` if it is pickled or does not fit its member."""

    def unsafe(problem: str, hint: str | None = None) -> SourceUnsafe:
        return SourceUnsafe(f"{archive.name}: {name} {problem}.", hint=hint, file=archive.name, tensor=name)

    if meta["use_pickle"] or meta.get("tensor_meta") is None:
        raise unsafe(
            "is pickled in the archive, and loading it could run code",
            "Tensor subclasses are pickled: unwrap a torchao model first "
            "(torchao.utils.unwrap_tensor_subclass), then export and save it again.",
        )
    tensor = meta["tensor_meta"]
    dtype = _SERIALIZE_TO_TORCH_DTYPE.get(tensor["dtype"])
    if dtype is None or tensor["layout"] != 7:
        raise unsafe("is not a strided tensor of a known dtype")
    shape = _numbers(tensor["sizes"])
    strides = _numbers(tensor["strides"])
    offset = _numbers([tensor["storage_offset"]])
    if shape is None or strides is None or offset is None or len(shape) != len(strides) or len(shape) > 64:
        raise unsafe("has sizes, strides or an offset that are not plain numbers")
    member = folder + meta["path_name"]
    if member not in archive:
        raise SourceNotFound(f"{archive.name} has no {member}, where {name} should be.", file=archive.name)
    span, size = extent(shape, strides), archive.size(member)
    if math.prod(size for size in shape if size) > _ITEM_LIMIT or (offset[0] + span) * dtype.itemsize > _ITEM_LIMIT:
        raise unsafe("has a shape that overflows")
    if span and not size:
        raise SourceNotFound(
            f"{archive.name} has no weights: {name} was saved without its bytes.",
            hint="Export and save the program with its real weights, not under FakeTensorMode.",
            tensor=name,
        )
    if span and (offset[0] + span) * dtype.itemsize > size:
        raise unsafe(f"needs {(offset[0] + span) * dtype.itemsize} bytes; {member} has {size}")
    if span and archive.offset(member) % dtype.itemsize:
        raise unsafe("is not aligned in the archive", "Save the program again with torch.export.save.")
    trains = bool(tensor["requires_grad"]) and (dtype.is_floating_point or dtype.is_complex)
    return Payload(member, dtype, shape, strides, offset[0], bool(meta["is_param"]), trains)


def _numbers(values: list[dict[str, Any]]) -> tuple[int, ...] | None:
    numbers = tuple(value.get("as_int", -1) for value in values)
    return numbers if all(0 <= number < _ITEM_LIMIT for number in numbers) else None


class ArchiveWeights:
    """Tensors of a `.pt2` archive by FQN, read by range. Satisfies `WeightSource`.

    From a local archive `tensor` gives tensors mapped from it; from a remote one, storage that nobody has written,
    small ones excepted. `fill` writes the real values into the latter.
    """

    def __init__(self, archive: Archive, payloads: Mapping[str, Payload]) -> None:
        self._archive = archive
        self._payloads = dict(payloads)
        reader = archive.reader
        self._map = MappedFile(reader) if isinstance(reader, LocalReader) else None
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._infos = {name: _info(name, payload) for name, payload in payloads.items()}

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every parameter, buffer and tensor constant, by FQN."""
        return self._infos

    @property
    def resident(self) -> bool:
        """Whether `tensor` gives real values without `fill`."""
        return self._map is not None

    def chunks(self, name: str) -> Iterator[Chunk]:
        """The bytes of the tensor's dense copy, read from the archive."""
        payload, info = self._payloads[name], self._infos[name]
        if not info.nbytes:
            return
        reader, base = self._archive.reader, self._archive.offset(payload.member)
        if is_dense(payload.shape, payload.strides):
            start = base + payload.offset * payload.dtype.itemsize
            yield from reader.chunks(start, info.nbytes, MAX_CHUNK)
            return

        def read(offset: int, length: int) -> bytes:
            return reader.read(base + offset, length)

        yield from gather(read, payload.dtype, payload.shape, payload.strides, payload.offset)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor; two names of one member share its storage, as they did when the program was saved."""
        payload = self._payloads[name]
        storage = self._storage(payload.member)
        tensor = over(storage, payload.dtype, payload.shape, payload.strides, payload.offset)
        if payload.parameter:
            return torch.nn.Parameter(tensor, requires_grad=payload.requires_grad)
        return tensor

    def fill(self) -> None:
        """Read every storage that is untouched, once, in chunks; nothing to do where the archive is mapped."""
        if self._map is not None:
            return
        for member, storage in self._storages.items():
            if storage.nbytes() > SMALL:
                self._load(member, storage)

    def _storage(self, member: str) -> torch.UntypedStorage:
        if member not in self._storages:
            size = self._archive.size(member)
            if self._map is not None and size:
                self._storages[member] = self._map.storage(self._archive.offset(member), size)
            else:
                self._storages[member] = _untouched(size)
                if 0 < size <= SMALL:
                    self._load(member, self._storages[member])
        return self._storages[member]

    def _load(self, member: str, storage: torch.UntypedStorage) -> None:
        target = over(storage, torch.uint8, (storage.nbytes(),), (1,), 0).numpy().data
        position = 0
        for chunk in self._archive.reader.chunks(self._archive.offset(member), storage.nbytes(), MAX_CHUNK):
            target[position : position + len(chunk)] = chunk
            position += len(chunk)


def _untouched(size: int) -> torch.UntypedStorage:
    return torch.empty(size, dtype=torch.uint8).untyped_storage()


def _info(name: str, payload: Payload) -> TensorInfo:
    count = math.prod(payload.shape)
    place = (payload.member, payload.offset, payload.shape, payload.strides, payload.dtype)
    return TensorInfo(
        name=name,
        dtype=str(payload.dtype).removeprefix("torch."),
        shape=payload.shape,
        strides=payload.strides,
        storage_offset=payload.offset,
        nbytes=count * payload.dtype.itemsize,
        identity=place if count else None,
    )
