"""Small programs whose CUDA export is compared with upstream's: each function gives one program per method.

The first group is captured with `Program`: its weights exist only in a source, and the programs' own memory is filled
with NaN, so that any value that leaks from there shows. The others hold their weights, as upstream's exporters do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export
from torch.nn import functional as F

Programs = dict[str, ExportedProgram]
Samples = dict[str, tuple[tuple[object, ...], dict[str, object]]]


class Block(nn.Module):
    """A gated MLP with a residual, as in current decoders."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Plain(nn.Module):
    """Two blocks and a key cache that the forward pass writes."""

    def __init__(self, width: int = 64, hidden: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(layers))
        self.register_buffer("kv_cache_k", torch.zeros(layers, 32, width))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            cache = self.kv_cache_k[index]
            cache.index_copy_(0, pos, x)
            x = x + cache.sum(0)
        return x


class Tied(nn.Module):
    """An embedding whose weight is the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, 64)
        self.block = Block(64, 128)
        self.head = nn.Linear(64, 512, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(tokens)))


class Views(nn.Module):
    """Parameters that are slices, permutations and expansions; buffers that are changed, and not zero; constants."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.randn(4, 64, 64) * 0.1
        self.sliced = nn.Parameter(base[1:3, ::2], requires_grad=False)
        self.permuted = nn.Parameter((torch.randn(64, 96) * 0.1).t(), requires_grad=False)
        self.expanded = nn.Parameter(torch.randn(64, 1).expand(64, 48), requires_grad=False)
        self.register_buffer("table", torch.randn(16, 64))
        self.register_buffer("running", torch.randn(16, 64))
        self.register_buffer("kv_cache_constant", torch.randn(16, 64))
        self.constant = torch.randn(32, 64)
        self.scale = nn.Parameter(torch.tensor(1.5), requires_grad=False)

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x * self.scale + self.table[pos] + self.kv_cache_constant.sum(0) * 0.01
        self.running.index_copy_(0, pos, x)
        x = x + self.running.mean(0) + self.constant.sum(0) * 0.01
        y = x @ self.sliced[0].t() + x @ self.sliced[1].t()
        return x @ self.permuted.t(), y.sum(-1, keepdim=True) * (x @ self.expanded)


