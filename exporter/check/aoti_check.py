"""Runs a stored CUDA artifact on the GPU and compares it with eager.

ExecuTorch's Python runtime has no CUDA back end, but torch can run what was exported: the `.so` is named data of the
program, its constants are the segments of the stored `.ptd`. Every byte of both is read back by range and compared
with its digest on the way; the weights go through a pipe to a child process (`exporter.check.aoti_child`), which holds
them on the GPU and nowhere else. Eager runs here, on the GPU too, with weights from the source.

Host memory: two chunks of 8 MiB and the program, whatever the model's size. GPU memory: the weights once, at two times.
"""

from __future__ import annotations

import gc
import hashlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import save_file
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from exporter.check.aoti_program import Delegate, find_delegates
from exporter.check.eager import flat_inputs
from exporter.check.kernel_images import uncovered
from exporter.check.ports import Reads, StoredArtifact
from exporter.contract.errors import VerificationFailed
from exporter.contract.manifest import Data, Verification
from exporter.contract.segments import Chunk
from exporter.source.captured import Captured
from exporter.source.program_copy import copy_program

CHUNK = 8 * 2**20
REQUEST = "request.json"
TENSORS = "cases.safetensors"
SPARE_GPU_BYTES = 512 * 2**20
"""GPU memory left for activations and the CUDA context when deciding whether the weights fit."""
_MAX_REPLY = 2**20


