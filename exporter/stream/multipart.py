"""`WeightStream`: weight segments into a stored `.ptd`, in bounded memory, the header sent last.

Part 1 is kept for the header, so `segment_base_offset` is one part size; parts 2..N are the segments in order, each
exactly the part size except the last. A file that fits one part is one PUT with the header in its natural place.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from exporter.contract.errors import InternalError, StoreRejected, VerificationFailed, WeightlessError
from exporter.contract.manifest import PTD_MEDIA_TYPE, Data
from exporter.contract.objects import StoredObject
from exporter.contract.segments import Chunk, Segment
from exporter.stream.hashing import RunningHash
from exporter.stream.layout import SEGMENT_ALIGNMENT, aligned, data_size, plan_parts, segment_alignment
from exporter.stream.parts import PartSender
from exporter.stream.ports import MultipartTarget, StreamListener
from exporter.stream.ptd import build_header, with_base
from exporter.stream.table import SegmentTable

HEADER_SLACK = 64 * 1024
"""Bytes that the plan adds to three times the planned header: keys may change until `finish`, and some come later."""
_ZEROS = bytes(2**20)


class WeightStream:
    """Sends segments to `key` of a store. `open`, then `send` as often as needed, then `finish`; else `abort`.

    Memory: never more than `max_buffer` bytes of part buffers, whatever the model's size: parts in flight are
    max(1, max_buffer / part size - 2), beside one part being filled and one for a small segment that is hashed before
    it is placed. On top comes one chunk of the segment's reader (`MAX_CHUNK`). `peak_buffer` says what was used.

    `open`, `send` and `finish` belong to one thread at a time; `abort` may come from another.
    """

    def __init__(
        self,
        target: MultipartTarget,
        key: str,
        *,
        part_size: int | None,
        max_buffer: int,
        listener: StreamListener,
        media_type: str = PTD_MEDIA_TYPE,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._target = target
        self._key = key
        self._given_part_size = part_size
        self._max_buffer = max_buffer
        self._listener = listener
        self._media_type = media_type
        self._metadata = dict(metadata or {})
        self._sender: PartSender | None = None
        self._table = SegmentTable(())
        self._max_parts = 0
        self._end = 0
        self._fill: bytearray | None = None
        self._fill_number = 2
        self._finished = False
        self._hasher: ThreadPoolExecutor | None = None
        self._zero_digests: dict[int, str] = {}
        self.part_size = 0
        """Bytes of a part; known after `open`."""
        self.planned_bytes = 0
        """Bytes of segment data that `open` planned for, reserve included."""
        self.unused_bytes = 0
        """Bytes of segments that no method asks for; set by `finish`."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that the store has taken, the header's part included."""
        return self._sender.bytes_sent if self._sender else 0

    @property
    def peak_buffer(self) -> int:
        """Most bytes of part buffers that existed at once."""
        return self._sender.peak_buffer if self._sender else 0

    @property
    def duplicate_bytes(self) -> int:
        """Bytes of segments that were found equal to an earlier one only after they were sent."""
        return self._table.duplicate_bytes

    def __enter__(self) -> WeightStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.abort()
            return
        # The first error is the one to report; what an abort cannot do now, the reaper does.
        with contextlib.suppress(WeightlessError):
            self.abort()

    # --- the steps ---

    def open(self, planned: Sequence[Segment], reserve: int = 0) -> None:
        """Plan the parts for `planned` segments and `reserve` bytes of later ones; nothing is sent yet.

        `StoreRejected` where the store's limits or the buffer cannot hold the plan.
        """
        if self._sender is not None:
            raise InternalError("the stream is open already")
        capabilities = self._target.capabilities
        self.planned_bytes = data_size((s.size, s.alignment) for s in planned) + reserve
        names = [(name, index) for index, segment in enumerate(planned) for name in segment.names]
        header = 3 * len(build_header([(0, s.size) for s in planned], names)) + HEADER_SLACK
        plan = plan_parts(self.planned_bytes, header, capabilities, self._max_buffer, self._given_part_size)
        self.part_size = plan.part_size
        self._max_parts = capabilities.max_parts
        self._table = SegmentTable(planned)
        self._sender = PartSender(
            self._target,
            self._key,
            plan,
            self._listener,
            media_type=self._media_type,
            metadata=self._metadata,
            expected=self.planned_bytes + plan.part_size,
        )

    def send(self, segments: Iterable[Segment]) -> None:
        """Read, hash and send `segments`, in order. Blocks while the buffer is full. Callable again for more."""
        sender = self._opened()
        for segment in segments:
            sender.check()
            if segment.zeros:
                self._place(segment, self._digest_of_zeros(segment.size), None)
            elif segment.size <= self.part_size:
                self._send_small(segment)
            else:
                self._send_large(segment)

    def finish(self, *, name: str, layout: str, used: Mapping[str, Sequence[str]] | None) -> Data:
        """Send what is left and the header, join the parts, and describe the file for the manifest.

        `used` maps a planned segment's first key to the keys that the program asks for; a planned segment that is not
        in it gets the key ``unused:{fqn}``. None: every planned name is used as planned.
        """
        self._opened().check()
        names, self.unused_bytes = self._table.names(used)
        header = build_header(self._table.ranges(), names)
        base = aligned(len(header), SEGMENT_ALIGNMENT)
        if self._fill_number == 2 and base + self._end <= self.part_size:
            whole = self._put(header.ljust(base, b"\0"))
        else:
            base = self.part_size
            header = with_base(header, base)
            whole = self._complete(header)
        self._finished = True
        self._close()
        return Data.model_validate(
            {
                "name": name,
                "media_type": self._media_type,
                "layout": layout,
                "size": base + self._end,
                "header_digest": "sha256:" + hashlib.sha256(header).hexdigest(),
                "header_size": len(header),
                "crc64nvme": whole,
                "weight_set": self._table.weight_set(),
                "urls": (self._target.uri(self._key),),
                "segment_base_offset": base,
                "segments": self._table.describe(names),
            }
        )

    def abort(self) -> None:
        """Give everything back. Harmless when finished or aborted already; may come from another thread."""
        if self._sender is not None and not self._finished:
            self._sender.abort()
        self._close()

    def _close(self) -> None:
        if self._hasher is not None:
            self._hasher.shutdown(wait=False)

    # --- segments ---

    def _send_small(self, segment: Segment) -> None:
        """Hash before placing, so that equal content is stored once. Reads straight into place where it fits."""
        offset = aligned(self._end, segment_alignment(segment.alignment))
        start = offset - self._fill_start()
        if start + segment.size <= self.part_size:
            with memoryview(self._filling())[start : start + segment.size] as view:
                sha256 = _read_into(segment, view)
            if not self._table.merge(segment, sha256):
                self._append_zeros(offset - self._end)
                self._end += segment.size
                self._table.record(segment, offset, sha256)
                self._flush_if_full()
            return
        sender = self._opened()
        scratch = sender.take()
        try:
            with memoryview(scratch)[: segment.size] as view:
                self._place(segment, _read_into(segment, view), view)
        finally:
            sender.give(scratch)

    def _send_large(self, segment: Segment) -> None:
        sender = self._opened()
        offset = aligned(self._end, segment_alignment(segment.alignment))
        self._append_zeros(offset - self._end)
        if self._hasher is None:
            self._hasher = ThreadPoolExecutor(1, thread_name_prefix="sha256")
        running = RunningHash(self._hasher)
        for view in _views(segment):
            self._append(view, running)
            sender.check()
        self._table.record(segment, offset, running.hexdigest())

    def _place(self, segment: Segment, sha256: str, content: memoryview | None) -> None:
        """Place a segment whose digest is known; content None means zeros."""
        if self._table.merge(segment, sha256):
            return
        offset = aligned(self._end, segment_alignment(segment.alignment))
        self._append_zeros(offset - self._end)
        if content is None:
            self._append_zeros(segment.size)
        else:
            self._append(content)
        self._table.record(segment, offset, sha256)

    def _digest_of_zeros(self, size: int) -> str:
        if size not in self._zero_digests:
            sha256 = hashlib.sha256()
            for start in range(0, size, len(_ZEROS)):
                sha256.update(memoryview(_ZEROS)[: size - start])
            self._zero_digests[size] = sha256.hexdigest()
        return self._zero_digests[size]

    # --- bytes into parts ---

    def _fill_start(self) -> int:
        """Offset, relative to the base, of the first byte of the part being filled."""
        return (self._fill_number - 2) * self.part_size

    def _filling(self) -> bytearray:
        if self._fill is None:
            if self._fill_number > self._max_parts:
                raise StoreRejected(
                    f"the segments need more than the {self._max_parts} parts that the store takes",
                    hint="Raise WEIGHTLESS_PART_SIZE: the compiler's own segments were larger than planned.",
                )
            self._fill = self._opened().take()
        return self._fill

    def _append_zeros(self, count: int) -> None:
        while count:
            step = min(count, len(_ZEROS))
            self._append(memoryview(_ZEROS)[:step])
            count -= step

    def _append(self, data: memoryview, running: RunningHash | None = None) -> None:
        """Copy `data` into parts; `running` hashes the copy, since a reader may overwrite its chunk."""
        while data:
            start = self._end - self._fill_start()
            step = min(len(data), self.part_size - start)
            view = memoryview(self._filling())[start : start + step]
            view[:] = data[:step]
            self._end += step
            data = data[step:]
            if running is not None:
                running.update(view)
                if self._end - self._fill_start() == self.part_size:
                    running.settle()  # an upload thread gives the buffer back to be filled again
            self._flush_if_full()

    def _flush_if_full(self) -> None:
        if self._end - self._fill_start() == self.part_size:
            self._flush()

    def _flush(self) -> None:
        """Hand the part being filled to an upload thread."""
        self._opened().submit(self._fill_number, self._filling(), self._end - self._fill_start())
        self._fill = None
        self._fill_number += 1

    def _opened(self) -> PartSender:
        if self._sender is None:
            raise InternalError("the stream is not open")
        if self._finished:
            raise InternalError("the stream is finished")
        return self._sender

    # --- the end ---

    def _put(self, header: bytes) -> str:
        """The whole file as one object; its CRC."""
        sender = self._opened()
        body, size = sender.take(), len(header) + self._end
        body[: len(header)] = header
        if self._fill is not None:
            body[len(header) : size] = memoryview(self._fill)[: self._end]
        stored, whole = sender.put(memoryview(body)[:size])
        self._verify(size, whole, stored)
        return whole

    def _complete(self, header: bytes) -> str:
        """The header as part 1, then Complete; the CRC of the whole file."""
        sender = self._opened()
        if len(header) > self.part_size:
            raise InternalError(f"the header has {len(header)} bytes, more than a part of {self.part_size}")
        if self._end > self._fill_start():
            self._flush()
        sender.wait()
        body = sender.take()
        body[: len(header)] = header
        body[len(header) :] = bytes(len(body) - len(header))
        sender.submit(1, body, len(body))
        stored, whole = sender.complete(self._fill_number - 1)
        self._verify(self.part_size + self._end, whole, stored)
        return whole

    def _verify(self, size: int, whole: str, stored: StoredObject | None) -> None:
        """What the store says of the object, as far as it says anything, is what was sent."""
        if stored is None or stored.size != size:
            there = None if stored is None else stored.size
            raise VerificationFailed(f"the store has {there} bytes of {self._target.uri(self._key)}, not {size}")
        if stored.crc64nvme not in (None, whole):
            raise VerificationFailed(f"the store has another CRC64NVME of {self._target.uri(self._key)} than was sent")


def _views(segment: Segment) -> Iterator[memoryview]:
    """The segment's chunks as flat views; `VerificationFailed` where they are not exactly its size."""
    left = segment.size
    for chunk in segment.read():
        with _flat(chunk) as view:
            left -= len(view)
            if left < 0:
                break
            yield view
    if left:
        given = "more" if left < 0 else str(segment.size - left)
        raise VerificationFailed(
            f"the weight {segment.names[0].key!r} gave {given} bytes instead of {segment.size}",
            hint="Its source changed or is damaged; export again.",
        )


def _flat(chunk: Chunk) -> memoryview:
    view = memoryview(chunk)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _read_into(segment: Segment, target: memoryview) -> str:
    """Fill `target` with the segment; its SHA-256 in hex."""
    sha256 = hashlib.sha256()
    at = 0
    for view in _views(segment):
        sha256.update(view)
        target[at : at + len(view)] = view
        at += len(view)
    return sha256.hexdigest()
