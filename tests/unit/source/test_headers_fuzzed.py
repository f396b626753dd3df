"""Random and nearly right headers: nothing but our own errors comes out, and nothing large is allocated."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exporter.contract.errors import SourceUnsafe
from exporter.source.archive import Archive
from exporter.source.gguf import read_gguf
from exporter.source.safetensors import read_header
from tests.unit.source.files import Buffer

BOUND = 8 * 2**20
"""Bytes that a reader may allocate over a file of a few hundred bytes, whatever it says."""

numbers = st.one_of(st.integers(-2, 40), st.sampled_from([2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1, -(2**63)]))
junk = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.floats(), st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.one_of(st.sampled_from(["F32", "BF16", "U8", "BOOL", "F4"]), junk),
        "shape": st.one_of(st.lists(numbers, max_size=4), junk),
        "data_offsets": st.one_of(st.lists(numbers, min_size=2, max_size=2), junk),
    }
)
headers = st.one_of(junk, st.dictionaries(st.text(max_size=3), st.one_of(entries, junk), max_size=4))


def survives(read: Callable[[], Any]) -> None:
    tracemalloc.start()
    try:
        read()
    except SourceUnsafe:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < BOUND


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(header=headers, data=st.binary(max_size=64), delta=st.sampled_from([0, 0, 0, -1, 1, 2**40, 2**63]))
def test_safetensors(header: Any, data: bytes, delta: int) -> None:
    text = json.dumps(header).encode()
    length = max(0, len(text) + delta) % 2**64
    survives(lambda: read_header(Buffer(length.to_bytes(8, "little") + text + data), "x.safetensors"))


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=200), size=st.sampled_from([None, 2**40]))
def test_random_bytes(data: bytes, size: int | None) -> None:
    real = None if size is None else max(size, len(data))
    survives(lambda: read_header(Buffer(data), "x.safetensors"))
    survives(lambda: read_gguf(Buffer(b"GGUF\3\0\0\0" + data), "x.gguf"))
    survives(lambda: Archive(Buffer(data), "x.pt2"))
    if real is not None:
        survives(lambda: Archive(Buffer(data, real), "x.pt2"))


big = st.one_of(st.integers(0, 12), st.sampled_from([2**31, 2**32, 2**61, 2**63, 2**64 - 1]))
small = st.integers(0, 40)
pieces = st.one_of(
    big.map(lambda value: struct.pack("<Q", value)),
    small.map(lambda value: struct.pack("<I", value)),
    st.binary(max_size=8),
    st.text(max_size=5).map(lambda value: struct.pack("<Q", len(value.encode())) + value.encode()),
)


@settings(max_examples=300, deadline=None)
@given(tensors=big, pairs=big, body=st.lists(pieces, max_size=24), data=st.integers(0, 200))
def test_gguf(tensors: int, pairs: int, body: list[bytes], data: int) -> None:
    file = b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs) + b"".join(body) + b"\0" * data
    survives(lambda: read_gguf(Buffer(file), "x.gguf"))
