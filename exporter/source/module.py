"""Weights of a module or program that is in this process: mapped from a file, untouched, or real."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from exporter.contract.errors import SourceUnsafe
from exporter.contract.segments import MAX_CHUNK, Chunk
from exporter.source.mapped import MappedFile
from exporter.source.ports import TensorInfo, WeightSource
from exporter.source.strided import extent, gather, is_dense


class ModuleWeights:
    """The bytes of tensors by name. Satisfies `WeightSource`.

    A tensor whose storage lies in one of `maps` is read from the file with `pread`, page cache dropped behind, so that
    the map does not become resident; the file's bytes are given even if the tensor was written to since. Others are
    read from memory. Ties (same bytes of the same storage) have equal identities.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], maps: Sequence[MappedFile] = ()) -> None:
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self._maps = tuple(maps)
        self._infos = {name: describe(name, tensor) for name, tensor in self._tensors.items()}

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor that was given, by its name."""
        return self._infos

    def chunks(self, name: str) -> Iterator[Chunk]:
        """The bytes of the tensor's dense copy, in the order of its dimensions."""
        tensor, info = self._tensors[name], self._infos[name]
        if not info.nbytes:
            return
        storage, item = tensor.untyped_storage(), tensor.element_size()
        mapped, base = self._place(storage)
        start = info.storage_offset * item
        if is_dense(info.shape, info.strides):
            if mapped is not None:
                yield from mapped.reader.chunks(base + start, info.nbytes, MAX_CHUNK)
                return
            whole = _memory(storage)
            for position in range(start, start + info.nbytes, MAX_CHUNK):
                yield whole[position : min(position + MAX_CHUNK, start + info.nbytes)]
            return

        def read(offset: int, length: int) -> bytes:
            if mapped is not None:
                return mapped.reader.read(base + offset, length)
            return bytes(_memory(storage)[offset : offset + length])

        yield from gather(read, tensor.dtype, info.shape, info.strides, info.storage_offset)

    def _place(self, storage: torch.UntypedStorage) -> tuple[MappedFile | None, int]:
        for mapped in self._maps:
            base = mapped.locate(storage)
            if base is not None:
                return mapped, base
        return None, 0


def describe(name: str, tensor: torch.Tensor) -> TensorInfo:
    """What a `WeightSource` says of a tensor of this process. `SourceUnsafe` for one without plain strided storage."""
    if type(tensor.data) is not torch.Tensor or tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise SourceUnsafe(
            f"{name} is not a plain CPU tensor ({type(tensor.data).__name__}, {tensor.layout}, {tensor.device}).",
            hint="Unwrap tensor subclasses before the export.",
            tensor=name,
        )
    shape, strides, item = tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size()
    storage = tensor.untyped_storage()
    if (tensor.storage_offset() + extent(shape, strides)) * item > storage.nbytes():
        raise SourceUnsafe(f"{name} has {storage.nbytes()} bytes of storage, fewer than its shape needs.", tensor=name)
    place = (storage.data_ptr(), tensor.storage_offset() * item, shape, strides, str(tensor.dtype))
    return TensorInfo(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=shape,
        strides=strides,
        storage_offset=int(tensor.storage_offset()),
        nbytes=tensor.numel() * item,
        identity=place if tensor.numel() else None,
    )


def _memory(storage: torch.UntypedStorage) -> memoryview:
    flat = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
    return flat.numpy().data


def fill(tensors: Mapping[str, torch.Tensor], weights: WeightSource) -> None:
    """Write the source's bytes into the storages of `tensors`, chunk by chunk: for back ends that read values.

    A storage is written once, however many names it has. Tensors must be dense or freshly made with untouched storage.
    """
    infos, done = weights.tensors(), set[object]()
    for name, tensor in tensors.items():
        info = infos[name]
        if info.identity is not None and info.identity in done:
            continue
        done.add(info.identity)
        if not is_dense(info.shape, info.strides):
            dense = torch.empty_like(tensor)
            _write(dense, weights.chunks(name))
            tensor.data.copy_(dense)
        else:
            _write(tensor, weights.chunks(name))


def _write(tensor: torch.Tensor, chunks: Iterator[Chunk]) -> None:
    target = _memory(tensor.untyped_storage())
    position = tensor.storage_offset() * tensor.element_size()
    for chunk in chunks:
        target[position : position + len(chunk)] = chunk
        position += len(chunk)
