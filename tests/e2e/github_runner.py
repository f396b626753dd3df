"""Runs a composite action's steps as GitHub's runner does, and reads what they say as the runner would.

Written after docs.github.com: "Workflow commands for GitHub Actions", "Metadata syntax", "Variables reference".
Only what our action uses of expressions is known: inputs, outputs of earlier steps, and the status functions.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
ACTION = ROOT / ".github" / "actions" / "export"
_KNOWN = {"error", "warning", "notice", "debug", "group", "endgroup", "add-mask", "stop-commands"}
_V2 = re.compile(r"^\s*::([a-zA-Z-]+)(?: ([^:]*))?::(.*)$", re.DOTALL)
_V1 = re.compile(r"##\[([a-zA-Z-]+)[^\]]*\]")


@dataclass
class Result:
    """What a job would have of the action: outputs, summary, annotations, log as shown, masked values, last status."""

    status: int = 0
    outputs: dict[str, str] = field(default_factory=dict)
    summary: str = ""
    annotations: list[dict[str, str]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    masked: set[str] = field(default_factory=set)
    surprises: list[str] = field(default_factory=list)
    """Commands that no step should have sent."""
    raw: str = ""

    def errors(self) -> list[dict[str, str]]:
        """The error annotations."""
        return [item for item in self.annotations if item["command"] == "error"]


class Commands:
    """Reads a step's output line by line, as the runner does."""

    def __init__(self, result: Result) -> None:
        self._result = result
        self._token: str | None = None

    def line(self, text: str) -> None:
        """One line of standard output or error."""
        if self._token is not None:
            if text.strip() == f"::{self._token}::":
                self._token = None
            else:
                self._show(text)
            return
        found = _V2.match(text)
        if found is None:
            if old := _V1.search(text):
                self._result.surprises.append(f"##[{old.group(1)}]")
            self._show(text)
            return
        self._obey(found.group(1), found.group(2) or "", found.group(3))

    @property
    def listening(self) -> bool:
        """Whether commands are obeyed."""
        return self._token is None

    def _obey(self, name: str, properties: str, data: str) -> None:
        result = self._result
        if name not in _KNOWN:
            result.surprises.append(name)
        elif name == "stop-commands":
            assert len(data) >= 16, "a token that can be guessed"
            self._token = data
        elif name == "add-mask":
            result.masked.add(_unescape(data))
        elif name == "group":
            result.groups.append(_unescape(data))
        elif name in ("error", "warning", "notice"):
            pairs = [pair.split("=", 1) for pair in properties.split(",") if pair]
            values = {key: _unescape(value, in_property=True) for key, value in pairs}
            result.annotations.append({"command": name, "message": _unescape(data), **values})

    def _show(self, text: str) -> None:
        for secret in self._result.masked:
            text = text.replace(secret, "***")
        self._result.log.append(text)


def _unescape(text: str, *, in_property: bool = False) -> str:
    pairs = [("%0D", "\r"), ("%0A", "\n")]
    if in_property:
        pairs += [("%3A", ":"), ("%2C", ",")]
    for code, plain in pairs:
        text = text.replace(code, plain)
    return text.replace("%25", "%")


