"""The reaper: a thread that aborts orphaned uploads, at the start and then every minute."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import structlog

from exporter.contract.errors import WeightlessError
from exporter.contract.objects import Upload

log = structlog.get_logger(__name__)

REAP_SECONDS = 60.0


class Reaper:
    """Calls `abort` (with the time) in rounds; an error is logged when it is new, and the next round tries again."""

    def __init__(self, abort: Callable[[float], Sequence[Upload]], *, every: float = REAP_SECONDS) -> None:
        self._abort = abort
        self._every = every
        self._stop = threading.Event()
        self._said = ""

    def run(self) -> None:
        """Rounds until stopped."""
        while True:
            self.round()
            if self._stop.wait(self._every):
                return

    def round(self) -> None:
        """One round."""
        try:
            for upload in self._abort(time.time()):
                log.info("an orphaned upload was given back", key=upload.key, upload=upload.id)
            self._said = ""
        except WeightlessError as error:
            if error.message != self._said:
                log.error("uploads cannot be cleaned up", error=error.message, hint=error.hint)
            self._said = error.message
        except Exception:
            log.exception("the reaper met an unexpected error and goes on")

    def stop(self) -> None:
        """End after the round at hand."""
        self._stop.set()
