"""The action's own steps, run as GitHub runs them, against a live service: what a job gets in every kind of end."""

from __future__ import annotations

import hashlib
import http.client
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from markdown_it import MarkdownIt

from tests.e2e.github_runner import Job
from tests.e2e.live_service import LiveService, free_port, running

HOSTILE = (
    "::add-mask::models\r\n::error::owned%0A\x1b[31m##[error]x ::set-output name=state::y |<img src=x> `</details>`\n"
)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def ask(service: LiveService, **given: Any) -> dict[str, str]:
    """The action's inputs; values that are no strings are JSON."""
    inputs = {"service-url": service.url, "recipe": "scripted", "source": service.source}
    inputs["target"] = '{"backend": "portable"}'
    for name, value in given.items():
        inputs[name.replace("_", "-")] = value if isinstance(value, str) else json.dumps(value)
    return inputs


def error(code: str, message: str = "it went wrong", **more: Any) -> dict[str, Any]:
    return {"code": code, "message": message, "hint": "Do something else.", "stage": "compiling", **more}


def test_action_success(scripted: LiveService, job: Job) -> None:
    samples = {"type": "resources", "hostAnonBytes": 2**30, "hostRssBytes": 2**30, "gpuBytes": 0, "diskWrittenBytes": 1}
    result = job.run(
        ask(
            scripted,
            options={"events": [{"type": "stage", "name": "compiling", "state": "started"}, samples, samples]},
            budgets={"hostMemory": "1GiB", "gpuMemory": "1GiB"},
            max_host_memory="4GiB",
            labels={"pr": "7"},
        )
    )
    assert result.status == 0, result.raw
    outputs = result.outputs
    export = scripted.export(outputs["export-id"])
    assert outputs["state"] == export["state"] == "succeeded"
    assert export["budgets"] == {"hostMemory": 4 * 2**30, "gpuMemory": 2**30}
    assert export["labels"] == {"pr": "7"}
    assert outputs["manifest-uri"] == export["manifest"]["uri"]
    assert outputs["manifest-digest"] == export["manifest"]["digest"]
    manifest = scripted.get(f"/exports/{export['id']}/manifest")[2]
    checksums = Path(outputs["subject-checksums"]).read_text().splitlines()
    assert checksums[0] == f"{hashlib.sha256(manifest).hexdigest()}  manifest.json"
    assert checksums[1].endswith("  model.pte")
    assert outputs["program-uri"] == f"{export['manifest']['uri'].rpartition('/')[0]}/1/model.pte"
    assert Path(outputs["program-uri"].removeprefix("file://")).is_file()
    assert json.loads(manifest)["data"][0]["urls"] == [f"../../weights/{export['id']}-1/model.ptd"]
    store = export["manifest"]["uri"].partition("/exports/")[0]
    assert json.loads(outputs["data-uris"]) == [f"{store}/weights/{export['id']}-1/model.ptd"]
    assert [item["command"] for item in result.annotations] == ["notice", "notice"]
    assert f"{scripted.url}/exports/{export['id']}" in result.summary
    for text in ("succeeded", "25 %", "4.00 GiB", "compiling", "sent", "2 segments", "xychart-beta"):
        assert text in result.summary, text
    assert result.surprises == []


def test_action_model_failure(scripted: LiveService, job: Job) -> None:
    failure = error(
        "unsupported-model", "aten::fft has no kernel", details={"method": "forward", "operators": ["a", "b"]}
    )
    result = job.run(ask(scripted, options={"failure": failure, "log": "a traceback\n"}))
    assert result.status == 1
    assert result.outputs["state"] == "failed"
    assert result.outputs["manifest-uri"] == ""
    (shown,) = result.errors()
    assert shown["title"] == "Export failed: unsupported-model"
    assert shown["message"] == "aten::fft has no kernel in stage compiling\nDo something else."
    assert "a traceback" in result.log
    assert result.groups[-1].startswith("Log of exp_")
    assert "whoever submitted" in result.summary
    assert "a, b" in result.summary


