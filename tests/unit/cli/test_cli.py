"""The command line's public face: help, flags, exit statuses, and one JSON object on standard output."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main

from exporter.contract import errors
from service.cli import app
from service.client import ServiceUnreachable, WaitTimeout
from service.commands.exports import state_status
from service.commands.output import Output, exit_status, size_text

from .conftest import EXPORT, Ran, Service

FLAGS = {
    "serve": "--host --port --json",
    "submit": "--source -o --option --options --target --max-gpu-memory --max-host-memory --max-scratch-disk "
    "--max-wall-time --label --priority --verify --no-verify --reuse --no-reuse --webhook --idempotency-key --dry-run "
    "--wait --timeout --cancel-on-interrupt --url --json",
    "status": "--wait --timeout --cancel-on-interrupt --url --json",
    "list": "--state --recipe --repository --label --limit --cursor --url --json",
    "logs": "--follow -f --url --json",
    "cancel": "--url --json",
    "pull": "-o --output --only --save-manifest --cache --max-size --digest --allow-origin --parallel --block "
    "--limit-rate --url --json",
    "verify": "--digest --allow-origin --parallel --block --url --json",
    "inspect": "--url --json",
    "gc": "--older-than --wait --dry-run --json",
    "doctor": "--store --no-store --json",
    "token create": "--scope --expires --json",
    "token revoke": "--json",
    "token list": "--json",
    "policy check": "--claims --policy --recipe --source --json",
}
"""Public: a flag that goes or changes its name is a new major version and a note in the changelog."""


def commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    found = {}
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            found.update({f"{name} {inner}": item for inner, item in command.commands.items()})
        else:
            found[name] = command
    return found


def test_the_flags_are_these() -> None:
    found = {
        name: {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
        for name, command in commands().items()
    }
    shown = {name: {flag for flag in flags if flag.startswith("-")} for name, flags in found.items()}
    assert shown == {name: set(flags.split()) for name, flags in FLAGS.items()}


@pytest.mark.parametrize("name", FLAGS)
def test_help_says_what_it_does_with_an_example(weightless: Callable[..., Ran], name: str) -> None:
    ran = weightless(*name.split(), "--help")
    assert ran.status == 0
    assert ran.err == ""
    for flag in FLAGS[name].split():
        assert re.search(rf"(^|[ ,/]){re.escape(flag)}\b", ran.out), flag
    if name != "token list":
        assert f"weightless {name}" in ran.out.split("Examples:")[1]


def test_serve_help_lists_every_setting(weightless: Callable[..., Ran]) -> None:
    from service.settings import Settings

    out = weightless("serve", "--help").out
    for name in Settings.model_fields:
        assert f"WEIGHTLESS_{name.upper()}" in out


def test_without_arguments_there_is_help(weightless: Callable[..., Ran]) -> None:
    ran = weightless()
    assert "Commands:" in ran.out + ran.err


def test_the_version(weightless: Callable[..., Ran]) -> None:
    ran = weightless("--version")
    assert ran.status == 0
    assert re.match(r"\d+\.\d+|unknown", ran.out)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.InvalidRequest("x"), 2),
        (ServiceUnreachable("x"), 3),
        (errors.StoreUnavailable("x"), 3),
        (errors.StoreRejected("x"), 3),
        (errors.StoreRejected("x", status=403), 4),
        (errors.Unauthenticated("x"), 4),
        (errors.Forbidden("x"), 4),
        (errors.SourceAccessDenied("x"), 4),
        (errors.Cancelled("x"), 5),
        (WaitTimeout("x"), 6),
        (errors.VerificationFailed("x"), 1),
        (errors.NotFound("x"), 1),
        (errors.InternalError("x"), 1),
        (errors.UnsupportedModel("x"), 1),
    ],
)
def test_statuses_of_errors(error: errors.WeightlessError, status: int) -> None:
    assert exit_status(error) == status


@pytest.mark.parametrize(
    ("state", "status"),
    [("queued", 0), ("starting", 0), ("running", 0), ("succeeded", 0), ("failed", 1), ("cancelled", 5)],
)
def test_statuses_of_exports(state: str, status: int) -> None:
    assert state_status(state) == status


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"],
        ["submit"],
        ["submit", "r"],
        ["submit", "r", "--source", "s3://b/x", "--nothing"],
        ["submit", "r", "--source", "s3://b/x", "-o", "novalue"],
        ["submit", "r", "--source", "s3://b/x", "--options", "[1]"],
        ["submit", "r", "--source", "s3://b/x", "--options", "{"],
        ["submit", "r", "--source", "s3://b/x", "--target", "backend=abacus"],
        ["submit", "r", "--source", "s3://b/x", "--max-gpu-memory", "-1"],
        ["submit", "r", "--source", "s3://b/x", "--max-gpu-memory", "NaN"],
        ["submit", "r", "--source", "s3://b/x", "--label", "x"],
        ["submit", "r", "--source", "s3://b/x", "--priority", "many"],
        ["submit", "r", "--source", "s3://b/x", "--wait", "--timeout", "soon"],
        ["submit", "Bad Recipe", "--source", "s3://b/x"],
        ["status"],
        ["list", "--limit", "0"],
        ["pull", EXPORT],
        ["pull", "ftp://host/x", "-o", "out"],
        ["pull", "http://127.0.0.1:9/elsewhere", "-o", "out"],
        ["pull", "x", "-o", "out", "--block", "1"],
        ["verify", "s3://bucket"],
        ["gc", "--older-than", "old"],
        ["token", "create"],
        ["policy", "check"],
        ["status", EXPORT, "--url", "ftp://x"],
    ],
)
def test_wrong_usage_is_2(
    weightless: Callable[..., Ran], arguments: list[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = weightless(*arguments)
    assert ran.status == 2, ran
    assert ran.out == ""
    assert "rror" in ran.err or "Usage" in ran.err
    assert weightless(*arguments, "--json").json["error"]["code"] == "invalid-request"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["status", EXPORT],
        ["list"],
        ["logs", EXPORT],
        ["cancel", EXPORT],
        ["submit", "r", "--source", "s3://b/x"],
        ["pull", EXPORT, "-o", "out"],
        ["verify", "http://127.0.0.1:9/exports/x"],
        ["inspect", EXPORT],
    ],
)
def test_no_service_is_3(weightless: Callable[..., Ran], arguments: list[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("service.client.RETRIES", 0)
    ran = weightless(*arguments, "--json")
    assert ran.status == 3
    assert ran.json["error"]["code"] == "service-unreachable"
    assert "cannot be reached" in ran.err


def answer(status: int, body: object) -> tuple[int, dict[str, str], bytes]:
    return status, {"Content-Type": "application/json"}, json.dumps(body).encode()


VIEW = {
    "id": EXPORT, "state": "running", "stage": "uploading", "recipe": "r", "source": "s3://b/x", "options": {},
    "target": {"backend": "xnnpack"}, "budgets": {}, "labels": {}, "priority": 0, "owner": "local",
    "caller": {"kind": "local"}, "attempt": 1, "attempts": [], "createdAt": "2026-11-30T15:00:00Z",
    "progress": {"stage": "uploading", "done": 1024, "total": 4096, "unit": "bytes"}, "resources": {"peaks": {}},
    "links": {"self": "x", "page": "http://page"},
}  # fmt: skip
FAILED = {
    **VIEW, "state": "failed", "stage": None,
    "error": {"code": "unsupported-model", "message": "no \x1b[31mkernel\x1b[0m", "hint": "change it"},
}  # fmt: skip


def test_status_of_a_running_and_a_failed_export(weightless: Callable[..., Ran], service: Service) -> None:
    service.script = lambda *_: answer(200, VIEW)
    ran = weightless("status", EXPORT, "--url", service.url)
    assert ran.status == 0
    assert "running (uploading)" in ran.out
    assert "1.0 KiB of 4.0 KiB" in ran.out
    service.script = lambda *_: answer(200, FAILED)
    ran = weightless("status", EXPORT, "--url", service.url)
    assert ran.status == 1
    assert "unsupported-model: no kernel" in ran.out
    assert "\x1b" not in ran.out
    ran = weightless("status", EXPORT, "--url", service.url, "--json")
    assert (ran.status, ran.json["error"]["code"]) == (1, "unsupported-model")


@pytest.mark.parametrize(
    ("status", "code", "expected"), [(401, "unauthenticated", 4), (403, "forbidden", 4), (404, "not-found", 1)]
)
def test_refusals(weightless: Callable[..., Ran], service: Service, status: int, code: str, expected: int) -> None:
    service.script = lambda *_: answer(status, {"code": code, "detail": "no", "hint": "h", "reason": "scope"})
    ran = weightless("cancel", EXPORT, "--url", service.url, "--json")
    assert ran.status == expected
    assert ran.json["error"]["code"] == code
    assert "hint: h" in ran.err


def test_submit_sends_what_was_asked_for(weightless: Callable[..., Ran], service: Service) -> None:
    service.script = lambda *_: answer(202, VIEW)
    arguments = [
        "submit", "exported-program", "--source", "s3://b/m.pt2", "--options", '{"a": 1, "b": 2}', "-o", "b=3",
        "-o", "name=kquant-17gb", "-o", 'list=["x"]', "-o", "odd=NaN", "--target", "backend=cuda",
        "--target", "arch=sm_90,sm_100", "--max-gpu-memory", "8GiB", "--max-wall-time", "2h", "--label", "pr=1=2",
        "--priority", "5", "--no-verify", "--no-reuse", "--idempotency-key", "k1", "--url", service.url,
    ]  # fmt: skip
    ran = weightless(*arguments, "--target", "cudaVersion=13.0")
    assert (ran.status, ran.out) == (0, f"{EXPORT}\n")
    _, path, headers, body = service.seen[-1]
    assert (path, headers["idempotency-key"]) == ("/exports", "k1")
    assert json.loads(body) == {
        "recipe": "exported-program", "source": "s3://b/m.pt2",
        "options": {"a": 1, "b": 3, "name": "kquant-17gb", "list": ["x"], "odd": "NaN"},
        "target": {"backend": "cuda", "arch": ["sm_90", "sm_100"], "cudaVersion": "13.0"},
        "budgets": {"gpuMemory": "8GiB", "wallTime": "2h"}, "labels": {"pr": "1=2"}, "priority": 5,
        "verify": False, "reuseWeights": False,
    }  # fmt: skip


def test_submit_sends_no_defaults(weightless: Callable[..., Ran], service: Service) -> None:
    service.script = lambda *_: answer(202, VIEW)
    assert weightless("submit", "r", "--source", "s3://b/x", "--url", service.url, "--json").json["id"] == EXPORT
    body = json.loads(service.seen[-1][3])
    assert set(body) == {"recipe", "source", "options", "target", "budgets", "labels"}


def follow(service: Service, last: str, export: dict[str, Any]) -> None:
    events = [
        {"type": "state", "to": "running"},
        {"type": "stage", "name": "uploading", "state": "started"},
        {"type": "progress", "stage": "uploading", "done": 5, "total": 10, "unit": "bytes"},
        {"type": "from-the-future"},
        {"type": "warning", "code": "w", "message": "be\x07ware"},
        {"type": "state", "to": last},
    ]
    stream = "".join(f"id: {n}\ndata: {json.dumps(event)}\n\n" for n, event in enumerate(events, 1)).encode()

    def script(method: str, path: str, headers: dict[str, str], body: bytes) -> Any:
        if path.endswith("/events"):
            return 200, {"Content-Type": "text/event-stream"}, [stream]
        if path.endswith("/manifest"):
            return answer(409, {"code": "not-finished", "detail": "x"})
        return answer(202 if method == "POST" else 200, export)

    service.script = script


@pytest.mark.parametrize(("last", "status"), [("succeeded", 0), ("failed", 1), ("cancelled", 5)])
def test_submit_and_wait(weightless: Callable[..., Ran], service: Service, last: str, status: int) -> None:
    view = {**(FAILED if last == "failed" else VIEW), "state": last}
    follow(service, last, view)
    ran = weightless("submit", "r", "--source", "s3://b/x", "--wait", "--url", service.url, "--json")
    assert ran.status == status
    assert ran.json["state"] == last
    assert "uploading 5 B/10 B" in ran.err
    assert "warning: beware" in ran.err


def test_the_wait_ends_with_6_and_the_export_goes_on(weightless: Callable[..., Ran], service: Service) -> None:
    service.script = lambda method, path, *_: (
        (200, {"Content-Type": "text/event-stream"}, [b": ping\n\n"]) if path.endswith("/events") else answer(202, VIEW)
    )
    ran = weightless("submit", "r", "--source", "s3://b/x", "--wait", "--timeout", "1s", "--url", service.url, "--json")
    assert (ran.status, ran.json["error"]["code"]) == (6, "wait-timeout")
    assert not any(path.endswith("/cancel") for _, path, _, _ in service.seen)


def test_a_log_cannot_send_control_characters(weightless: Callable[..., Ran], service: Service) -> None:
    service.script = lambda *_: (200, {}, b"one\x1b]0;title\x07\nt\x1b[31mwo\n")
    assert weightless("logs", EXPORT, "--url", service.url).out.splitlines()[1] == "two"
    assert "\x1b" not in weightless("logs", EXPORT, "--url", service.url).out
    assert weightless("logs", EXPORT, "--url", service.url, "--json").json["lines"][1] == "two"


def test_list(weightless: Callable[..., Ran], service: Service) -> None:
    service.script = lambda *_: answer(200, {"items": [{**VIEW, "source": "s3://b/" + "x" * 300}], "nextCursor": "abc"})
    ran = weightless("list", "--state", "running", "--label", "a=b", "--url", service.url)
    assert len(ran.out.splitlines()) == 2
    assert "--cursor abc" in ran.err
    assert service.seen[0][1] == "/exports?state=running&label=a%3Db&limit=20"


def test_a_token_does_not_go_to_another_host(
    weightless: Callable[..., Ran], service: Service, monkeypatch: Any
) -> None:
    monkeypatch.setenv("WEIGHTLESS_TOKEN", "wl_secret")
    service.script = lambda *_: answer(404, {"code": "not-found", "detail": "no"})
    weightless("verify", f"{service.url}/exports/{EXPORT}", "--url", "http://127.0.0.1:9")
    assert "authorization" not in service.seen[-1][2]
    weightless("verify", f"{service.url}/exports/{EXPORT}/manifest", "--url", service.url)
    assert service.seen[-1][2]["authorization"] == "Bearer wl_secret"


@pytest.mark.parametrize("token", ["se cret\n1", "sécret", "\x00secret", " "])
def test_a_token_that_is_none_is_not_shown(weightless: Callable[..., Ran], monkeypatch: Any, token: str) -> None:
    if "\x00" in token:
        monkeypatch.setattr("service.commands.session.token_source", lambda *_: lambda: token)
    else:
        monkeypatch.setenv("WEIGHTLESS_TOKEN", token)
    ran = weightless("list", "--json")
    assert ran.status == 4
    assert "cret" not in ran.out + ran.err


def test_markup_in_names_is_text(capfd: pytest.CaptureFixture[str]) -> None:
    output = Output(False)
    output.line("[red]x[/red] [link=http://e]y[/link]")
    output.table(["a"], [["[bold]z"]])
    output.say("[red]q")
    printed = capfd.readouterr()
    assert "[red]x[/red] [link=http://e]y[/link]" in printed.out
    assert "[bold]z" in printed.out
    assert printed.err == "[red]q\n"


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (2**30, "1.0 GiB"), (2**40, "1.0 TiB"), (2**50, "1024.0 TiB")],
)
def test_sizes(size: int, text: str) -> None:
    assert size_text(size) == text


def test_the_client_starts_without_the_service_and_without_torch() -> None:
    heavy = "{'torch', 'sqlalchemy', 'fastapi', 'boto3', 'botocore', 'alembic', 'uvicorn', 'executorch'}"
    code = f"import sys, service.cli; print(*({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
