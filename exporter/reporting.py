"""How a running export tells where it is: stage, progress and upload events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from exporter.contract.errors import WeightlessError
from exporter.contract.events import EventLog, StageName
from exporter.contract.manifest import Data
from exporter.contract.objects import Upload
from exporter.ports import Interruption, Meter
from exporter.stream.reuse import ReusingStream

UNUSED = "unused:"
"""Starts the key of a stored weight that no method asks for."""


class Stages:
    """Stage events and their accounting; also how a lowering reports (`lowering.ports.Progress`)."""

    def __init__(self, events: EventLog, meter: Meter, interruption: Interruption) -> None:
        self._events = events
        self._meter = meter
        self._interruption = interruption
        self._started: list[StageName] = []

    @property
    def current(self) -> StageName | None:
        """The stage that was started last."""
        return self._started[-1] if self._started else None

    @contextmanager
    def during(self, name: StageName) -> Iterator[None]:
        """One stage: events around it, its time and peaks in the meter, and its name in our errors."""
        with self.spanning(name), self._meter.stage(name):
            yield
        self._interruption.check()

    @contextmanager
    def spanning(self, name: StageName) -> Iterator[None]:
        """The events of a stage that has another one inside; the parts of it are accounted one by one."""
        self.start(name)
        try:
            yield
        except WeightlessError as error:
            error.stage = error.stage or name
            raise
        self._events.emit("stage", name=name, state="finished")

    def start(self, name: StageName) -> None:
        """The `started` event of a stage, once."""
        if name not in self._started:
            self._started.append(name)
            self._events.emit("stage", name=name, state="started")

    def step(self, stage: StageName, method: str, done: int, total: int) -> None:
        """Progress of a lowering, in methods."""
        self._interruption.check()
        self._events.progress(stage, done, total, "methods")
        self._events.emit("stage", name=stage, state="finished" if done == total else "started", method=method)


class UploadEvents:
    """Tells of an upload: opened before its first part, so that a reaper knows its id."""

    def __init__(self, events: EventLog) -> None:
        self._events = events

    def opened(self, upload: Upload, uri: str, part_size: int) -> None:
        """The upload exists."""
        self._tell(upload, uri, part_size, "opened")

    def completed(self, upload: Upload, uri: str, part_size: int) -> None:
        """The object is there."""
        self._tell(upload, uri, part_size, "completed")

    def aborted(self, upload: Upload, uri: str, part_size: int) -> None:
        """The parts were given back."""
        self._tell(upload, uri, part_size, "aborted")

    def sent(self, done: int, total: int) -> None:
        """Bytes in the store."""
        self._events.progress("uploading", done, total)

    def _tell(self, upload: Upload, uri: str, part_size: int, state: str) -> None:
        self._events.emit("upload", upload_id=upload.id, uri=uri, part_size=part_size, state=state)


def warn_of_waste(events: EventLog, stream: ReusingStream, data: Sequence[Data]) -> None:
    """A warning where more than 1% of the stored weights are asked for by no method, or were stored twice."""
    stored = sum(segment.size for item in data for segment in item.segments)
    unused = [
        name.key for item in data for segment in item.segments for name in segment.names if name.key.startswith(UNUSED)
    ]
    if stream.unused_bytes > stored // 100:
        text = f"{stream.unused_bytes} of {stored} stored bytes are asked for by no method"
        events.emit("warning", code="unused-weights", message=text, details={"names": unused[:100]})
    if stream.duplicate_bytes > stored // 100:
        text = (
            f"{stream.duplicate_bytes} of {stored} stored bytes were found to be duplicates only after they were sent"
        )
        events.emit("warning", code="duplicate-weights", message=text)