@pytest.mark.slow
def test_action_exports_and_pulls_a_real_model(real: LiveService, job: Job) -> None:
    inputs = {"recipe": "exported-program", "target": '{"backend": "portable"}', "pull": "out", "max-wall-time": "10m"}
    result = job.run({"service-url": real.url, "source": real.source, **inputs})
    assert result.status == 0, result.raw
    folder = Path(result.outputs["pulled"])
    assert folder == job.folder / "workspace" / "out"
    lines = Path(result.outputs["subject-checksums"]).read_text().splitlines()
    sums = {name: value for value, name in (line.split("  ") for line in lines)}
    assert hashlib.sha256((folder / "model.pte").read_bytes()).hexdigest() == sums["model.pte"]
    assert (folder / "model.ptd").stat().st_size > 0
    assert "verifying" in result.summary
    assert "passed" in result.summary
    assert result.groups == [f"Log of {result.outputs['export-id']}", "Pull to out"]


@pytest.mark.parametrize(
    ("code", "title", "whose"),
    [
        ("budget-exceeded", "Export failed: budget-exceeded", "whoever submitted the export"),
        ("host-out-of-memory", "Export failed: host-out-of-memory (for the service's operator)", "not at fault"),
        ("internal", "Export failed: internal (a fault of the service)", "not at fault"),
    ],
)
def test_action_says_whose_fault_it_is(scripted: LiveService, job: Job, code: str, title: str, whose: str) -> None:
    result = job.run(ask(scripted, options={"failure": error(code)}))
    assert result.status == 1
    assert [item["title"] for item in result.errors()] == [title]
    assert whose in result.summary


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_action_cancelled_run_cancels_its_export(scripted: LiveService, job: Job, number: int) -> None:
    result = job.run(ask(scripted, options={"seconds": 120}), interrupt=number)
    assert result.status == 128 + number
    export = scripted.wait_for(result.outputs["export-id"], "cancelled")
    assert export["state"] == "cancelled"
    assert "cancelled" in result.summary
    assert result.errors() == []


def test_action_cancelled_while_its_submission_is_unanswered_leaves_no_export(scripted: LiveService, job: Job) -> None:
    before = {item["id"] for item in listed(scripted)}
    with silent_front(scripted) as (url, arrived):
        inputs = {**ask(scripted, options={"seconds": 120}), "service-url": url}
        result = job.run(inputs, interrupt=signal.SIGINT, when=lambda outputs: arrived.is_set())
    assert result.status == 130
    (new,) = [item for item in listed(scripted) if item["id"] not in before]
    assert result.outputs["export-id"] == new["id"]
    assert scripted.wait_for(new["id"])["state"] == "cancelled"


def test_action_killed_step_leaves_no_export(scripted: LiveService, job: Job) -> None:
    result = job.run(ask(scripted, options={"seconds": 120}), interrupt=signal.SIGKILL)
    assert result.status == -signal.SIGKILL
    assert scripted.wait_for(result.outputs["export-id"])["state"] == "cancelled"


@pytest.mark.slow
def test_action_service_down(job: Job) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    result = job.run({"service-url": url, "recipe": "scripted", "source": "file:///m"})
    assert result.status == 3
    (shown,) = result.errors()
    assert shown["title"] == "The Weightless service cannot be reached"
    assert url in shown["message"]
    assert result.outputs["export-id"] == ""
    assert "cannot be reached" in result.summary


def test_action_without_waiting(scripted: LiveService, job: Job) -> None:
    result = job.run(ask(scripted, wait="false", options={"seconds": 1}))
    assert result.status == 0
    assert result.outputs["state"] in ("queued", "starting", "running")
    assert scripted.wait_for(result.outputs["export-id"])["state"] == "succeeded"


