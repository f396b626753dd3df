"""Exports one small model with upstream's low-memory mode and with phantom weights, compares, and runs both on the GPU.

    python -m tests.gpu.parity CASE            # one JSON line on standard output
    python -m tests.gpu.parity CASE as-upstream   # lowMemoryMode: false against upstream without low_memory_mode

Both sides lower the very same programs with the same Inductor settings, each in a compile folder of its own.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from exporter.check.aoti_check import AotiCheck
from exporter.check.ports import StoredArtifact
from exporter.contract.manifest import Data, Method, Program, SegmentInfo, SegmentKey, digest
from exporter.contract.objects import StoredObject
from exporter.contract.segments import Chunk, Segment
from exporter.contract.spec import Target
from exporter.lowering.canonical import canonical_chunks, canonical_layout
from exporter.lowering.cuda import CudaLowering, _external_entries, inductor_settings
from exporter.lowering.cuda_target import compile_specs
from exporter.lowering.scratch import compile_folder
from exporter.source.captured import Captured
from exporter.source.ports import TensorInfo
from exporter.source.program_copy import copy_program
from tests.gpu.models import HELD, SOURCED, Programs, Samples

TARGET = Target(backend="cuda", max_autotune=True)


class TensorSource:
    """A source over tensors of this process."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: self._info(name, tensor) for name, tensor in self._tensors.items()}

    @staticmethod
    def _info(name: str, tensor: torch.Tensor) -> TensorInfo:
        layout = canonical_layout(tensor)
        place = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
        return TensorInfo(name, layout.dtype_name, layout.shape, tuple(tensor.stride()), 0, layout.nbytes, place)

    def chunks(self, name: str) -> Iterator[Chunk]:
        return canonical_chunks(self._tensors[name])


class MemoryReads:
    """Objects in memory, for the check."""

    def __init__(self, objects: Mapping[str, bytes]) -> None:
        self._objects = objects

    def head(self, key: str) -> StoredObject | None:
        return StoredObject(key, len(self._objects[key])) if key in self._objects else None

    def read(self, key: str, offset: int, length: int) -> bytes:
        return self._objects[key][offset : offset + length]


class Quiet:
    """Progress that nobody reads."""

    def step(self, stage: str, method: str, done: int, total: int) -> None:
        print(f"{stage} {method} {done}/{total}", file=sys.stderr)


@dataclass(frozen=True)
class Exported:
    """One side's result: the program's bytes and the bytes of each segment's names."""

    program: bytes
    segments: Mapping[tuple[str, ...], bytes]
    seconds: float

    def digests(self) -> dict[str, tuple[int, str]]:
        """Size and SHA-256 by key; keys of library-local constants without their library's hash."""
        return {
            _stable(key): (len(body), hashlib.sha256(body).hexdigest())
            for keys, body in self.segments.items()
            for key in keys
        }


def _stable(key: str) -> str:
    # `{SHA-256 of the .so}_so_blob:_tensor_constant0`: the library itself is not deterministic.
    prefix, marker, rest = key.partition("_so_blob:")
    return prefix[: -len("0" * 64)] + "…" + rest if marker else key


def upstream(programs: Programs, target: Target = TARGET) -> Exported:
    """ExecuTorch's own export of `programs`."""
    from executorch.backends.cuda.cuda_partitioner import CudaPartitioner
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
    from executorch.exir.passes import MemoryPlanningPass

    started = time.monotonic()
    settings = inductor_settings() if target.low_memory_mode else nullcontext()
    with compile_folder(), settings:
        edge = to_edge_transform_and_lower(
            {name: copy_program(program) for name, program in programs.items()},
            partitioner={name: [CudaPartitioner(compile_specs(target, name))] for name in programs},
            compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
        )
        manager = edge.to_executorch(
            ExecutorchBackendConfig(
                extract_delegate_segments=True,
                memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False),
                emit_mutable_buffer_names=True,
            )
        )
        segments = {
            tuple(keys): data if isinstance(data, bytes) else data.to_bytes()
            for keys, data, _ in _external_entries(manager)
        }
        return Exported(manager.buffer, segments, time.monotonic() - started)


