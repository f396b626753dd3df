"""GGUF: the library's own files are read as it reads them; lying headers are refused."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from exporter.contract.errors import SourceUnsafe, UnsupportedModel
from exporter.source.gguf import GgufWeights, read_gguf
from tests.unit.source.files import Buffer, tree_of

F32, Q4_0 = 0, 2


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: list[int], kind: int, offset: int) -> bytes:
    dims = struct.pack(f"<{len(shape)}Q", *reversed(shape))
    return text(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, offset)


def file_of(
    tensors: list[bytes],
    pairs: list[bytes] | None = None,
    data: int = 0,
    counts: tuple[int, int] | None = None,
    version: int = 3,
    magic: bytes = b"GGUF",
) -> bytes:
    pairs = pairs or []
    numbers = counts or (len(tensors), len(pairs))
    head = magic + struct.pack("<IQQ", version, *numbers) + b"".join(pairs) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + b"\0" * data


def test_a_file_of_the_library_is_read_as_it_was_written(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_string("general.name", "tiny")
    writer.add_array("tokens", ["a", "bc"])
    writer.add_array("scores", [1, 2, 3])
    writer.add_bool("flag", True)
    one, two = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(5, dtype=np.float16)
    writer.add_tensor("one", one)
    writer.add_tensor("two", two)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    weights = GgufWeights(tree_of(tmp_path), "m.gguf")
    assert weights.header.metadata["llama.block_count"] == 2
    assert weights.header.metadata["tokens"] == ("a", "bc")
    assert weights.header.metadata["scores"] == (1, 2, 3)
    assert weights.header.metadata["flag"] is True
    assert weights.tensors()["one"].shape == (2, 3)
    assert weights.tensors()["two"].dtype == "float16"
    assert b"".join(weights.chunks("one")) == one.tobytes()
    assert b"".join(weights.chunks("two")) == two.tobytes()


def test_quantised_tensors_are_measured_but_not_given(tmp_path: Path) -> None:
    data = file_of([tensor("q", [2, 64], Q4_0, 0)], data=72)
    assert read_gguf(Buffer(data), "q.gguf").tensors["q"].end == len(data)
    with pytest.raises(UnsupportedModel, match="quantised"):
        GgufWeights(tree_of(tmp_path, q__gguf=data), "q.gguf")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "past the end"),
        (b"GGUF\3", "past the end"),
        (file_of([], magic=b"GGML"), "not a GGUF"),
        (file_of([], version=1), "version 1"),
        (file_of([], version=0x03000000), "version"),
        (file_of([], counts=(2**63, 0)), "more than fit"),
        (file_of([], counts=(0, 2**64 - 1)), "more than fit"),
        (file_of([], counts=(1, 0), data=32), "without a name"),
        (file_of([], [pair("k", 8, struct.pack("<Q", 2**40))], data=32), "string of"),
        (file_of([], [pair("k", 9, struct.pack("<IQ", 4, 2**61))], data=32), "more than fit"),
        (file_of([], [pair("k", 9, struct.pack("<IQ", 8, 2**40))], data=32), "more than fit"),
        (file_of([], [pair("k", 9, struct.pack("<IQ", 9, 1) * 9)], data=99), "nested"),
        (file_of([], [pair("k", 13, b"")], data=32), "unknown type 13"),
        (file_of([], [pair("k", 7, b"\2")], data=32), "neither 0 nor 1"),
        (file_of([], [pair("k", 0, b"\1")] * 2, data=32), "twice"),
        (file_of([], [struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<I", 0) + b"\0"], data=32), "UTF-8"),
        (file_of([], [pair("general.alignment", 4, struct.pack("<I", 3))], data=32), "power of two"),
        (file_of([], [pair("general.alignment", 4, struct.pack("<I", 0))], data=32), "power of two"),
        (file_of([], [pair("general.alignment", 8, text("32"))], data=32), "power of two"),
        (file_of([tensor("a", [2], F32, 0)], data=4), "past the file"),
        (file_of([tensor("a", [2], F32, 2**63)], data=8), "past the file"),
        (file_of([tensor("a", [1], F32, 2)], data=32), "not aligned"),
        (file_of([tensor("a", [2**40, 2**40], F32, 0)], data=8), "overflows"),
        (file_of([tensor("a", [2**62, 4, 0], F32, 0)], data=8), "overflows"),
        (file_of([tensor("a", [1] * 9, F32, 0)], data=8), "9 dimensions"),
        (file_of([tensor("a", [2], 99, 0)], data=8), "unknown type 99"),
        (file_of([tensor("a", [2, 31], Q4_0, 0)], data=99), "whole blocks"),
        (file_of([tensor("a", [2], F32, 0)] * 2, data=8), "twice"),
        (file_of([tensor("a", [16], F32, 0), tensor("b", [2], F32, 32)], data=64), "over the bytes"),
    ],
)
def test_a_lying_header_is_refused(data: bytes, problem: str) -> None:
    reader = Buffer(data)
    with pytest.raises(SourceUnsafe, match=problem) as caught:
        read_gguf(reader, "model.gguf")
    assert "model.gguf" in caught.value.message
    assert "offset" in caught.value.details
    assert reader.largest <= len(data)
