"""`submit`, `status`, `list`, `logs`, `cancel`: the commands that talk to the service."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from exporter.contract.base import parse_duration
from exporter.contract.errors import InvalidRequest, WeightlessError
from exporter.contract.events import clean_text
from exporter.contract.manifest import parse_manifest
from exporter.contract.spec import ExportRequest
from service.client import TERMINAL, Client, WaitTimeout
from service.commands.follow import Follower
from service.commands.interrupts import Interrupted
from service.commands.output import CANCELLED, DONE, FAILED, Json, Output
from service.commands.session import DEFAULT_URL, Url, open_client
from service.commands.summary import print_export, summarise

ExportId = Annotated[str, typer.Argument(metavar="ID", help="The export's id: exp_ and 26 characters.")]
Timeout = Annotated[
    str | None,
    typer.Option("--timeout", metavar="D", help="Stop waiting after D (90s, 2h); status 6, and the export goes on."),
]
CancelOnInterrupt = Annotated[
    bool,
    typer.Option("--cancel-on-interrupt", help="Cancel the export when this command gets SIGINT or SIGTERM (for CI)."),
]
CANCEL_WAIT = 30.0
"""Seconds that an interrupted command waits for its export to be cancelled."""


def submit(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="What to export; `weightless doctor` lists them.")],
    source: Annotated[str, typer.Option("--source", metavar="URI", help="file://, s3:// or hf://repo@revision.")],
    option: Annotated[
        list[str] | None,
        typer.Option(
            "-o", "--option", metavar="KEY=JSON", help="An option of the recipe. What is no JSON is a string."
        ),
    ] = None,
    options: Annotated[
        str | None, typer.Option("--options", metavar="JSON", help="All options as one JSON object.")
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option("--target", metavar="KEY=JSON", help="backend (default cuda), cudaVersion, arch, …"),
    ] = None,
    max_gpu_memory: Annotated[
        str | None, typer.Option("--max-gpu-memory", metavar="SIZE", help="Fail above this GPU memory.")
    ] = None,
    max_host_memory: Annotated[
        str | None, typer.Option("--max-host-memory", metavar="SIZE", help="Fail above this host memory.")
    ] = None,
    max_scratch_disk: Annotated[
        str | None, typer.Option("--max-scratch-disk", metavar="SIZE", help="Fail above this scratch disk.")
    ] = None,
    max_wall_time: Annotated[
        str | None, typer.Option("--max-wall-time", metavar="D", help="Fail after this time.")
    ] = None,
    label: Annotated[list[str] | None, typer.Option("--label", metavar="K=V", help="A label to find it by.")] = None,
    priority: Annotated[int | None, typer.Option("--priority", metavar="N", help="-100 to 100; higher first.")] = None,
    verify: Annotated[bool, typer.Option(help="Run the stored artifact against eager.")] = True,
    reuse: Annotated[bool, typer.Option(help="Send only weights that are not stored yet.")] = True,
    webhook: Annotated[str | None, typer.Option("--webhook", metavar="URL", help="Where to say that it ended.")] = None,
    idempotency_key: Annotated[
        str | None, typer.Option("--idempotency-key", metavar="K", help="The same key never queues twice (24 h).")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would take; queue nothing.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the export to its end.")] = False,
    timeout: Timeout = None,
    cancel_on_interrupt: CancelOnInterrupt = False,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Queue an export; --wait follows it with a progress bar.

    \b
    Examples:
      weightless submit huggingface --source file:///models/minilm --target backend=xnnpack -o sequenceLength=128 --wait
      weightless submit exported-program --source s3://models/m.pt2 --max-gpu-memory 8GiB --label pr=123
    """
    output = Output(as_json)
    seconds = None if timeout is None else _duration(timeout)
    budgets = {
        "gpuMemory": max_gpu_memory,
        "hostMemory": max_host_memory,
        "scratchDisk": max_scratch_disk,
        "wallTime": max_wall_time,
    }
    body: dict[str, Any] = {
        "recipe": recipe,
        "source": source,
        "options": {**_json_object(options, "--options"), **_pairs(option, "-o")},
        "target": {"backend": "cuda", **_target(_pairs(target, "--target"))},
        "budgets": {name: value for name, value in budgets.items() if value is not None},
        "labels": _labels(label),
        "priority": priority,
        "verify": None if verify else False,
        "reuseWeights": None if reuse else False,
        "webhook": None if webhook is None else {"url": webhook},
    }
    body = {name: value for name, value in body.items() if value is not None}
    _check(body)
    with open_client(url) as client:
        if dry_run:
            answer = client.dry_run(body)
            output.line(json.dumps(answer, indent=2))
            output.result(answer)
            return
        export = client.submit(body, idempotency_key=idempotency_key)
        if not wait:
            output.say(f"queued; follow it with: weightless status {export['id']} --wait")
            output.line(export["id"])
            output.result(export)
            return
        _wait(client, export["id"], output, seconds, cancel_on_interrupt)