def ours(captured: Captured, target: Target = TARGET) -> tuple[Exported, dict[str, Any]]:
    """Our export, the segments read as the stream would read them."""
    started = time.monotonic()
    lowering = CudaLowering(target)
    lowering.preflight(captured)
    plan = lowering.plan(captured)
    lowered = lowering.lower(captured, Quiet())
    used = lowered.used or {}
    segments = {tuple(used[item.names[0].key]): _body(item) for item in plan.segments if item.names[0].key in used}
    segments |= {tuple(name.key for name in item.names): _body(item) for item in lowered.appended}
    program = b"".join(bytes(chunk) for chunk in lowered.program())
    unused = sum(item.size for item in plan.segments if item.names[0].key not in used)
    figures = {"details": dict(lowered.details), "planned": len(plan.segments), "unused_bytes": unused}
    return Exported(program, segments, time.monotonic() - started), figures


def _body(segment: Segment) -> bytes:
    return b"".join(bytes(chunk) for chunk in segment.read())


def emptied(programs: Programs) -> tuple[Programs, TensorSource]:
    """The programs with NaN in place of every parameter and of every buffer that is not zero, and a source of them."""
    source: dict[str, torch.Tensor] = {}
    hollow: dict[int, torch.Tensor] = {}
    result = {}
    for name, program in programs.items():
        result[name] = copy_program(program)
        table = result[name].state_dict
        for fqn, tensor in list(table.items()):
            if not torch.count_nonzero(tensor):
                continue
            source[fqn] = tensor.detach()
            if id(tensor) not in hollow:
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).fill_(torch.nan)
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                hollow[id(tensor)] = torch.nn.Parameter(made, requires_grad=False) if is_parameter else made
            table[fqn] = hollow[id(tensor)]
    return result, TensorSource(source)


def run_on_gpu(exported: Exported, captured: Captured, methods: Sequence[str]) -> dict[str, str]:
    """Relative error or reason per method, by the product's own check."""
    body, infos = bytearray(), []
    for keys, data in exported.segments.items():
        body += bytes(-len(body) % 128)
        infos.append(SegmentInfo(offset=len(body), size=len(data), digest=digest(data), names=tuple(map(_named, keys))))
        body += data
    stored = Data(
        name="aoti_cuda_blob.ptd",
        layout="flat-tensor/fqn",
        size=len(body),
        header_digest=digest(b""),
        header_size=0,
        urls=("w",),
        segment_base_offset=0,
        segments=tuple(infos),
    )
    program = Program(
        name="model.pte",
        media_type="application/octet-stream",
        digest=digest(exported.program),
        size=len(exported.program),
        urls=("p",),
        methods=tuple(Method(name=name) for name in methods),
    )
    with TemporaryDirectory() as folder:
        check = AotiCheck(MemoryReads({"p": exported.program, "w": bytes(body)}), Path(folder))
        check.prepare(captured)
        found = check.verify(StoredArtifact(program, "p", [("w", stored)]))
    return {item.method: item.max_relative_error or f"{item.status}: {item.reason}" for item in found}


def _named(key: str) -> SegmentKey:
    return SegmentKey(key=key)


def as_upstream(case: str) -> dict[str, Any]:
    """What is said of `lowMemoryMode: false`: programs, segments and whole data files, and upstream against itself."""
    torch.manual_seed(0)
    target = TARGET.model_copy(update={"low_memory_mode": False})
    programs, samples = SOURCED[case]()
    first, second = upstream(programs, target), upstream(programs, target)
    given, source = emptied(programs)
    result, _ = ours(Captured(given, source, samples), target)
    return {
        "case": f"{case}, lowMemoryMode false",
        "equal": result.digests() == first.digests(),
        "program_equal": result.program == first.program,
        "data_file_equal": _data_file(result) == _data_file(first),
        "upstream_program_equals_itself": first.program == second.program,
        "upstream_segments_equal_themselves": first.digests() == second.digests(),
        "keys": [len(first.digests()), len(result.digests())],
    }


