"""Safetensors: the library's own files are read as it reads them; lying headers are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from exporter.contract.errors import SourceNotFound, SourceUnsafe
from exporter.source.module import ModuleWeights
from exporter.source.remote import ObjectTree
from exporter.source.safetensors import MAX_HEADER, SafetensorsWeights, read_header, shard_names
from tests.unit.source.files import Buffer, Objects, tree_of

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.arange(4, dtype=torch.bfloat16),
    "c": torch.tensor([True, False]),
    "d": torch.tensor(7, dtype=torch.int64),
    "e": torch.zeros(0, 3),
    "f": torch.arange(16, dtype=torch.uint8).view(torch.float8_e4m3fn),
}


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A file with this header, whatever it says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_every_dtype_is_read_as_the_library_wrote_it(tmp_path: Path) -> None:
    data = safetensors.torch.save(TENSORS, metadata={"format": "pt"})
    weights = SafetensorsWeights(tree_of(tmp_path, model__safetensors=data))
    assert weights.tensors().keys() == TENSORS.keys()
    for name, expected in TENSORS.items():
        info = weights.tensors()[name]
        assert (info.dtype, info.shape) == (str(expected.dtype).removeprefix("torch."), tuple(expected.shape))
        assert info.strides == expected.stride() or not expected.numel()
        raw = b"".join(bytes(chunk) for chunk in weights.chunks(name))
        assert raw == bytes(expected.reshape(-1).view(torch.uint8).numpy().data)
        mapped = weights.tensor(name)
        assert mapped.dtype == expected.dtype
        assert torch.equal(mapped.view(torch.uint8), expected.view(torch.uint8)) if expected.dim() else True
    again = ModuleWeights({"x": weights.tensor("a")}, weights.maps)
    assert b"".join(bytes(chunk) for chunk in again.chunks("x")) == bytes(TENSORS["a"].numpy().data)


def test_a_header_of_odd_length_leaves_tensors_that_still_compute(tmp_path: Path) -> None:
    value = torch.randn(64, 64)
    text = json.dumps({"a": entry("F32", [64, 64], 0, value.nbytes)}).encode()
    text += b" " * (1 - len(text) % 2)
    data = len(text).to_bytes(8, "little") + text + bytes(value.numpy().data)
    mapped = SafetensorsWeights(tree_of(tmp_path, model__safetensors=data)).tensor("a")
    assert mapped.data_ptr() % 2 == 1
    assert torch.allclose(mapped @ mapped + mapped.sin(), value @ value + value.sin(), atol=1e-5)


def test_a_remote_file_gives_untouched_storage_and_the_same_bytes() -> None:
    objects = Objects({"m/model.safetensors": safetensors.torch.save(TENSORS)})
    weights = SafetensorsWeights(ObjectTree("s3://b/m", "m", objects))
    assert weights.tensor("a").shape == (2, 3)
    assert b"".join(bytes(chunk) for chunk in weights.chunks("a")) == bytes(TENSORS["a"].numpy().data)


GOOD = entry("F32", [2], 0, 8)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "too short"),
        (b"\0" * 7, "too short"),
        (file_of({}, length=2**63), "header has"),
        (file_of({}, length=MAX_HEADER + 1), "header has"),
        (file_of({"a": GOOD}, b"\0" * 8, length=2**20), "header has"),
        (file_of(b"[]"), "not a JSON object"),
        (file_of(b"{"), "not readable JSON"),
        (file_of(b"\xff\xfe{}"), "not readable JSON"),
        (file_of(b'{"a": NaN}'), "not JSON"),
        (file_of(b"[" * 200_000), "not readable JSON"),
        (file_of(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "a": 1}', b"\0" * 8), "twice"),
        (file_of({"__metadata__": {"a": 1}}), "map of strings"),
        (file_of({"a": {"dtype": "F32", "shape": [2]}}), "exactly"),
        (file_of({"a": {**GOOD, "more": 1}}, b"\0" * 8), "exactly"),
        (file_of({"a": entry("F4", [2], 0, 1)}, b"\0"), "unknown dtype"),
        (file_of({"a": entry("F32", [-2], 0, 8)}, b"\0" * 8), "list of sizes"),
        (file_of({"a": entry("F32", [2.0], 0, 8)}, b"\0" * 8), "list of sizes"),
        (file_of({"a": entry("F32", [True, 2], 0, 8)}, b"\0" * 8), "list of sizes"),
        (file_of({"a": entry("F32", [1] * 65, 0, 4)}, b"\0" * 4), "list of sizes"),
        (file_of({"a": entry("F32", [3], 0, 8)}, b"\0" * 8), "does not fill"),
        (file_of({"a": entry("F32", [2**62, 2**62], 0, 8)}, b"\0" * 8), "does not fill"),
        (file_of({"a": entry("F32", [2**62, 4, 0], 0, 0)}), "does not fill"),
        (file_of({"a": entry("F32", [2**63], 0, 8)}, b"\0" * 8), "list of sizes"),
        (file_of({"a": entry("F32", [2], 0, 8)}, b"\0" * 7), "not within"),
        (file_of({"a": entry("F32", [2], 8, 0)}, b"\0" * 8), "not within"),
        (file_of({"a": entry("F32", [2], -8, 0)}, b"\0" * 8), "two positions"),
        (file_of({"a": entry("F32", [0], 2**64, 2**64)}, b""), "two positions"),
        (file_of({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, b"\0" * 12), "overlaps"),
        (file_of({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 0, 8)}, b"\0" * 8), "overlaps"),
        (file_of({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 12, 20)}, b"\0" * 20), "hole"),
        (file_of({"a": entry("F32", [2], 4, 12)}, b"\0" * 12), "hole"),
        (file_of({"a": GOOD}, b"\0" * 9), "end at byte"),
    ],
)
def test_a_lying_header_is_refused(data: bytes, problem: str) -> None:
    reader = Buffer(data)
    with pytest.raises(SourceUnsafe, match=problem) as caught:
        read_header(reader, "model.safetensors")
    assert "model.safetensors" in caught.value.message
    assert reader.largest <= max(len(data), 8)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    data = safetensors.torch.save(TENSORS)
    for cut in (1, 8, len(data) // 2, len(data) - 9):
        with pytest.raises(SourceUnsafe):
            SafetensorsWeights(tree_of(tmp_path, model__safetensors=data[:-cut]))


def test_the_order_of_the_header_does_not_matter() -> None:
    data = file_of({"b": entry("F32", [2], 8, 16), "a": entry("F32", [2], 0, 8)}, b"\0" * 16)
    assert read_header(Buffer(data), "x").keys() == {"a", "b"}


def test_a_sharded_checkpoint_is_read_through_its_index(tmp_path: Path) -> None:
    one, two = safetensors.torch.save({"a": TENSORS["a"]}), safetensors.torch.save({"b": TENSORS["b"]})
    (tmp_path / "one.safetensors").write_bytes(one)
    (tmp_path / "two.safetensors").write_bytes(two)
    index = {"metadata": {"total_size": 1}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "unrelated.safetensors").write_bytes(b"not one of the shards")
    weights = SafetensorsWeights(tree_of(tmp_path))
    assert weights.tensors().keys() == {"a", "b"}


@pytest.mark.parametrize(
    ("index", "error"),
    [
        ({"weight_map": {"a": "../other.safetensors"}}, SourceUnsafe),
        ({"weight_map": {"a": "/etc/passwd"}}, SourceUnsafe),
        ({"weight_map": {"a": "pytorch_model.bin"}}, SourceUnsafe),
        ({"weight_map": {"a": 1}}, SourceUnsafe),
        ({"weight_map": {}}, SourceUnsafe),
        ([], SourceUnsafe),
        ({"weight_map": {"a": "missing.safetensors"}}, SourceNotFound),
    ],
)
def test_an_index_names_files_beside_it_only(index: Any, error: type[Exception], tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    tree = tree_of(tmp_path, model__safetensors__index__json=json.dumps(index).encode())
    with pytest.raises(error):
        SafetensorsWeights(tree)


def test_two_shards_with_one_name_are_refused(tmp_path: Path) -> None:
    data = safetensors.torch.save({"a": TENSORS["a"]})
    with pytest.raises(SourceUnsafe, match="Two files"):
        SafetensorsWeights(tree_of(tmp_path, one__safetensors=data, two__safetensors=data))


def test_a_folder_without_weights_is_not_found_and_one_with_pickles_unsafe(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match="no weights"):
        shard_names(tree_of(tmp_path, config__json=b"{}"))
    with pytest.raises(SourceUnsafe, match=r"pytorch_model\.bin") as caught:
        shard_names(tree_of(tmp_path, pytorch_model__bin=b"\x80\x02"))
    assert "safetensors" in caught.value.hint


def test_a_file_without_tensors_has_no_weights(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match="no tensor"):
        SafetensorsWeights(tree_of(tmp_path, model__safetensors=file_of({})))


def test_a_pickle_called_safetensors_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(SourceUnsafe):
        SafetensorsWeights(tree_of(tmp_path))
