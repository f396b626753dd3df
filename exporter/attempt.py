"""What one attempt writes into the store, in the order that makes the manifest the commit, and how to take it away."""

from __future__ import annotations

import hashlib
import mimetypes
import threading
from collections.abc import Iterable
from contextlib import suppress
from urllib.parse import quote

from exporter.contract.errors import IllegalState, NotFound, StoreUnavailable, WeightlessError
from exporter.contract.manifest import MAX_MANIFEST, MEDIA_TYPE, PTE_MEDIA_TYPE, File, Program, parse_manifest
from exporter.contract.segments import Chunk
from exporter.contract.spec import ExportSpec
from exporter.lowering.ports import Lowered
from exporter.ports import Store
from exporter.source.captured import Captured
from exporter.stream.reuse import ReusingStream


class Keys:
    """Where an attempt writes. Only the manifest's key is shared by attempts."""

    def __init__(self, spec: ExportSpec) -> None:
        self._attempt = str(spec.attempt)
        self._home = f"exports/{spec.id}"
        self._weights = f"weights/{spec.id}-{spec.attempt}"
        self._resumed = spec.resume.key if spec.resume is not None else None
        self.manifest = f"{self._home}/manifest.json"

    def data(self, name: str) -> str:
        """The key of a data file."""
        return f"{self._weights}/{name}"

    def resumed(self, name: str) -> str | None:
        """The key of the data file of this name that an earlier attempt began to send and this one may finish."""
        return self._resumed if self._resumed is not None and self._resumed.endswith(f"/{name}") else None

    @staticmethod
    def data_url(store: Store, key: str) -> str:
        """A data file's URL for the manifest: absolute in a bucket, else relative to the manifest.

        A server's paths have no place in a manifest, and a directory may be moved with all that is in it.
        """
        uri = store.uri(key)
        return uri if uri.startswith("s3://") else f"../../{quote(key)}"

    def absolute(self, relative: str) -> str:
        """The key of a URL that is relative to the manifest."""
        return f"{self._home}/{relative}"

    def program(self) -> str:
        """The program, relative to the manifest."""
        return f"{self._attempt}/model.pte"

    def file(self, name: str) -> str:
        """A further file, relative to the manifest."""
        return f"{self._attempt}/files/{name}"


class Rollback:
    """What an attempt has in the store before its commit, and how to take it away: once, from whichever thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._keys: list[str] = []
        self._streams: list[tuple[ReusingStream, str]] = []
        self._lock = threading.Lock()
        self._committed = False
        self.started = False
        """Whether anything was taken away: what still runs for the attempt fails because of that."""

    def of_stream(self, stream: ReusingStream, key: str) -> ReusingStream:
        """Remember a stream: it is aborted, and what it may have completed is deleted."""
        self._streams.append((stream, key))
        return stream

    def of_key(self, key: str) -> None:
        """Remember an object, before it is written."""
        self._keys.append(key)

    def committed(self) -> None:
        """The manifest is there, or may be: nothing is taken away any more."""
        self._committed = True

    def run(self) -> None:
        """Take everything away. Errors of the store are swallowed: the reaper and gc find what is left."""
        with self._lock:
            if self._committed:
                return
            self.started = True
            while self._streams:
                stream, key = self._streams.pop()
                with suppress(WeightlessError):
                    stream.abort()
                with suppress(WeightlessError):
                    self._remove_data(key)
            while self._keys:
                with suppress(WeightlessError):
                    self._store.delete(self._keys.pop())

    def _remove_data(self, key: str) -> None:
        """Delete a data file, unless another export found it in the index and holds it: then `gc` decides later."""
        if not any(True for _ in self._store.list(f"{key.rpartition('/')[0]}/leases/")):
            self._store.delete(key)


def put_program(store: Store, rollback: Rollback, keys: Keys, lowered: Lowered) -> Program:
    """Store the program. It holds no weights: code, constants of a few bytes, and compiled kernels."""
    url = keys.program()
    size, sha256 = _put(store, rollback, keys.absolute(url), lowered.program(), PTE_MEDIA_TYPE)
    return Program(
        name="model.pte",
        media_type=PTE_MEDIA_TYPE,
        digest=sha256,
        size=size,
        urls=(url,),
        methods=tuple(lowered.methods),
    )


def put_files(store: Store, rollback: Rollback, keys: Keys, captured: Captured) -> tuple[File, ...]:
    """Store the tokenizer and configuration files."""
    files = []
    for name, read in sorted(captured.files.items()):
        media_type = mimetypes.guess_type(name)[0] or "application/octet-stream"
        size, sha256 = _put(store, rollback, keys.absolute(keys.file(name)), read(), media_type)
        files.append(File(name=name, media_type=media_type, digest=sha256, size=size, urls=(keys.file(name),)))
    return tuple(files)


def _put(store: Store, rollback: Rollback, key: str, chunks: Iterable[Chunk], media_type: str) -> tuple[int, str]:
    body = b"".join(chunks)
    rollback.of_key(key)
    store.put(key, body, media_type=media_type)
    return len(body), f"sha256:{hashlib.sha256(body).hexdigest()}"


def refuse_committed(store: Store, keys: Keys) -> None:
    """`IllegalState` where the export has a manifest already. Also the first word with the store: one that refuses or
    does not answer stops the export here, before anything costly."""
    if store.head(keys.manifest) is not None:
        raise _taken()


def commit(store: Store, rollback: Rollback, keys: Keys, content: bytes, spec: ExportSpec) -> None:
    """Write the manifest unless there is one. `IllegalState` where another attempt has committed.

    A lost reply is settled by reading: the manifest is ours if its export and attempt are. Where even that fails, what
    was written stays, since a manifest may point at it.
    """
    failure: StoreUnavailable | None = None
    try:
        if store.put(keys.manifest, content, media_type=MEDIA_TYPE, if_absent=True) is not None:
            rollback.committed()
            return
    except StoreUnavailable as error:
        failure = error
    try:
        committed = _stored_attempt(store, keys)
    except WeightlessError:
        rollback.committed()
        raise
    if committed == (spec.id, spec.attempt):
        rollback.committed()
        return
    if committed is None and failure is not None:
        raise failure
    raise _taken()


def _taken() -> IllegalState:
    return IllegalState("another attempt has committed this export", hint="Its manifest is the one that counts.")


def _stored_attempt(store: Store, keys: Keys) -> tuple[str, int] | None:
    """Export and attempt of the manifest that is there now, None where there is none."""
    try:
        found = store.head(keys.manifest)
        if found is None:
            return None
        stored = parse_manifest(store.read(keys.manifest, 0, min(found.size, MAX_MANIFEST)))
    except NotFound:
        return None
    return stored.export.id, stored.export.attempt