def test_action_timeout_lets_the_export_go_on(scripted: LiveService, job: Job) -> None:
    result = job.run(ask(scripted, timeout="1s", options={"seconds": 4}))
    assert result.status == 6
    assert result.outputs["state"] in ("queued", "starting", "running")
    assert result.errors()[0]["title"] == "The export is not finished yet"
    assert scripted.wait_for(result.outputs["export-id"])["state"] == "succeeded"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("service-url", "ftp://example.org"),
        ("options", "{"),
        ("options", "[]"),
        ("target", '"cuda"'),
        ("budgets", '{"gpuMemory": "lots"}'),
        ("max-gpu-memory", "-1"),
        ("max-wall-time", "soon"),
        ("labels", '{"a": 1}'),
        ("priority", "high"),
        ("wait", "maybe"),
        ("timeout", "later"),
        ("recipe", "../etc"),
    ],
)
def test_action_refuses_wrong_inputs_before_it_sends_them(job: Job, name: str, value: str) -> None:
    inputs = {"service-url": "http://127.0.0.1:9", "recipe": "scripted", "source": "file:///m"}
    result = job.run({**inputs, name: value})
    assert result.status == 2
    assert result.errors()[0]["title"] == "The export request is not valid"


def test_action_unknown_recipe_is_refused_with_the_service_s_words(scripted: LiveService, job: Job) -> None:
    result = job.run(ask(scripted, recipe="no-such-recipe"))
    assert result.status == 2
    assert "no-such-recipe" in result.errors()[0]["message"]


def test_action_compares_with_the_previous_export(scripted: LiveService, tmp_path: Path) -> None:
    source = f"file://{scripted.folder}/models/compared.pt2"
    jobs = [Job(tmp_path / name) for name in ("one", "two", "three")]
    for item in jobs:
        item.folder.mkdir()
    first = jobs[0].run(ask(scripted, source=source, options={"segments": 3}))
    assert "Since" not in first.summary
    second = jobs[1].run(ask(scripted, source=source, options={"segments": 5}))
    assert f"Since <code>{first.outputs['export-id'].replace('_', '&#95;')}</code>" in second.summary
    assert "0 changed, 2 added, 0 removed, 3 the same" in second.summary
    third = jobs[2].run(ask(scripted, source=source, compare_with="missing.json", options={}))
    assert third.status == 0
    assert any("missing.json" in item["message"] for item in third.annotations)


def test_action_hostile_text_in_every_field(scripted: LiveService, job: Job) -> None:
    events = [{"type": "warning", "code": HOSTILE, "message": HOSTILE, "details": {}}]
    failure = error("unsupported-model", HOSTILE, details={HOSTILE: HOSTILE, "operators": [HOSTILE]})
    options = {"events": events, "failure": {**failure, "hint": HOSTILE}, "log": f"{HOSTILE}\n" * 3}
    result = job.run(ask(scripted, options=options, labels={"note": HOSTILE}))
    assert result.status == 1, result.raw
    assert result.surprises == []
    assert result.masked == set()
    assert len(result.errors()) == 1
    assert result.outputs["state"] == "failed"
    assert "\x1b" not in result.raw
    assert "\x1b" not in result.summary
    assert rendered_tags(result.summary) <= ALLOWED_TAGS


def test_action_hostile_names_in_a_manifest(scripted: LiveService, job: Job) -> None:
    name = "::error::{}|<img src=x>`*_[a](javascript:alert(1))</details>"
    result = job.run(ask(scripted, options={"tensor": name, "method": "<script>|`"}))
    assert result.status == 0
    assert result.errors() == []
    assert result.surprises == []
    assert rendered_tags(result.summary) <= ALLOWED_TAGS
    assert (
        "javascript:"
        not in MarkdownIt("gfm-like", {"linkify": False}).render(result.summary).replace("&#58;", ":").split("</a>")[0]
    )


