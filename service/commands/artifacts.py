"""`pull`, `verify`, `inspect`: the commands that read what an export left in its store."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from exporter.artifact.cache import WeightCache
from exporter.artifact.inspect import inspect as inspect_blob
from exporter.artifact.location import split_uri, stored_blob
from exporter.artifact.pull import PullReport, select
from exporter.artifact.pull import pull as pull_files
from exporter.artifact.stdout import stream_file
from exporter.artifact.transfer import Limits
from exporter.artifact.verify import FileCheck
from exporter.artifact.verify import verify as verify_files
from exporter.contract.base import parse_size
from exporter.contract.errors import InvalidRequest
from exporter.contract.events import clean_text
from exporter.contract.spec import EXPORT_ID
from service.commands.describe import print_description
from service.commands.interrupts import Interrupted
from service.commands.output import DONE, FAILED, Json, Output, size_text
from service.commands.resolve import Resolved, open_reads, resolve
from service.commands.session import DEFAULT_URL, Url

Target = Annotated[
    str,
    typer.Argument(metavar="MANIFEST", help="An export id, a path, file://, s3://, or the service's URL of an export."),
]
Expected = Annotated[
    str | None, typer.Option("--digest", metavar="sha256:…", help="Refuse a manifest with another digest.")
]
AllowOrigin = Annotated[
    list[str] | None,
    typer.Option("--allow-origin", metavar="URI", help="A further store that the manifest may point at."),
]
Parallel = Annotated[int, typer.Option("--parallel", min=1, max=64, help="Ranges at once.")]
Block = Annotated[
    str, typer.Option("--block", metavar="SIZE", help="Bytes of one range. Memory: parallel x block for buffers.")
]
Rate = Annotated[str | None, typer.Option("--limit-rate", metavar="SIZE", help="At most this many bytes a second.")]


def pull(
    manifest: Target,
    out: Annotated[str, typer.Option("-o", "--output", metavar="DIR", help="Folder to fill; - for standard output.")],
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="WHAT", help="program, data, files, or a file's name.")
    ] = None,
    save_manifest: Annotated[
        bool,
        typer.Option("--save-manifest", help="Keep manifest.json beside the files; `verify DIR` checks them by it."),
    ] = False,
    cache: Annotated[
        Path | None, typer.Option("--cache", metavar="DIR", help="Keep weights here, and take them from here.")
    ] = None,
    max_size: Annotated[str, typer.Option("--max-size", metavar="SIZE", help="Of the cache.")] = "100GiB",
    expected: Expected = None,
    allow_origin: AllowOrigin = None,
    parallel: Parallel = 8,
    block: Block = "8MiB",
    limit_rate: Rate = None,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Download an export's files in parallel, every byte checked; run it again to go on after a break.

    \b
    Examples:
      weightless pull exp_01JZ… -o out/
      weightless pull s3://bucket/exports/exp_01JZ…/manifest.json -o out/ --only program
      weightless pull exp_01JZ… --only program -o - > model.pte
    """
    output = Output(as_json)
    limits = _limits(parallel, block, limit_rate)
    keep = None if cache is None else WeightCache(cache, _size(max_size, "--max-size"))
    with resolve(manifest, url, allow_origin or (), expected) as found:
        if out == "-":
            _to_stdout(found, only or [], limits, output)
            return
        try:
            with _Bars(output) as bars:
                report = pull_files(
                    found.manifest,
                    found.origin,
                    Path(out),
                    only=only or [],
                    limits=limits,
                    cache=keep,
                    progress=bars.show,
                    save=found.content if save_manifest else None,
                )
        except Interrupted:
            output.say(f"{out} is not whole; run the command again to go on")
            raise
    _print_pull(output, found, report)


def _print_pull(output: Output, found: Resolved, report: PullReport) -> None:
    for file in report.files:
        output.line(f"{file.path}  {size_text(file.size)}")
    output.say(f"{size_text(report.bytes_fetched)} fetched, {size_text(report.bytes_reused)} were here, all checked")
    output.result(
        {
            "manifest": {"uri": found.uri, "digest": found.digest},
            "files": [
                {
                    "name": file.name,
                    "path": file.path,
                    "size": file.size,
                    "fetched": file.fetched,
                    "reused": file.reused,
                }
                for file in report.files
            ],
            "bytesFetched": report.bytes_fetched,
            "bytesReused": report.bytes_reused,
        }
    )


