"""`.pt2` archives: read by range, the same program as torch's own loader gives, and nothing held."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from exporter.contract.errors import InvalidRequest, SourceNotFound, SourceUnsafe
from exporter.contract.segments import MAX_CHUNK
from exporter.source.local import LocalTree
from exporter.source.payload import SMALL
from exporter.source.pt2 import Pt2, open_pt2, pt2_models
from exporter.source.remote import ObjectTree
from tests.unit.source.files import Objects

Export = tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]


class Tied(nn.Module):
    """Ties, a strided parameter, buffers of both kinds, one of them written to."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.sliced = nn.Parameter(torch.arange(24.0).view(4, 6).t()[1:3])
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        self.count.add_(1)
        hidden = self.embed(tokens) * self.scale + self.sliced.sum() + torch.tensor([0.5])
        return {"logits": self.head(hidden), "count": self.count.clone()}


class Shapes(nn.Module):
    """Symbolic arithmetic of several kinds."""

    def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
        rows, columns = x.shape
        return x.reshape(rows // 2, 2 * columns), torch.arange(rows * columns - 3), max(rows, columns), x[: rows // 3]


class Branches(nn.Module):
    """Higher-order operators, a message with quotes, an unbacked size."""

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        size = n.item()
        torch._check(size >= 2, lambda: 'it\'s "too" small\n')
        torch._check(size <= 10)
        with torch.no_grad():
            y = x * 2
        return torch.cond(y.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (y,)), torch.ones(size)


class Inputs(nn.Module):
    """Structured and constant inputs."""

    def forward(self, bag: dict[str, Any], n: int, mode: str, items: list[Any], *, scale: float = 2.0) -> Any:
        out = bag["a"] * n + bag["b c.d"] * scale
        return {"out": out, "items": [item + 1 for item in items], "mode": out if mode == "bilinear" else items[0]}


CASES: dict[str, Callable[[], Export]] = {
    "tied": lambda: (Tied(), (torch.tensor([[1, 2, 3]]),), {}, None),
    "convolution": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)).eval(),
        (torch.randn(2, 3, 8, 8),),
        {},
        ({0: Dim("batch", min=1, max=8), 2: Dim("height", min=4, max=64)},),
    ),
    "transformer": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1).eval(),
        (torch.randn(1, 4, 16),),
        {},
        None,
    ),
    "shapes": lambda: (
        Shapes(),
        (torch.randn(8, 6),),
        {},
        ({0: 2 * Dim("half", min=4, max=32), 1: Dim("columns", min=4, max=32)},),
    ),
    "branches": lambda: (Branches(), (torch.randn(3), torch.tensor(3)), {}, None),
    "inputs": lambda: (
        Inputs(),
        ({"a": torch.randn(3), "b c.d": torch.randn(3)}, 3, "bilinear", [torch.randn(3), torch.randn(2)]),
        {"scale": 1.5},
        None,
    ),
}


def export(case: str, path: Path, **options: Any) -> ExportedProgram:
    """Export a case, save it, and give what torch's own loader makes of the file."""
    torch.manual_seed(0)
    module, args, kwargs, dynamic = CASES[case]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic, **options)
        torch.export.save(program, path)
        return torch.export.load(path)


def opened(path: Path, model: str | None = None) -> Pt2:
    return open_pt2(LocalTree(str(path), str(path), [str(path.parent)]), path.name, model)


def outputs(program: ExportedProgram, pt2: Pt2) -> list[Any]:
    assert pt2.samples is not None
    args, kwargs = pt2.samples
    leaves: list[Any] = torch.utils._pytree.tree_leaves(program.module()(*args, **kwargs))
    return leaves


def same(ours: list[Any], theirs: list[Any]) -> bool:
    return len(ours) == len(theirs) and all(
        torch.equal(torch.as_tensor(one), torch.as_tensor(two)) for one, two in zip(ours, theirs, strict=True)
    )


def contents(program: ExportedProgram) -> dict[str, bytes]:
    """Every tensor's dense bytes, by FQN."""
    found = {}
    for name, tensor in {**program.state_dict, **program.constants}.items():
        copy = torch.empty_like(tensor.detach())
        copy.copy_(tensor.detach())
        found[name] = bytes(copy.untyped_storage())
    return found


# torch's strict export does not take branches (the message) and transformer (a fast path).
@pytest.mark.parametrize(
    ("case", "strict"), [(case, False) for case in CASES] + [(case, True) for case in ("tied", "shapes", "convolution")]
)
def test_the_program_and_its_weights_are_those_of_torchs_loader(case: str, strict: bool, tmp_path: Path) -> None:
    stock = export(case, tmp_path / "m.pt2", strict=strict)
    pt2 = opened(tmp_path / "m.pt2")
    expected = contents(stock)
    assert pt2.weights.tensors().keys() == expected.keys()
    for name, data in expected.items():
        assert b"".join(bytes(chunk) for chunk in pt2.weights.chunks(name)) == data
    assert str(pt2.program.graph_signature) == str(stock.graph_signature)
    assert pt2.program.range_constraints == stock.range_constraints
    assert same(outputs(pt2.program, pt2), outputs(stock, pt2))


