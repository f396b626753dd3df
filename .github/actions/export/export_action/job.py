"""One step of a job: submit, follow, report. The exit status is the command line's (contract.md)."""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from exporter.contract.errors import Forbidden, InvalidRequest, NotFound, Unauthenticated, WeightlessError, error_class
from exporter.contract.manifest import Manifest, digest, parse_manifest
from service.client import Client, ServiceUnreachable, WaitTimeout
from service.commands.session import token_source
from service.web.timeline import timeline_of

from .changes import Changes, changes_between
from .inputs import Inputs, read_inputs
from .progress import Progress
from .runner import Runner
from .summary import Outcome, refusal, summary_of

DONE, FAILED, USAGE, UNREACHABLE, NOT_ALLOWED, CANCELLED, TIMED_OUT = range(7)
LOG_LINES = 5000
"""Last lines of the export's log that the step prints."""
_STATUS = {"succeeded": DONE, "failed": FAILED, "cancelled": CANCELLED}


class Signalled(BaseException):
    """The runner wants the step to end. Not an `Exception`: nothing on the way may take it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def main(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Run the step and return its exit status."""
    runner = Runner(environment)
    try:
        if "--cancel" in arguments:
            return cancel_left(runner, environment)
        return Step(runner, environment).run()
    except WeightlessError as error:
        return refuse(runner, error, environment)
    except Exception:
        runner.error("The Weightless action failed", "A fault of the action itself; its log has the traceback.")
        runner.say(traceback.format_exc())
        return FAILED
    finally:
        runner.close()


def refuse(runner: Runner, error: WeightlessError, environment: Mapping[str, str]) -> int:
    """Say why there is no export, and whose fault it is."""
    message, hint = error.message, error.hint
    if isinstance(error, Unauthenticated) and not environment.get("INPUT_TOKEN"):
        hint = login_hint(environment) or hint
    if isinstance(error, ServiceUnreachable):
        title, status = "The Weightless service cannot be reached", UNREACHABLE
        hint = "Check the input service-url, and that the service runs. An export that was queued already goes on."
    elif isinstance(error, (Unauthenticated, Forbidden)):
        title, status = "The Weightless service did not accept this job", NOT_ALLOWED
    elif isinstance(error, WaitTimeout):
        title, status = "The export is not finished yet", TIMED_OUT
    elif isinstance(error, InvalidRequest):
        title, status = "The export request is not valid", USAGE
    else:
        title, status = f"The export was refused: {error.code}", FAILED
    reason = f" (reason: {error.details['reason']})" if error.details.get("reason") else ""
    runner.error(title, f"{message}{reason}. {hint}" if hint else f"{message}{reason}")
    runner.summary(refusal(title, message + reason, hint))
    return status


def login_hint(environment: Mapping[str, str]) -> str | None:
    """What is missing where GitHub offers the job no OIDC token; None where it does."""
    if environment.get("ACTIONS_ID_TOKEN_REQUEST_URL") and environment.get("ACTIONS_ID_TOKEN_REQUEST_TOKEN"):
        return None
    if from_fork(environment):
        return (
            "This pull request comes from a fork, and GitHub gives workflows of forks no OIDC token. "
            "Export after the merge, or from a workflow_run or workflow_dispatch of this repository; "
            "see docs.github.com, OpenID Connect."
        )
    return "The job has no OIDC token: give it `permissions: id-token: write` in the workflow file."


