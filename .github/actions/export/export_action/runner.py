"""How a step speaks to the GitHub Actions runner: commands on standard output, values in files.

A runner executes ``::command::`` and ``##[command]`` wherever they appear in a step's output, and names, logs and
errors are other people's text. So everything that is printed stands between ``::stop-commands::`` and its random token,
except the commands of this module, whose values are escaped. Values go to `GITHUB_OUTPUT` under random delimiters.
Sources: docs.github.com, "Workflow commands for GitHub Actions".
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from exporter.contract.events import clean_text

MAX_SUMMARY = 1_000_000
"""Bytes of a step's summary; GitHub refuses one above 1 MiB."""
MAX_ANNOTATION = 4000
"""Characters of an annotation's text."""


class Runner:
    """Standard output and the files of one step."""

    def __init__(self, environment: Mapping[str, str], out: TextIO = sys.stdout) -> None:
        self._out = out
        self._output = environment.get("GITHUB_OUTPUT")
        self._summary = environment.get("GITHUB_STEP_SUMMARY")
        self._stopped: str | None = None

    def say(self, text: str) -> None:
        """Print text that may hold anything; the runner takes nothing in it for a command."""
        if self._stopped is None:
            self._stopped = secrets.token_hex(16)
            self._write(f"::stop-commands::{self._stopped}")
        for line in clean_text(text).splitlines():
            self._write(line)

    def command(self, name: str, text: str = "", **properties: str) -> None:
        """Send a workflow command; text and properties are escaped."""
        if self._stopped is not None:
            self._write(f"::{self._stopped}::")
            self._stopped = None
        listed = ",".join(f"{key}={_property(value)}" for key, value in properties.items())
        self._write(f"::{name}{' ' if listed else ''}{listed}::{_data(text)}")

    def error(self, title: str, text: str) -> None:
        """An error annotation."""
        self.command("error", clean_text(text)[:MAX_ANNOTATION], title=clean_text(title))

    def notice(self, title: str, text: str) -> None:
        """A notice annotation."""
        self.command("notice", clean_text(text)[:MAX_ANNOTATION], title=clean_text(title))

    def mask(self, secret: str) -> None:
        """Keep a secret out of every log of the job."""
        if secret:
            self.command("add-mask", secret)

    @contextmanager
    def group(self, title: str) -> Iterator[None]:
        """Lines that the log folds away."""
        self.command("group", clean_text(title))
        try:
            yield
        finally:
            self.command("endgroup")

    def output(self, name: str, value: str) -> None:
        """Set an output of the step; `value` may have several lines."""
        if not self._output:
            return
        delimiter = f"weightless_{secrets.token_hex(16)}"
        with Path(self._output).open("a", encoding="utf-8", newline="\n") as file:
            file.write(f"{name}<<{delimiter}\n{value}\n{delimiter}\n")

    def summary(self, markdown: str) -> None:
        """Append to the job summary, at most `MAX_SUMMARY` bytes: cut at the end of a line, so of a table's row."""
        if not self._summary:
            return
        data = markdown.encode()
        if len(data) > MAX_SUMMARY:
            data = data[:MAX_SUMMARY].rsplit(b"\n", 1)[0] + b"\n"
        with Path(self._summary).open("ab") as file:
            file.write(data)

    def close(self) -> None:
        """Let the runner listen again: what follows is not this step's."""
        if self._stopped is not None:
            self._write(f"::{self._stopped}::")
            self._stopped = None

    def _write(self, line: str) -> None:
        self._out.write(line + "\n")
        self._out.flush()


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
