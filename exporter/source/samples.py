"""The sample inputs of a `.pt2`: the one pickle in it, loaded by torch's restricted unpickler and then checked."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from typing import Any

import torch

from exporter.contract.errors import SourceUnsafe
from exporter.source.archive import Archive
from exporter.source.treespec import KEY

MAX_SAMPLES = 256 * 2**20
"""Largest sample inputs that are read, in bytes."""
MAX_DEPTH = 64

Samples = tuple[tuple[object, ...], dict[str, object]]


class _Bytes:
    """Bytes in memory as a `RangeReader`."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    @property
    def size(self) -> int:
        return len(self._data)

    def read(self, offset: int, length: int) -> bytes:
        return self._data[offset : offset + length]

    def chunks(self, offset: int, length: int, chunk_size: int) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        return None


def load_samples(data: bytes, what: str) -> Samples | None:
    """Positional and keyword inputs, None for an empty file.

    `SourceUnsafe` for anything but tensors, numbers, plain strings and containers of them.
    """
    if not data:
        return None
    inner = Archive(_Bytes(data), what)
    sizes = {inner.size(name) for name in inner.members()}
    try:
        loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, TypeError, KeyError, AttributeError, EOFError) as error:
        raise SourceUnsafe(
            f"{what} holds objects other than tensors and plain values, or is damaged; it was not loaded.",
            hint="Export with example inputs made of tensors, numbers, strings, tuples, lists and dicts.",
        ) from error
    if not isinstance(loaded, tuple) or len(loaded) != 2:
        raise SourceUnsafe(f"{what} is not a pair of positional and keyword inputs.")
    args, kwargs = (_plain(item, what, sizes, 0) for item in loaded)
    if not isinstance(args, tuple) or not isinstance(kwargs, dict) or not all(isinstance(key, str) for key in kwargs):
        raise SourceUnsafe(f"{what} is not a pair of positional and keyword inputs.")
    if not all(key.isidentifier() for key in kwargs):
        raise SourceUnsafe(f"{what} has a keyword input whose name is not an identifier.")
    return args, kwargs


def _plain(value: Any, what: str, sizes: set[int], depth: int) -> Any:
    """The value with exact built-in types only, or `SourceUnsafe`."""
    if depth > MAX_DEPTH:
        raise SourceUnsafe(f"{what} is nested too deeply.")
    if value is None or type(value) in (bool, int, float, torch.dtype, torch.device):
        return value
    if type(value) is str:
        if value and not KEY.fullmatch(value):
            raise SourceUnsafe(f"{what} has a string with quotes, escapes or characters outside of ASCII.")
        return value
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return _tensor(value, what, sizes)
    if type(value) in (tuple, list, torch.Size):
        items = [_plain(item, what, sizes, depth + 1) for item in value]
        return items if type(value) is list else tuple(items)
    if type(value) in (dict, OrderedDict):
        result: dict[Any, Any] = type(value)()
        for key, item in value.items():
            if not (type(key) is int or (type(key) is str and KEY.fullmatch(key))):
                raise SourceUnsafe(f"{what} has a dict with a key that is not a plain string or number.")
            result[key] = _plain(item, what, sizes, depth + 1)
        return result
    raise SourceUnsafe(
        f"{what} has a {type(value).__name__} among the inputs.",
        hint="Export with example inputs made of tensors, numbers, strings, tuples, lists and dicts.",
    )


def _tensor(value: torch.Tensor, what: str, sizes: set[int]) -> torch.Tensor:
    """A plain strided tensor whose storage is no larger than the archive's member: else it reads past its end."""
    if value.layout != torch.strided or value.device.type != "cpu":
        raise SourceUnsafe(f"{what} has an input that is not a plain CPU tensor.")
    if value.untyped_storage().nbytes() not in sizes | {0}:
        raise SourceUnsafe(f"{what} has an input whose storage is larger than its bytes.")
    return value