def verify(
    manifest: Target,
    expected: Expected = None,
    allow_origin: AllowOrigin = None,
    parallel: Parallel = 8,
    block: Block = "8MiB",
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Read the stored bytes again and check them against the manifest; nothing is written to disk.

    \b
    Examples:
      weightless verify exp_01JZ…
      weightless verify out/
    """
    output = Output(as_json)
    limits = _limits(parallel, block, None)
    with resolve(manifest, url, allow_origin or (), expected) as found, _Bars(output) as bars:
        for entry in select(found.manifest):
            bars.expect(entry.name, entry.size)
        checks = verify_files(found.manifest, found.origin, limits=limits, progress=bars.advance)
    _print_checks(output, found, checks)
    raise typer.Exit(DONE if all(check.ok for check in checks) else FAILED)


def _print_checks(output: Output, found: Resolved, checks: list[FileCheck]) -> None:
    for check in checks:
        output.line(f"{'ok ' if check.ok else 'BAD'}  {check.name}  {size_text(check.size)}, {check.regions} regions")
        for problem in check.problems:
            output.line(f"     {problem}", "red")
    output.result(
        {
            "ok": all(check.ok for check in checks),
            "manifest": {"uri": found.uri, "digest": found.digest},
            "files": [
                {
                    "name": check.name,
                    "ok": check.ok,
                    "uri": check.uri,
                    "size": check.size,
                    "regions": check.regions,
                    "badRegions": check.bad_regions,
                    "badBytes": check.bad_bytes,
                    "problems": list(check.problems),
                }
                for check in checks
            ],
        }
    )


def inspect(
    file: Annotated[
        str, typer.Argument(metavar="FILE_OR_URI", help="A .pte, .ptd or manifest: path, file://, s3://, export id.")
    ],
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Say what is in a program, a data file or a manifest; only its head is read.

    \b
    Examples:
      weightless inspect out/model.pte
      weightless inspect s3://bucket/weights/exp_01JZ…-1/model.ptd --json
    """
    output = Output(as_json)
    if EXPORT_ID.fullmatch(file) or file.startswith(("http://", "https://")):
        with resolve(file, url) as found:
            description: dict[str, Any] = {
                "kind": "manifest",
                "uri": found.uri,
                "size": len(found.content),
                "digest": found.digest,
                "manifest": found.manifest.model_dump(mode="json", by_alias=True, exclude_none=True),
            }
    else:
        path = str(Path(file) / "manifest.json") if "://" not in file and Path(file).is_dir() else file
        root, key = split_uri(path)
        description = inspect_blob(stored_blob(open_reads(root), key))
    print_description(output, description)
    output.result(description)


def _to_stdout(found: Resolved, only: list[str], limits: Limits, output: Output) -> None:
    entries = select(found.manifest, only)
    if len(entries) != 1 or output.as_json:
        raise InvalidRequest(
            "standard output takes exactly one file, and no --json",
            hint=f"Choose with --only: {', '.join(entry.name for entry in entries)}.",
        )
    size = stream_file(entries[0], found.origin, sys.stdout.buffer, limits)
    output.say(f"{entries[0].name}: {size_text(size)}, checked")


def _limits(parallel: int, block: str, rate: str | None) -> Limits:
    size = _size(block, "--block")
    if not 4096 <= size <= 2**30:
        raise InvalidRequest(f"--block {block}: between 4096 bytes and 1GiB")
    return Limits(parallel, size, None if rate is None else max(1, _size(rate, "--limit-rate")))


def _size(text: str, name: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise InvalidRequest(f"{name} {text}: {error}") from error


class _Bars:
    """A bar for each file, on a terminal."""

    def __init__(self, output: Output) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            console=output.err,
            disable=not output.bars,
        )
        self._tasks: dict[str, TaskID] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> _Bars:
        self._progress.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._progress.__exit__(*details)

    def expect(self, name: str, total: int) -> None:
        """A file of `total` bytes will be shown."""
        with self._lock:
            self._tasks[name] = self._progress.add_task(clean_text(name), total=total)

    def advance(self, name: str, size: int) -> None:
        """Say that `size` more bytes of an expected file are done. Safe from several threads."""
        with self._lock:
            self._progress.advance(self._tasks[name], size)

    def show(self, name: str, done: int, total: int) -> None:
        """Say that `done` of `total` bytes of a file are there. Safe from several threads."""
        with self._lock:
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(clean_text(name), total=total)
            self._progress.update(self._tasks[name], completed=done)
