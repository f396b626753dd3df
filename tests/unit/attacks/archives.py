"""A good `.pt2` archive to alter, and the means to alter it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from exporter.source.archive import Archive
from exporter.source.local import LocalTree

Members = dict[str, bytes]
MODEL = "models/model.json"
WEIGHTS = "data/weights/model_weights_config.json"
CONSTANTS = "data/constants/model_constants_config.json"
SAMPLES = "data/sample_inputs/model.pt"


class Victim(nn.Module):
    """A dynamic dimension, a keyword, a string, a branch, a buffer and a constant: something for each door."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: torch.Tensor, mode: str, *, bag: dict[str, torch.Tensor]) -> torch.Tensor:
        y = self.linear(x) + self.shift + torch.tensor([1.5])
        y = torch.cond(y.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (y,))
        return nn.functional.gelu(y, approximate="tanh") + bag["k"]


def save_victim(path: Path) -> None:
    """Export the victim and save it as torch does."""
    torch.manual_seed(0)
    rows = torch.export.Dim("rows", min=2, max=64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(
            Victim().eval(),
            (torch.randn(3, 4), "plain"),
            {"bag": {"k": torch.randn(4)}},
            dynamic_shapes={"x": {0: rows}, "mode": None, "bag": {"k": None}},
        )
        torch.export.save(program, path)


def read_members(path: Path) -> Members:
    """All members of an archive, without torch's own records."""
    archive = Archive(LocalTree(str(path), str(path), [str(path.parent)]).open(path.name), path.name)
    return {name: archive.read(name, 2**30) for name in archive.members() if not name.startswith(".data/")}


def write_members(path: Path, members: Members) -> None:
    """An archive written by PyTorch's own writer."""
    writer = torch._C.PyTorchFileWriter(str(path))
    for name, data in members.items():
        writer.write_record(name, data, len(data))
    writer.write_end_of_file()


def edit_json(members: Members, member: str, change: Callable[[Any], Any]) -> Members:
    """A copy of `members` with the JSON of one changed in place."""
    document = json.loads(members[member])
    change(document)
    return {**members, member: json.dumps(document).encode()}
