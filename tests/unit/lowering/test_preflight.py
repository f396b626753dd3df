"""Operators that the CUDA runtime has no kernel for are named before any compile; no other is."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import export
from torch.nn import functional as F

from exporter.contract.errors import UnsupportedModel
from exporter.lowering.preflight import check_operators

pytest.importorskip("triton", reason="the CUDA back end imports triton")
pytestmark = pytest.mark.filterwarnings("ignore")


class Decoder(nn.Module):
    """Much of what models do and the back end compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.linear = nn.Linear(64, 64)
        self.conv = nn.Conv1d(64, 64, 3)
        self.norms = nn.ModuleList([nn.LayerNorm(64), nn.RMSNorm(64)])
        self.register_buffer("cache", torch.zeros(8, 64))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.norms[1](self.norms[0](self.embed(x)) + self.linear(self.embed(x)))
        self.cache.index_copy_(0, pos, h[0, :1])
        q = h.view(1, -1, 4, 16).transpose(1, 2)
        a = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).reshape(1, -1, 64)
        top, index = torch.topk(a, 4)
        ordered, _ = torch.sort(a, dim=-1, stable=True)
        mixed = torch.gather(a, 2, index) + torch.scatter(a, 2, index, top)[..., :4]
        masked = torch.where(torch.tril(torch.ones(4, 4, dtype=torch.bool)), 1.0, 0.0)
        picked = torch.argmax(F.softmax(torch.bmm(a, a.transpose(1, 2)), -1))
        return self.conv(a.transpose(1, 2)), ordered, mixed, masked, picked, torch.cumsum(a, 1), F.one_hot(pos, 8)


class Unsupported(nn.Module):
    """Leaves of decompositions and operators themselves."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.fft.rfft(x).abs(), torch.linalg.svdvals(x), torch.histc(x), torch.cdist(x, x)


class Branches(nn.Module):
    """The operator is inside a branch of a condition."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y + torch.histc(y, bins=4), (x,))


@pytest.mark.parametrize("triton", [True, False])
def test_supported_operators_pass(triton: bool) -> None:
    program = export(Decoder().eval(), (torch.randint(0, 100, (1, 9)), torch.tensor([3])))
    check_operators("forward", program, triton=triton)


def test_unsupported_operators_are_named() -> None:
    program = export(Unsupported(), (torch.randn(4, 4),))
    with pytest.raises(UnsupportedModel) as caught:
        check_operators("encode", program, triton=True)
    assert caught.value.details["method"] == "encode"
    assert caught.value.details["operators"] == [
        "aten._cdist_forward.default",
        "aten._fft_r2c.default",
        "aten._linalg_svd.default",
        "aten.histc.default",
    ]
    assert "encode" in caught.value.message


def test_operators_inside_branches_are_found() -> None:
    program = export(Branches(), (torch.randn(4, 4),))
    with pytest.raises(UnsupportedModel, match=r"aten\.histc"):
        check_operators("forward", program, triton=True)
