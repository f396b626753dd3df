"""Reads safetensors files by range, after a check of the header that believes nothing.

Format: eight bytes little-endian length, that many bytes of JSON, then the data buffer
(https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from exporter.contract.errors import SourceNotFound, SourceUnsafe
from exporter.contract.segments import MAX_CHUNK, Chunk
from exporter.source.local import LocalReader
from exporter.source.mapped import MappedFile
from exporter.source.ports import RangeReader, SourceTree, TensorInfo

MAX_HEADER = 100_000_000
"""Largest header, in bytes: the limit of the format's own reader."""
MAX_INDEX = 64 * 2**20
"""Largest `*.safetensors.index.json`, in bytes."""

_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack")


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: torch's dtype name, shape, and its bytes [begin, end) from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def strict_json(data: bytes, what: str) -> Any:
    """JSON with every key once and no NaN; `SourceUnsafe` names `what` otherwise."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise SourceUnsafe(f"{what} names {twice[:200]!r} twice.")
        return found

    def refuse(text: str) -> Any:
        raise SourceUnsafe(f"{what} holds {text}, which is not JSON.")

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise SourceUnsafe(f"{what} is not readable JSON: {str(error)[:200]}.") from error


def read_header(reader: RangeReader, name: str) -> dict[str, Entry]:
    """The tensors of one file, by name. `SourceUnsafe` for a header that contradicts the file's size or itself.

    Nothing larger than the header is allocated, and no header larger than the file or `MAX_HEADER` is read.
    """
    size = reader.size
    if size < 8:
        raise SourceUnsafe(f"{name} has {size} bytes: too short for a safetensors file.", file=name, offset=0)
    start = reader.read(0, 8)
    if start[:4] == b"PK\x03\x04" or (start[0] == 0x80 and start[1] in range(2, 6)):
        raise SourceUnsafe(
            f"{name} is a pickle of torch.save under another name; it was not loaded.", file=name, offset=0
        )
    length = int.from_bytes(start, "little")
    if length > MAX_HEADER or length > size - 8:
        raise SourceUnsafe(
            f"{name} says that its header has {length} bytes; the file has {size} and the limit is {MAX_HEADER}.",
            file=name,
            offset=0,
        )
    header = strict_json(reader.read(8, length), f"The header of {name}")
    if not isinstance(header, dict):
        raise SourceUnsafe(f"The header of {name} is not a JSON object.", file=name, offset=8)
    _check_metadata(header.pop("__metadata__", None), name)
    base = 8 + length
    entries = {key: _entry(key, value, name, base, size) for key, value in header.items()}
    _check_layout(entries, name, base, size)
    return entries


def _check_metadata(value: object, name: str) -> None:
    if value is None:
        return
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise SourceUnsafe(f"The metadata of {name} is not a map of strings.", file=name, offset=8)


def _natural(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _entry(key: str, value: object, name: str, start: int, size: int) -> Entry:
    def unsafe(problem: str) -> SourceUnsafe:
        return SourceUnsafe(f"{name}: tensor {key[:200]!r} {problem}.", file=name, tensor=key[:200], offset=start)

    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise unsafe("does not have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise unsafe(f"has the unknown dtype {str(dtype)[:40]!r}")
    if not isinstance(shape, list) or len(shape) > 64 or not all(map(_natural, shape)):
        raise unsafe("has a shape that is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_natural, offsets)):
        raise unsafe("has offsets that are not two positions")
    begin, end = offsets
    if begin > end or start + end > size:
        raise unsafe(f"lies at [{begin}, {end}), which is not within the {size - start} bytes of data")
    torch_name = _DTYPES[dtype]
    item: int = getattr(torch, torch_name).itemsize
    count = _product(shape)
    if count is None or count * item != end - begin:
        raise unsafe(f"has shape {shape[:8]} of {dtype}, which does not fill its {end - begin} bytes")
    return Entry(torch_name, tuple(shape), start + begin, start + end)


def _product(shape: Sequence[int]) -> int | None:
    """Elements of a shape; None past 2**63 - 1, even where a zero dimension would hide it."""
    if math.prod(size for size in shape if size) >= 2**63:
        return None
    return math.prod(shape)


def _check_layout(entries: Mapping[str, Entry], name: str, start: int, size: int) -> None:
    """The tensors must tile the data buffer: no overlap, no hole, nothing after the last."""
    position = start
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            problem = "overlaps the tensor before it" if entry.begin < position else "leaves a hole before it"
            raise SourceUnsafe(
                f"{name}: tensor {key[:200]!r} {problem}.", file=name, tensor=key[:200], offset=entry.begin
            )
        position = entry.end
    if position != size:
        raise SourceUnsafe(
            f"{name} has {size} bytes, but its tensors end at byte {position}.", file=name, offset=position
        )


def shard_names(tree: SourceTree) -> tuple[str, ...]:
    """The safetensors files of a source: those of its index where it has one, else every `*.safetensors`.

    `SourceNotFound` where there are none, `SourceUnsafe` where there are only pickles, or the index is not sound.
    """
    files = tree.files()
    index = next((name for name in ("model.safetensors.index.json",) if name in files), None)
    index = index or next((name for name in sorted(files) if name.endswith(".safetensors.index.json")), None)
    if index is not None and "model.safetensors" not in files:
        return tuple(sorted(set(read_index(tree, index).values())))
    if "model.safetensors" in files:
        return ("model.safetensors",)
    found = tuple(sorted(name for name in files if name.endswith(".safetensors")))
    if found:
        return found
    pickles = sorted(name for name in files if name.lower().endswith(_PICKLES))
    if pickles:
        raise SourceUnsafe(
            f"The source has its weights only as {pickles[0]}, which may run code when it is loaded.",
            hint="Save them with safetensors.torch.save_file, or model.save_pretrained of a current transformers.",
            files=pickles[:16],
        )
    raise SourceNotFound("The source has no weights: no *.safetensors file is in it.", source=tree.uri)


def read_index(tree: SourceTree, index: str) -> dict[str, str]:
    """The weight map of a sharded checkpoint: tensor name to file name, every file one of the source's."""
    files = tree.files()
    if files[index] > MAX_INDEX:
        raise SourceUnsafe(f"{index} has {files[index]} bytes; the limit is {MAX_INDEX}.", file=index)
    reader = tree.open(index)
    try:
        content = strict_json(reader.read(0, reader.size), index)
    finally:
        reader.close()
    weights = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weights, dict) or not weights or not all(isinstance(name, str) for name in weights.values()):
        raise SourceUnsafe(f"{index} has no weight_map of file names.", file=index)
    folder = index.rpartition("/")[0]
    placed = {key: f"{folder}/{name}" if folder else name for key, name in weights.items()}
    for name in sorted(set(placed.values())):
        if not name.endswith(".safetensors") or any(part in ("", ".", "..") for part in name.split("/")):
            raise SourceUnsafe(f"{index} names {name[:200]!r}, which is not a safetensors file beside it.", file=index)
        if name not in files:
            raise SourceNotFound(f"{index} names {name[:200]}, which is not in the source.", file=name[:200])
    return placed


