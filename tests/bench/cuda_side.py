"""One measured process of `cuda_memory`: makes a checkpoint, or exports it one way. JSON on the last line.

python -m tests.bench.cuda_side generate|ours|upstream|upstream-strict|idle LAYERS VOCABULARY SOURCE [OUT] [verify]
"""

from __future__ import annotations

import gc
import hashlib
import json
import mmap
import os
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import BaseModel
from torch import nn
from torch.export import ExportedProgram, export
from torch.nn import functional as F

WIDTH, HIDDEN = 4096, 14336
DTYPE = torch.bfloat16
KV_LENGTH = int(os.environ.get("KV_LENGTH", "256"))


class Layer(nn.Module):
    """A gated MLP of a current decoder's size, 336 MiB of bf16, and a key cache."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kv_cache_k", torch.zeros(KV_LENGTH, WIDTH), persistent=False)
        self.norm = nn.RMSNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        self.kv_cache_k.index_copy_(0, pos, x)
        return x + self.kv_cache_k[:1].sum(0)


class Decoder(nn.Module):
    """Layers; with a vocabulary, an embedding before and a head after them."""

    def __init__(self, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.embed = nn.Embedding(vocabulary, WIDTH) if vocabulary else None
        self.head = nn.Linear(WIDTH, vocabulary, bias=False) if vocabulary else None

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers:
            x = layer(x, pos)
        return x if self.head is None else self.head(x)


def skeleton(layers: int, vocabulary: int) -> Decoder:
    """The model on the meta device, its caches as zeros that nobody has touched (torch.zeros writes them)."""
    with torch.device("meta"):
        model = Decoder(layers, vocabulary).to(DTYPE)
    for layer in model.layers:
        pages = mmap.mmap(-1, 2 * KV_LENGTH * WIDTH, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        layer.kv_cache_k = torch.frombuffer(pages, dtype=DTYPE).view(KV_LENGTH, WIDTH)
    return model.eval()


def example(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample inputs."""
    torch.manual_seed(0)
    x = torch.tensor([7]) if vocabulary else torch.randn(1, WIDTH, dtype=DTYPE)
    return x, torch.tensor([3])


def generate(layers: int, vocabulary: int, path: Path) -> None:
    """Write random weights as safetensors, one tensor in memory at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = dict(skeleton(layers, vocabulary).state_dict())
    header, at = {}, 0
    for name, tensor in state.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in state.values():
            values = torch.empty(tensor.shape, dtype=DTYPE, device=device).normal_(0, 0.02).cpu()
            file.write(memoryview(values.view(torch.uint8).reshape(-1).numpy()))
    print(json.dumps({"source_bytes": path.stat().st_size}))


class BenchOptions(BaseModel):
    """Options of the recipe below."""

    layers: int
    vocabulary: int


class BenchRecipe:
    """The benchmark's model over a local safetensors file: mapped, captured without strict mode."""

    name: ClassVar[str] = "bench"
    description: ClassVar[str] = "The benchmark's decoder."
    Options: ClassVar[type[BaseModel]] = BenchOptions
    example: ClassVar[Mapping[str, Any]] = {}

    def availability(self) -> str | None:
        """Always."""
        return None

    def capture(self, tree: Any, options: BenchOptions, target: Any) -> Any:
        """The one method, with the file's tensors as they are mapped."""
        from exporter.source.captured import Captured
        from exporter.source.safetensors import SafetensorsWeights

        weights = SafetensorsWeights(tree)
        model = skeleton(options.layers, options.vocabulary)
        model.load_state_dict({name: weights.tensor(name) for name in weights.tensors()}, assign=True)
        model.requires_grad_(False)
        sample = example(options.vocabulary)
        with torch.no_grad():
            program = export(model, sample, strict=False)
        return Captured({"forward": program}, weights, {"forward": (sample, {})})


def ours(layers: int, vocabulary: int, source: Path, out: Path, verify: bool) -> dict[str, Any]:
    """The product's own process, with one more recipe; the store is `file://`."""
    from types import MappingProxyType

    from exporter.__main__ import run
    from exporter.contract.events import EventLog
    from exporter.contract.spec import ExportSpec
    from exporter.lowering.cuda import CudaLowering
    from exporter.recipes import registry

    registry.RECIPES = MappingProxyType({**registry.RECIPES, "bench": BenchRecipe()})
    seen: dict[str, Any] = {}
    lower = CudaLowering.lower

    def remembered(self: CudaLowering, captured: Any, progress: Any) -> Any:
        lowered = lower(self, captured, progress)
        seen.update(lowered.details)
        return lowered

    CudaLowering.lower = remembered  # type: ignore[method-assign]
    spec = ExportSpec.model_validate(
        {
            "id": "exp_01J00000000000000000000000",
            "attempt": 1,
            "createdAt": "2026-01-01T00:00:00Z",
            "request": {
                "recipe": "bench",
                "source": source.as_uri(),
                "options": {"layers": layers, "vocabulary": vocabulary},
                "target": {"backend": "cuda", "maxAutotune": True},
                "verify": verify,
            },
            "store": {"uri": out.as_uri()},
            "sources": {"roots": [str(source.parent)]},
        }
    )
    lines: list[bytes] = []
    status = run(spec, EventLog(lambda data: lines.append(bytes(data))))
    events = [json.loads(line) for line in b"".join(lines).splitlines()]
    if status:
        print(json.dumps(events[-1]), file=sys.stderr)
        raise SystemExit(status)
    manifest = json.loads(next(out.rglob("manifest.json")).read_bytes())
    segments = [
        (name["key"], segment["size"], segment["digest"].removeprefix("sha256:"))
        for data in manifest["data"]
        for segment in data["segments"]
        for name in segment["names"]
    ]
    return {
        "gpu_peak_gib": round(seen["gpuPeakAllocatedBytes"] / 2**30, 3),
        "stored_bytes": manifest["resources"]["bytesUploaded"] + manifest["program"]["size"],
        "largest_kernel": seen["largestKernel"],
        "stages_s": {item["name"]: item["milliseconds"] / 1000 for item in manifest["resources"]["stages"]},
        "verification": [item.get("maxRelativeError") or item["status"] for item in manifest["verification"]],
        "segments": segments,
    }


