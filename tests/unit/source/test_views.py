"""Windows on large storages and tensors under two names are found, and told with names and figures."""

from __future__ import annotations

import torch
from torch import nn

from exporter.source.views import MIN_WASTE, find_views


class Sliced(nn.Module):
    """A 40 KiB slice of 32 MiB, beside a plain parameter and two halves of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.window = nn.Parameter(torch.zeros(8 * 2**20)[1024 : 1024 + 10 * 1024])
        self.plain = nn.Parameter(torch.zeros(1024, 1024))
        whole = torch.zeros(2, 1024, 512)
        self.first, self.second = nn.Parameter(whole[0]), nn.Parameter(whole[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.window.sum() + self.plain.sum() + self.first.sum() + self.second.sum()


class Listed(nn.Module):
    """A parameter that is reached through a list too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, 16))
        self.again = [self.table]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.table + x @ self.again[0]


def test_a_window_on_a_large_storage_is_told_with_its_ratio() -> None:
    program = torch.export.export(Sliced(), (torch.zeros(3),))
    (finding,) = find_views({"forward": program, "again": program})
    assert finding.code == "partial-storage"
    assert finding.details["tensors"] == ["window"]
    assert finding.details["usedBytes"] == 40 * 1024
    assert finding.details["storageBytes"] == 32 * 2**20
    assert finding.details["ratio"] == 819
    assert "window" in finding.message


def test_small_waste_and_ties_are_not_told() -> None:
    class Quiet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.zeros(MIN_WASTE // 8)[:4])
            self.two = nn.Linear(4, 4)
            self.tied = self.two.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(x) + self.one + self.tied.sum()

    assert find_views({"forward": torch.export.export(Quiet(), (torch.zeros(1, 4),))}) == []


def test_a_constant_that_shares_a_parameters_bytes_is_told() -> None:
    program = torch.export.export(nn.Linear(4, 4), (torch.zeros(1, 4),))
    program.constants["twin"] = program.state_dict["weight"]
    (finding,) = find_views({"forward": program})
    assert finding.code == "duplicate-tensor"
    assert finding.details["tensors"] == ["weight", "twin"]


def test_a_parameter_that_is_reached_through_a_list_is_told() -> None:
    (finding,) = find_views({"forward": torch.export.export(Listed(), (torch.zeros(1, 16),), strict=False)})
    assert finding.code == "duplicate-tensor"
    assert finding.details["tensors"] == ["table", "lifted_tensor_0"]