def test_action_summary_of_a_large_export(scripted: LiveService, job: Job) -> None:
    result = job.run(ask(scripted, options={"segments": 1000, "tensor": "model.layers.{}.self_attn.q_proj.weight"}))
    assert result.status == 0
    assert len(result.summary.encode()) < 2**20
    tables = [
        token for token in MarkdownIt("gfm-like", {"linkify": False}).parse(result.summary) if token.type == "tr_open"
    ]
    assert len(tables) > 1000
    assert rendered_tags(result.summary) <= ALLOWED_TAGS


def test_action_summary_that_would_be_too_large_is_cut_at_a_row(scripted: LiveService, job: Job) -> None:
    result = job.run(ask(scripted, options={"segments": 9000, "tensor": "layers.{}." + "weight_" * 20}))
    assert result.status == 0
    assert 900_000 < len(result.summary.encode()) <= 1_000_000
    assert "Cut here" in result.summary
    assert result.summary.count("<details>") == result.summary.count("</details>")
    assert rendered_tags(result.summary) <= ALLOWED_TAGS


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A service that wants tokens."""
    with running(tmp_path_factory.mktemp("guarded"), WEIGHTLESS_AUTH="token") as service:
        yield service


def test_action_without_id_token_permission(guarded: LiveService, job: Job) -> None:
    result = job.run(ask(guarded))
    assert result.status == 4
    (shown,) = result.errors()
    assert "id-token: write" in shown["message"]
    assert "reason: missing" in shown["message"]
    assert "id&#45;token" in result.summary or "id-token" in result.summary


def test_action_in_a_fork_pull_request(guarded: LiveService, tmp_path: Path) -> None:
    event = tmp_path / "event.json"
    event.write_text(json.dumps({"pull_request": {"head": {"repo": {"id": 2}}, "base": {"repo": {"id": 1}}}}))
    job = Job(tmp_path, {"GITHUB_EVENT_NAME": "pull_request", "GITHUB_EVENT_PATH": str(event)})
    result = job.run(ask(guarded))
    assert result.status == 4
    assert "comes from a fork" in result.errors()[0]["message"]
    assert "fork" in result.summary


def test_action_masks_a_token_that_is_not_accepted(guarded: LiveService, job: Job) -> None:
    token = "wl_canary_5d1f0c6b7a"
    result = job.run(ask(guarded, token=token))
    assert result.status == 4
    assert result.masked == {token}
    everything = "\n".join(
        [*result.log, result.summary, json.dumps(result.outputs), json.dumps(result.annotations), guarded.log()]
    )
    assert token not in everything


def listed(service: LiveService) -> list[dict[str, Any]]:
    """The newest exports."""
    items: list[dict[str, Any]] = json.loads(service.get("/exports?limit=200")[2])["items"]
    return items


@contextmanager
def silent_front(service: LiveService) -> Iterator[tuple[str, threading.Event]]:
    """A server before the service that passes everything on, but keeps the first answer to itself."""
    arrived, ended = threading.Event(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            connection = http.client.HTTPConnection(urlsplit(service.url).netloc, timeout=30)
            names = ("Content-Type", "Idempotency-Key", "Accept")
            headers = {name: self.headers[name] for name in names if name in self.headers}
            connection.request("POST", self.path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
            connection.close()
            if not arrived.is_set():
                arrived.set()
                ended.wait(20)
                self.close_connection = True
                return
            self.send_response(answer.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *details: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", arrived
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


ALLOWED_TAGS = {"details", "summary", "code"}


def rendered_tags(markdown: str) -> set[str]:
    """Names of the HTML tags that a Markdown parser lets through as such, outside of its own output."""
    found: set[str] = set()
    for token in MarkdownIt("gfm-like", {"linkify": False}).parse(markdown):
        for item in [token, *(token.children or [])]:
            if item.type in ("html_block", "html_inline"):
                found |= {part.strip("</").split(">")[0].split()[0].lower() for part in item.content.split("<")[1:]}
            assert item.type != "image"
    return found
