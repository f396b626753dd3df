"""Stops a running export from outside of its main thread: a signal, a budget, a deadline, a failed stream.

`request` raises `Interrupted` in the main thread at its next Python instruction. A main thread that sits in a long C++
call does not get there, so a watchdog ends the process itself when the grace is over: it runs the same clean-up.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from exporter.contract.errors import Cancelled, WeightlessError

GRACE = 4.0
"""Seconds that the main thread has to unwind, clean up and end, after which the watchdog cleans up itself."""
LAST_RESORT = 4.0
"""Seconds that the watchdog's clean-up may take; with `GRACE` it stays within the 10 s of contract.md."""
CANCELLED_STATUS = 143


class Interrupted(BaseException):
    """Raised in the main thread; not an `Exception`, so that a library's handler does not swallow it."""

    def __init__(self, error: WeightlessError) -> None:
        super().__init__(error.message)
        self.error = error


class Interruption:
    """The one request to stop that a process gets; later ones change nothing.

    `clean_up` gives back what the export left in the store, `report` writes the terminal event; both must be safe to
    call from another thread and more than once.
    """

    def __init__(
        self,
        clean_up: Callable[[], None],
        report: Callable[[WeightlessError], None],
        *,
        grace: float = GRACE,
        last_resort: float = LAST_RESORT,
    ) -> None:
        self._clean_up = clean_up
        self._report = report
        self._grace = grace
        self._last_resort = last_resort
        self._error: WeightlessError | None = None
        self._asked = threading.Event()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._shields = 0
        self._wakeup: tuple[int, int] | None = None

    def install(self) -> None:
        """Handle SIGTERM and SIGINT as a cancel. Only from the main thread."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        self._wakeup = (reader, writer)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: self.request(Cancelled("the export was cancelled")))
        signal.signal(signal.SIGUSR1, self._raise_here)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_forget_signals)
        threading.Thread(target=self._listen, args=(reader,), name="signals", daemon=True).start()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    @property
    def error(self) -> WeightlessError | None:
        """Why the export has to stop; None while it may go on."""
        return self._error

    def request(self, error: WeightlessError) -> None:
        """Stop the export with `error`. From any thread."""
        with self._lock:
            if self._error is not None or self._ended.is_set():
                return
            self._error = error
        self._asked.set()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def check(self) -> None:
        """Raise `Interrupted` if a stop was asked for: between stages, should a library have swallowed it."""
        if self._error is not None and not self._shields:
            raise Interrupted(self._error)

    @contextlib.contextmanager
    def shield(self) -> Iterator[None]:
        """Inside, the main thread is not interrupted: for clean-up and for the commit."""
        self._shields += 1
        try:
            yield
        finally:
            self._shields -= 1

    def end(self) -> None:
        """The export is over: later requests and the watchdog do nothing."""
        self._ended.set()

    def _raise_here(self, _number: int, _frame: FrameType | None) -> None:
        if not self._ended.is_set():
            self.check()

    def _listen(self, reader: int) -> None:
        """The C signal handler writes each signal's number at once, also while the main thread is in C++."""
        while numbers := os.read(reader, 64):
            if {signal.SIGTERM, signal.SIGINT}.intersection(numbers):
                self.request(Cancelled("the export was cancelled"))

    def _watch(self) -> None:
        self._asked.wait()
        if self._ended.wait(self._grace) or self._error is None:
            return
        cleaner = threading.Thread(target=self._clean_quietly, daemon=True)
        cleaner.start()
        cleaner.join(self._last_resort)
        if not self._ended.is_set():
            self._report(self._error)
            os._exit(CANCELLED_STATUS if isinstance(self._error, Cancelled) else 1)

    def _clean_quietly(self) -> None:
        with contextlib.suppress(Exception):
            self._clean_up()


def _forget_signals() -> None:
    """A forked worker keeps neither the handlers nor the pipe: a signal to it must not stop its parent."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
