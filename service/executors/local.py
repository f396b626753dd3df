"""Exports on this machine: one process group per slot, found again after a restart of the service.

In `{data}/jobs/{id}/{attempt}/` lie `spec.json`, `events.jsonl` (the process's own standard output), `log.txt` (its
standard error), `tmp/` (removed at the end), and three small files of a shell that wraps it: `group` (its process id,
written before the exporter starts), `exit` (the exporter's exit status) and `oom` (the cgroup's counter at the start).
The shell holds a lock on `events.jsonl` by inheritance, so whether an attempt lives is asked of the kernel.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Sequence, Set
from pathlib import Path

import structlog

from exporter.contract.errors import ExecutorLost, InternalError, WeightlessError
from exporter.contract.events import MAX_LINE, AnyEvent, parse_event
from exporter.contract.machine import MachineReport
from exporter.contract.spec import ExportSpec
from service.executors import cgroup
from service.executors.base import Ended, Fate
from service.executors.environment import exporter_environment

log = structlog.get_logger(__name__)

COMMAND = (sys.executable, "-P", "-m", "exporter")
"""The exporter; `run` or `doctor --json` is appended. `-P` keeps the working directory out of the import path."""
DOCTOR_SECONDS = 300
READ_BYTES = 4 * 2**20
"""Bytes of an event file that one call reads."""

# Traps that do something are reset in the exporter, unlike ignored signals: the shell outlives a SIGTERM to the group,
# and the exporter gets it. Core files would hold weights.
_SHELL = """umask 077; ulimit -c 0; ulimit -n "$1" 2>/dev/null; shift
trap : TERM INT HUP
echo $$ >group.new && mv group.new group || exit 125
"$@" <spec.json; status=$?
echo $status >exit.new && mv exit.new exit
exit $status
"""
OPEN_FILES = 65536
"""Soft limit of open files for an exporter, where the hard limit allows it."""


class LocalExecutor:
    """Runs exporters as child processes. One service at a time may use a data directory: `lock` is held for that."""

    kind = "local"

    def __init__(
        self,
        data_dir: Path,
        *,
        slots: int | None = None,
        command: Sequence[str] = COMMAND,
        host: str | None = None,
    ) -> None:
        self._data_dir = data_dir
        self._slots = slots
        self._gpus = 0
        self._command = tuple(command)
        self.host = host or socket.gethostname()
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = take_lock(data_dir / "executor.lock")
        self.id = identity(data_dir / "executor.id")

    @property
    def reattachable(self) -> bool:
        """True unless we are a container's first process, whose end is everybody's."""
        return os.getpid() != 1 and os.getppid() != 0

    def describe(self) -> MachineReport:
        """Run `doctor` and read its report."""
        folder = self._data_dir / "doctor"
        (folder / "tmp" / "home").mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            done = subprocess.run(
                [*self._command, "doctor", "--json"],
                cwd=folder,
                env=exporter_environment(folder),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=DOCTOR_SECONDS,
                check=False,
            )
            return MachineReport.model_validate_json(done.stdout)
        except subprocess.TimeoutExpired as error:
            raise ExecutorLost(f"doctor did not answer within {DOCTOR_SECONDS} seconds") from error
        except OSError as error:
            raise ExecutorLost(f"doctor cannot be started: {error.strerror}") from error
        except ValueError as error:
            tail = done.stderr.decode("utf-8", "replace")[-500:]
            raise ExecutorLost(f"doctor gave no report (status {done.returncode})", hint=tail) from error
        finally:
            shutil.rmtree(folder / "tmp", ignore_errors=True)

    def slots(self, report: MachineReport | None) -> int:
        """As many as were set, else one per GPU, else one."""
        self._gpus = len(report.gpus) if report is not None else self._gpus
        return max(1, self._gpus) if self._slots is None else self._slots

    def start(self, spec: ExportSpec, slot: int) -> LocalAttempt:
        """Make the folder and start the process."""
        folder = self.folder(spec.id, spec.attempt)
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "tmp" / "home").mkdir(parents=True, mode=0o700)
        (folder / "oom").write_text(str(cgroup.oom_kills()), encoding="ascii")
        _write_spec(folder, spec)
        events = os.open(folder / "events.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        errors = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(events, fcntl.LOCK_EX | fcntl.LOCK_NB)
            process = subprocess.Popen(
                ["/bin/sh", "-c", _SHELL, "exporter", str(OPEN_FILES), *self._command, "run"],
                cwd=folder,
                env=exporter_environment(folder, gpu=self._gpu(slot)),
                stdin=subprocess.DEVNULL,
                stdout=events,
                stderr=errors,
                start_new_session=True,
                close_fds=True,
            )
        except OSError as error:
            raise ExecutorLost(f"the exporter cannot be started: {error.strerror}") from error
        finally:
            os.close(events)
            os.close(errors)
        return LocalAttempt(folder, process)

    def attach(self, export_id: str, attempt: int) -> LocalAttempt:
        """The attempt whose folder an earlier process of the service made."""
        return LocalAttempt(self.folder(export_id, attempt), None)

    def folder(self, export_id: str, attempt: int) -> Path:
        """Where an attempt's files are."""
        return self._data_dir / "jobs" / export_id / str(attempt)

    def sweep(self, known: Set[tuple[str, int]]) -> None:
        """End the process groups of attempts that the database has given to somebody else, or has seen the end of."""
        for path in self._data_dir.glob("jobs/exp_*/*/events.jsonl"):
            folder = path.parent
            attempt = LocalAttempt(folder, None)
            number = int(folder.name) if folder.name.isdigit() else 0
            if (folder.parent.name, number) not in known and attempt.alive():
                log.warning("an attempt that is not ours any more is ended", export=folder.parent.name, attempt=number)
                attempt.clean()

    def close(self) -> None:
        """Let another service have the data directory."""
        os.close(self._lock)

    def _gpu(self, slot: int) -> str | None:
        """The GPU of a slot, as CUDA_VISIBLE_DEVICES names it; None leaves the variable as it is.

        More slots than GPUs share them in turn.
        """
        outer = os.environ.get("CUDA_VISIBLE_DEVICES")
        if outer is None:
            return str(slot % self._gpus) if self._gpus else None
        visible = [name for name in outer.split(",") if name.strip()]
        return visible[slot % len(visible)] if visible else ""


