"""Event lines: what an exporter writes to its output, one JSON object a line (contract.md has the table).

`EventLog` numbers and writes them; `parse_event` reads one back. `seq` starts at 1 and has no gaps within an attempt.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from exporter.contract.base import Lenient
from exporter.contract.errors import InternalError

MAX_LINE = 64 * 1024
"""Bytes that an event line may have, its newline included."""
RECORD_SEPARATOR = "\x1e"
"""Starts an event line where other output shares the stream (RFC 7464)."""
PROGRESS_INTERVAL = 1.0
"""Seconds between two progress events of one stage; with the last one at its end, at most two a second."""

StageName = Literal["resolving", "capturing", "compiling", "uploading", "committing", "verifying"]
STAGES: tuple[StageName, ...] = ("resolving", "capturing", "compiling", "uploading", "committing", "verifying")

_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-Z\\-_]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)


def clean_text(text: str) -> str:
    """`text` without ANSI sequences, control characters and direction overrides; tabs and newlines stay."""
    return _CONTROL.sub("", text.encode("utf-8", "replace").decode("utf-8"))


class Event(Lenient):
    """What every event has: format version, sequence number (from 1) and time (RFC 3339, UTC)."""

    v: Literal[1] = 1
    seq: int = Field(ge=1)
    time: str


class StateEvent(Event):
    """Written by the service alone: the export moved from one state to another."""

    type: Literal["state"] = "state"
    from_: str | None = Field(default=None, alias="from")
    to: str
    attempt: int
    reason: str | None = None


class StageEvent(Event):
    """A stage started or finished; `method` where a stage works on one method."""

    type: Literal["stage"] = "stage"
    name: StageName
    state: Literal["started", "finished"]
    method: str | None = None


class ProgressEvent(Event):
    """How far a stage is; `rate` is units a second. At most two a second."""

    type: Literal["progress"] = "progress"
    stage: StageName
    done: int = Field(ge=0)
    total: int = Field(ge=0)
    unit: Literal["bytes", "methods", "segments"]
    rate: int | None = None


class ResourcesEvent(Event):
    """What the process tree holds now, in bytes; once a second."""

    type: Literal["resources"] = "resources"
    host_anon_bytes: int = Field(ge=0)
    host_rss_bytes: int = Field(ge=0)
    gpu_bytes: int = Field(ge=0)
    disk_written_bytes: int = Field(ge=0)


class UploadEvent(Event):
    """A multipart upload was opened (before its first part), completed or aborted."""

    type: Literal["upload"] = "upload"
    upload_id: str
    uri: str
    part_size: int = Field(ge=0)
    state: Literal["opened", "completed", "aborted"]


class WarningEvent(Event):
    """Something that the user should know and that does not stop the export."""

    type: Literal["warning"] = "warning"
    code: str
    message: str
    details: dict[str, Any] = Field(default_factory=dict)


class FinishedEvent(Event):
    """Terminal: the manifest is stored."""

    type: Literal["finished"] = "finished"
    manifest_uri: str
    manifest_digest: str
    bytes_uploaded: int = Field(ge=0)
    bytes_reused: int = Field(ge=0)


class ErrorBody(Lenient):
    """The `error` of a failed event; the same object as the API's."""

    code: str
    message: str
    hint: str = ""
    retryable: bool = False
    stage: str | None = None
    details: dict[str, Any] = Field(default_factory=dict)


class FailedEvent(Event):
    """Terminal: the export failed, or was cancelled (code `cancelled`)."""

    type: Literal["failed"] = "failed"
    error: ErrorBody


AnyEvent = (
    StateEvent | StageEvent | ProgressEvent | ResourcesEvent | UploadEvent | WarningEvent | FinishedEvent | FailedEvent
)
_ADAPTER: TypeAdapter[AnyEvent] = TypeAdapter(Annotated[AnyEvent, Field(discriminator="type")])


def parse_event(line: str | bytes) -> AnyEvent:
    """The event on one line. `InternalError` where it is none, is longer than `MAX_LINE`, or has an unknown type."""
    data = line.encode() if isinstance(line, str) else line
    if len(data) > MAX_LINE:
        raise InternalError(f"an event line has {len(data)} bytes, more than {MAX_LINE}")
    try:
        return _ADAPTER.validate_json(data.strip().lstrip(RECORD_SEPARATOR.encode()))
    except ValidationError as error:
        raise InternalError("a line is not an event", details=str(error.errors(include_input=False))[:500]) from error


def dump_event(event: AnyEvent) -> dict[str, Any]:
    """The event as JSON-ready data, camelCase, without absent fields."""
    return event.model_dump(mode="json", by_alias=True, exclude_none=True)


def _shrink(value: Any, limit: int) -> Any:
    if isinstance(value, str):
        return value if len(value) <= limit else value[:limit] + "…"
    if isinstance(value, list):
        return [_shrink(item, limit) for item in value[:100]]
    if isinstance(value, dict):
        return {key: _shrink(item, limit) for key, item in list(value.items())[:100]}
    return value


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return {clean_text(str(key)): _clean(item) for key, item in value.items()}
    return value


class EventLog:
    """Numbers events and hands each line to `write` at once. Safe to call from several threads.

    `write` gets whole lines, newline included, at most `MAX_LINE` bytes. Nothing is written after a terminal event.
    """

    def __init__(self, write: Callable[[bytes], object], *, framed: bool = False) -> None:
        self._write = write
        self._prefix = RECORD_SEPARATOR if framed else ""
        self._lock = threading.Lock()
        self._seq = 0
        self._ended = False
        self._last_progress: dict[str, float] = {}
        self._held_progress: dict[str, dict[str, Any]] = {}

    @property
    def ended(self) -> bool:
        """Whether a terminal event was written."""
        return self._ended

    def emit(self, kind: str, **fields: Any) -> None:
        """Write one event of type `kind`; fields by their Python or JSON names, None left out."""
        with self._lock:
            if kind == "stage" and fields.get("state") == "finished" and fields.get("method") is None:
                held = self._held_progress.pop(str(fields.get("name")), None)
                if held is not None:
                    self._emit("progress", held)
            self._emit(kind, fields)

    def progress(self, stage: StageName, done: int, total: int, unit: str = "bytes", rate: int | None = None) -> None:
        """Write a progress event, or hold it back for a second after the stage's last; its end writes what is held."""
        fields = {"stage": stage, "done": done, "total": total, "unit": unit, "rate": rate}
        with self._lock:
            moment = time.monotonic()
            last = self._last_progress.get(stage)
            if last is not None and moment - last < PROGRESS_INTERVAL:
                self._held_progress[stage] = fields
                return
            self._last_progress[stage] = moment
            self._held_progress.pop(stage, None)
            self._emit("progress", fields)

    def _emit(self, kind: str, fields: dict[str, Any]) -> None:
        if self._ended:
            return
        body = {"v": 1, "seq": self._seq + 1, "time": now(), "type": kind, **_clean(fields)}
        event = _ADAPTER.validate_python(body, by_alias=True, by_name=True)
        line = self._line(event)
        self._write(line)
        self._seq += 1
        self._ended = kind in ("finished", "failed")

    def _line(self, event: AnyEvent) -> bytes:
        data = dump_event(event)
        for limit in (None, 2000, 200, 40):
            body = data if limit is None else _shrink(data, limit)
            line = f"{self._prefix}{json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n".encode()
            if len(line) <= MAX_LINE:
                return line
        raise InternalError(f"an event of type {event.type} does not fit {MAX_LINE} bytes")


def now() -> str:
    """The current time as RFC 3339 in UTC with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
