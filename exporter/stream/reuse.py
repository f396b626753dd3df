"""`ReusingStream`: a weight stream that sends nothing where the store already holds the very file.

No candidate under the layout: one pass, read, hash, send. A candidate: the pass only hashes, while the compile runs.
Equal: the manifest points at the stored file. Different: a second pass, in which parts equal to the candidate's are
copied inside the store and only the rest is sent.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType

from exporter.contract.errors import Cancelled, InternalError, StoreRejected, StoreUnavailable, WeightlessError
from exporter.contract.manifest import PTD_MEDIA_TYPE, Data
from exporter.contract.objects import Capabilities, Part, StoredObject, Upload
from exporter.contract.segments import Segment
from exporter.stream import crc
from exporter.stream.index import IndexEntry, PartDigest, WeightIndex
from exporter.stream.layout import RESERVED_BUFFERS
from exporter.stream.multipart import WeightStream
from exporter.stream.ports import MultipartTarget, ReuseTarget, StreamListener
from exporter.stream.table import layout_digest


class HashingTarget:
    """A target that keeps nothing but the digests of parts; plans as for the store that it stands for."""

    def __init__(self, target: MultipartTarget) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._size = 0

    @property
    def capabilities(self) -> Capabilities:
        """The store's own."""
        return self._target.capabilities

    def uri(self, key: str) -> str:
        """The URI that the object would have."""
        return self._target.uri(key)

    def create_upload(self, key: str, *, media_type: str, metadata: Mapping[str, str], part_size: int) -> Upload:
        """An upload in name only."""
        return Upload(key, "hashing")

    def upload_part(self, upload: Upload, number: int, body: memoryview, *, crc64nvme: str | None) -> Part:
        """Count the part."""
        with self._lock:
            self._size += len(body)
        return Part(number, len(body), "hashing", crc64nvme)

    def copy_part(self, upload: Upload, number: int, source_key: str, offset: int, length: int) -> Part:
        """There is nothing to copy into."""
        raise StoreRejected("nothing is stored while weights are only hashed")

    def list_parts(self, upload: Upload) -> Sequence[Part]:
        """None are held."""
        return []

    def complete_upload(self, upload: Upload, parts: Sequence[Part], *, crc64nvme: str | None) -> StoredObject:
        """The object that it would be."""
        return StoredObject(upload.key, self._size, None, crc64nvme)

    def abort_upload(self, upload: Upload) -> None:
        """Nothing is held."""

    def put(
        self,
        key: str,
        body: bytes | memoryview,
        *,
        media_type: str,
        metadata: Mapping[str, str] | None = None,
        if_absent: bool = False,
    ) -> StoredObject | None:
        """The object that it would be."""
        return StoredObject(key, len(body), None, None)

    def head(self, key: str) -> StoredObject | None:
        """Nothing is stored."""
        return None


class DigestingTarget:
    """Passes everything on, and keeps the digests of parts; copies parts of `source` that are equal.

    A copy counts only where SHA-256 and CRC say so, and where the store's own CRC of it, if it gives one, agrees.
    """

    def __init__(self, target: MultipartTarget, source: IndexEntry | None = None) -> None:
        self._target = target
        self._source = source
        self._known = {(part.crc64nvme, part.size): part for part in source.parts} if source else {}
        self._lock = threading.Lock()
        self._digests: dict[int, PartDigest] = {}
        self.copied_bytes = 0

    @property
    def capabilities(self) -> Capabilities:
        """The store's own."""
        return self._target.capabilities

    @property
    def parts(self) -> tuple[PartDigest, ...]:
        """Digests of the parts, in order."""
        return tuple(self._digests[number] for number in sorted(self._digests))

    def uri(self, key: str) -> str:
        """As the store."""
        return self._target.uri(key)

    def create_upload(self, key: str, *, media_type: str, metadata: Mapping[str, str], part_size: int) -> Upload:
        """As the store."""
        return self._target.create_upload(key, media_type=media_type, metadata=metadata, part_size=part_size)

    def upload_part(self, upload: Upload, number: int, body: memoryview, *, crc64nvme: str | None) -> Part:
        """Copy where the source has the same bytes, else send."""
        checksum = crc64nvme or crc.crc64nvme(body)
        sha256 = "sha256:" + hashlib.sha256(body).hexdigest()
        digest = PartDigest(number=number, size=len(body), crc64nvme=checksum, sha256=sha256)
        part = self._copy(upload, digest) or self._target.upload_part(upload, number, body, crc64nvme=checksum)
        with self._lock:
            self._digests[number] = digest
        return part

    def _copy(self, upload: Upload, wanted: PartDigest) -> Part | None:
        there = self._known.get((wanted.crc64nvme, wanted.size))
        if self._source is None or there is None or there.sha256 != wanted.sha256:
            return None
        offset = (there.number - 1) * self._source.part_size
        try:
            part = self._target.copy_part(upload, wanted.number, self._source.key, offset, wanted.size)
        except StoreRejected:  # the source went away, or the store cannot copy: sent instead
            return None
        if part.crc64nvme is not None and part.crc64nvme != wanted.crc64nvme:
            return None
        with self._lock:
            self.copied_bytes += wanted.size
        return part

    def copy_part(self, upload: Upload, number: int, source_key: str, offset: int, length: int) -> Part:
        """As the store."""
        return self._target.copy_part(upload, number, source_key, offset, length)

    def list_parts(self, upload: Upload) -> Sequence[Part]:
        """As the store."""
        return self._target.list_parts(upload)

    def complete_upload(self, upload: Upload, parts: Sequence[Part], *, crc64nvme: str | None) -> StoredObject:
        """As the store."""
        return self._target.complete_upload(upload, parts, crc64nvme=crc64nvme)

    def abort_upload(self, upload: Upload) -> None:
        """As the store."""
        self._target.abort_upload(upload)

    def put(
        self,
        key: str,
        body: bytes | memoryview,
        *,
        media_type: str,
        metadata: Mapping[str, str] | None = None,
        if_absent: bool = False,
    ) -> StoredObject | None:
        """As the store."""
        return self._target.put(key, body, media_type=media_type, metadata=metadata, if_absent=if_absent)

    def head(self, key: str) -> StoredObject | None:
        """As the store."""
        return self._target.head(key)


