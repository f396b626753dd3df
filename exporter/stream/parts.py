"""`PartSender`: part buffers and the threads that upload them, within a stated bound."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from exporter.contract.errors import Cancelled, InternalError, WeightlessError
from exporter.contract.objects import Part, StoredObject, Upload
from exporter.stream import crc
from exporter.stream.layout import RESERVED_BUFFERS, PartPlan
from exporter.stream.ports import MultipartTarget, StreamListener

ABORT_WAIT = 5.0
"""Seconds that `abort` waits for parts in flight; a straggler aborts the upload once more when it ends."""


class PartSender:
    """One multipart upload of `key`, created with its first part.

    At most `plan.in_flight + RESERVED_BUFFERS` buffers of one part size exist at a time: `take` waits for one. Failures
    of upload threads are kept and raised by the next `check`, `take` or `submit` of the thread that fills buffers.
    """

    def __init__(
        self,
        target: MultipartTarget,
        key: str,
        plan: PartPlan,
        listener: StreamListener,
        *,
        media_type: str,
        metadata: Mapping[str, str],
        expected: int,
    ) -> None:
        self._target = target
        self._key = key
        self._plan = plan
        self._listener = listener
        self._media_type = media_type
        self._metadata = dict(metadata)
        self._expected = expected
        self._changed = threading.Condition()
        self._telling = threading.Lock()
        self._buffers = 0
        self._free: list[bytearray] = []
        self._in_flight = 0
        self._parts: dict[int, Part] = {}
        self._executor: ThreadPoolExecutor | None = None
        self._failure: BaseException | None = None
        self._aborted = False
        self._done = False
        self.upload: Upload | None = None
        self.bytes_sent = 0
        self.peak_buffer = 0

    def check(self) -> None:
        """Raise what made the upload fail, or `Cancelled` after an abort."""
        if self._failure is not None:
            raise self._failure
        if self._aborted:
            raise Cancelled("the stream was aborted")

    def take(self) -> bytearray:
        """A buffer of one part size, its old content garbage. Waits until one is free."""
        with self._changed:
            self.check()
            while not self._free and self._buffers >= self._plan.in_flight + RESERVED_BUFFERS:
                self._changed.wait()
                self.check()
            if self._free:
                return self._free.pop()
            self._buffers += 1
            self.peak_buffer = max(self.peak_buffer, self._buffers * self._plan.part_size)
        return bytearray(self._plan.part_size)

    def give(self, buffer: bytearray) -> None:
        """Hand a buffer of `take` back."""
        with self._changed:
            if self._aborted:
                self._buffers -= 1
            else:
                self._free.append(buffer)
            self._changed.notify_all()

    def submit(self, number: int, body: bytearray, length: int) -> None:
        """Upload the first `length` bytes of `body`, a buffer of `take`, as part `number`; it is given back then.

        Creates the upload first if there is none. Buffers are never resized: a failed request may still hold a view.
        """
        executor = self._start()
        with self._changed:
            self._in_flight += 1
        try:
            executor.submit(self._send, number, body, length).add_done_callback(
                lambda future: self._dropped(future, body)
            )
        except RuntimeError:  # shut down by an abort from another thread
            with self._changed:
                self._in_flight -= 1
            self.check()
            raise

    def wait(self) -> None:
        """Wait until no part is in flight; raise what failed."""
        with self._changed:
            while self._in_flight:
                self._changed.wait()
        self.check()

    def complete(self, count: int) -> tuple[StoredObject, str]:
        """Join parts 1 to `count`; the object and the CRC64NVME of the whole."""
        self.wait()
        upload = self.upload
        parts = [self._parts[number] for number in sorted(self._parts)]
        if upload is None or [part.number for part in parts] != list(range(1, count + 1)):
            raise InternalError("a part is missing")
        whole = crc.combine((part.crc64nvme or "", part.size) for part in parts)
        stored = self._target.complete_upload(upload, parts, crc64nvme=whole)
        self._done = True
        self._close()
        self._listener.completed(upload, self._target.uri(self._key), self._plan.part_size)
        return stored, whole

    def put(self, body: memoryview) -> tuple[StoredObject | None, str]:
        """Send `body` as the whole object, without a multipart upload; the object and its CRC64NVME."""
        self.check()
        whole = crc.crc64nvme(body)
        stored = self._target.put(self._key, body, media_type=self._media_type, metadata=self._metadata)
        self._done = True
        with self._telling:
            self.bytes_sent = len(body)
            self._listener.sent(len(body), len(body))
        return stored, whole

    def abort(self) -> None:
        """Stop, and give the parts back. Harmless when done or aborted already; may come from another thread."""
        with self._changed:
            if self._done or self._aborted:
                return
            self._aborted = True
            self._changed.notify_all()
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + ABORT_WAIT
        with self._changed:
            while self._in_flight and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            self._free.clear()
        if self.upload is not None:
            self._target.abort_upload(self.upload)
            self._listener.aborted(self.upload, self._target.uri(self._key), self._plan.part_size)

    def _close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True)
        self._free.clear()

    def _start(self) -> ThreadPoolExecutor:
        self.check()
        if self._executor is None:
            # Kept at once: from here on every way out aborts it. Told before any byte is sent: a killed process
            # leaves a recorded id.
            self.upload = self._target.create_upload(
                self._key, media_type=self._media_type, metadata=self._metadata, part_size=self._plan.part_size
            )
            self._listener.opened(self.upload, self._target.uri(self._key), self._plan.part_size)
            self._executor = ThreadPoolExecutor(self._plan.in_flight, thread_name_prefix="part")
        return self._executor

    def _send(self, number: int, body: bytearray, length: int) -> None:
        """Runs in an upload thread. Never raises: the failure is kept for the thread that fills buffers."""
        upload = self.upload
        try:
            if upload is None:
                raise InternalError("a part came before its upload")
            if self._failure is None and not self._aborted:
                view = memoryview(body)[:length]
                checksum = crc.crc64nvme(view)
                part = self._target.upload_part(upload, number, view, crc64nvme=checksum)
                self._acknowledge(replace(part, number=number, size=length, crc64nvme=checksum))
        except BaseException as error:
            self._failure = self._failure or error
        finally:
            self.give(body)
            with self._changed:
                self._in_flight -= 1
                aborted = self._aborted
                self._changed.notify_all()
        if aborted and upload is not None:
            # The abort may not have waited for this part: what it left in the store has to go too.
            with contextlib.suppress(WeightlessError):
                self._target.abort_upload(upload)

    def _dropped(self, future: Future[None], body: bytearray) -> None:
        """A part that an abort took out of the queue is no longer in flight."""
        if future.cancelled():
            self.give(body)
            with self._changed:
                self._in_flight -= 1
                self._changed.notify_all()

    def _acknowledge(self, part: Part) -> None:
        with self._telling:
            self._parts[part.number] = part
            self.bytes_sent += part.size
            self._listener.sent(self.bytes_sent, max(self.bytes_sent, self._expected))