class AotiCheck:
    """Checks CUDA artifacts against eager on the GPU.

    `gpu_limit` is the export's budget in bytes, None without one; `arch` what its target asks for, which the kernel
    images must cover.
    """

    def __init__(
        self, reads: Reads, scratch: Path, *, gpu_limit: int | None = None, arch: tuple[str, ...] = ()
    ) -> None:
        self._reads = reads
        self._scratch = scratch
        self._limit = gpu_limit
        self._arch = arch
        self._captured: Captured | None = None

    def prepare(self, captured: Captured) -> None:
        """Remember what to compare with. Nothing runs before the compile, so that its GPU peak is its own."""
        self._captured = captured

    def verify(self, artifact: StoredArtifact) -> Sequence[Verification]:
        """The outcome per method. `VerificationFailed` where stored bytes or outputs differ.

        A method that cannot run here (weights larger than the GPU, kernels of ExecuTorch's own runtime, no sample) is
        ``skipped`` with the reason; its segments are compared with their digests all the same.
        """
        program = self._read_program(artifact)
        delegates = find_delegates(program)
        self._check_images(delegates)
        reason = self._cannot_run(artifact, delegates)
        if reason is not None:
            for key, data in artifact.data:
                self._send(key, data, {}, None)
            return [
                Verification(method=item.name, status="skipped", reason=reason) for item in artifact.program.methods
            ]
        assert self._captured is not None
        folder = Path(tempfile.mkdtemp(prefix="verify-", dir=self._scratch))
        try:
            cases = self._eager(self._captured, delegates)
            return self._compare(folder, artifact, delegates, cases)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _read_program(self, artifact: StoredArtifact) -> bytes:
        wanted = artifact.program
        body = bytearray()
        for offset in range(0, wanted.size, CHUNK):
            body += self._reads.read(artifact.program_key, offset, min(CHUNK, wanted.size - offset))
        if f"sha256:{hashlib.sha256(body).hexdigest()}" != wanted.digest:
            raise _failed(
                "changed", wanted.name, f"{wanted.name} differs from what was sent: its SHA-256 is another one"
            )
        return bytes(body)

    def _check_images(self, delegates: Mapping[str, list[Delegate]]) -> None:
        for method, found in delegates.items():
            for delegate in found:
                missing = uncovered(delegate.library, self._arch)
                if missing:
                    raise VerificationFailed(
                        f"the kernels of method {method} do not run on {', '.join(missing)}, which the target asks for",
                        stage="verifying",
                        kind="arch",
                    )

    def _cannot_run(self, artifact: StoredArtifact, delegates: Mapping[str, list[Delegate]]) -> str | None:
        if self._captured is None or not self._captured.samples:
            return "no sample inputs"
        if not torch.cuda.is_available():
            return "no GPU"
        if any(len(found) != 1 for found in delegates.values()):
            return "a method is split into several delegates"
        if any(found[0].inputs is None for found in delegates.values()):
            return "a method has operators outside of its delegate"
        needed = sum(segment.size for _, data in artifact.data for segment in data.segments) + SPARE_GPU_BYTES
        free = torch.cuda.mem_get_info()[0]
        if needed > free:
            return f"the weights need {needed} bytes of GPU memory, {free} are free"
        if self._limit is not None and needed > self._limit:
            return f"the weights need {needed} bytes of GPU memory, the budget is {self._limit}"
        return None

    def _eager(self, captured: Captured, delegates: Mapping[str, list[Delegate]]) -> list[_Case]:
        shared: dict[str, torch.Tensor] = {}
        cases = []
        for method, program in captured.programs.items():
            if method in captured.samples and method in delegates:
                state = shared if captured.share_buffers else {}
                cases.append(_run_eager(method, program, captured, state))
                gc.collect()
                torch.cuda.empty_cache()
        return cases

    def _compare(
        self,
        folder: Path,
        artifact: StoredArtifact,
        delegates: Mapping[str, list[Delegate]],
        cases: Sequence[_Case],
    ) -> Sequence[Verification]:
        assert self._captured is not None
        used = {method: found[0] for method, found in delegates.items() if any(case.method == method for case in cases)}
        keys = list(dict.fromkeys(constant.key for delegate in used.values() for constant in delegate.constants))
        order = self._stored_order(artifact, keys)
        written = {
            name
            for program in self._captured.programs.values()
            for name in program.graph_signature.buffers_to_mutate.values()
        }
        _write_request(folder, used, cases, order, written)
        command = [sys.executable, "-m", "exporter.check.aoti_child", str(folder)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            try:
                for key, data in artifact.data:
                    self._send(key, data, set(order), child.stdin)
                child.stdin.close()
            except BrokenPipeError:
                pass  # what the child says and how it ended tell more
            except BaseException:
                child.kill()
                raise
            reply = child.stdout.read(_MAX_REPLY).decode("utf-8", "replace")
            status = child.wait()
        return _outcome(reply.splitlines(), status, artifact, cases)

    @staticmethod
    def _stored_order(artifact: StoredArtifact, keys: list[str]) -> dict[str, list[str]]:
        """For each segment that is needed, in stored order: its first name and the needed keys that it holds."""
        wanted, order = set(keys), {}
        for _, data in artifact.data:
            for segment in data.segments:
                held = [name.key for name in segment.names if name.key in wanted]
                if held:
                    order[segment.names[0].key] = held
        missing = wanted - {key for held in order.values() for key in held}
        if missing:
            raise _failed("incomplete", "", f"the program asks for {sorted(missing)[0]}, which no stored data file has")
        return order

    def _send(self, key: str, data: Data, wanted: set[str] | dict[str, Any], sink: IO[bytes] | None) -> None:
        """Read a data file back, compare header, segments and gaps, and write wanted segments to `sink`."""
        stored = self._reads.head(key)
        if stored is None or stored.size != data.size:
            size = "absent" if stored is None else f"{stored.size} bytes"
            raise _failed("truncated", data.name, f"{data.name} is {size} in the store, {data.size} bytes were sent")
        header = self._read_checked(key, 0, data.header_size or 0, data.header_digest, data.name, "its header", None)
        at = header
        for segment in data.segments:
            start = data.segment_base_offset + segment.offset
            self._check_gap(key, at, start, data.name)
            target = sink if segment.names[0].key in wanted else None
            what = segment.names[0].fqn or segment.names[0].key
            at = start + self._read_checked(key, start, segment.size, segment.digest, data.name, what, target)

    def _read_checked(
        self, key: str, start: int, size: int, wanted: str, name: str, what: str, sink: IO[bytes] | None
    ) -> int:
        digest = hashlib.sha256()
        for offset in range(0, size, CHUNK):
            chunk = self._reads.read(key, start + offset, min(CHUNK, size - offset))
            digest.update(chunk)
            if sink is not None:
                sink.write(chunk)
        if f"sha256:{digest.hexdigest()}" != wanted:
            raise _failed("changed", name, f"{name} was changed in the store: {what} differs from what was sent")
        return size

    def _check_gap(self, key: str, start: int, end: int, name: str) -> None:
        for offset in range(start, end, CHUNK):
            length = min(CHUNK, end - offset)
            if self._reads.read(key, offset, length) != bytes(length):
                raise _failed("header", name, f"{name} was changed in the store: the padding is not zero")


@dataclass(frozen=True, slots=True)
class _Case:
    method: str
    inputs: tuple[object, ...]
    outputs: tuple[object, ...]


def _failed(kind: str, name: str, message: str) -> VerificationFailed:
    return VerificationFailed(message, stage="verifying", kind=kind, file=name)


def _run_eager(method: str, program: ExportedProgram, captured: Captured, state: dict[str, torch.Tensor]) -> _Case:
    """One method on the GPU, weights from the source; outputs on the host. Mutated buffers stay in `state`."""
    from torch.export.passes import move_to_device_pass

    args, kwargs = captured.samples[method]
    infos = captured.weights.tensors()

    def loaded(fqn: str, tensor: torch.Tensor) -> torch.Tensor:
        values = _on_gpu(tensor, partial(captured.weights.chunks, fqn), fqn in infos)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        return torch.nn.Parameter(values, requires_grad=False) if is_parameter else values

    moved = move_to_device_pass(copy_program(program, loaded), "cuda")
    module = moved.module(check_guards=False)
    for name in program.graph_signature.buffers_to_mutate.values():
        owner, _, leaf = name.rpartition(".")
        holder = module.get_submodule(owner)
        state.setdefault(name, holder.get_buffer(leaf).detach().clone())
        holder._buffers[leaf] = state[name]
    on_gpu = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("cuda"), (args, dict(kwargs)))
    with torch.no_grad():
        outputs = module(*on_gpu[0], **on_gpu[1])
    host = tuple(value.cpu() if isinstance(value, torch.Tensor) else value for value in pytree.tree_leaves(outputs))
    return _Case(method, flat_inputs(program, args, kwargs), host)


