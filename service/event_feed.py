"""Wakes event streams: one question to the database for all of them, four times a second, and a stop for shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from exporter.contract.errors import WeightlessError
from service.job_store import JobStore

log = structlog.get_logger(__name__)

POLL_SECONDS = 0.25


class EventFeed:
    """Tells streams when their export has new events. Lives on one event loop.

    Whatever the number of streams, the cost is one indexed query a poll for each 500 exports that are watched.
    """

    def __init__(self, jobs: JobStore, *, poll_seconds: float = POLL_SECONDS) -> None:
        self._jobs = jobs
        self._poll_seconds = poll_seconds
        self._watchers: dict[str, set[asyncio.Event]] = {}
        self._newest: dict[str, int] = {}
        self._stopping = asyncio.Event()

    @property
    def stopping(self) -> bool:
        """Whether streams should end now."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """End every stream; called from the event loop."""
        self._stopping.set()
        for events in self._watchers.values():
            for event in events:
                event.set()

    async def wait(self, seconds: float) -> bool:
        """Sleep; True if streams should end now."""
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return False
        return True

    @contextmanager
    def watch(self, export_id: str) -> Iterator[asyncio.Event]:
        """An event that is set whenever the export may have news; the watcher clears it before it looks."""
        event = asyncio.Event()
        if self.stopping:
            event.set()
        self._watchers.setdefault(export_id, set()).add(event)
        try:
            yield event
        finally:
            watchers = self._watchers[export_id]
            watchers.discard(event)
            if not watchers:
                del self._watchers[export_id]
                self._newest.pop(export_id, None)

    async def run(self) -> None:
        """Poll until stopped."""
        while not await self.wait(self._poll_seconds):
            watched = list(self._watchers)
            if not watched:
                continue
            try:
                newest = await asyncio.to_thread(self._jobs.newest_events, watched)
            except WeightlessError as error:
                log.warning("event feed could not read the database", error=error.message)
                continue
            for export_id in watched:
                number = newest.get(export_id, -1)
                if self._newest.get(export_id) != number and export_id in self._watchers:
                    self._newest[export_id] = number
                    for event in self._watchers[export_id]:
                        event.set()