class _Hashing:
    """Tells a listener of the progress of a pass that opens no upload."""

    def __init__(self, listener: StreamListener) -> None:
        self._listener = listener

    def opened(self, upload: Upload, uri: str, part_size: int) -> None:
        """There is none."""

    def completed(self, upload: Upload, uri: str, part_size: int) -> None:
        """There was none."""

    def aborted(self, upload: Upload, uri: str, part_size: int) -> None:
        """There was none."""

    def sent(self, done: int, total: int) -> None:
        """So much is hashed."""
        self._listener.sent(done, total)


class ReusingStream:
    """A `WeightStream` with a memory of what is stored. The same steps, and two more around the commit.

    `finish` gives the file that the manifest is to name, which may be another export's: its key is `key`. After the
    verification and before the manifest, `publish` enters the file into the index, or moves to the file of a faster
    export and removes its own. After the manifest, `release`.

    `holder` is the id of this export. Segments are kept for a second pass, and so must be readable again.
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
    ) -> None:
        self._target = target
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
        if self._digesting is None or self._inner is None:
            return 0
        return self._inner.bytes_sent - self._digesting.copied_bytes

    @property
    def peak_buffer(self) -> int:
        """Most bytes of part buffers that existed at once."""
        return max(self._first_peak, self._inner.peak_buffer if self._inner else 0)

    @property
    def unused_bytes(self) -> int:
        """Bytes of segments that no method asks for."""
        return self._inner.unused_bytes if self._inner else 0

    @property
    def duplicate_bytes(self) -> int:
        """Bytes of segments found equal to an earlier one too late."""
        return self._inner.duplicate_bytes if self._inner else 0

    def open(self, planned: Sequence[Segment], reserve: int = 0) -> None:
        """Plan, and look whether the store holds weights of this layout."""
        self._planned, self._reserve = planned, reserve
        self._layout = layout_digest(planned)
        found = self._index.candidates(self._layout) if planned else []
        # Parts of another size can never be equal, nor the base offset: such a candidate is none.
        wanted = self._part_size or (found[0].part_size if found else None)
        self._candidates = [entry for entry in found if entry.part_size == wanted and self._fits(entry.part_size)]
        if self._candidates:
            self._part_size = wanted
            self._inner = self._stream(HashingTarget(self._target), _Hashing(self._listener))
        else:
            self._digesting = DigestingTarget(self._target)
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
        self._finished = True
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
        self._digesting = DigestingTarget(self._target, self._candidates[0])
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
        if self._digesting is None or not self._planned:
            return data
        part_size = self._opened().part_size
        entry = IndexEntry(key=self._own_key, part_size=part_size, data=data, parts=self._digesting.parts)
        winner = self._index.add(self._layout, entry)
        if winner is None or winner.key == self._own_key or not winner.equals(data) or not self._index.lease(winner):
            return data
        self._reuse(winner)
        self._target.delete(self._own_key)
        return self._renamed(winner, data)

    def release(self) -> None:
        """After the manifest: it keeps the file from now on. A lease that stays is read by `gc`."""
        if self._used is not None:
            with contextlib.suppress(StoreUnavailable, StoreRejected):
                self._index.release(self._used.key)

    def abort(self) -> None:
        """Give everything back; may come from another thread."""
        self._aborted = True
        if self._inner is not None:
            self._inner.abort()
        self.release()

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
