"""Where things are printed, and with which status the command ends.

Results go to standard output; progress and messages go to standard error. With `--json` standard output holds exactly
one JSON object. Names and errors come from other people: control characters are stripped, and nothing is markup.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from exporter.contract.errors import WeightlessError
from exporter.contract.events import clean_text

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output; messages go to standard error.")
]

DONE = 0
FAILED = 1
USAGE = 2
UNREACHABLE = 3
NOT_ALLOWED = 4
CANCELLED = 5
TIMED_OUT = 6

_STATUS = {
    "invalid-request": USAGE,
    "service-unreachable": UNREACHABLE,
    "store-unavailable": UNREACHABLE,
    "store-rejected": UNREACHABLE,
    "queue-full": UNREACHABLE,
    "rate-limited": UNREACHABLE,
    "unauthenticated": NOT_ALLOWED,
    "forbidden": NOT_ALLOWED,
    "source-access-denied": NOT_ALLOWED,
    "cancelled": CANCELLED,
    "wait-timeout": TIMED_OUT,
}


def exit_status(error: WeightlessError) -> int:
    """The exit status for an error of a command itself (contract.md); an export's own failure is always `FAILED`."""
    if error.code == "store-rejected" and error.details.get("status") in (401, 403):
        return NOT_ALLOWED
    return _STATUS.get(error.code, FAILED)


PIPE_WIDTH = 10_000
"""Columns of a table that no terminal shows: its lines are never folded, so that other programs can cut them."""


class Output:
    """Prints for one command. `bars` says whether progress bars may be drawn."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.out = Console(file=sys.stdout, markup=False, highlight=False, emoji=False, soft_wrap=True)
        if not self.out.is_terminal:
            self.out.width = PIPE_WIDTH
        self.err = Console(file=sys.stderr, markup=False, highlight=False, emoji=False, soft_wrap=True)
        self.bars = self.err.is_terminal

    def say(self, message: str, style: str | None = None) -> None:
        """A message on standard error."""
        self.err.print(Text(clean_text(message), style=style or ""))

    def line(self, text: str = "", style: str | None = None) -> None:
        """A line of the result, for people; nothing with `--json`."""
        if not self.as_json:
            self.out.print(Text(clean_text(text), style=style or ""))

    def fields(self, rows: Sequence[tuple[str, str | None]]) -> None:
        """Names and values, aligned; rows without a value are left out."""
        shown = [(name, value) for name, value in rows if value is not None]
        width = max((len(name) for name, _ in shown), default=0)
        for name, value in shown:
            self.line(f"{name.ljust(width)}  {value}")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table for people; nothing with `--json`."""
        if self.as_json:
            return
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*(Text(clean_text(cell)) for cell in row))
        self.out.print(table)

    def result(self, value: Mapping[str, Any]) -> None:
        """The one object of `--json`; nothing without it."""
        if self.as_json:
            sys.stdout.write(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n")
            sys.stdout.flush()

    def error(self, error: WeightlessError) -> None:
        """An error: sentence and hint for people, and the object with `--json`."""
        self.say(f"error: {error.message}", "red")
        if error.details.get("errors"):
            for item in error.details["errors"] if isinstance(error.details["errors"], list) else ():
                self.say(f"  {item}")
        if error.hint:
            self.say(f"hint: {error.hint}")
        self.result({"error": error.as_dict()})


def size_text(size: int) -> str:
    """A number of bytes for people: three digits and a binary unit."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{int(value)} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
