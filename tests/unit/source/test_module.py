"""Bytes of tensors in their dense order, from memory, from maps and from ranges; ties; bounds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.contract.errors import SourceUnsafe
from exporter.contract.segments import MAX_CHUNK
from exporter.source.local import LocalReader, LocalTree
from exporter.source.mapped import MappedFile, over
from exporter.source.module import ModuleWeights, describe, fill
from exporter.source.strided import dense_order, extent, gather, is_dense


def dense_bytes(tensor: torch.Tensor) -> bytes:
    """The whole storage of what torch makes of `tensor` elsewhere: the order that the contract speaks of."""
    copy = torch.empty_like(tensor.detach())
    copy.copy_(tensor.detach())
    flat = torch.empty(0, dtype=torch.uint8).set_(copy.untyped_storage(), 0, (copy.untyped_storage().nbytes(),), (1,))
    return bytes(flat.numpy().data)


def joined(weights: ModuleWeights, name: str) -> bytes:
    pieces = [bytes(chunk) for chunk in weights.chunks(name)]
    assert all(len(piece) <= MAX_CHUNK for piece in pieces)
    return b"".join(pieces)


BASE = torch.arange(2 * 3 * 4 * 5, dtype=torch.int16).reshape(2, 3, 4, 5)
VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: BASE,
    "permuted": lambda: BASE.permute(2, 0, 3, 1),
    "channels last": lambda: BASE.to(memory_format=torch.channels_last),
    "sliced rows": lambda: BASE[1:],
    "sliced columns": lambda: BASE[..., 1:3],
    "stepped": lambda: BASE[:, ::2],
    "permuted slice": lambda: BASE[:, 1:].permute(3, 1, 0, 2),
    "expanded": lambda: BASE[:, :1].expand(2, 7, 4, 5),
    "expanded scalar": lambda: torch.tensor(3.0).expand(4, 5),
    "unfolded": lambda: torch.arange(10).unfold(0, 4, 2),
    "transposed": lambda: BASE.reshape(6, 20).t(),
    "scalar": lambda: torch.tensor(2.5, dtype=torch.bfloat16),
    "empty": lambda: torch.empty(0, 3),
    "ones in strides": lambda: torch.arange(6.0).as_strided((1, 3, 1, 2), (99, 2, 7, 1)),
    "bool": lambda: torch.tensor([True, False, True])[::2],
    "complex": lambda: torch.arange(6).to(torch.complex64).reshape(2, 3).t(),
    "float8": lambda: torch.arange(8, dtype=torch.uint8).view(torch.float8_e4m3fn)[::2],
    "parameter": lambda: torch.nn.Parameter(torch.randn(3, 3).t()),
}


@pytest.mark.parametrize("view", VIEWS)
def test_memory_gives_the_bytes_of_the_dense_copy(view: str) -> None:
    tensor = VIEWS[view]()
    weights = ModuleWeights({"w": tensor})
    info = weights.tensors()["w"]
    assert (info.shape, info.nbytes) == (tuple(tensor.shape), tensor.numel() * tensor.element_size())
    assert joined(weights, "w") == joined(weights, "w") == dense_bytes(tensor)


@pytest.mark.parametrize("view", VIEWS)
def test_a_mapped_file_gives_the_same(view: str, tmp_path: Path) -> None:
    tensor = VIEWS[view]().detach()
    path = tmp_path / "w"
    path.write_bytes(b"\7" * 64 + bytes(tensor.untyped_storage()))
    reader = LocalTree("x", str(path), [str(tmp_path)]).open("w")
    mapped = MappedFile(reader)
    size = tensor.untyped_storage().nbytes()
    if not size:
        return
    storage = mapped.storage(64, size)
    same = over(storage, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
    assert mapped.locate(storage) == 64
    assert mapped.locate(torch.empty(3).untyped_storage()) is None
    assert joined(ModuleWeights({"w": same}, [mapped]), "w") == dense_bytes(tensor)


@settings(max_examples=200, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), max_size=4),
    data=st.data(),
    offset=st.integers(0, 3),
)
def test_any_geometry_gives_the_bytes_of_the_dense_copy(shape: list[int], data: st.DataObject, offset: int) -> None:
    strides = data.draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    storage = torch.arange(offset + extent(shape, strides) + 1, dtype=torch.int32)
    tensor = storage.as_strided(shape, strides, offset)
    assert joined(ModuleWeights({"w": tensor}), "w") == dense_bytes(tensor)


def test_large_strided_tensors_are_read_in_bounded_pieces() -> None:
    largest = 0
    storage = torch.arange(6 * 2**20, dtype=torch.int32)
    raw = storage.numpy().data.cast("B")

    def read(offset: int, length: int) -> bytes:
        nonlocal largest
        largest = max(largest, length)
        return bytes(raw[offset : offset + length])

    for tensor in (storage.view(2**11, -1)[:, 1:], storage.view(-1, 2**11)[:, 3], storage[:4].expand(2**20, 4)):
        pieces = list(gather(read, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()))
        assert max(map(len, pieces)) <= MAX_CHUNK
        assert b"".join(map(bytes, pieces)) == dense_bytes(tensor)
    assert largest <= MAX_CHUNK


def test_dense_tensors_of_any_order_of_dimensions_are_known() -> None:
    assert is_dense((2, 3), (3, 1))
    assert is_dense((2, 3), (1, 2))
    assert is_dense((1, 3), (77, 1))
    assert is_dense((), ())
    assert not is_dense((2, 3), (4, 1))
    assert not is_dense((2, 3), (0, 1))
    assert not is_dense((2, 2, 2), (1, 1, 5))
    assert dense_order((2, 3, 4), (1, 2, 6), torch.float32) == (2, 1, 0)


def test_ties_have_one_identity_and_views_others() -> None:
    one = torch.randn(4, 4)
    infos = ModuleWeights(
        {"a": one, "b": one, "c": one.view(4, 4), "d": one.t(), "e": one[:2], "f": one.clone()}
    ).tensors()
    assert infos["a"].identity == infos["b"].identity == infos["c"].identity
    assert len({infos[name].identity for name in "adef"}) == 4


def test_what_has_no_plain_storage_is_refused() -> None:
    for tensor in (torch.ones(2, 2).to_sparse(), torch.ones(2, device="meta"), _emptied()):
        with pytest.raises(SourceUnsafe):
            describe("w", tensor)


def _emptied() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def test_untouched_tensors_are_filled_once_per_storage() -> None:
    table = torch.randn(4, 4)
    real = {"a": table, "b": table, "c": torch.randn(6, 2).t(), "d": torch.randn(4, 4)[:, 1:]}
    empty = torch.zeros(4, 4)
    target = {"a": empty, "b": empty, "c": torch.zeros(6, 2).t(), "d": torch.zeros(4, 4)[:, 1:]}
    fill(target, ModuleWeights(real))
    assert all(torch.equal(target[name], real[name]) for name in real)


def test_reading_a_mapped_file_leaves_it_out_of_memory(tmp_path: Path) -> None:
    size = 64 * 2**20
    path = tmp_path / "big"
    path.write_bytes(os.urandom(2**20) * (size // 2**20))
    reader = LocalTree("x", str(path), [str(tmp_path)]).open("big")
    mapped = MappedFile(reader)
    weights = ModuleWeights({"w": mapped.tensor(0, size, torch.uint8, (size,), (1,))}, [mapped])
    before = resident()
    total = sum(len(chunk) for chunk in weights.chunks("w"))
    assert total == size
    assert resident() - before < 3 * MAX_CHUNK


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_write_to_a_mapped_tensor_stays_in_the_process(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_bytes(bytes(16))
    reader = LocalReader(os.open(path, os.O_RDONLY), "w")
    mapped = MappedFile(reader)
    tensor = mapped.tensor(0, 16, torch.int32, (4,), (1,))
    tensor.add_(1)
    assert tensor.tolist() == [1, 1, 1, 1]
    assert path.read_bytes() == bytes(16)
    assert joined(ModuleWeights({"w": tensor}, [mapped]), "w") == bytes(16)