class Cached(nn.Module):
    """Attention over a cache, for one prefill and one decode method."""

    def __init__(self, width: int = 64, heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.heads, self.length = heads, length
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        for name in ("k", "v"):
            self.register_buffer(f"kv_cache_{name}", torch.zeros(1, heads, length, width // heads))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        batch, steps, width = x.shape
        split = [part.view(batch, steps, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]
        self.kv_cache_k.index_copy_(2, pos, split[1])
        self.kv_cache_v.index_copy_(2, pos, split[2])
        mask = torch.arange(self.length, device=x.device)[None, :] <= pos[:, None]
        attended = F.scaled_dot_product_attention(
            split[0], self.kv_cache_k, self.kv_cache_v, attn_mask=mask[None, None]
        )
        return self.out(attended.transpose(1, 2).reshape(batch, steps, width))


def plain(dtype: torch.dtype = torch.bfloat16) -> tuple[Programs, Samples]:
    """A plain model."""
    model = Plain().to(dtype).eval()
    sample = (torch.randn(1, 64, dtype=dtype), torch.tensor([3]))
    return {"forward": export(model, sample)}, {"forward": (sample, {})}


def tied() -> tuple[Programs, Samples]:
    """A tied one, with a dynamic number of tokens."""
    model = Tied().to(torch.bfloat16).eval()
    sample = (torch.randint(0, 512, (1, 8)),)
    program = export(model, sample, dynamic_shapes=({1: Dim("tokens", min=2, max=64)},))
    return {"forward": program}, {"forward": (sample, {})}


def views() -> tuple[Programs, Samples]:
    """Sliced, permuted and expanded parameters, mutated and constant buffers."""
    model = Views().eval()
    sample = (torch.randn(1, 64), torch.tensor([5]))
    return {"forward": export(model, sample)}, {"forward": (sample, {})}


def two_methods() -> tuple[Programs, Samples]:
    """Prefill (dynamic length) and decode, sharing weights and a cache."""
    model = Cached().to(torch.bfloat16).eval()
    long = (torch.randn(1, 8, 64, dtype=torch.bfloat16), torch.arange(8))
    one = (torch.randn(1, 1, 64, dtype=torch.bfloat16), torch.tensor([8]))
    steps = Dim("steps", min=2, max=32)
    prefill = export(model, long, dynamic_shapes=({1: steps}, {0: steps}))
    return {"prefill": prefill, "decode": export(model, one)}, {"prefill": (long, {}), "decode": (one, {})}


def int8() -> tuple[Programs, Samples]:
    """torchao int8 weights: wrapper subclasses that stay in the exported program's state."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64)).to(torch.bfloat16).eval()
    quantize_(model, Int8WeightOnlyConfig())
    sample = (torch.randn(2, 64, dtype=torch.bfloat16),)
    return {"forward": export(model, sample)}, {"forward": (sample, {})}


def int4() -> tuple[Programs, Samples]:
    """torchao int4 weights in the packing of `_weight_int4pack_mm`; packed on the GPU."""
    from torchao.quantization import Int4WeightOnlyConfig, quantize_

    model = nn.Sequential(nn.Linear(1024, 256, bias=False), nn.SiLU(), nn.Linear(256, 128, bias=False))
    model = model.to(torch.bfloat16).eval().to("cuda")
    quantize_(model, Int4WeightOnlyConfig(group_size=128, int4_packing_format="tile_packed_to_4d"))
    sample = (torch.randn(2, 1024, dtype=torch.bfloat16),)
    return {"forward": export(model.to("cpu"), sample, strict=True)}, {"forward": (sample, {})}


def _without_torchtune() -> None:
    """Register `executorch.extension.llm.modules` without running it: it imports torchtune, its submodules do not."""
    import executorch.extension.llm as parent

    name = "executorch.extension.llm.modules"
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [str(Path(folder) / "modules") for folder in parent.__path__]
        sys.modules[name] = package


class _Seen(Exception):
    def __init__(self, programs: Programs) -> None:
        super().__init__("captured")
        self.programs = programs


@contextmanager
def _stop_at_lowering() -> Iterator[None]:
    import executorch.exir

    def stop(programs: Any, **_: Any) -> None:
        raise _Seen(dict(programs) if isinstance(programs, dict) else {"forward": programs})

    with mock.patch.object(executorch.exir, "to_edge_transform_and_lower", stop):
        yield


def _captured(run: Callable[[], object]) -> tuple[Programs, Samples]:
    _without_torchtune()
    try:
        with _stop_at_lowering():
            run()
    except _Seen as seen:
        return seen.programs, {}
    raise AssertionError("upstream's exporter did not reach its lowering")


def muse_glimmer() -> tuple[Programs, Samples]:
    """Upstream's tiny Muse Glimmer, quantised in line (its tests build it)."""
    from dataclasses import replace

    from executorch.examples.models.muse_glimmer.export.export_solo import export_and_lower
    from executorch.examples.models.muse_glimmer.loaders.checkpoint_loader import _finalize
    from executorch.examples.models.muse_glimmer.tests import test_pipeline as tiny
    from executorch.extension.llm.export.quant import quantize_model

    config = replace(tiny.TINY_CONFIG)
    state = quantize_model(tiny.build_random_tiny_model(), tiny.DEFAULT_RECIPE)
    model = _finalize(state, "cuda", config, torch.bfloat16)
    return _captured(lambda: export_and_lower(model, config, "/nonexistent"))


def gemma4() -> tuple[Programs, Samples]:
    """Upstream's tiny Gemma 4."""
    from executorch.examples.models.gemma4_31b.cuda_packers import convert_quantized_tensors_for_cuda
    from executorch.examples.models.gemma4_31b.export import export_and_lower
    from executorch.examples.models.gemma4_31b.model import Gemma4_31B
    from executorch.examples.models.gemma4_31b.tests import test_pipeline as tiny
    from executorch.extension.llm.export.load import assign_state_dict
    from executorch.extension.llm.export.quant import quantize_model

    source = tiny.build_random_tiny_model()
    source.lm_head.weight = nn.Parameter(source.embed_tokens.weight.clone())
    state = quantize_model(source, tiny.DEFAULT_RECIPE)
    with torch.device("meta"):
        model = Gemma4_31B(tiny.TINY_CONFIG)
    assign_state_dict(model, state)
    convert_quantized_tensors_for_cuda(model)
    model.eval()
    return _captured(lambda: export_and_lower(model, tiny.TINY_CONFIG, "/nonexistent"))


def qwen35_moe() -> tuple[Programs, Samples]:
    """Upstream's tiny Qwen3.5-MoE with int4 experts and linears."""
    import executorch.backends.cuda.triton.kernels  # noqa: F401
    from executorch.examples.models.qwen3_5_moe import export as qwen
    from executorch.examples.models.qwen3_5_moe import test_quantize_roundtrip as tiny

    model = tiny._make_quantized_model("4w", "8w", 32)
    qwen._materialize_buffers(model, tiny.TINY_CONFIG)
    args = SimpleNamespace(output_dir="/nonexistent", backend="cuda")
    return _captured(lambda: qwen._export_cuda(model, tiny.TINY_CONFIG, args))


SOURCED: dict[str, Callable[[], tuple[Programs, Samples]]] = {
    "plain": plain,
    "tied": tied,
    "views": views,
    "two-methods": two_methods,
}
"""Cases whose weights come from a source."""
HELD: dict[str, Callable[[], tuple[Programs, Samples]]] = {
    "int8": int8,
    "int4": int4,
    "muse-glimmer": muse_glimmer,
    "gemma4": gemma4,
    "qwen3.5-moe": qwen35_moe,
}
"""Cases whose programs hold their weights."""