def _on_gpu(tensor: torch.Tensor, read: Callable[[], Iterator[Chunk]], from_source: bool) -> torch.Tensor:
    if not from_source or tensor.numel() == 0:
        return tensor.detach().to("cuda")
    made = torch.empty_like(tensor, device="cuda", requires_grad=False)
    flat = torch.empty(0, dtype=torch.uint8, device="cuda").set_(
        made.untyped_storage(), 0, (made.untyped_storage().nbytes(),), (1,)
    )
    at = 0
    for chunk in read():
        piece = torch.frombuffer(bytearray(chunk), dtype=torch.uint8)
        flat[at : at + len(piece)].copy_(piece)
        at += len(piece)
    return made


def _write_request(
    folder: Path,
    used: Mapping[str, Delegate],
    cases: Sequence[_Case],
    order: Mapping[str, list[str]],
    written: set[str],
) -> None:
    """Write what the child reads before the weights come: `request.json`, the libraries, tensors. Nothing pickled.

    `written` are FQNs of buffers that a method changes: equal ones are stored once, but each needs memory of its own.
    """
    tensors: dict[str, torch.Tensor] = {}

    def encode(values: Sequence[object]) -> list[str]:
        names = []
        for value in values:
            if isinstance(value, torch.Tensor):
                names.append(str(len(tensors)))
                tensors[names[-1]] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return names

    methods = []
    for index, case in enumerate(cases):
        delegate = used[case.method]
        library = f"{index}.so"
        (folder / library).write_bytes(delegate.library)
        methods.append(
            {
                "method": case.method,
                "library": library,
                "inputs": encode([case.inputs[position] for position in delegate.inputs or ()]),
                "outputs": encode([case.outputs[position] for position in delegate.outputs or ()]),
                "constants": [constant.as_dict() for constant in delegate.constants],
            }
        )
    sizes = {constant.key: constant.nbytes for delegate in used.values() for constant in delegate.constants}
    fqns = {constant.key: constant.fqn for delegate in used.values() for constant in delegate.constants}
    storages = [
        {"size": sizes[held[0]], "keys": held, "own": [key for key in held if fqns[key] in written]}
        for held in order.values()
    ]
    save_file(tensors, folder / TENSORS)
    (folder / REQUEST).write_text(json.dumps({"methods": methods, "storages": storages}), encoding="utf-8")


def _outcome(
    lines: Sequence[str], status: int, artifact: StoredArtifact, cases: Sequence[_Case]
) -> Sequence[Verification]:
    doing, failure, found = "starting", "", dict[str, Verification]()
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        doing, failure = record.get("doing", doing), record.get("failure", failure)
        if "method" not in record:
            continue
        name = record["method"]
        if "error" in record:
            found[name] = Verification(
                method=name, status="passed", max_relative_error=record["error"], against="eager"
            )
        elif "skipped" in record:
            found[name] = Verification(method=name, status="skipped", reason=record["skipped"])
    if status < 0:
        name = signal.Signals(-status).name
        raise VerificationFailed(
            f"the stored program died of {name} on the GPU while {doing}", kind="crashed", signal=name
        )
    if failure or status:
        raise VerificationFailed(failure or f"the check ended with status {status} while {doing}", kind="runtime")
    return [
        found.get(item.name) or Verification(method=item.name, status="skipped", reason="no sample inputs")
        for item in artifact.program.methods
    ]
