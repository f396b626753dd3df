"""SIGINT and SIGTERM as one exception, so that a command can tidy up and end with the signal's own status."""

from __future__ import annotations

import signal
from types import FrameType


class Interrupted(BaseException):
    """The command got a signal. Not an `Exception`: nothing on the way may take it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def status(self) -> int:
        """128 and the signal's number, as shells have it."""
        return 128 + self.number


def raise_interrupts() -> None:
    """From now on SIGINT and SIGTERM raise `Interrupted` in the main thread."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGTERM, handler)
