"""One export, from its spec to its committed manifest.

`export` is the whole story. What it needs is given to it (`Parts`); what it leaves in the store before the manifest is
remembered by a `Rollback` and taken away again if anything fails. Writing `manifest.json` with `If-None-Match: *` is
the commit: before it nothing is visible, after it everything is.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from exporter.attempt import Keys, Rollback, commit, put_files, put_program, refuse_committed
from exporter.check.ports import StoredArtifact
from exporter.contract.errors import InternalError, WeightlessError
from exporter.contract.events import EventLog
from exporter.contract.manifest import (
    Data,
    ExportInfo,
    Manifest,
    Program,
    Source,
    Toolchain,
    Verification,
    digest,
)
from exporter.contract.spec import ExportSpec
from exporter.lowering.ports import Lowered, Lowering, Plan
from exporter.ports import Check, Interruption, Meter, Store
from exporter.reporting import Stages, UploadEvents, warn_of_waste
from exporter.source.captured import Captured
from exporter.source.ports import SourceTree
from exporter.source.views import find_views
from exporter.stream.reuse import ReusingStream


@dataclass(frozen=True, slots=True)
class Parts:
    """The concrete parts of one export, built by the program's entry point."""

    store: Store
    resolve: Callable[[str], SourceTree]
    capture: Callable[[SourceTree], Captured]
    lowering: Lowering
    check: Check | None
    events: EventLog
    stages: Stages
    meter: Meter
    interruption: Interruption
    rollback: Rollback
    toolchain: Toolchain


def export(spec: ExportSpec, parts: Parts) -> None:
    """Run one export to its `finished` event. Raises what stopped it, with nothing left in the store."""
    try:
        manifest, content = _export(spec, parts)
    except BaseException:
        with parts.interruption.shield():
            parts.rollback.run()
        raise
    parts.events.emit(
        "finished",
        manifest_uri=parts.store.uri(Keys(spec).manifest),
        manifest_digest=digest(content),
        bytes_uploaded=manifest.resources.bytes_uploaded,
        bytes_reused=manifest.resources.bytes_reused,
    )


def _export(spec: ExportSpec, parts: Parts) -> tuple[Manifest, bytes]:
    keys, stages, store, rollback = Keys(spec), parts.stages, parts.store, parts.rollback

    with stages.during("resolving"):
        tree = parts.resolve(spec.request.source)
        refuse_committed(store, keys)

    with stages.during("capturing"):
        captured = parts.capture(tree)
        for finding in find_views(captured.programs):
            parts.events.emit("warning", code=finding.code, message=finding.message, details=dict(finding.details))
        if parts.check is not None:
            parts.check.prepare(captured)

    with stages.during("compiling"):
        parts.lowering.preflight(captured)
        plan = parts.lowering.plan(captured)
        key = keys.resumed(plan.name) or keys.data(plan.name)
        stream = rollback.of_stream(weight_stream(spec, parts, key), key)
        ahead = SendAhead(stream, plan, parts)
        lowered = parts.lowering.lower(captured, stages)

    with stages.during("uploading"):
        data = finish_data(stream, plan, lowered, ahead)
        warn_of_waste(parts.events, stream, data)

    with stages.spanning("committing"):
        with parts.meter.stage("committing"):
            program = put_program(store, rollback, keys, lowered)
            files = put_files(store, rollback, keys, captured)
        # Everything is in the store: let go of the weights that a back end packed before a second process loads them.
        del captured, lowered, ahead
        gc.collect()  # graphs are cycles

        with stages.during("verifying"):
            verification = verify(parts.check, program, keys, stream, data)

        with parts.meter.stage("committing"):
            data = tuple(stream.publish(item) for item in data)

        with parts.meter.stage("committing"), parts.interruption.shield():
            manifest = Manifest(
                export=describe_export(spec, tree),
                program=program,
                data=tuple(item.model_copy(update={"urls": (keys.data_url(store, stream.key),)}) for item in data),
                files=files,
                toolchain=parts.toolchain,
                resources=parts.meter.resources().model_copy(update=moved_bytes(stream)),
                verification=verification,
            )
            content = manifest.canonical()
            commit(store, rollback, keys, content, spec)
            stream.release()
            parts.interruption.end()
    return manifest, content


def weight_stream(spec: ExportSpec, parts: Parts, key: str) -> ReusingStream:
    """The stream of a data file, with the spec's limits, telling the events of its upload."""
    return ReusingStream(
        parts.store,
        key,
        holder=spec.id,
        reuse=spec.request.reuse_weights,
        resume=spec.resume if spec.resume is not None and spec.resume.key == key else None,
        part_size=spec.store.part_size,
        max_buffer=spec.store.max_buffer,
        listener=UploadEvents(parts.events),
        metadata={"weightless-export": spec.id, "weightless-attempt": str(spec.attempt)},
    )


class SendAhead:
    """Sends the planned segments in a thread while the compile runs; a failure stops the export at once."""

    def __init__(self, stream: ReusingStream, plan: Plan, parts: Parts) -> None:
        self._stream = stream
        self._plan = plan
        self._parts = parts
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if plan.segments:
            stream.open(plan.segments, plan.reserve)
            parts.stages.start("uploading")
            self._thread = threading.Thread(target=self._send, name="send-ahead", daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Wait until all planned segments are sent; raises what stopped them."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _send(self) -> None:
        try:
            self._stream.send(self._plan.segments)
        except BaseException as error:
            self._error = error
            if isinstance(error, WeightlessError) and not self._parts.rollback.started:
                self._parts.interruption.request(error)


def finish_data(stream: ReusingStream, plan: Plan, lowered: Lowered, ahead: SendAhead) -> tuple[Data, ...]:
    """Send what the compiler made, then the header. No data file where the program needs none and nothing was sent."""
    ahead.join()
    if not plan.segments:
        if not lowered.appended:
            if lowered.needs_data:
                raise InternalError("the program asks for a data file, and the back end made none")
            return ()
        stream.open(lowered.appended)
    stream.send(lowered.appended)
    return (stream.finish(name=plan.name, layout=plan.layout, used=lowered.used),)


def verify(
    check: Check | None, program: Program, keys: Keys, stream: ReusingStream, data: Sequence[Data]
) -> tuple[Verification, ...]:
    """Run the check on what is stored now; without one, say so for each method."""
    if check is None:
        return tuple(Verification(method=m.name, status="skipped", reason="not asked for") for m in program.methods)
    stored = [(stream.key, item) for item in data]
    return tuple(check.verify(StoredArtifact(program, keys.absolute(program.urls[0]), stored)))


def moved_bytes(stream: ReusingStream) -> dict[str, int]:
    """The manifest's `resources` that the stream knows."""
    return {
        "bytes_uploaded": stream.bytes_sent,
        "bytes_reused": stream.bytes_reused,
        "unused_bytes": stream.unused_bytes,
        "duplicate_bytes": stream.duplicate_bytes,
    }


def describe_export(spec: ExportSpec, tree: SourceTree) -> ExportInfo:
    """The manifest's `export`: the pinned source, the target, the options as they were given."""
    sizes = list(tree.files().values())
    return ExportInfo(
        id=spec.id,
        attempt=spec.attempt,
        recipe=spec.request.recipe,
        created_at=spec.created_at,
        source=Source(uri=tree.uri, revision=tree.revision, size=sizes[0] if len(sizes) == 1 else None),
        target=spec.request.target.model_dump(mode="json", by_alias=True, exclude_unset=True),
        options=spec.request.options,
    )