def test_ties_and_geometry_survive(tmp_path: Path) -> None:
    export("tied", tmp_path / "m.pt2")
    pt2 = opened(tmp_path / "m.pt2")
    state, infos = pt2.program.state_dict, pt2.weights.tensors()
    assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()
    assert infos["embed.weight"].identity == infos["head.weight"].identity
    assert isinstance(state["sliced"], nn.Parameter)
    assert infos["sliced"].strides == (1, 6)
    assert "scale" in pt2.program.constants
    assert "count" in state


def test_running_the_program_does_not_change_what_the_source_gives(tmp_path: Path) -> None:
    export("tied", tmp_path / "m.pt2")
    pt2 = opened(tmp_path / "m.pt2")
    before = (tmp_path / "m.pt2").read_bytes()
    outputs(pt2.program, pt2)
    assert b"".join(bytes(chunk) for chunk in pt2.weights.chunks("count")) == bytes(8)
    assert (tmp_path / "m.pt2").read_bytes() == before


def test_no_weight_becomes_resident_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(24)])
    program = torch.export.export(module, (torch.zeros(1, 1024),))
    torch.export.save(program, tmp_path / "m.pt2")
    del program, module
    opened(tmp_path / "m.pt2")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    before = resident()
    pt2 = opened(tmp_path / "m.pt2")
    total = sum(len(chunk) for name in pt2.weights.tensors() for chunk in pt2.weights.chunks(name))
    assert total > 96 * 2**20
    assert resident() - before < 4 * MAX_CHUNK
    assert list(scratch.iterdir()) == []


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_remote_archive_is_read_by_range_and_filled_on_request(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(module, (torch.randn(2, 256),))
        torch.export.save(program, tmp_path / "m.pt2")
    objects = Objects({"dir/m.pt2": (tmp_path / "m.pt2").read_bytes()})
    pt2 = open_pt2(ObjectTree("s3://b/dir/m.pt2", "dir/m.pt2", objects), "m.pt2")
    assert objects.largest < 2 * SMALL
    assert not pt2.weights.resident
    assert torch.equal(pt2.program.state_dict["2.bias"], module[2].bias)
    pt2.weights.fill()
    assert same(outputs(pt2.program, pt2), outputs(program, pt2))


def test_an_archive_of_two_programs_needs_a_name(tmp_path: Path) -> None:
    from torch.export.pt2_archive._package import package_pt2

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = torch.export.export(nn.Linear(2, 2), (torch.randn(1, 2),))
        two = torch.export.export(nn.Linear(3, 3), (torch.randn(1, 3),))
        package_pt2(str(tmp_path / "m.pt2"), exported_programs={"prefill": one, "decode": two})
    tree = LocalTree("x", str(tmp_path / "m.pt2"), [str(tmp_path)])
    assert pt2_models(tree, "m.pt2") == ("decode", "prefill")
    assert opened(tmp_path / "m.pt2", "decode").program.state_dict["weight"].shape == (3, 3)
    for model in (None, "other"):
        with pytest.raises(InvalidRequest, match="prefill"):
            opened(tmp_path / "m.pt2", model)


def test_a_file_that_is_no_archive_or_another_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    path.write_bytes(b"this is not an archive at all, whatever its name says")
    with pytest.raises(SourceUnsafe, match="not an archive") as caught:
        opened(path)
    assert "torch.export.save" in caught.value.hint
    torch.save({"a": torch.ones(3)}, path)
    with pytest.raises(SourceUnsafe, match=r"not a \.pt2 archive"):
        opened(path)


def test_a_program_saved_without_its_weights_is_not_found(tmp_path: Path) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with FakeTensorMode():
            program = torch.export.export(nn.Linear(4, 4), (torch.randn(1, 4),))
        torch.export.save(program, tmp_path / "m.pt2")
    with pytest.raises(SourceNotFound, match="no weights"):
        opened(tmp_path / "m.pt2")


def test_a_tensor_subclass_is_refused_with_a_hint(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    module = nn.Sequential(nn.Linear(64, 64))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization.quantize_(module, quantization.Int8WeightOnlyConfig())
        torch.export.save(torch.export.export(module, (torch.randn(1, 64),)), tmp_path / "m.pt2")
    with pytest.raises(SourceUnsafe, match="pickled") as caught:
        opened(tmp_path / "m.pt2")
    assert "unwrap" in caught.value.hint