def _data_file(exported: Exported) -> bytes:
    """The segments in their order, each aligned: what a data file holds behind its header."""
    body = bytearray()
    for data in exported.segments.values():
        body += bytes(-len(body) % 128) + data
    return bytes(body)


def images(exported: Exported) -> dict[str, Any]:
    """Kernel images by our reader and by cuobjdump, which is given each fat binary or cubin that it finds."""
    from exporter.check.aoti_program import find_delegates
    from exporter.check.kernel_images import kernel_images

    delegates = [item for found in find_delegates(exported.program).values() for item in found]
    mine = sorted({f"{image.kind} {image.arch}" for item in delegates for image in kernel_images(item.library)})
    theirs: set[str] = set()
    for item in delegates:
        theirs |= _cuobjdump(item.library)
    return {"ours": mine, "cuobjdump": sorted(theirs)}


def _cuobjdump(library: bytes) -> set[str]:
    tool = shutil.which("cuobjdump") or "/usr/local/cuda/bin/cuobjdump"
    marks = [(library.find(b"\x50\xed\x55\xba"), "fatbin"), (library.find(b"\x7fELF\x02\x01\x01\x33"), "cubin")]
    found = set()
    with TemporaryDirectory() as folder:
        for at, kind in marks:
            if at < 0:
                continue
            path = Path(folder) / f"kernel.{kind}"
            path.write_bytes(library[at:])
            for option, name in (("--list-elf", "sass"), ("--list-ptx", "ptx")):
                text = subprocess.run([tool, option, str(path)], capture_output=True, text=True, check=False).stdout
                found |= {f"{name} {arch}" for arch in re.findall(r"sm_\d+[a-z]?", text)}
    return found


def compare(case: str) -> dict[str, Any]:
    """All that is said of one case."""
    torch.manual_seed(0)
    if case in HELD:
        import executorch.backends.cuda.quantize_op_dispatch  # noqa: F401
        from torch._inductor import config

        # Both sides tune one candidate per matrix product: weights are compared, and these models have many shapes.
        config.test_configs.max_mm_configs = 1
        config.benchmark_epilogue_fusion = False
    programs, samples = {**SOURCED, **HELD}[case]()
    reference = upstream(programs)
    given, source = emptied(programs) if case in SOURCED else (programs, TensorSource({}))
    captured = Captured(given, source, samples, share_buffers=len(programs) > 1)
    result, figures = ours(captured)
    wanted, found = reference.digests(), result.digests()
    differing = sorted(key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key))
    report: dict[str, Any] = {
        "case": case,
        "keys": len(wanted),
        "segments": [len(reference.segments), len(result.segments)],
        "bytes": sum(len(body) for body in reference.segments.values()),
        "equal": not differing,
        "differing": differing[:20],
        "seconds": {"upstream": round(reference.seconds, 1), "ours": round(result.seconds, 1)},
        "program_bytes": [len(reference.program), len(result.program)],
        **figures,
    }
    if differing:
        again = upstream(programs).digests()
        report["upstream_differs_from_itself"] = sorted(key for key in wanted if wanted[key] != again.get(key))[:20]
    report["images"] = images(result)
    if samples:
        # How much two artifacts of upstream's differ in their error: the tuning is not deterministic.
        whole = Captured(programs, TensorSource({}), samples, share_buffers=len(programs) > 1)
        report["errors"] = _errors(reference, result, whole, captured, samples)
    return report


def _errors(
    reference: Exported, result: Exported, whole: Captured, captured: Captured, samples: Samples
) -> dict[str, Any]:
    found = {}
    for side, exported, of in (("upstream", reference, whole), ("ours", result, captured)):
        try:
            found[side] = run_on_gpu(exported, of, list(samples))
        except Exception as error:
            found[side] = {"failure": f"{type(error).__name__}: {error}"[:500]}
    return found


if __name__ == "__main__":
    run = as_upstream if sys.argv[2:] == ["as-upstream"] else compare
    print("PARITY " + json.dumps(run(sys.argv[1])), flush=True)
