"""`ReusingStream`: a weight stream that sends nothing where the store already holds the very file.

No candidate under the layout: one pass, read, hash, send. A candidate: the pass only hashes, while the compile runs.
Equal: the manifest points at the stored file. Different: a second pass, in which parts equal to the candidate's are
copied inside the store and only the rest is sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from exporter.contract.errors import Cancelled, InternalError, StoreRejected, StoreUnavailable, WeightlessError
from exporter.contract.manifest import PTD_MEDIA_TYPE, Data
from exporter.contract.segments import Segment
from exporter.contract.spec import OpenUpload
from exporter.stream.index import IndexEntry, WeightIndex
from exporter.stream.layout import RESERVED_BUFFERS
from exporter.stream.multipart import WeightStream
from exporter.stream.ports import MultipartTarget, ReuseTarget, StreamListener
from exporter.stream.resume import ResumingTarget
from exporter.stream.table import layout_digest
from exporter.stream.targets import DigestingTarget, HashingListener, HashingTarget


@dataclass(frozen=True, slots=True)
class _Totals:
    """What stays of a finished stream; bytes."""

    sent: int = 0
    peak: int = 0
    unused: int = 0
    duplicate: int = 0
    part_size: int = 0


class ReusingStream:
    """A `WeightStream` with a memory of what is stored. The same steps, and two more around the commit.

    `finish` gives the file that the manifest is to name, which may be another export's: its key is `key`. After the
    verification and before the manifest, `publish` enters the file into the index, or moves to the file of a faster
    export and removes its own. After the manifest, `release`.

    `reuse` False sends everything; the file is entered into the index all the same. `holder` is the id of this
    export. `resume`: an upload of `key` that an earlier attempt left open; parts that it holds are not sent again.
    Segments are kept for a second pass, and so must be readable again.
    """

    def __init__(
        self,
        target: ReuseTarget,
        key: str,
        *,
        holder: str,
        part_size: int | None,
        max_buffer: int,
        listener: StreamListener,
        media_type: str = PTD_MEDIA_TYPE,
        metadata: Mapping[str, str] | None = None,
        reuse: bool = True,
        resume: OpenUpload | None = None,
    ) -> None:
        self._target = target
        self._reuses = reuse
        self._published: IndexEntry | None = None
        self._resuming = None if resume is None else ResumingTarget(target, resume)
        self._resume_part_size = None if resume is None else resume.part_size
        self._own_key = key
        self._part_size = part_size
        self._max_buffer = max_buffer
        self._listener = listener
        self._media_type = media_type
        self._metadata = metadata
        self._index = WeightIndex(target, holder)
        self._planned: Sequence[Segment] = ()
        self._reserve = 0
        self._layout = ""
        self._candidates: list[IndexEntry] = []
        self._sent: list[Segment] = []
        self._digesting: DigestingTarget | None = None
        self._inner: WeightStream | None = None
        self._used: IndexEntry | None = None
        self._totals: _Totals | None = None
        self._first_peak = 0
        self._aborted = False
        self._finished = False
        self.key = key
        """The key of the file that `finish` described."""
        self.bytes_reused = 0
        """Bytes of the file that were not sent."""

    def __enter__(self) -> ReusingStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            if not self._finished:
                self.abort()
            return
        with contextlib.suppress(WeightlessError):
            self.abort()

    @property
    def bytes_sent(self) -> int:
        """Bytes that went over the network."""
        return self._now().sent

    @property
    def peak_buffer(self) -> int:
        """Most bytes of part buffers that existed at once."""
        return self._now().peak

    @property
    def unused_bytes(self) -> int:
        """Bytes of segments that no method asks for."""
        return self._now().unused

    @property
    def duplicate_bytes(self) -> int:
        """Bytes of segments found equal to an earlier one too late."""
        return self._now().duplicate

    def _now(self) -> _Totals:
        if self._totals is not None:
            return self._totals
        inner = self._inner
        if inner is None:
            return _Totals(peak=self._first_peak)
        kept = 0 if self._resuming is None else self._resuming.kept_bytes
        sent = 0 if self._digesting is None else inner.bytes_sent - self._digesting.copied_bytes - kept
        peak = max(self._first_peak, inner.peak_buffer)
        return _Totals(sent, peak, inner.unused_bytes, inner.duplicate_bytes, inner.part_size)

    def open(self, planned: Sequence[Segment], reserve: int = 0) -> None:
        """Plan, and look whether the store holds weights of this layout."""
        self._planned, self._reserve = planned, reserve
        self._layout = layout_digest(planned) if planned else ""
        found = self._index.candidates(self._layout) if planned and self._reuses else []
        # Parts of another size can never be equal, nor the base offset: such a candidate is none.
        wanted = self._part_size or (found[0].part_size if found else None)
        self._candidates = [entry for entry in found if entry.part_size == wanted and self._fits(entry.part_size)]
        if self._candidates:
            self._part_size = wanted
            self._inner = self._stream(HashingTarget(self._target), HashingListener(self._listener))
        else:
            if self._resume_part_size is not None and self._fits(self._resume_part_size):
                self._part_size = self._part_size or self._resume_part_size
            self._digesting = DigestingTarget(self._resuming or self._target)
            self._inner = self._stream(self._digesting, self._listener)
        self._inner.open(planned, reserve)

    def _fits(self, part_size: int) -> bool:
        return part_size * (RESERVED_BUFFERS + 1) <= self._max_buffer

    def send(self, segments: Iterable[Segment]) -> None:
        """Read and hash `segments`, and send them where there is no candidate."""
        self._opened().send(self._kept(segments))

    def _kept(self, segments: Iterable[Segment]) -> Iterator[Segment]:
        for segment in segments:
            self._sent.append(segment)
            yield segment

    def finish(self, *, name: str, layout: str, used: Mapping[str, Sequence[str]] | None) -> Data:
        """The file for the manifest: a stored one that is equal, else the one just sent."""
        data = self._finish(name, layout, used)
        self._totals = self._now()
        self._finished = True
        self._drop_earlier()
        # Segments lead to weights that a back end may hold in memory: nothing of them is needed any more.
        self._planned, self._sent, self._inner = (), [], None
        return data

    def _finish(self, name: str, layout: str, used: Mapping[str, Sequence[str]] | None) -> Data:
        data = self._opened().finish(name=name, layout=layout, used=used)
        if self._digesting is not None:
            return data
        for entry in self._candidates:
            if entry.equals(data) and self._index.lease(entry):
                self._reuse(entry)
                return self._renamed(entry, data)
        self._first_peak = self.peak_buffer
        self._digesting = DigestingTarget(self._resuming or self._target, self._candidates[0])
        self._inner = self._stream(self._digesting, self._listener)
        if self._aborted:
            raise Cancelled("the stream was aborted")
        self._inner.open(self._planned, self._reserve)
        self._inner.send(self._sent)
        data = self._inner.finish(name=name, layout=layout, used=used)
        self.bytes_reused = self._digesting.copied_bytes
        return data

    def publish(self, data: Data) -> Data:
        """After the verification, before the manifest: the file that the manifest is to name.

        A file sent by this export goes into the index. Where a faster export entered an equal one, that is used, and
        this export's own is removed. A reused file is looked at once more.
        """
        if self._used is not None:
            self._index.check(self._used)
            return data
        if self._digesting is None or not self._layout:
            return data
        part_size = self._now().part_size
        entry = IndexEntry(key=self._own_key, part_size=part_size, data=data, parts=self._digesting.parts)
        self._published = entry
        winner = self._index.add(self._layout, entry)
        if winner is None or winner.key == self._own_key:
            return data
        self._published = None
        if not self._reuses or not winner.equals(data) or not self._index.lease(winner):
            return data
        self._reuse(winner)
        self._target.delete(self._own_key)
        return self._renamed(winner, data)

    def release(self) -> None:
        """After the manifest: it keeps the file from now on. A lease that stays is read by `gc`."""
        self._published = None
        if self._used is not None:
            with contextlib.suppress(StoreUnavailable, StoreRejected):
                self._index.release(self._used.key)

    def abort(self) -> None:
        """Give everything back, the index entry and the lease too; may come from another thread."""
        self._aborted = True
        inner = self._inner
        if inner is not None:
            inner.abort()
        self._drop_earlier()
        if self._published is not None:
            with contextlib.suppress(StoreUnavailable, StoreRejected):
                self._index.remove(self._layout, self._published)
        self.release()

    def _drop_earlier(self) -> None:
        """Give an earlier attempt's upload back that was of no use."""
        if self._resuming is not None:
            self._resuming.drop()

    def _reuse(self, entry: IndexEntry) -> None:
        self._used = entry
        self.key = entry.key
        self.bytes_reused = entry.data.size

    def _renamed(self, entry: IndexEntry, data: Data) -> Data:
        """This export's description (its names, its view of tensors), at the place of the stored file."""
        return data.model_copy(update={"urls": (self._target.uri(entry.key),)})

    def _stream(self, target: MultipartTarget, listener: StreamListener) -> WeightStream:
        return WeightStream(
            target,
            self._own_key,
            part_size=self._part_size,
            max_buffer=self._max_buffer,
            listener=listener,
            media_type=self._media_type,
            metadata=self._metadata,
        )

    def _opened(self) -> WeightStream:
        if self._inner is None:
            raise InternalError("the stream is not open")
        return self._inner
