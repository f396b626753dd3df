"""One checked pass over a stored file: blocks read in parallel, every region's SHA-256 and the CRC64NVME of the whole.

Memory: `Limits.parallel * Limits.block` bytes of buffers, whatever the file's size. Threads take blocks in file order;
a region that spans blocks is hashed in order, each thread waiting for its turn. A thread that waits holds a block
that comes after those it waits for, and those are held by threads that do not wait for it, so no wait is endless.
"""

from __future__ import annotations

import base64
import bisect
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from awscrt.checksums import combine_crc64nvme, crc64nvme

from exporter.artifact.ports import Blob
from exporter.artifact.regions import Region

INTERRUPT_SECONDS = 2.0
"""How long an interrupted pass waits for its threads."""
_ZEROS = bytes(64 * 1024)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of a transfer happens at once. Buffers take `parallel * block` bytes: 64 MiB by default.

    `rate` caps bytes a second over all threads; None is no cap.
    """

    parallel: int = 8
    block: int = 8 * 2**20
    rate: int | None = None

    @property
    def buffer_bytes(self) -> int:
        """The bound on bytes of a file that are in memory at once."""
        return self.parallel * self.block


class Sink(Protocol):
    """Takes checked blocks."""

    @property
    def ordered(self) -> bool:
        """Whether blocks must come in file order, each after all regions that end in it were found good."""

    def write(self, index: int, offset: int, data: memoryview) -> None:
        """Take block `index`, which starts at `offset`. All of it, or an error."""


@dataclass(slots=True)
class Outcome:
    """What a pass found: regions whose bytes differ, and the file's CRC64NVME (S3's base64)."""

    bad: list[Region]
    crc64nvme: str


@dataclass(slots=True)
class _State:
    position: int
    hasher: Any = field(default_factory=hashlib.sha256)
    zero: bool = True


class Throttle:
    """Spreads bytes over time so that no more than `rate` a second pass, all threads together."""

    def __init__(self, rate: int | None) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def wait(self, size: int) -> None:
        """Sleep until `size` more bytes may pass."""
        if self._rate is None:
            return
        with self._lock:
            now = time.monotonic()
            start = max(now, self._free_at)
            self._free_at = start + size / self._rate
        if start > now:
            time.sleep(start - now)


class CheckedPass:
    """Reads a blob once and checks `regions`, which must cover it without holes.

    `local(index, view)` may fill a block from what an earlier run left and return True; it is checked like any other.
    With `stop_early` the first bad region ends the pass; else all are found.
    """

    def __init__(
        self,
        blob: Blob,
        regions: Sequence[Region],
        limits: Limits,
        *,
        sink: Sink | None = None,
        local: Callable[[int, memoryview], bool] | None = None,
        progress: Callable[[int], None] | None = None,
        stop_early: bool = True,
    ) -> None:
        self._blob = blob
        self._regions = regions
        self._starts = [region.offset for region in regions]
        self._limits = limits
        self._sink = sink
        self._local = local
        self._progress = progress
        self._stop_early = stop_early
        self._throttle = Throttle(limits.rate)
        self._count = -(-blob.size // limits.block)
        self._crcs = [0] * self._count
        self._turn = threading.Condition()
        self._states: dict[int, _State] = {}
        self._next = 0
        self._emitted = 0
        self._bad: list[Region] = []
        self._error: BaseException | None = None
        self._stopped = False

    def run(self) -> Outcome:
        """Make the pass. Raises what a read or the sink raised first."""
        threads = [
            threading.Thread(target=self._work, name=f"transfer-{number}", daemon=True)
            for number in range(min(self._limits.parallel, self._count))
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)
        except BaseException as error:
            self._stop(error)
            # A thread in the middle of a request is not waited for long: it looks for a stop before it writes.
            until = time.monotonic() + INTERRUPT_SECONDS
            for thread in threads:
                thread.join(max(0.0, until - time.monotonic()))
            raise
        if self._error is not None:
            raise self._error
        return Outcome(sorted(self._bad, key=lambda region: region.offset), self._whole_crc())

    def _length(self, index: int) -> int:
        return min(self._limits.block, self._blob.size - index * self._limits.block)

    def _whole_crc(self) -> str:
        total = 0
        for index, value in enumerate(self._crcs):
            total = combine_crc64nvme(total, value, self._length(index)) if index else value
        return base64.b64encode(total.to_bytes(8, "big")).decode()

    def _stop(self, error: BaseException | None) -> None:
        with self._turn:
            self._stopped = True
            if self._error is None and error is not None:
                self._error = error
            self._turn.notify_all()

    def _take(self) -> int | None:
        with self._turn:
            if self._stopped or self._next >= self._count:
                return None
            self._next += 1
            return self._next - 1

    def _work(self) -> None:
        try:
            buffer = bytearray(min(self._limits.block, self._blob.size))
            with memoryview(buffer) as view:
                while (index := self._take()) is not None:
                    self._block(index, buffer, view[: self._length(index)])
        except _Stopped:
            pass
        except BaseException as error:
            self._stop(error)

    def _block(self, index: int, buffer: bytearray, view: memoryview) -> None:
        offset = index * self._limits.block
        if self._local is None or not self._local(index, view):
            self._throttle.wait(len(view))
            self._blob.read_into(offset, view)
        if self._stopped:
            raise _Stopped
        self._crcs[index] = crc64nvme(view)
        if self._sink is not None and not self._sink.ordered:
            self._sink.write(index, offset, view)
        self._check(offset, buffer, view)
        if self._sink is not None and self._sink.ordered:
            self._await(lambda: self._emitted == index)
            self._sink.write(index, offset, view)
            with self._turn:
                self._emitted += 1
                self._turn.notify_all()
        if self._progress is not None:
            self._progress(len(view))

    def _check(self, offset: int, buffer: bytearray, view: memoryview) -> None:
        end = offset + len(view)
        number = bisect.bisect_right(self._starts, offset) - 1
        while number < len(self._regions) and self._regions[number].offset < end:
            region = self._regions[number]
            first, last = max(region.offset, offset), min(region.end, end)
            self._advance(number, region, buffer, view, first - offset, last - offset, first)
            number += 1

    def _advance(
        self, number: int, region: Region, buffer: bytearray, view: memoryview, start: int, stop: int, at: int
    ) -> None:
        """Take the piece of a region that lies in a block: `start` to `stop` in the buffer, `at` in the file."""
        whole = stop - start == region.size
        if whole:
            state = _State(at)
        else:
            with self._turn:
                state = self._states.setdefault(number, _State(region.offset))
            self._await(lambda: state.position == at)
        if region.digest is None:
            state.zero = state.zero and all_zero(buffer, start, stop)
        else:
            state.hasher.update(view[start:stop])
        done = at + (stop - start) == region.end
        good = not done or (state.zero if region.digest is None else _digest(state) == region.digest)
        if not whole or not good:
            self._settle(number, region, state, stop - start, done, good)
        if self._stop_early and not good:
            raise _Stopped

    def _settle(self, number: int, region: Region, state: _State, size: int, done: bool, good: bool) -> None:
        """Let whoever waits for the next piece go on, and note a region that turned out bad."""
        with self._turn:
            state.position += size
            if done:
                self._states.pop(number, None)
            if not good:
                self._bad.append(region)
                self._stopped = self._stopped or self._stop_early
            self._turn.notify_all()

    def _await(self, ready: Callable[[], bool]) -> None:
        with self._turn:
            while not ready():
                if self._stopped:
                    raise _Stopped
                self._turn.wait()


class _Stopped(Exception):
    """Ends a thread after another one failed; never leaves this module."""


def _digest(state: _State) -> str:
    return "sha256:" + str(state.hasher.hexdigest())


def all_zero(buffer: bytes | bytearray, start: int, stop: int) -> bool:
    """Whether every byte from `start` to `stop` is zero."""
    step = len(_ZEROS)
    for at in range(start, stop, step):
        size = min(step, stop - at)
        if not buffer.startswith(_ZEROS[:size] if size < step else _ZEROS, at, at + size):
            return False
    return True
