"""The exporter process: `python -m exporter run` performs one export, `python -m exporter doctor` names what is here.

Concrete parts are built here and nowhere else. Nothing heavy is imported before file descriptor 1 was moved away: event
lines are the only thing that is written to it, whatever a library prints.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from exporter.contract.errors import Cancelled, InvalidRequest, WeightlessError
from exporter.contract.events import EventLog
from exporter.contract.spec import ExportSpec
from exporter.failures import classify
from exporter.interruption import CANCELLED_STATUS, Interrupted, Interruption
from exporter.meter import Meter, gpu_reader, process_tree

if TYPE_CHECKING:
    from exporter.lowering.ports import Lowering
    from exporter.pipeline import Parts
    from exporter.ports import Check, Store
    from exporter.reporting import Stages
    from exporter.source.ports import ObjectReads

MAX_SPEC = 4 * 2**20
"""Bytes that a spec may have; a request is at most 1 MiB."""
SUCCEEDED, FAILED, BAD_SPEC = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run the command; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m exporter", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run_parser = commands.add_parser("run", help="perform one export; the spec is JSON on standard input")
    run_parser.add_argument("--spec-env", metavar="NAME", help="read the spec from this environment variable instead")
    run_parser.add_argument("--framed", action="store_true", help="start event lines with U+001E (RFC 7464)")
    doctor_parser = commands.add_parser("doctor", help="describe this machine")
    doctor_parser.add_argument("--json", action="store_true", help="one JSON object (contract.machine.MachineReport)")
    options = parser.parse_args(arguments)
    output = _take_output()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("botocore").setLevel(logging.WARNING)
    if options.command == "doctor":
        return _doctor(output, as_json=options.json)
    events = EventLog(partial(_write_all, output), framed=options.framed)
    try:
        spec = _read_spec(options.spec_env)
    except InvalidRequest as error:
        events.emit("failed", error=error.as_dict())
        return BAD_SPEC
    return run(spec, events)


def run(spec: ExportSpec, events: EventLog) -> int:
    """Perform one export; the exit status. The terminal event is written in any case."""
    os.umask(0o077)
    if not spec.request.source.lower().startswith("hf:"):
        os.environ["HF_HUB_OFFLINE"] = "1"
    with _scratch_folder() as scratch:
        attempt = _Attempt(spec, events, scratch)
        error = attempt.run()
    if error is None:
        return SUCCEEDED
    events.emit("failed", error=error.as_dict())
    return CANCELLED_STATUS if isinstance(error, Cancelled) else FAILED


class _Attempt:
    """One export with its interruption and its meter around it."""

    def __init__(self, spec: ExportSpec, events: EventLog, scratch: Path) -> None:
        self._spec = spec
        self._events = events
        self._scratch = scratch
        self._stages: Stages | None = None
        self._parts: Parts | None = None
        self._interruption = Interruption(self._clean_up, self._report)
        self._meter = Meter(events, spec.request.budgets, scratch, self._interruption.request, gpu_reader())

    def run(self) -> WeightlessError | None:
        """What stopped the export, None if it is committed."""
        failure: BaseException | None = None
        try:
            self._interruption.install()
            self._meter.start()
            self._parts = self._build()
            self._interruption.check()
            _export(self._spec, self._parts)
        except BaseException as error:
            failure = error
        self._interruption.end()
        self._meter.stop()
        if failure is None:
            return None
        return classify(self._interruption.error or _cause(failure), self._stage())

    def _build(self) -> Parts:
        """The concrete parts. `InvalidRequest` for an unknown recipe, its options, or the store's URI.

        The store and the source come first: they need no torch, whose import takes seconds, and most refusals are
        theirs.
        """
        from exporter.reporting import Stages
        from exporter.source.resolve import resolve
        from exporter.store.open import open_store

        request = self._spec.request
        store = open_store(self._spec.store)
        self._stages = stages = Stages(self._events, self._meter, self._interruption)
        stages.start("resolving")
        with self._meter.stage("resolving"):
            tree = resolve(request.source, self._spec.sources, self._bucket)

        from exporter.attempt import Rollback
        from exporter.pipeline import Parts
        from exporter.recipes.registry import find_recipe, parse_options
        from exporter.toolchain import toolchain

        recipe = find_recipe(request.recipe)
        options = parse_options(recipe, request.options)
        return Parts(
            store=store,
            resolve=lambda uri: tree,
            capture=partial(recipe.capture, options=options, target=request.target),
            lowering=_lowering(self._spec),
            check=_check(self._spec, store, self._scratch),
            events=self._events,
            stages=stages,
            meter=self._meter,
            interruption=self._interruption,
            rollback=Rollback(store),
            toolchain=toolchain(),
        )

    def _bucket(self, name: str) -> ObjectReads:
        from exporter.store.s3_reads import S3Reads

        return S3Reads(name, self._spec.store)

    def _stage(self) -> str | None:
        return self._stages.current if self._stages is not None else None

    def _clean_up(self) -> None:
        if self._parts is not None:
            self._parts.rollback.run()

    def _report(self, error: WeightlessError) -> None:
        self._events.emit("failed", error=classify(error, self._stage()).as_dict())
        shutil.rmtree(self._scratch, ignore_errors=True)
        _end_children()


def _export(spec: ExportSpec, parts: Parts) -> None:
    from exporter.pipeline import export

    export(spec, parts)


def _cause(failure: BaseException) -> BaseException:
    return failure.error if isinstance(failure, Interrupted) else failure


def _lowering(spec: ExportSpec) -> Lowering:
    backend = spec.request.target.backend
    if backend == "cuda":
        from exporter.lowering.cuda import CudaLowering

        return CudaLowering(spec.request.target)
    if backend == "xnnpack":
        from exporter.lowering.xnnpack import xnnpack_lowering

        return xnnpack_lowering()
    from exporter.lowering.portable import portable_lowering

    return portable_lowering()


def _check(spec: ExportSpec, store: Store, scratch: Path) -> Check | None:
    if not spec.request.verify_:
        return None
    if spec.request.target.backend == "cuda":
        from exporter.check.aoti_check import AotiCheck

        return AotiCheck(store, scratch, gpu_limit=spec.request.budgets.gpu_memory, arch=spec.request.target.arch)
    from exporter.check.smoke import SmokeCheck

    return SmokeCheck(store, scratch)


def _doctor(output: int, *, as_json: bool) -> int:
    from exporter.doctor import describe_machine, readable

    report = describe_machine()
    text = json.dumps(report.model_dump(mode="json", by_alias=True)) if as_json else readable(report)
    _write_all(output, text.encode() + b"\n")
    return SUCCEEDED


def _take_output() -> int:
    """Move descriptor 1 away: the copy is ours and is not inherited; what a library prints goes to standard error."""
    sys.stdout.flush()
    output = os.dup(1)
    os.dup2(2, 1)
    return output


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _read_spec(variable: str | None) -> ExportSpec:
    """The spec; `InvalidRequest` where there is none or it does not fit the model. Its text is not repeated."""
    if variable is not None:
        data = os.environ.pop(variable, "").encode()
    else:
        data = sys.stdin.buffer.read(MAX_SPEC + 1)
    if not data or len(data) > MAX_SPEC:
        raise InvalidRequest(f"there is no spec, or it has more than {MAX_SPEC} bytes")
    try:
        return ExportSpec.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(f"the spec is not valid at {where or 'its root'}: {first['msg']}") from error


@contextlib.contextmanager
def _scratch_folder() -> Iterator[Path]:
    """A private folder below TMPDIR for everything that the process and its children write; removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="weightless-"))
    for variable, name in (
        ("TMPDIR", "tmp"),
        ("TORCHINDUCTOR_CACHE_DIR", "inductor"),
        ("TRITON_CACHE_DIR", "triton"),
        ("HF_HOME", "hf"),
    ):
        (folder / name).mkdir()
        os.environ[variable] = str(folder / name)
    tempfile.tempdir = None
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _end_children() -> None:
    """Kill what this process started and has not ended: compile workers, a check."""
    for pid in process_tree(os.getpid())[1:]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    status = main()
    # Not sys.exit: an upload thread that still waits for a dead store, or a pool of compile workers, would hold it up.
    _end_children()
    sys.stderr.flush()
    os._exit(status)