class LocalAttempt:
    """One process group and its folder. `process` is None where another process of the service started it."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes] | None) -> None:
        self._folder = folder
        self._process = process
        self._offset = 0

    def lines(self) -> Sequence[AnyEvent]:
        """Complete lines behind the last call's; a line that is no event is reported and skipped."""
        found: list[AnyEvent] = []
        try:
            with (self._folder / "events.jsonl").open("rb") as file:
                file.seek(self._offset)
                data = file.read(READ_BYTES)
        except OSError:
            return found
        end = data.rfind(b"\n") + 1
        if end == 0 and len(data) > MAX_LINE:
            end = len(data)
        for line in data[:end].splitlines():
            try:
                found.append(parse_event(line))
            except WeightlessError as error:
                log.warning("an exporter wrote a line that is no event", folder=self._folder.name, error=error.message)
        self._offset += end
        return found

    def alive(self) -> bool:
        """Whether the shell, the exporter or a process that inherited its output is there."""
        try:
            descriptor = os.open(self._folder / "events.jsonl", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def ended(self) -> Ended | None:
        """How the exporter ended: from the shell's note, or from the shell's own end where both were killed."""
        status = self._noted("exit")
        if status is None:
            code = None if self._process is None else self._process.poll()
            if code is None and (self._process is not None or self.alive()):
                return None
            status = self._noted("exit")
            if status is None and code is not None:
                status = 128 - code if code < 0 else code
        self._reap()
        if status is None:
            # The shell notes its group before it starts the exporter.
            return Ended(Fate.NEVER_RAN if self._noted("group") is None else Fate.VANISHED)
        kills = cgroup.oom_kills() - (self._noted("oom") or 0)
        return Ended(Fate.EXITED, status, max(0, kills), cgroup.memory_limit())

    def stop(self) -> None:
        """SIGTERM to the group."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the group."""
        self._signal(signal.SIGKILL)

    def clean(self) -> None:
        """End what is left of the group and remove `tmp/`."""
        self._signal(signal.SIGKILL)
        self._reap()
        shutil.rmtree(self._folder / "tmp", ignore_errors=True)

    def _reap(self) -> None:
        if self._process is not None:
            try:
                self._process.wait(timeout=1)
            except subprocess.TimeoutExpired:
                log.warning("an exporter's shell does not end", folder=str(self._folder))

    def _signal(self, number: signal.Signals) -> None:
        """To the process group, and for SIGKILL to whatever left the group but still works in our folder."""
        members = self._members()
        group = self._process.pid if self._process is not None else self._noted("group")
        for pid, its_group in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if its_group == group:
                    os.killpg(its_group, number)
                    group = None
                elif number == signal.SIGKILL and pid != os.getpid():
                    os.kill(pid, number)

    def _members(self) -> list[tuple[int, int]]:
        """(process id, group) of each process that works in our folder: a recycled process id does not."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    where = (entry / "cwd").readlink()
                    if where == self._folder or self._folder in where.parents:
                        found.append((int(entry.name), os.getpgid(int(entry.name))))
        return found

    def _noted(self, name: str) -> int | None:
        try:
            return int((self._folder / name).read_text(encoding="ascii").strip())
        except (OSError, ValueError):
            return None


class LocalLogs:
    """The logs below `{data}/jobs`. Satisfies `service.ports.LogSource`."""

    def __init__(self, data_dir: Path) -> None:
        self._jobs = data_dir / "jobs"

    def read(self, export_id: str, attempt: int, offset: int, length: int) -> bytes | None:
        """A piece of an attempt's log."""
        try:
            with (self._jobs / export_id / str(attempt) / "log.txt").open("rb") as file:
                file.seek(offset)
                return file.read(length)
        except OSError:
            return None

    def remove(self, export_id: str) -> None:
        """Remove an export's folder."""
        shutil.rmtree(self._jobs / export_id, ignore_errors=True)


def _write_spec(folder: Path, spec: ExportSpec) -> None:
    path = folder / "spec.json"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(spec_json(spec))


def spec_json(spec: ExportSpec) -> bytes:
    """The spec as an exporter reads it: only the fields that were set, since a target refuses what is not its own."""
    return json.dumps(spec.model_dump(mode="json", by_alias=True, exclude_unset=True)).encode()


def take_lock(path: Path) -> int:
    """Hold a file's lock as long as this process lives; `InternalError` where another process has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise InternalError(
            "another service uses this data directory", hint="Stop it, or set WEIGHTLESS_DATA_DIR to another directory."
        ) from error
    return descriptor


def identity(path: Path) -> str:
    """A random name for this data directory's executor, made once."""
    try:
        return path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        name = uuid.uuid4().hex
        path.write_text(name, encoding="ascii")
        return name