def from_fork(environment: Mapping[str, str]) -> bool:
    """Whether the event is a pull request from another repository."""
    try:
        event = json.loads(Path(environment.get("GITHUB_EVENT_PATH", "")).read_bytes())
        request = event["pull_request"]
        head, base = request["head"]["repo"], request["base"]["repo"]
        return head is None or head["id"] != base["id"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def cancel_left(runner: Runner, environment: Mapping[str, str]) -> int:
    """Cancel the export of a step that was killed before it could; a finished export stays as it is."""
    export_id = environment.get("EXPORT_ID", "")
    if export_id:
        with _client(runner, environment["INPUT_SERVICE_URL"], environment) as client:
            state = client.cancel(export_id).get("state")
        runner.notice("Export cancelled", f"{export_id} is {state}")
    return DONE


class Step:
    """One export, from the inputs to the outputs."""

    def __init__(self, runner: Runner, environment: Mapping[str, str]) -> None:
        self._runner = runner
        self._environment = environment
        self._progress = Progress(runner)
        self._export: Mapping[str, Any] | None = None

    def run(self) -> int:
        """Submit and, unless told otherwise, wait."""
        inputs = read_inputs(self._environment)
        key = self._key(inputs.body)
        with _client(self._runner, inputs.service_url, self._environment) as client:
            try:
                with signals():
                    export = self._export = client.submit(inputs.body, idempotency_key=key)
                    self._runner.output("export-id", export["id"])
                    page = str(export.get("links", {}).get("page", ""))
                    self._runner.notice("Export queued", f"{export['id']}: {page}")
                    if not inputs.wait:
                        self._runner.output("state", export["state"])
                        self._runner.summary(summary_of(Outcome(export)))
                        return DONE
                    self._follow(client, export["id"], inputs.timeout)
            except Signalled as signalled:
                return self._cancelled(inputs, key, signalled.number)
            return self._report(client, inputs, export["id"])

    def _key(self, body: Mapping[str, Any]) -> str:
        """The same step of the same run never queues twice, however often it is tried."""
        names = ("GITHUB_REPOSITORY_ID", "GITHUB_RUN_ID", "GITHUB_RUN_ATTEMPT", "GITHUB_JOB", "GITHUB_ACTION")
        parts = [self._environment.get(name, "") for name in names]
        if not parts[1]:
            return hashlib.sha256(os.urandom(32)).hexdigest()
        return hashlib.sha256(json.dumps([*parts, body], sort_keys=True).encode()).hexdigest()

    def _follow(self, client: Client, export_id: str, timeout: int | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            for event in client.events(export_id, deadline=deadline):
                self._progress.show(event)
        except WaitTimeout:
            self._runner.output("state", str(client.export(export_id)["state"]))
            raise

    def _cancelled(self, inputs: Inputs, key: str, number: int) -> int:
        """Cancel the export, also one whose submission was not answered yet: the same key and body name it."""
        with suppress(WeightlessError), _client(self._runner, inputs.service_url, self._environment) as client:
            export = self._export or client.submit(inputs.body, idempotency_key=key)
            self._runner.output("export-id", export["id"])
            export = client.cancel(export["id"])
            self._runner.output("state", str(export["state"]))
            self._runner.notice("Export cancelled", f"{export['id']} was cancelled with its workflow")
            self._runner.summary(summary_of(Outcome({**export, "state": "cancelled"})))
        return 128 + number

    def _report(self, client: Client, inputs: Inputs, export_id: str) -> int:
        export = client.export(export_id)
        state = str(export["state"])
        self._runner.output("state", state)
        manifest = self._artifact(client, export) if state == "succeeded" else None
        self._print_log(client, export_id)
        changes, compared = self._compare(client, inputs, export, manifest)
        timeline = timeline_of(self._progress.events)
        self._runner.summary(summary_of(Outcome(export, manifest, timeline, changes, compared)))
        self._annotate(export)
        if inputs.pull and state == "succeeded":
            return self._pull(inputs, export_id)
        return _STATUS.get(state, FAILED)

    def _annotate(self, export: Mapping[str, Any]) -> None:
        error = export.get("error")
        if error:
            kind = error_class(str(error["code"]))
            whose = {"operator": " (for the service's operator)", "service": " (a fault of the service)"}.get(
                kind.actor, ""
            )
            stage = f" in stage {error['stage']}" if error.get("stage") else ""
            self._runner.error(
                f"Export failed: {error['code']}{whose}", f"{error['message']}{stage}\n{error.get('hint', '')}".strip()
            )
        elif export["state"] == "cancelled":
            self._runner.error("Export cancelled", f"{export['id']} was cancelled by somebody else")
        else:
            self._runner.notice("Export succeeded", f"{export['id']}: {(export.get('manifest') or {}).get('uri', '')}")

    def _artifact(self, client: Client, export: Mapping[str, Any]) -> Manifest:
        data = client.manifest(export["id"])
        manifest, reference = parse_manifest(data), export["manifest"]
        uri = str(reference["uri"])
        self._runner.output("manifest-uri", uri)
        self._runner.output("manifest-digest", digest(data))
        self._runner.output("program-uri", absolute(uri, manifest.program.urls[0]))
        self._runner.output("data-uris", json.dumps([absolute(uri, item.urls[0]) for item in manifest.data]))
        folder = Path(self._environment.get("RUNNER_TEMP", ".")) / f"weightless-{export['id']}"
        folder.mkdir(parents=True, exist_ok=True)
        subjects = [(digest(data), "manifest.json"), (manifest.program.digest, manifest.program.name)]
        subjects += [(item.digest, item.name) for item in manifest.files]
        checksums = folder / "subject-checksums.txt"
        checksums.write_text(
            "".join(f"{value.removeprefix('sha256:')}  {name}\n" for value, name in subjects), encoding="utf-8"
        )
        self._runner.output("subject-checksums", str(checksums))
        return manifest

    def _compare(
        self, client: Client, inputs: Inputs, export: Mapping[str, Any], manifest: Manifest | None
    ) -> tuple[Changes | None, str]:
        """What changed; a comparison that cannot be made is a notice and never a failure."""
        if manifest is None or inputs.compare_with == "none":
            return None, ""
        try:
            name, old = self._earlier(client, inputs.compare_with, export)
        except WeightlessError as error:
            self._runner.notice("Nothing to compare with", error.message)
            return None, ""
        return (None, "") if old is None else (changes_between(old, manifest), name)

    def _earlier(self, client: Client, wanted: str, export: Mapping[str, Any]) -> tuple[str, Manifest | None]:
        if wanted == "previous":
            listed = client.exports(state="succeeded", recipe=str(export["recipe"]), limit=100)["items"]
            alike = [item for item in listed if item["id"] != export["id"] and _model(item) == _model(export)]
            if not alike:
                return "", None
            wanted = str(alike[0]["id"])
        if wanted.startswith("exp_"):
            return wanted, parse_manifest(client.manifest(wanted))
        try:
            return wanted, parse_manifest(Path(wanted).read_bytes())
        except OSError as error:
            raise NotFound(f"{wanted} cannot be read: {error.strerror}") from error

    def _print_log(self, client: Client, export_id: str) -> None:
        lines: list[str] = []
        try:
            for line in client.logs(export_id):
                lines.append(line)
                del lines[:-LOG_LINES]
        except WeightlessError as error:
            lines.append(f"the log cannot be read: {error.message}")
        with self._runner.group(f"Log of {export_id}"):
            self._runner.say("\n".join(lines))

    def _pull(self, inputs: Inputs, export_id: str) -> int:
        # -P: the workspace, which is the current folder, is no place to import from.
        command = [sys.executable, "-P", "-m", "service.cli", "pull", export_id, "-o", inputs.pull]
        environment = {**self._environment, "WEIGHTLESS_URL": inputs.service_url, **_login(self._environment)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
        with self._runner.group(f"Pull to {inputs.pull}"):
            self._runner.say(done.stdout + done.stderr)
        if done.returncode == DONE:
            self._runner.output("pulled", str(Path(inputs.pull).resolve()))
        else:
            last = (done.stderr.strip().splitlines() or ["weightless pull failed"])[-1]
            self._runner.error("The export succeeded, but its download failed", last)
        return done.returncode


class signals:  # noqa: N801 - reads as a word after `with`
    """SIGINT and SIGTERM raise `Signalled` inside the block."""

    def __enter__(self) -> None:
        def handler(number: int, frame: FrameType | None) -> None:
            # The next signal must not interrupt the clean-up that this one starts.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise Signalled(number)

        self._before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *details: object) -> None:
        if details[0] is None or not issubclass(details[0], Signalled):  # type: ignore[arg-type]
            for number, before in self._before.items():
                signal.signal(number, before)


def absolute(manifest_uri: str, url: str) -> str:
    """`url` of a manifest's file, resolved against the manifest's own URI."""
    if "://" in url:
        return url
    scheme, _, rest = manifest_uri.rpartition("/")[0].partition("://")
    return f"{scheme}://{posixpath.normpath(f'{rest}/{url}')}"


def _model(export: Mapping[str, Any]) -> tuple[str, str]:
    return str(export["source"]).partition("@")[0], str(export["target"].get("backend"))


def _login(environment: Mapping[str, str]) -> dict[str, str]:
    login = {"WEIGHTLESS_TOKEN": environment.get("INPUT_TOKEN", "")}
    if environment.get("INPUT_AUDIENCE"):
        login["WEIGHTLESS_OIDC_AUDIENCE"] = environment["INPUT_AUDIENCE"]
    return login


def _client(runner: Runner, url: str, environment: Mapping[str, str]) -> Client:
    """A client that asks for a fresh token on each call, and has each one masked."""
    fresh = token_source(url.rstrip("/"), {**environment, **_login(environment)})
    masked: set[str] = set()

    def token() -> str | None:
        value = fresh()
        if value and value not in masked:
            masked.add(value)
            runner.mask(value)
        return value

    return Client(url, token)
