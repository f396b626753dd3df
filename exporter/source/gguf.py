"""Reads the header of GGUF files by range, believing nothing, and their tensors as raw bytes.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gguf.constants import GGML_QUANT_SIZES

from exporter.contract.errors import SourceUnsafe, UnsupportedModel
from exporter.contract.segments import MAX_CHUNK, Chunk
from exporter.source.ports import RangeReader, SourceTree, TensorInfo

MAX_HEADER = 100_000_000
"""Most bytes of header (metadata and tensor table) that are read."""
MAX_DEPTH = 4
"""Deepest nesting of arrays in the metadata."""
MAX_RANK = 8
MAX_NAME = 65_535

_WINDOW = 2**20
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9

_PLAIN = {
    0: "float32",
    1: "float16",
    24: "int8",
    25: "int16",
    26: "int32",
    27: "int64",
    28: "float64",
    30: "bfloat16",
}
"""ggml types that are torch's too, by dtype name."""

_BLOCKS: dict[int, tuple[int, int]] = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
"""Elements and bytes of a block of each ggml type, as the `gguf` package lists them."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: ggml type number, shape outer to inner as torch has it, and its bytes [begin, end) in the file."""

    name: str
    ggml_type: int
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata by key, and tensors by name in the order of the file."""

    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


class _Cursor:
    """Reads forward through the header in windows, never past the file's end or `MAX_HEADER`."""

    def __init__(self, reader: RangeReader, name: str) -> None:
        self._reader = reader
        self._name = name
        self._limit = min(reader.size, MAX_HEADER)
        self._window = b""
        self._start = 0
        self.position = 0

    def unsafe(self, problem: str, offset: int | None = None) -> SourceUnsafe:
        where = self.position if offset is None else offset
        return SourceUnsafe(f"{self._name} {problem} (at byte {where}).", file=self._name, offset=where)

    def remaining(self) -> int:
        """Bytes that the header could still have."""
        return self._limit - self.position

    def take(self, length: int) -> bytes:
        """The next `length` bytes."""
        if length > self.remaining():
            raise self.unsafe(f"says that {length} bytes follow, past the end of the file or of what is read")
        inside = self.position - self._start
        if inside < 0 or inside + length > len(self._window):
            self._start = self.position
            self._window = self._reader.read(self.position, min(max(length, _WINDOW), self.remaining()))
            inside = 0
        self.position += length
        return self._window[inside : inside + length]

    def number(self, code: str) -> Any:
        """One number of a `struct` code."""
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def text(self, limit: int) -> str:
        """A string with its length before it."""
        length = self.number("<Q")
        if length > limit:
            raise self.unsafe(f"has a string of {length} bytes, more than {limit}")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.unsafe("has a string that is not UTF-8") from error


