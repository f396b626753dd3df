"""A Ray job's log taken apart: event lines start with U+001E, everything else is text for people.

Ray gives a log from its start whenever it is read anew, so both halves remember what they have had: events by their
`seq`, the text by its length.
"""

from __future__ import annotations

import os
from pathlib import Path

import structlog

from exporter.contract.errors import WeightlessError
from exporter.contract.events import MAX_LINE, RECORD_SEPARATOR, AnyEvent, parse_event

log = structlog.get_logger(__name__)

MAX_LOG = 64 * 2**20
"""Bytes of text that are kept of one attempt."""
MAX_PENDING = 4 * MAX_LINE
"""Characters of an unfinished line that are held."""


class FramedLog:
    """Splits one attempt's log; the text goes to `path`, which may hold what an earlier process wrote."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._kept = path.stat().st_size if path.exists() else 0
        self._skip = self._kept
        self._pending = ""
        self._seq = 0

    @property
    def empty(self) -> bool:
        """Whether nothing was ever kept: a job that ran has at least Ray's own first line."""
        return self._kept == 0

    def restart(self) -> None:
        """The log comes from its start again."""
        self._pending = ""
        self._skip = self._kept

    def feed(self, text: str) -> list[AnyEvent]:
        """Take a piece of the log; the events that are new and complete."""
        *lines, self._pending = (self._pending + text).split("\n")
        found: list[AnyEvent] = []
        kept: list[str] = []
        for line in lines:
            # A library may leave an unfinished line in front of an event.
            before, mark, rest = line.rpartition(RECORD_SEPARATOR)
            event = self._event(rest) if mark else None
            if event is None:
                kept.append(f"{line}\n")
            else:
                kept.append(before)
                found.append(event)
        if len(self._pending) > MAX_PENDING:
            kept.append(self._pending)
            self._pending = ""
        self._keep("".join(kept).encode("utf-8", "replace"))
        fresh = [event for event in found if event.seq > self._seq]
        self._seq = max((event.seq for event in fresh), default=self._seq)
        return fresh

    def _event(self, text: str) -> AnyEvent | None:
        try:
            return parse_event(text)
        except WeightlessError as error:
            log.warning("a marked line is no event", attempt=str(self._path.parent.name), error=error.message)
            return None

    def _keep(self, data: bytes) -> None:
        skipped = min(self._skip, len(data))
        self._skip -= skipped
        data = data[skipped:][: MAX_LOG - self._kept]
        if not data:
            return
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        self._kept += len(data)
