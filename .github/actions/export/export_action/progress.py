"""Prints what an export is doing, a line for each change and at most one a stage in fifteen seconds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from service.web.words import size

from .runner import Runner

INTERVAL = 15.0
MAX_KEPT = 20_000
"""Events kept for the summary's chart: more than five hours of one a second; older samples are halved beyond that."""


class Progress:
    """Shows events, and keeps those that a timeline is made of."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._said: dict[str, float] = {}
        self.events: list[Mapping[str, Any]] = []

    def show(self, event: Mapping[str, Any]) -> None:
        """Show one event of the export's stream."""
        kind = event.get("type")
        if kind == "state":
            reason = f": {event['reason']}" if event.get("reason") else ""
            self._runner.say(f"{event.get('to')}{reason}")
        elif kind == "stage" and event.get("state") == "started":
            method = f" {event['method']}" if event.get("method") else ""
            self._runner.say(f"{event.get('name')}{method} …")
        elif kind == "progress":
            self._amount(event)
        elif kind == "warning":
            self._runner.notice(f"Warning: {event.get('code')}", str(event.get("message")))
        if kind in ("state", "stage", "resources", "finished", "failed"):
            self._keep(event)

    def _amount(self, event: Mapping[str, Any]) -> None:
        stage, now = str(event.get("stage")), time.monotonic()
        if now - self._said.get(stage, -INTERVAL) < INTERVAL:
            return
        self._said[stage] = now
        done, total = int(event.get("done", 0)), int(event.get("total", 0))
        if event.get("unit") != "bytes":
            self._runner.say(f"{stage}: {done} of {total} {event.get('unit')}")
            return
        rate = f", {size(int(event['rate']))}/s" if event.get("rate") else ""
        self._runner.say(f"{stage}: {size(done)} of {size(total)}{rate}")

    def _keep(self, event: Mapping[str, Any]) -> None:
        self.events.append(event)
        if len(self.events) > MAX_KEPT:
            others = [item for item in self.events if item.get("type") != "resources"]
            samples = [item for item in self.events if item.get("type") == "resources"][::2]
            self.events = sorted([*others, *samples], key=lambda item: int(item.get("seq", 0)))