class SafetensorsWeights:
    """The tensors of one or more safetensors files. Satisfies `WeightSource`."""

    def __init__(self, tree: SourceTree, names: Sequence[str] | None = None) -> None:
        """Reads and checks the headers of `names`, by default `shard_names(tree)`; keeps the files open."""
        self._places: dict[str, tuple[RangeReader, Entry]] = {}
        self._maps: dict[int, MappedFile] = {}
        self.readers: list[RangeReader] = []
        for name in shard_names(tree) if names is None else names:
            reader = tree.open(name)
            self.readers.append(reader)
            for key, entry in read_header(reader, name).items():
                if key in self._places:
                    raise SourceUnsafe(f"Two files of the source have a tensor {key[:200]!r}.", file=name)
                self._places[key] = (reader, entry)
        if not self._places:
            raise SourceNotFound("The source's safetensors files hold no tensor.", source=tree.uri)
        self._infos = {key: _info(key, reader, entry) for key, (reader, entry) in self._places.items()}

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor, by its name in the file."""
        return self._infos

    def chunks(self, name: str) -> Iterator[Chunk]:
        """The tensor's bytes as stored; a safetensors file is dense and row-major."""
        reader, entry = self._places[name]
        return reader.chunks(entry.begin, entry.end - entry.begin, MAX_CHUNK)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor mapped from a local file; from a remote one, storage of the right size that nobody has written."""
        reader, entry = self._places[name]
        dtype: torch.dtype = getattr(torch, entry.dtype)
        strides = _row_major(entry.shape)
        if not isinstance(reader, LocalReader) or entry.begin == entry.end:
            return torch.empty(entry.shape, dtype=dtype)
        mapped = self._maps.setdefault(id(reader), MappedFile(reader))
        return mapped.tensor(entry.begin, entry.end - entry.begin, dtype, entry.shape, strides)

    @property
    def maps(self) -> tuple[MappedFile, ...]:
        """The files mapped so far, for `ModuleWeights`."""
        return tuple(self._maps.values())

    def close(self) -> None:
        """Close the files. Tensors already mapped stay valid."""
        for reader in self.readers:
            reader.close()


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _info(key: str, reader: RangeReader, entry: Entry) -> TensorInfo:
    return TensorInfo(
        name=key,
        dtype=entry.dtype,
        shape=entry.shape,
        strides=_row_major(entry.shape),
        storage_offset=0,
        nbytes=entry.end - entry.begin,
        identity=(id(reader), entry.begin, entry.end) if entry.end > entry.begin else None,
    )