def upstream(layers: int, vocabulary: int, source: Path, out: Path, strict: bool) -> dict[str, Any]:
    """ExecuTorch 1.5.1 with low_memory_mode. Strict: weights in host memory first, as its example exporters do."""
    from executorch.backends.cuda.cuda_backend import CudaBackend
    from executorch.backends.cuda.cuda_partitioner import CudaPartitioner
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
    from executorch.exir.backend.compile_spec_schema import CompileSpec
    from executorch.exir.passes import MemoryPlanningPass
    from safetensors.torch import load_file
    from torch._inductor import config

    state = load_file(source)
    if strict:
        state = {name: tensor.clone() for name, tensor in state.items()}
    model = skeleton(layers, vocabulary)
    model.load_state_dict(state, assign=True)
    del state
    config.aot_inductor.compile_wrapper_opt_level = "O0"
    with torch.no_grad():
        program: ExportedProgram | None = export(model, example(vocabulary), strict=strict)
    del model
    gc.collect()
    specs = [CudaBackend.generate_method_name_compile_spec("forward"), CompileSpec("low_memory_mode", b"ON")]
    edge = to_edge_transform_and_lower(
        {"forward": program},
        partitioner={"forward": [CudaPartitioner(specs)]},
        compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
    )
    program = None
    gc.collect()
    manager = edge.to_executorch(
        ExecutorchBackendConfig(
            extract_delegate_segments=True,
            memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False),
            emit_mutable_buffer_names=True,
        )
    )
    del edge
    gc.collect()
    out.mkdir(parents=True, exist_ok=True)
    with (out / "model.pte").open("wb") as file:
        manager.write_to_file(file)
    manager.write_tensor_data_to_file(str(out))
    return {"gpu_peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3)}


def ptd_segments(path: Path) -> list[tuple[str, int, str]]:
    """(key, size, SHA-256) of every name in a `.ptd`."""
    from executorch.extension.flat_tensor.serialize.serialize import FlatTensorHeader, _deserialize_to_flat_tensor

    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header = FlatTensorHeader.from_bytes(data[8 : 8 + FlatTensorHeader.EXPECTED_LENGTH])
        tensors = _deserialize_to_flat_tensor(data[: header.flatbuffer_offset + header.flatbuffer_size])
        view = memoryview(data)
        digests = []
        for segment in tensors.segments:
            start = header.segment_base_offset + segment.offset
            digests.append((segment.size, hashlib.sha256(view[start : start + segment.size]).hexdigest()))
        view.release()
        return [(item.key, *digests[item.segment_index]) for item in tensors.named_data]


def idle() -> dict[str, Any]:
    """The tree's baseline: torch, executorch, a CUDA context and the warm compile workers, nothing exported."""
    import executorch.backends.cuda.cuda_partitioner
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.warm_pool()
    AsyncCompile.wait_pool_ready()
    torch.zeros(1, device="cuda")
    time.sleep(5)
    return {"gpu_peak_gib": 0.0, "threads": torch._inductor.config.compile_threads, "at": executorch.__path__[0][-20:]}


def main() -> None:
    """Do what the command line says."""
    side, layers, vocabulary, source = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]).absolute()
    if side == "generate":
        generate(layers, vocabulary, source)
        return
    out = Path(sys.argv[5]).absolute()
    started = time.monotonic()
    if side == "ours":
        figures = ours(layers, vocabulary, source, out, "verify" in sys.argv[6:])
    elif side == "idle":
        figures = idle()
    else:
        figures = upstream(layers, vocabulary, source, out, side == "upstream-strict")
    figures["export_s"] = round(time.monotonic() - started, 2)
    if side.startswith("upstream") and os.environ.get("SEGMENTS") == "1":
        hashing = time.monotonic()
        figures["segments"] = ptd_segments(next(out.glob("*.ptd")))
        figures["hash_s"] = round(time.monotonic() - hashing, 2)
    print(json.dumps(figures), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