@dataclass
class Job:
    """A job on a runner. `environment` adds to, or replaces, the variables that GitHub documents."""

    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(
        self,
        inputs: Mapping[str, str],
        *,
        interrupt: int | None = None,
        when: Callable[[Mapping[str, str]], bool] = lambda outputs: "export-id" in outputs,
    ) -> Result:
        """Run the action. With `interrupt`, that signal goes to the step's own process once `when(outputs)` holds."""
        action = yaml.safe_load((ACTION / "action.yml").read_text())
        given = {name: str(inputs.get(name, spec.get("default", ""))) for name, spec in action["inputs"].items()}
        assert set(inputs) <= set(given), "an input that the action does not have"
        for name, spec in action["inputs"].items():
            assert not spec.get("required") or name in inputs, f"input required and not supplied: {name}"
        result, steps = Result(), {}
        cancelled = False
        self._lend_client()
        for number, step in enumerate(action["runs"]["steps"]):
            if not _wanted(step.get("if", "success()"), result.status, cancelled):
                continue
            found = self._step(
                number, step, given, steps, result, interrupt if step.get("id") == "export" else None, when
            )
            if step.get("id"):
                steps[step["id"]] = found
            cancelled = cancelled or (interrupt is not None and step.get("id") == "export")
        result.outputs = {name: _expand(spec["value"], given, steps) for name, spec in action["outputs"].items()}
        return result

    def _step(
        self,
        number: int,
        step: Mapping[str, Any],
        inputs: Mapping[str, str],
        steps: Mapping[str, Mapping[str, str]],
        result: Result,
        interrupt: int | None,
        when: Callable[[Mapping[str, str]], bool],
    ) -> dict[str, str]:
        assert step["shell"] == "bash"
        script = self.folder / f"step-{number}.sh"
        script.write_text(_expand(step["run"], inputs, steps))
        output, summary = self.folder / f"output-{number}", self.folder / f"summary-{number}"
        output.touch()
        summary.touch()
        environment = self._variables(output, summary)
        environment |= {name: _expand(value, inputs, steps) for name, value in step.get("env", {}).items()}
        process = subprocess.Popen(
            ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", str(script)],
            cwd=environment["GITHUB_WORKSPACE"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if interrupt is not None:
            threading.Thread(target=_interrupt, args=(process, interrupt, output, when), daemon=True).start()
        commands = Commands(result)
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                result.raw += line
                commands.line(line.rstrip("\r\n"))
        status = process.wait()
        assert commands.listening or status < 0, "a step left the runner deaf"
        result.status = status if result.status == 0 else result.status
        result.summary += summary.read_text()
        return read_outputs(output.read_text())

    def _variables(self, output: Path, summary: Path) -> dict[str, str]:
        workspace, temp = self.folder / "workspace", self.folder / "temp"
        workspace.mkdir(exist_ok=True)
        paths = {name: self.folder / name.lower() for name in ("GITHUB_ENV", "GITHUB_PATH", "GITHUB_STATE")}
        for path in paths.values():
            path.touch()
        return {
            "PATH": os.environ["PATH"],
            "HOME": os.environ.get("HOME", "/root"),
            "CI": "true",
            "GITHUB_ACTIONS": "true",
            "GITHUB_ACTION": "__self",
            "GITHUB_ACTION_PATH": str(ACTION),
            "GITHUB_EVENT_NAME": "push",
            "GITHUB_JOB": "export",
            "GITHUB_OUTPUT": str(output),
            "GITHUB_REF": "refs/heads/main",
            "GITHUB_REPOSITORY": "octo/models",
            "GITHUB_REPOSITORY_ID": "123456",
            "GITHUB_RUN_ATTEMPT": "1",
            "GITHUB_RUN_ID": str(abs(hash(self.folder)) % 10**10),
            "GITHUB_SERVER_URL": "https://github.com",
            "GITHUB_STEP_SUMMARY": str(summary),
            "GITHUB_WORKSPACE": str(workspace),
            "RUNNER_OS": "Linux",
            "RUNNER_TEMP": str(temp),
            **{name: str(path) for name, path in paths.items()},
            **self.environment,
        }

    def _lend_client(self) -> None:
        """What install.sh would make, from the packages of this test run."""
        folder = self.folder / "temp" / "weightless" / "bin"
        folder.mkdir(parents=True, exist_ok=True)
        for name, words in (("python", ""), ("weightless", "-m service.cli ")):
            script = folder / name
            script.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} {words}"$@"\n')
            script.chmod(0o755)


def read_outputs(text: str) -> dict[str, str]:
    """The values of a GITHUB_OUTPUT file; a malformed one is an error, as it is for the runner."""
    outputs: dict[str, str] = {}
    lines = text.split("\n")
    while lines and lines != [""]:
        name, mark, delimiter = lines.pop(0).partition("<<")
        assert mark, "an output without a delimiter"
        assert len(delimiter) >= 16, "a delimiter that can be guessed"
        assert delimiter in lines, "an output without an end"
        end = lines.index(delimiter)
        outputs[name] = "\n".join(lines[:end])
        del lines[: end + 1]
    return outputs


def _interrupt(
    process: subprocess.Popen[str], number: int, output: Path, when: Callable[[Mapping[str, str]], bool]
) -> None:
    while process.poll() is None:
        text = output.read_text()
        whole = text == "" or (text.endswith("\n") and text.count("\n") % 3 == 0)
        if whole and when(read_outputs(text)):
            process.send_signal(signal.Signals(number))
            return
        time.sleep(0.02)


def _wanted(condition: str, status: int, cancelled: bool) -> bool:
    known = {"success()": status == 0 and not cancelled, "cancelled()": cancelled, "always()": True}
    return known[condition]


def _expand(text: str, inputs: Mapping[str, str], steps: Mapping[str, Mapping[str, str]]) -> str:
    def value(found: re.Match[str]) -> str:
        kind, *path = found.group(1).split(".")
        if kind == "inputs":
            return inputs[path[0]]
        assert kind == "steps", found.group()
        assert path[1] == "outputs", found.group()
        return steps.get(path[0], {}).get(path[2], "")

    return re.sub(r"\$\{\{\s*([\w.-]+)\s*\}\}", value, str(text))
