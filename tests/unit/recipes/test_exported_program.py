"""The recipe `exported-program`: which file, which sample."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from exporter.check.eager import eager_cases
from exporter.contract.errors import InvalidRequest, SourceNotFound
from exporter.contract.spec import SourcePolicy, Target
from exporter.recipes.exported_program import (
    ExportedProgramOptions,
    ExportedProgramRecipe,
    archive_name,
    made_up_sample,
)
from exporter.recipes.samples import TensorInput, config_samples, make_all
from exporter.source.resolve import resolve

PORTABLE = Target(backend="portable")


class Tree:
    """A source of which only the names matter."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def files(self) -> Mapping[str, int]:
        return dict.fromkeys(self._names, 1)


@pytest.mark.parametrize(
    ("names", "wanted", "found"),
    [
        (("model.pt2",), None, "model.pt2"),
        (("archive",), None, "archive"),
        (("notes.txt", "model.pt2"), None, "model.pt2"),
        (("a.pt2", "b.pt2"), "b.pt2", "b.pt2"),
    ],
)
def test_the_archive_is_the_only_one_or_the_one_named(names: tuple[str, ...], wanted: str | None, found: str) -> None:
    assert archive_name(Tree(*names), wanted) == found  # type: ignore[arg-type]


def test_no_guess_between_two_archives() -> None:
    with pytest.raises(InvalidRequest, match="2 files"):
        archive_name(Tree("a.pt2", "b.pt2"), None)  # type: ignore[arg-type]
    with pytest.raises(SourceNotFound, match=r"c\.pt2"):
        archive_name(Tree("a.pt2"), "c.pt2")  # type: ignore[arg-type]


class Model(torch.nn.Module):
    """Takes floats, integers, a number and a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)

    def forward(self, value: torch.Tensor, ids: torch.Tensor, scale: int, *, mask: torch.Tensor) -> torch.Tensor:
        return (value + self.embed(ids)) * scale * mask


def program(**settings: Any) -> torch.export.ExportedProgram:
    args = (torch.randn(3, 4), torch.tensor([1, 2, 3]), 5)
    return torch.export.export(Model().eval(), args, {"mask": torch.ones(3, 1)}, strict=False, **settings)


def test_a_made_up_sample_has_the_captured_shapes_and_runs() -> None:
    args, kwargs = made_up_sample(program())
    assert [tuple(value.shape) if isinstance(value, torch.Tensor) else value for value in args] == [(3, 4), (3,), 5]
    assert list(kwargs) == ["mask"]
    first, second = made_up_sample(program()), made_up_sample(program())
    assert torch.equal(first[0][0], second[0][0])  # type: ignore[arg-type]


def test_a_symbolic_size_has_a_value_that_is_allowed() -> None:
    rows = torch.export.Dim("rows", min=3, max=9)
    shapes = {"value": {0: rows}, "ids": {0: rows}, "scale": None, "mask": {0: rows}}
    args, kwargs = made_up_sample(program(dynamic_shapes=shapes))
    size = args[0].shape[0]  # type: ignore[attr-defined]
    assert 3 <= size <= 9
    assert args[1].shape == (size,)  # type: ignore[attr-defined]
    assert kwargs["mask"].shape == (size, 1)  # type: ignore[attr-defined]


def test_an_archive_with_its_own_sample(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(program(), tmp_path / "model.pt2")
    tree = resolve(str(tmp_path), SourcePolicy(roots=(str(tmp_path),)), lambda name: pytest.fail(name))
    captured = ExportedProgramRecipe().capture(tree, ExportedProgramOptions(method="run"), PORTABLE)
    (case,) = eager_cases(captured)
    assert case.method == "run"
    assert torch.equal(case.inputs[1], torch.tensor([1, 2, 3]))  # type: ignore[arg-type]
    options = ExportedProgramOptions(inputs=(TensorInput(dtype="float32", shape=(3, 4)),))
    with pytest.raises(InvalidRequest, match="4 inputs"):
        ExportedProgramRecipe().capture(tree, options, PORTABLE)


def test_samples_are_the_same_every_time_and_within_bounds() -> None:
    inputs = {
        "ids": TensorInput(dtype="int64", shape=(2, 50), low=3, high=5),
        "mask": TensorInput(dtype="bool", shape=(9,)),
    }
    first, second = make_all(inputs), make_all(inputs)
    assert torch.equal(first["ids"], second["ids"])
    assert set(first["ids"].unique().tolist()) == {3, 4, 5}
    assert first["mask"].dtype == torch.bool


def test_a_model_of_an_unknown_kind_of_input_asks_for_inputs() -> None:
    with pytest.raises(InvalidRequest, match="input_features") as caught:
        config_samples(object(), "input_features", 1, None)
    assert "inputs" in caught.value.hint


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [("bool", 0, 2), ("bool", -1, 1), ("uint8", -1, 1), ("int8", 0, 128), ("int64", 0, 2**63 - 1), ("int32", 5, 1)],
)
def test_a_sample_s_bounds_fit_its_dtype(dtype: str, low: int, high: int) -> None:
    with pytest.raises(ValidationError):
        TensorInput.model_validate({"dtype": dtype, "shape": (2,), "low": low, "high": high})