def status(
    export_id: ExportId,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the export to its end.")] = False,
    timeout: Timeout = None,
    cancel_on_interrupt: CancelOnInterrupt = False,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Show one export; the exit status is 1 if it failed and 5 if it was cancelled.

    \b
    Examples:
      weightless status exp_01JZ… --wait --timeout 2h
    """
    output = Output(as_json)
    seconds = None if timeout is None else _duration(timeout)
    with open_client(url) as client:
        if wait:
            _wait(client, export_id, output, seconds, cancel_on_interrupt)
        else:
            _end(client, client.export(export_id), output)


def list_exports(
    state: Annotated[str | None, typer.Option("--state", help="queued, starting, running, succeeded, …")] = None,
    recipe: Annotated[str | None, typer.Option("--recipe", help="Exports of one recipe.")] = None,
    repository: Annotated[str | None, typer.Option("--repository", help="Exports of one GitHub repository.")] = None,
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="K=V", help="Exports with this label; all that are given.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=200, help="How many.")] = 20,
    cursor: Annotated[str | None, typer.Option("--cursor", help="nextCursor of an earlier list.")] = None,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """List exports, newest first.

    \b
    Examples:
      weightless list --state failed --label pr=123
    """
    output = Output(as_json)
    filters = {
        "state": state, "recipe": recipe, "repository": repository, "label": label, "limit": limit, "cursor": cursor,
    }  # fmt: skip
    with open_client(url) as client:
        page = client.exports(**filters)
    rows = [
        [
            item["id"],
            item["state"],
            item["recipe"],
            item["source"],
            item["createdAt"],
            (item.get("error") or {}).get("code", ""),
        ]
        for item in page["items"]
    ]
    output.table(["id", "state", "recipe", "source", "created", "error"], rows)
    if page.get("nextCursor"):
        output.say(f"more: --cursor {page['nextCursor']}")
    output.result(page)


def logs(
    export_id: ExportId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the export has ended.")] = False,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Print an export's log.

    \b
    Examples:
      weightless logs exp_01JZ… --follow
    """
    output = Output(as_json)
    lines: list[str] = []
    with open_client(url) as client:
        for line in client.logs(export_id, follow=follow):
            if as_json:
                lines.append(clean_text(line))
            else:
                sys.stdout.write(clean_text(line) + "\n")
                sys.stdout.flush()
    output.result({"id": export_id, "lines": lines})


def cancel(export_id: ExportId, url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Cancel an export; one that has ended stays as it is.

    \b
    Examples:
      weightless cancel exp_01JZ…
    """
    output = Output(as_json)
    with open_client(url) as client:
        export = client.cancel(export_id)
    output.line(f"{export['id']} {export['state']}")
    output.result(export)


def _wait(client: Client, export_id: str, output: Output, seconds: int | None, cancel_on_interrupt: bool) -> None:
    deadline = None if seconds is None else time.monotonic() + seconds
    output.say(f"following {export_id}")
    try:
        with Follower(output) as follower:
            follower.follow(client, export_id, deadline)
    except Interrupted:
        if not cancel_on_interrupt:
            output.say(f"{export_id} goes on; follow it with: weightless status {export_id} --wait")
            raise
        output.say(f"cancelling {export_id}")
        client.cancel(export_id)
        try:
            with Follower(output) as follower:
                follower.follow(client, export_id, time.monotonic() + CANCEL_WAIT)
        except WaitTimeout:
            output.say("it has not ended yet, but will")
    _end(client, client.export(export_id), output)


def _end(client: Client, export: dict[str, Any], output: Output) -> None:
    summary = None
    if export["state"] == "succeeded":
        try:
            summary = summarise(parse_manifest(client.manifest(export["id"])))
        except WeightlessError as error:
            output.say(f"warning: its manifest cannot be read: {error.message}")
    print_export(output, export, summary)
    output.result(export if summary is None else {**export, "summary": summary})
    raise typer.Exit(state_status(export["state"]))


def state_status(state: str) -> int:
    """The exit status for an export's state: 0 while it goes on and when it succeeded."""
    if state not in TERMINAL or state == "succeeded":
        return DONE
    return CANCELLED if state == "cancelled" else FAILED


def _check(body: dict[str, Any]) -> None:
    try:
        ExportRequest.model_validate(body)
    except ValidationError as error:
        found = error.errors(include_input=False, include_url=False)
        lines = [f"{'.'.join(map(str, item['loc']))}: {item['msg'].removeprefix('Value error, ')}" for item in found]
        raise InvalidRequest("the request is not valid: " + "; ".join(lines[:5])) from error


def _duration(text: str) -> int:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise InvalidRequest(f"--timeout {text}: {error}") from error


def _json_object(text: str | None, name: str) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        raise InvalidRequest(f"{name} is not JSON: {error}", hint="""Quote it: --options '{"a": 1}'""") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} is not a JSON object")
    return value


def _pairs(items: list[str] | None, name: str) -> dict[str, Any]:
    pairs: dict[str, Any] = {}
    for item in items or ():
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise InvalidRequest(f"{name} {item!r} is not KEY=JSON")
        try:
            pairs[key] = json.loads(text, parse_constant=_no_constant)
        except ValueError:
            pairs[key] = text
    return pairs


def _target(given: dict[str, Any]) -> dict[str, Any]:
    """What people write for what JSON wants: ``cudaVersion=13.0`` is a name and not a number, ``arch=sm_90`` a list."""
    version, arch = given.get("cudaVersion"), given.get("arch")
    if isinstance(version, (int, float)) and not isinstance(version, bool):
        given["cudaVersion"] = str(version)
    if isinstance(arch, str):
        given["arch"] = arch.split(",")
    return given


def _no_constant(text: str) -> Any:
    """NaN and Infinity are words here: no JSON reader on the way would take them as numbers."""
    raise ValueError(text)


def _labels(items: list[str] | None) -> dict[str, str]:
    labels = {}
    for item in items or ():
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise InvalidRequest(f"--label {item!r} is not K=V")
        labels[key] = value
    return labels
