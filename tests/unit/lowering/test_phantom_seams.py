"""The seam table against what is installed, and one contract test for the behaviour behind each seam, on the CPU."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram, export

from exporter.contract.errors import InternalError, ToolchainMismatch, UnsupportedModel
from exporter.lowering.phantom import ElsewhereData, HeldData, Phantoms, phantom_weights
from exporter.lowering.seams import TABLE, Seam, check_seams, find_mismatches
from exporter.lowering.weights import collect_weights
from exporter.source.captured import Captured
from tests.gpu.parity import TensorSource

pytest.importorskip("triton", reason="the CUDA back end imports triton")
pytestmark = pytest.mark.filterwarnings("ignore")

CUDA = "executorch.backends.cuda.cuda_backend"
COLLECTOR = "executorch.backends.cuda.cuda_weight_collector"


class Model(nn.Module):
    """A parameter, a constant buffer, a cache that is written, and a small parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32), requires_grad=False)
        self.register_buffer("table", torch.randn(32, 32))
        self.register_buffer("kv_cache", torch.zeros(32, 32))
        self.scale = nn.Parameter(torch.randn(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kv_cache.add_(x @ self.weight)
        return self.kv_cache + self.table * self.scale.sum()


def captured() -> Captured:
    program = export(Model(), (torch.randn(32, 32),))
    return Captured({"forward": program}, TensorSource({}), {})


@pytest.fixture
def placed() -> Iterator[tuple[Phantoms, ExportedProgram]]:
    """A program moved to the "device" `cpu` with phantoms, inside the context."""
    given = captured()
    weights = collect_weights(given)
    weights.segments(lambda fqn: f"key:{fqn}")
    phantoms = Phantoms(weights)
    with phantom_weights(phantoms):
        program = importlib.import_module(CUDA)._move_to_device_resize_kv(given.programs["forward"], "cpu")
        yield phantoms, program


# --- the table ---


def test_table_fits_what_is_installed() -> None:
    assert find_mismatches() == []
    check_seams()


def test_every_replaced_name_is_in_the_table_and_is_put_back() -> None:
    before = {seam: _value(seam) for seam in TABLE}
    phantoms = Phantoms(collect_weights(captured()))

    def failing() -> set[Seam]:
        with phantom_weights(phantoms):
            changed.update(seam for seam in TABLE if _value(seam) is not before[seam])
            raise RuntimeError("stop")

    changed: set[Seam] = set()
    with pytest.raises(RuntimeError, match="stop"):
        failing()
    assert {(seam.module, seam.attribute.partition(".")[0]) for seam in changed} <= {
        (seam.module, seam.attribute.partition(".")[0]) for seam in TABLE if seam.use == "replaced"
    }
    assert len(changed) >= 6
    assert {seam: _value(seam) for seam in TABLE} == before


def _value(seam: Seam) -> Any:
    owner: Any = importlib.import_module(seam.module)
    *path, last = seam.attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    return vars(owner).get(last, getattr(owner, last))


@pytest.mark.parametrize(
    ("seam", "text"),
    [
        (Seam(CUDA, "_gone", ("x",), "replaced", ""), "is not there"),
        (Seam(CUDA, "_is_emptied", ("x", "y"), "replaced", ""), "takes (x), not (x, y)"),
        (Seam("executorch.nowhere", "x", (), "replaced", ""), "cannot be imported"),
    ],
)
def test_a_mismatch_names_the_seam_and_the_versions(seam: Seam, text: str) -> None:
    with pytest.raises(ToolchainMismatch) as caught:
        check_seams((*TABLE, seam))
    assert text in caught.value.message
    assert torch.__version__.partition("+")[0] in caught.value.message
    assert caught.value.details["executorch"] == "1.5.1"


def test_nothing_is_replaced_when_the_table_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = importlib.import_module(CUDA)
    before = cuda._move_to_device_resize_kv
    monkeypatch.setattr(cuda, "_is_emptied", lambda one, two: True)
    with pytest.raises(ToolchainMismatch), phantom_weights(Phantoms(collect_weights(captured()))):
        raise AssertionError("entered")
    assert cuda._move_to_device_resize_kv is before


def test_a_second_context_is_refused() -> None:
    weights = collect_weights(captured())
    with (
        phantom_weights(Phantoms(weights)),
        pytest.raises(InternalError, match="second"),
        phantom_weights(Phantoms(weights)),
    ):
        raise AssertionError("entered")


# --- the seams, one by one ---


def test_move_makes_phantoms_and_keeps_small_tensors(placed: tuple[Phantoms, ExportedProgram]) -> None:
    _, program = placed
    cuda = importlib.import_module(CUDA)
    for name in ("weight", "table", "kv_cache"):
        tensor = program.state_dict[name]
        assert tensor.shape == (32, 32)
        assert tensor.untyped_storage().nbytes() == 0
        assert cuda._is_emptied(tensor)
    assert isinstance(program.state_dict["weight"], nn.Parameter)
    assert torch.equal(program.state_dict["scale"], program.state_dict["scale"].clone())
    assert program.state_dict["scale"].untyped_storage().nbytes() == 16


def test_zeros_become_stand_ins_that_know_their_weight(placed: tuple[Phantoms, ExportedProgram]) -> None:
    phantoms, program = placed
    cuda = importlib.import_module(CUDA)
    stand_in = cuda._full_zeros_preserving_strides(program.state_dict["table"], "cpu")
    assert stand_in.untyped_storage().nbytes() == 32 * 32 * 4
    assert stand_in.stride() == (32, 1)
    assert stand_in.storage_offset() == 0
    phantoms.write(stand_in, "p")
    data = phantoms.take("p")
    assert isinstance(data, ElsewhereData)
    assert data.weight.fqn == "table"


def test_an_unknown_emptied_tensor_fails_instead_of_becoming_zeros(placed: tuple[Phantoms, ExportedProgram]) -> None:
    phantoms, _ = placed
    cuda, collector = importlib.import_module(CUDA), importlib.import_module(COLLECTOR)
    stranger = torch.empty(64, 64)
    stranger.untyped_storage().resize_(0)
    with pytest.raises(InternalError, match="no weight is known"):
        cuda._full_zeros_preserving_strides(stranger, "cpu")
    with pytest.raises(InternalError, match="no weight is known"):
        collector._write_tensor_storage(stranger, "p")
    assert phantoms.weights.by_fqn


def test_cpu_clones_of_upstream_ask_for_our_stand_ins(placed: tuple[Phantoms, ExportedProgram]) -> None:
    """`_unlift_graph` clones every buffer: inside upstream's context an emptied one becomes our stand-in."""
    phantoms, program = placed
    cuda = importlib.import_module(CUDA)
    from torch._inductor import compile_fx

    def _unlift_graph(tensor: torch.Tensor) -> torch.Tensor:  # upstream tells the caller by this name
        return compile_fx.clone_preserve_strides(tensor)

    with cuda._compile_time_cpu_clones(torch.device("cuda")):
        clone = _unlift_graph(program.state_dict["table"])
        real = _unlift_graph(program.state_dict["scale"])
    phantoms.write(clone, "p")
    taken = phantoms.take("p")
    assert isinstance(taken, ElsewhereData)
    assert taken.weight.fqn == "table"
    assert torch.equal(real, program.state_dict["scale"])


def test_original_constants_are_answered_with_stand_ins(placed: tuple[Phantoms, ExportedProgram]) -> None:
    _, program = placed
    cuda = importlib.import_module(CUDA)
    from torch._inductor.graph import GraphLowering

    graph = GraphLowering.__new__(GraphLowering)
    graph.allocated_constant_name = {"weight": "weight"}  # type: ignore[misc]
    graph.constants = {"weight": program.state_dict["weight"]}
    graph.module = nn.Module()  # type: ignore[assignment]
    graph.module.meta = {}  # type: ignore[assignment]
    with cuda._compile_time_cpu_clones(torch.device("cuda")):
        value = graph.get_original_value_of_constant("weight")
    assert value.untyped_storage().nbytes() == 4096
    assert value.device == program.state_dict["weight"].device


def test_tensor_properties_are_none_and_emptied_tensors_stay_apart(placed: tuple[Phantoms, ExportedProgram]) -> None:
    _, program = placed
    cuda = importlib.import_module(CUDA)
    from torch._inductor import codecache, graph

    one, other = program.state_dict["table"], program.state_dict["kv_cache"]
    with cuda._compile_time_cpu_clones(torch.device("cuda")):
        assert codecache.TensorProperties(one) is None
        assert not graph.is_same_tensor(one, other)
        assert codecache.determine_aoti_mmap_flags(0) == (True, False)


def test_collector_takes_sizes_and_views_from_the_stand_ins(
    placed: tuple[Phantoms, ExportedProgram], tmp_path: Path
) -> None:
    _, program = placed
    cuda, collector = importlib.import_module(CUDA), importlib.import_module(COLLECTOR)
    stand_in = cuda._full_zeros_preserving_strides(program.state_dict["weight"], "cpu")
    real = torch.arange(6, dtype=torch.int32)
    artifact = collector.CudaWeightCollector().materialize(
        {"weight": (stand_in, None), "made": (real, None)}, str(tmp_path), lambda tensor: 1
    )
    entry = artifact.entries[0]
    assert (entry.storage_key, entry.storage_nbytes) == ("cuda_fqn_weight:cuda:weight", 4096)
    assert (entry.sizes, entry.strides, entry.storage_offset) == ((32, 32), (32, 1), 0)
    made = artifact.storages["cuda_fqn_weight:cuda:made"]
    assert isinstance(made, HeldData)
    assert made.to_bytes() == real.numpy().tobytes()
    assert list(tmp_path.iterdir()) == []


def test_named_data_store_merges_by_planned_segment(placed: tuple[Phantoms, ExportedProgram]) -> None:
    from executorch.exir._serialize._named_data_store import NamedDataStore

    phantoms, _ = placed
    weights = phantoms.weights.by_fqn
    store = NamedDataStore()
    for key, fqn in (("a", "weight"), ("b", "weight"), ("c", "table"), ("d", "kv_cache")):
        store.add_named_data(key, ElsewhereData(weights[fqn]), external_tag="tag")
    entries = store.get_named_data_store_output().external_data["tag"]
    assert entries["a"].buffer_index == entries["b"].buffer_index
    assert len({entries[key].buffer_index for key in "acd"}) == 3


def test_serialising_never_reads_a_phantom(placed: tuple[Phantoms, ExportedProgram]) -> None:
    from executorch.exir._serialize._cord import Cord

    data = ElsewhereData(placed[0].weights.by_fqn["weight"])
    assert len(Cord(data)) == 4096
    with pytest.raises(InternalError, match="weight"):
        data.to_bytes()
    with pytest.raises(InternalError, match="weight"), open("/dev/null", "wb") as out:
        Cord(data).write_to_file(out)


def test_autotuner_gets_memory_for_emptied_arguments(placed: tuple[Phantoms, ExportedProgram]) -> None:
    _, program = placed
    tensor = program.state_dict["weight"]
    with importlib.import_module(CUDA)._rehydrate_emptied_tensors([tensor]):
        assert tensor.untyped_storage().nbytes() == 4096
        assert not tensor.count_nonzero()
    assert tensor.untyped_storage().nbytes() == 0


def test_copies_for_preprocess_share_tensors() -> None:
    from executorch.backends.cuda.cuda_backend import CudaBackend
    from executorch.exir.backend.compile_spec_schema import CompileSpec

    program = captured().programs["forward"]
    copied = CudaBackend.copy_exported_program_for_preprocess(program, [CompileSpec("low_memory_mode", b"ON")])
    assert copied.state_dict["weight"] is program.state_dict["weight"]


def test_a_constant_that_a_pass_computed_is_refused() -> None:
    given = captured()
    phantoms = Phantoms(collect_weights(given))
    program = given.programs["forward"]
    program.state_dict["weight"] = nn.Parameter(program.state_dict["weight"] * 2, requires_grad=False)
    with phantom_weights(phantoms), pytest.raises(UnsupportedModel, match="weight"):
        importlib.import_module(CUDA)._move_to_device_resize_kv(program, "cpu")


def test_a_renamed_buffer_is_found_by_its_storage() -> None:
    given = captured()
    weights = collect_weights(given)
    tensor = given.programs["forward"].state_dict["table"]
    found = weights.find("p_table_copy_0", tensor)
    assert found is not None
    assert found.fqn == "table"


@contextlib.contextmanager
def _as_cpu_device() -> Iterator[None]:
    """Let upstream's CUDA back end compile for the CPU: everything but the kernels is the same."""
    from unittest import mock

    from executorch.backends.cuda.cuda_backend import CudaBackend

    from exporter.lowering import cuda

    @contextlib.contextmanager
    def collect(missing: set[str]) -> Iterator[None]:
        yield

    with (
        mock.patch.object(CudaBackend, "get_device_name", classmethod(lambda cls: "cpu")),
        mock.patch.object(CudaBackend, "collect_unsupported_fallback_kernels", collect),
        mock.patch.object(cuda, "_TAG", "aoti_cpu_blob"),
        mock.patch.object(cuda, "check_target"),
    ):
        yield


@pytest.mark.slow
def test_a_whole_export_has_upstreams_segments() -> None:
    """Plain model, key cache, weights in the source alone: the set of (key, size, SHA-256) equals upstream's."""
    from exporter.contract.spec import Target
    from tests.gpu import models, parity

    torch.manual_seed(0)
    target = Target(backend="cuda", max_autotune=False, triton_kernel_mode="off")
    programs, samples = models.plain()
    with _as_cpu_device():
        reference = parity.upstream(programs, target)
        given, source = parity.emptied(programs)
        result, _ = parity.ours(Captured(given, source, samples), target)
    assert result.digests() == reference.digests()
    assert len(result.digests()) == 9
    assert hashlib.sha256(bytes(2 * 32 * 64 * 2)).hexdigest() in {sha for _, sha in result.digests().values()}
