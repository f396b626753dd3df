"""`serve`, `doctor`, `gc`: what an operator runs beside the service."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from exporter.contract.base import parse_duration
from exporter.contract.errors import InternalError, InvalidRequest
from exporter.contract.machine import BackendReport, Check, MachineReport
from service.commands.output import DONE, FAILED, Json, Output, size_text

if TYPE_CHECKING:
    from service.settings import Settings

EXPORTER_PACKAGES = ("torch", "executorch", "transformers", "safetensors")
DOCTOR_SECONDS = 300
"""How long a machine may take to describe itself: the first import of torch is slow on a cold disk."""


class ServeCommand(typer.core.TyperCommand):
    """Adds the settings to the help, from the model that the service reads."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """List every variable, its default and its meaning."""
        from service.settings import settings_table

        rows = []
        for line in settings_table().splitlines()[2:]:
            name, default, meaning = (cell.strip(" |`") for cell in line.replace("`", "").split(" | ", 2))
            rows.append((name, f"{meaning} [{default}]"))
        with formatter.section("Settings (environment)"):
            formatter.write_dl(rows)


def serve(
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on (WEIGHTLESS_HOST).")] = None,
    port: Annotated[int | None, typer.Option("--port", help="Port to listen on (WEIGHTLESS_PORT).")] = None,
    as_json: Json = False,
) -> None:
    """Run the service and, unless told otherwise, a local executor.

    \b
    Examples:
      weightless serve
      WEIGHTLESS_STORE=s3://bucket/prefix weightless serve --port 9000
    """
    if host is not None:
        os.environ["WEIGHTLESS_HOST"] = host
    if port is not None:
        os.environ["WEIGHTLESS_PORT"] = str(port)
    from service.__main__ import main
    from service.settings import load_settings

    settings = load_settings()
    Output(as_json).result({"url": settings.base_url, "store": settings.store_uri, "auth": list(settings.auth)})
    raise typer.Exit(main() or DONE)


def doctor(
    store: Annotated[bool, typer.Option(help="Try the store that WEIGHTLESS_STORE names.")] = True,
    as_json: Json = False,
) -> None:
    """Say what this machine can export, and what is missing.

    \b
    Examples:
      weightless doctor
      WEIGHTLESS_STORE=s3://bucket/prefix weightless doctor --json
    """
    output = Output(as_json)
    output.say("looking at this machine")
    report = _describe_machine()
    checks = [*report.checks, *(_probe() if store and os.environ.get("WEIGHTLESS_STORE") else ())]
    able = any(backend.available for backend in report.backends)
    good = able and all(check.ok for check in checks if "store" in check.needed_for)
    _print_report(output, report, checks)
    output.line()
    output.line("this machine can export" if able else "this machine cannot export", "green" if able else "red")
    content = report.model_dump(mode="json", by_alias=True, exclude_none=True)
    content["checks"] = [check.model_dump(mode="json", by_alias=True, exclude_none=True) for check in checks]
    output.result({"ok": good, **content})
    raise typer.Exit(DONE if good else FAILED)


def _describe_machine() -> MachineReport:
    missing = [name for name in EXPORTER_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        return _without_exporter(missing)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "exporter", "doctor", "--json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            timeout=DOCTOR_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise InternalError(f"`python -m exporter doctor` took more than {DOCTOR_SECONDS} s") from error
    try:
        return MachineReport.model_validate_json(done.stdout)
    except ValueError as error:
        raise InternalError(
            f"`python -m exporter doctor` ended with status {done.returncode} and no report",
            hint="Run it by itself to see why.",
        ) from error


def _without_exporter(missing: list[str]) -> MachineReport:
    """The report of a machine that has the client and the service alone."""
    reason = "needs the exporter: pip install 'weightless[exporter]'"
    backends: tuple[Literal["cuda", "xnnpack", "portable"], ...] = ("cuda", "xnnpack", "portable")
    return MachineReport(
        versions={"python": platform.python_version()},
        backends=tuple(BackendReport(name=name, available=False, reason=reason) for name in backends),
        checks=tuple(Check(name=name, ok=False, message="not installed", needed_for=backends) for name in missing),
    )


def _probe() -> list[Check]:
    from exporter.artifact.probe import probe_store
    from exporter.store.open import open_store
    from service.settings import load_settings

    settings = load_settings()
    return probe_store(open_store(settings.store_spec()), settings.s3_ca_bundle)


def _print_report(output: Output, report: MachineReport, checks: list[Check]) -> None:
    output.fields([(name, version) for name, version in sorted(report.versions.items())])
    output.line()
    output.table(
        ["back end", "", "detail"],
        [
            [item.name, _mark(item.available), item.reason or " ".join(filter(None, (item.cuda_version, *item.arch)))]
            for item in report.backends
        ],
    )
    output.line()
    output.table(
        ["recipe", "", "detail"], [[r.name, _mark(r.available), r.reason or r.description] for r in report.recipes]
    )
    for gpu in report.gpus:
        output.line(f"GPU {gpu.index}: {gpu.name}, {size_text(gpu.memory_bytes)}, {gpu.arch}")
    if checks:
        output.line()
        output.table(
            ["check", "", "detail", "needed for"],
            [[check.name, _mark(check.ok), check.message, ", ".join(check.needed_for)] for check in checks],
        )


def _mark(good: bool) -> str:
    return "ok" if good else "no"


def gc(
    older_than: Annotated[
        str | None,
        typer.Option("--older-than", metavar="D", help="Expire exports that ended before this, such as 30d."),
    ] = None,
    wait: Annotated[
        str | None,
        typer.Option(
            "--wait", metavar="D", help="Between mark and deletion of weights; default: longest deadline + grace."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed; remove nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Remove expired exports, weights that no export names, and orphaned multipart uploads.

    Runs beside the database, with the service's settings. Unused weights are marked first and deleted by a later run.

    \b
    Examples:
      weightless gc --older-than 30d --dry-run
      weightless gc --older-than 30d
    """
    from service.commands.collect import collect
    from service.settings import load_settings

    output = Output(as_json)
    settings = load_settings()
    report = collect(
        settings,
        older_than=_seconds(older_than, "--older-than"),
        wait=_seconds(wait, "--wait"),
        now=time.time(),
        dry_run=dry_run,
    )
    if not dry_run:
        _remove_job_folders(settings, report["expired"])
    output.fields(
        [
            ("exports", f"{len(report['expired'])} expired"),
            ("objects", f"{len(report['deleted'])} deleted, {size_text(report['freedBytes'])}"),
            ("weights", f"{len(report['marked'])} marked, {len(report['waiting'])} marked before and waiting"),
            ("uploads", f"{len(report['abortedUploads'])} aborted"),
        ]
    )
    for problem in report["problems"]:
        output.say(f"warning: {problem}; no weights were deleted", "yellow")
    if dry_run:
        output.say("nothing was removed: this was a dry run")
    output.result(report)
    raise typer.Exit(FAILED if report["problems"] else DONE)


def _remove_job_folders(settings: Settings, ids: list[str]) -> None:
    for export_id in ids:
        shutil.rmtree(settings.data_dir / "jobs" / export_id, ignore_errors=True)


def _seconds(text: str | None, name: str) -> int | None:
    try:
        return None if text is None else parse_duration(text)
    except ValueError as error:
        raise InvalidRequest(f"{name} {text}: {error}") from error
