"""Follows an export's events: a progress bar on a terminal, a line for each change elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from exporter.contract.events import clean_text
from service.client import Client
from service.commands.output import Output, size_text

LINE_INTERVAL = 15.0
"""Seconds between two lines about the progress of one stage, where no bar is drawn."""


class Follower:
    """Shows one export until it ends. A context manager, so that the terminal is left clean."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[amount]}", markup=False),
            TimeElapsedColumn(),
            console=output.err,
            disable=not output.bars,
        )
        self._tasks: dict[str, TaskID] = {}
        self._said: dict[str, float] = {}
        self._last: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> Follower:
        self._bars.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._bars.__exit__(*details)

    def follow(self, client: Client, export_id: str, deadline: float | None) -> None:
        """Show events until the export has ended; `WaitTimeout` when `time.monotonic()` passes `deadline`."""
        for event in client.events(export_id, deadline=deadline):
            self.show(event)

    def show(self, event: Mapping[str, Any]) -> None:
        """Show one event; kinds that this version does not know are passed over."""
        kind = event.get("type")
        if kind == "state":
            reason = f": {event['reason']}" if event.get("reason") else ""
            self._say(f"{event.get('to')}{reason}")
        elif kind == "stage":
            self._stage(event)
        elif kind == "progress":
            self._progress(event)
        elif kind == "warning":
            self._say(f"warning: {event.get('message')}")

    def _say(self, text: str) -> None:
        self._bars.console.print(clean_text(text), markup=False, highlight=False)

    def _stage(self, event: Mapping[str, Any]) -> None:
        name = _stage_name(event)
        if event.get("state") == "started":
            if self._output.bars:
                self._task(name)
            else:
                self._say(f"{name} …")
        elif name in self._tasks:
            task = self._bars.tasks[self._bars.task_ids.index(self._tasks[name])]
            self._bars.update(
                self._tasks[name], total=task.total or 1, completed=task.total or 1, amount=self._all(name)
            )
            self._bars.stop_task(self._tasks[name])

    def _all(self, name: str) -> str:
        last = self._last.get(name)
        return "" if last is None else _amount({**last, "rate": None}, int(last["total"]), int(last["total"]))

    def _progress(self, event: Mapping[str, Any]) -> None:
        name, done, total = str(event.get("stage")), int(event.get("done", 0)), int(event.get("total", 0))
        amount = _amount(event, done, total)
        self._last[name] = {"unit": event.get("unit"), "total": total}
        if self._output.bars:
            self._bars.update(self._task(name), completed=done, total=total or None, amount=amount)
            return
        now = time.monotonic()
        if now - self._said.get(name, -LINE_INTERVAL) >= LINE_INTERVAL:
            self._said[name] = now
            self._say(f"{name} {amount}")

    def _task(self, name: str) -> TaskID:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(clean_text(name), total=None, amount="")
        return self._tasks[name]


def _stage_name(event: Mapping[str, Any]) -> str:
    method = event.get("method")
    return f"{event.get('name')} {method}" if method else str(event.get("name"))


def _amount(event: Mapping[str, Any], done: int, total: int) -> str:
    if event.get("unit") != "bytes":
        return f"{done}/{total} {event.get('unit')}"
    rate = event.get("rate")
    return f"{size_text(done)}/{size_text(total)}" + (f" {size_text(int(rate))}/s" if rate else "")
