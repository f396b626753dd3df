"""Which tensors become phantoms, where their bytes come from, and how they share segments."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram, export

from exporter.contract.errors import SourceNotFound, SourceUnsafe, UnsupportedModel
from exporter.contract.segments import MAX_CHUNK
from exporter.lowering import canonical
from exporter.lowering.canonical import canonical_chunks, canonical_layout, is_zero, strided_layout, zero_chunks
from exporter.lowering.weights import collect_weights, first_use_order
from exporter.source.captured import Captured
from exporter.source.ports import TensorInfo
from tests.gpu.parity import TensorSource

pytestmark = pytest.mark.filterwarnings("ignore")


def key(fqn: str) -> str:
    return f"k:{fqn}"


def program(model: nn.Module, *inputs: torch.Tensor) -> ExportedProgram:
    return export(model.eval(), inputs)


class Two(nn.Module):
    """`second` is used first; `unused` never."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(32, 32), requires_grad=False)
        self.second = nn.Parameter(torch.randn(32, 32), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(32, 32), requires_grad=False)
        self.small = nn.Parameter(torch.randn(8), requires_grad=False)
        self.register_buffer("a_cache", torch.zeros(32, 32))
        self.register_buffer("b_cache", torch.zeros(16, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x @ self.second + self.small.sum()) @ self.first
        self.a_cache.add_(y)
        self.b_cache.add_(1)
        return y + self.a_cache + self.b_cache.sum()


def nan_like(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.full_like(tensor, torch.nan)
    return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made


def hollow(model: nn.Module, *inputs: torch.Tensor, keep: tuple[str, ...] = ()) -> Captured:
    """The model's program with NaN for every parameter, and a source of the true values."""
    made = program(model, *inputs)
    source = {name: value.detach() for name, value in made.state_dict.items() if name not in keep}
    for name in source:
        made.state_dict[name] = nan_like(made.state_dict[name])
    return Captured({"forward": made}, TensorSource(source), {})


def test_plan_is_in_first_use_order_and_leaves_small_and_unused_tensors_out() -> None:
    captured = hollow(Two(), torch.randn(32, 32), keep=("a_cache", "b_cache"))
    weights = collect_weights(captured)
    assert list(weights.by_fqn) == ["second", "first", "a_cache", "b_cache"]
    assert weights.small_bytes == 32
    assert first_use_order(captured.programs["forward"])[:3] == ["second", "small", "first"]


def test_bytes_come_from_the_source_and_small_ones_are_filled_in() -> None:
    model = Two()
    captured = hollow(model, torch.randn(32, 32), keep=("a_cache", "b_cache"))
    segments = collect_weights(captured).segments(key)
    body = b"".join(bytes(chunk) for chunk in segments[0].read())
    assert body == model.second.detach().numpy().tobytes()
    assert torch.equal(captured.programs["forward"].state_dict["small"], model.small)


def test_zero_caches_of_one_size_share_a_segment_whoever_holds_them() -> None:
    for keep in (("a_cache", "b_cache"), ("a_cache",), ()):
        segments = collect_weights(hollow(Two(), torch.randn(32, 32), keep=keep)).segments(key)
        zero = [segment for segment in segments if segment.zeros]
        assert [[name.key for name in segment.names] for segment in zero] == [["k:a_cache", "k:b_cache"]]
        assert b"".join(bytes(chunk) for chunk in zero[0].read()) == bytes(4096)


class Tied(nn.Module):
    """Two names for one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(32, 32, bias=False)
        self.two = nn.Linear(32, 32, bias=False)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))


def test_ties_are_one_segment_even_where_the_source_has_one_name() -> None:
    made = program(Tied(), torch.randn(4, 32))
    names = [name for name in made.state_dict if name.endswith("weight")]
    value = made.state_dict[names[0]].detach().clone()
    empty = nan_like(made.state_dict[names[0]])
    for name in names:
        made.state_dict[name] = empty
    weights = collect_weights(Captured({"forward": made}, TensorSource({names[-1]: value}), {}))
    segments = weights.segments(key)
    assert len(segments) == 1
    assert b"".join(bytes(chunk) for chunk in segments[0].read()) == value.numpy().tobytes()


def test_a_second_view_of_untouched_memory_is_refused() -> None:
    made = program(Two(), torch.randn(32, 32))
    made.state_dict["first"] = nn.Parameter(made.state_dict["second"].detach().t(), requires_grad=False)
    source = TensorSource({"second": made.state_dict["second"].detach().clone()})
    with pytest.raises(UnsupportedModel, match="first"):
        collect_weights(Captured({"forward": made}, source, {}))


def test_values_that_nobody_has_are_an_error() -> None:
    made = program(Two(), torch.randn(32, 32))
    made.state_dict["first"] = nn.Parameter(torch.empty(32, 32, device="meta"), requires_grad=False)
    with pytest.raises(SourceNotFound, match="first"):
        collect_weights(Captured({"forward": made}, TensorSource({}), {}))


@pytest.mark.parametrize("wrong", [torch.randn(32, 31), torch.randn(32, 32).half(), torch.randn(32, 32).t()])
def test_a_source_of_another_tensor_is_refused(wrong: torch.Tensor) -> None:
    made = program(Two(), torch.randn(32, 32))
    with pytest.raises(SourceUnsafe, match="first"):
        collect_weights(Captured({"forward": made}, TensorSource({"first": wrong}), {}))


def test_one_name_with_two_contents_is_refused_before_the_compile() -> None:
    one, two = program(Two(), torch.randn(32, 32)), program(Two(), torch.randn(32, 32))
    with pytest.raises(UnsupportedModel, match="different contents"):
        collect_weights(Captured({"prefill": one, "decode": two}, TensorSource({}), {}))


def test_methods_share_weights() -> None:
    model = Two()
    one, two = program(model, torch.randn(32, 32)), program(model, torch.randn(32, 32))
    weights = collect_weights(Captured({"prefill": one, "decode": two}, TensorSource({}), {}))
    assert len(weights.by_fqn) == 4


def test_parts_of_a_tensor_subclass_are_weights_of_their_own() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(64, 64, bias=False)).eval()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    made = program(model, torch.randn(2, 64))
    weights = collect_weights(Captured({"forward": made}, TensorSource({}), {}))
    lowered = made.run_decompositions({})
    assert list(weights.by_fqn) == ["0.parametrizations.weight.original0"]
    inner = lowered.state_dict["0.parametrizations.weight.original0"]
    found = weights.find("0.parametrizations.weight.original0", inner)
    assert found is weights.by_fqn["0.parametrizations.weight.original0"]


# --- the canonical form ---

BASE = torch.arange(7 * 9 * 11, dtype=torch.float32).view(7, 9, 11)


@pytest.mark.parametrize(
    "tensor",
    [
        BASE,
        BASE.permute(2, 0, 1),
        BASE[1:4, 2:7, ::2],
        BASE[:, :1].expand(7, 5, 11),
        BASE.transpose(0, 1)[2:5],
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor(3.0),
        torch.randn(6).as_strided((3, 3), (1, 1)),
        BASE.to(torch.bfloat16).permute(1, 0, 2),
        torch.randn(2, 3).to(torch.float8_e4m3fn),
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.arange(10)[::3],
        torch.ones(3, dtype=torch.bool),
        torch.empty(0, 4),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}{tuple(tensor.stride())}",
)
def test_canonical_bytes_are_those_of_a_copy(tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canonical, "MAX_CHUNK", 64)
    copied = torch.empty_like(tensor)
    copied.copy_(tensor)
    storage = copied.untyped_storage()
    wanted = bytes(torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).numpy())
    pieces = [bytes(chunk) for chunk in canonical_chunks(tensor)]
    assert b"".join(pieces) == wanted
    assert all(len(piece) <= 64 for piece in pieces)
    layout = canonical_layout(tensor)
    assert (layout.nbytes, layout.strides) == (len(wanted), copied.stride())


def test_zero_is_about_bits() -> None:
    assert is_zero(torch.zeros(3, 5))
    assert not is_zero(torch.tensor([0.0, -0.0]))
    assert is_zero(torch.zeros(1, 8).expand(4, 8))


def test_zeros_are_chunked_without_memory_of_their_size() -> None:
    sizes = [memoryview(chunk).nbytes for chunk in zero_chunks(2 * MAX_CHUNK + 5)]
    assert sizes == [MAX_CHUNK, MAX_CHUNK, 5]


def test_a_cache_keeps_its_strides() -> None:
    tensor = torch.zeros(1, 8).expand(4, 8)
    assert strided_layout(tensor).nbytes == 32
    assert canonical_layout(tensor).nbytes == 128


class Once:
    """A source that says how often it was read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.reads = tensor, 0

    def tensors(self) -> dict[str, TensorInfo]:
        return dict(TensorSource({"second": self.tensor}).tensors())

    def chunks(self, name: str) -> Iterator[bytes]:
        self.reads += 1
        yield from (bytes(chunk) for chunk in canonical_chunks(self.tensor))


def test_planning_reads_no_parameter() -> None:
    made = program(Two(), torch.randn(32, 32))
    source = Once(made.state_dict["second"].detach().clone())
    weights = collect_weights(Captured({"forward": made}, source, {}))
    assert source.reads == 0
    digest = hashlib.sha256(b"".join(weights.segments(key)[0].read())).digest()  # type: ignore[arg-type]
    assert digest == hashlib.sha256(source.tensor.numpy().tobytes()).digest()
    assert source.reads == 1