def read_gguf(reader: RangeReader, name: str) -> GgufHeader:
    """The checked header; `SourceUnsafe` with name and offset for one that contradicts the file's size or itself."""
    cursor = _Cursor(reader, name)
    if cursor.take(4) != b"GGUF":
        raise cursor.unsafe("is not a GGUF file", 0)
    version = cursor.number("<I")
    if version not in (2, 3):
        raise cursor.unsafe(f"is of version {version}; 2 and 3 are read", 4)
    tensors, pairs = cursor.number("<Q"), cursor.number("<Q")
    # The shortest pair has 13 bytes (empty key, type, one-byte value), the shortest tensor entry 24.
    if pairs * 13 + tensors * 24 > cursor.remaining():
        raise cursor.unsafe(f"says that it has {pairs} metadata entries and {tensors} tensors: more than fit", 8)
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = cursor.text(MAX_NAME)
        if key in metadata:
            raise cursor.unsafe(f"has the metadata {key[:100]!r} twice")
        metadata[key] = _value(cursor, cursor.number("<I"), 0)
    entries = [_entry(cursor) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment > 2**20 or alignment & (alignment - 1):
        raise cursor.unsafe("has an alignment that is not a power of two")
    start = -(-cursor.position // alignment) * alignment
    return GgufHeader(version, metadata, _placed(cursor, entries, start, alignment, reader.size))


def _value(cursor: _Cursor, kind: int, depth: int) -> Any:
    if kind in _SCALARS:
        if kind == 7:
            flag = cursor.number("<B")
            if flag > 1:
                raise cursor.unsafe("has a boolean that is neither 0 nor 1")
            return bool(flag)
        return cursor.number(_SCALARS[kind])
    if kind == _STRING:
        return cursor.text(MAX_HEADER)
    if kind != _ARRAY:
        raise cursor.unsafe(f"has metadata of the unknown type {kind}")
    if depth >= MAX_DEPTH:
        raise cursor.unsafe("has metadata nested too deeply")
    inner, count = cursor.number("<I"), cursor.number("<Q")
    smallest = struct.calcsize(_SCALARS[inner]) if inner in _SCALARS else 8
    if count * smallest > cursor.remaining():
        raise cursor.unsafe(f"has an array of {count} items: more than fit")
    if inner in _SCALARS and inner != 7:
        return struct.unpack(f"<{count}{_SCALARS[inner][1]}", cursor.take(count * smallest))
    return tuple(_value(cursor, inner, depth + 1) for _ in range(count))


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int, int]:
    """Name, shape (outer to inner), type, offset in the data, and where in the file the entry stands."""
    where = cursor.position
    name = cursor.text(MAX_NAME)
    rank = cursor.number("<I")
    if rank > MAX_RANK:
        raise cursor.unsafe(f"has tensor {name[:100]!r} of {rank} dimensions")
    shape = tuple(cursor.number("<Q") for _ in range(rank))
    return name, tuple(reversed(shape)), cursor.number("<I"), cursor.number("<Q"), where


def _placed(
    cursor: _Cursor, entries: list[tuple[str, tuple[int, ...], int, int, int]], start: int, alignment: int, size: int
) -> dict[str, GgufTensor]:
    found: dict[str, GgufTensor] = {}
    for name, shape, kind, offset, where in entries:
        if not name or name in found:
            raise cursor.unsafe(f"has tensor {name[:100]!r} twice, or without a name", where)
        length = _length(cursor, name, shape, kind, where)
        if offset % alignment or start + offset + length > size:
            raise cursor.unsafe(
                f"has tensor {name[:100]!r} at {offset} with {length} bytes, "
                f"not aligned to {alignment} or past the file's {size}",
                where,
            )
        found[name] = GgufTensor(name, kind, shape, start + offset, start + offset + length)
    last = start
    for tensor in sorted(found.values(), key=lambda item: (item.begin, item.end)):
        if tensor.begin < last:
            raise cursor.unsafe(f"has tensor {tensor.name[:100]!r} over the bytes of another", tensor.begin)
        last = tensor.end
    return found


def _length(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int, where: int) -> int:
    if math.prod(size for size in shape if size) >= 2**60:
        raise cursor.unsafe(f"has tensor {name[:100]!r} with a shape that overflows", where)
    count = math.prod(shape)
    if kind not in _BLOCKS:
        raise cursor.unsafe(f"has tensor {name[:100]!r} of the unknown type {kind}", where)
    elements, size = _BLOCKS[kind]
    if (shape[-1] if shape else 1) % elements:
        raise cursor.unsafe(f"has tensor {name[:100]!r} whose rows are not whole blocks of {elements}", where)
    return count // elements * size


class GgufWeights:
    """The tensors of a GGUF file. Satisfies `WeightSource` for types that torch has; quantised ones are refused."""

    def __init__(self, tree: SourceTree, name: str) -> None:
        """Reads and checks the header of one file of `tree`."""
        self._reader = tree.open(name)
        self.header = read_gguf(self._reader, name)
        packed = [tensor.name for tensor in self.header.tensors.values() if tensor.ggml_type not in _PLAIN]
        if packed:
            raise UnsupportedModel(
                f"{name} has quantised tensors ({packed[0][:100]} and {len(packed) - 1} more).",
                hint="Convert the file to f32, f16 or bf16, and quantise for the back end instead.",
            )
        self._infos = {key: _info(tensor) for key, tensor in self.header.tensors.items()}

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor, by its name in the file."""
        return self._infos

    def chunks(self, name: str) -> Iterator[Chunk]:
        """The tensor's bytes as stored: dense, row-major."""
        tensor = self.header.tensors[name]
        return self._reader.chunks(tensor.begin, tensor.end - tensor.begin, MAX_CHUNK)


def _info(tensor: GgufTensor) -> TensorInfo:
    strides, step = [], 1
    for size in reversed(tensor.shape):
        strides.append(step)
        step *= max(size, 1)
    return TensorInfo(
        name=tensor.name,
        dtype=_PLAIN[tensor.ggml_type],
        shape=tensor.shape,
        strides=tuple(reversed(strides)),
        storage_offset=0,
        nbytes=tensor.end - tensor.begin,
        identity=(tensor.begin, tensor.end) if tensor.end > tensor.begin else None,
    )
