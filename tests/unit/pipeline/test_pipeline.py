"""The order of things in an export, with a back end that needs no torch, on a store that fails when told."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from exporter.attempt import Keys, Rollback
from exporter.check.ports import StoredArtifact
from exporter.contract.errors import InternalError, StoreUnavailable, VerificationFailed, WeightlessError
from exporter.contract.events import EventLog
from exporter.contract.manifest import Method, Toolchain, Verification, parse_manifest
from exporter.contract.segments import Chunk, Segment, SegmentName
from exporter.contract.spec import Budgets, ExportSpec
from exporter.lowering.ports import Lowered, Plan, Progress
from exporter.meter import Meter
from exporter.pipeline import Parts, export
from exporter.reporting import Stages
from exporter.source.captured import Captured
from exporter.source.resolve import resolve
from exporter.store.memory import Fault, MemoryStore

ID = "exp_01J0000000000000000000000A"
PART = 16 * 2**20


class Stopped(BaseException):
    """What an interruption raises here."""


@dataclass
class Interruption:
    """Raises at the next check what was asked for."""

    asked: list[WeightlessError] = field(default_factory=list)
    event: threading.Event = field(default_factory=threading.Event)

    def request(self, error: WeightlessError) -> None:
        self.asked.append(error)
        self.event.set()

    def check(self) -> None:
        if self.asked:
            raise Stopped

    def end(self) -> None: ...

    @contextmanager
    def shield(self) -> Iterator[None]:
        yield


def segment(key: str, content: bytes) -> Segment:
    def read() -> Iterator[Chunk]:
        for start in range(0, len(content), 2**20):
            yield content[start : start + 2**20]

    return Segment((SegmentName(key, fqn=key),), len(content), read)


def noise(size: int, seed: int) -> bytes:
    return hashlib.shake_128(bytes([seed])).digest(size)


@dataclass
class Lowering:
    """A back end with planned segments; `lower` waits for `until`, so that sending goes on beside it."""

    planned: Sequence[Segment] = ()
    appended: Sequence[Segment] = ()
    used: Mapping[str, Sequence[str]] | None = None
    error: Exception | None = None
    until: threading.Event | None = None

    def preflight(self, captured: Captured) -> None: ...

    def plan(self, captured: Captured) -> Plan:
        return Plan("model.ptd", "flat-tensor/fqn", self.planned, reserve=sum(item.size for item in self.appended))

    def lower(self, captured: Captured, progress: Progress) -> Lowered:
        progress.step("compiling", "forward", 0, 1)
        if self.until is not None:
            assert self.until.wait(30)
        progress.step("compiling", "forward", 1, 1)
        if self.error is not None:
            raise self.error
        program = b"program"
        return Lowered(lambda: iter([program]), len(program), [Method(name="forward")], self.appended, self.used)


@dataclass
class Check:
    """Looks at what is stored at the time of the check."""

    store: MemoryStore
    error: Exception | None = None
    seen: list[str] = field(default_factory=list)

    def prepare(self, captured: Captured) -> None: ...

    def verify(self, artifact: StoredArtifact) -> Sequence[Verification]:
        self.seen = [item.key for item in self.store.list("")]
        assert self.store.head(artifact.program_key) is not None
        if self.error is not None:
            raise self.error
        return [Verification(method="forward", status="passed", max_relative_error="0", against="eager")]


@dataclass
class Run:
    """An export that was run."""

    store: MemoryStore
    events: list[dict[str, Any]]
    error: BaseException | None
    check: Check
    interruption: Interruption

    @property
    def keys(self) -> list[str]:
        return [item.key for item in self.store.list("")]


@pytest.fixture
def run(tmp_path: Path) -> Any:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "weights").write_bytes(b"w")
    spec = ExportSpec.model_validate(
        {
            "id": ID,
            "attempt": 3,
            "createdAt": "2026-11-30T15:00:00Z",
            "request": {"recipe": "r", "source": str(tmp_path / "source"), "target": {"backend": "portable"}},
            "store": {"uri": f"memory://pipeline-{tmp_path.name}"},
            "sources": {"roots": [str(tmp_path)]},
        }
    )

    def go(lowering: Lowering, *, faults: dict[int, Fault] | None = None, check_error: Exception | None = None) -> Run:
        store = MemoryStore(spec.store.uri, faults=faults)
        lines: list[bytes] = []
        events, interruption, check = EventLog(lines.append), Interruption(), Check(store, check_error)
        if lowering.until is not None:
            interruption.event = lowering.until
        meter = Meter(events, Budgets(), tmp_path, interruption.request)
        parts = Parts(
            store=store,
            resolve=lambda uri: resolve(uri, spec.sources, lambda name: pytest.fail(name)),
            capture=lambda tree: Captured({}, None, {}, files={"b.json": lambda: iter([b"{}"])}),  # type: ignore[arg-type]
            lowering=lowering,
            check=check,
            events=events,
            stages=Stages(events, meter, interruption),
            meter=meter,
            interruption=interruption,
            rollback=Rollback(store),
            toolchain=Toolchain(weightless="0"),
        )
        error: BaseException | None = None
        try:
            export(spec, parts)
        except BaseException as failure:
            error = failure
        return Run(store, [json.loads(line) for line in lines], error, check, interruption)

    return go


def test_the_manifest_comes_last_and_the_check_before_it(run: Any) -> None:
    done: Run = run(Lowering(planned=[segment("a", noise(1000, 1))], appended=[segment("made", noise(10, 2))]))
    assert done.error is None
    home = f"exports/{ID}"
    assert done.check.seen == [f"{home}/3/files/b.json", f"{home}/3/model.pte", f"weights/{ID}-3/model.ptd"]
    (entry,) = done.store.list("weights/by-layout/")
    assert done.keys == sorted([*done.check.seen, f"{home}/manifest.json", entry.key])
    manifest = parse_manifest(
        done.store.read(f"{home}/manifest.json", 0, done.store.head(f"{home}/manifest.json").size)
    )  # type: ignore[union-attr]
    assert [name.key for item in manifest.data[0].segments for name in item.names] == ["a", "made"]
    assert manifest.program.urls == ("3/model.pte",)
    assert manifest.data[0].urls == (f"../../weights/{ID}-3/model.ptd",)
    assert manifest.files[0].urls == ("3/files/b.json",)
    assert manifest.verification[0].status == "passed"
    assert manifest.resources.bytes_uploaded == manifest.data[0].size
    finished = [event["name"] for event in done.events if event["type"] == "stage" and event["state"] == "finished"]
    assert finished[-2:] == ["verifying", "committing"]


def test_planned_segments_are_sent_while_the_compile_runs(run: Any) -> None:
    """The compile ends only when a part has arrived: it would wait for ever if sending came after it."""
    arrived = threading.Event()

    class Watching(Lowering):
        def plan(self, captured: Captured) -> Plan:
            plan = super().plan(captured)
            last = plan.segments[-1]

            def read() -> Iterator[Chunk]:
                arrived.set()
                yield from last.read()

            return Plan(plan.name, plan.layout, [*plan.segments[:-1], Segment(last.names, last.size, read)])

    planned = [segment("a", noise(PART, 1)), segment("b", noise(PART, 2)), segment("c", noise(100, 3))]
    done: Run = run(Watching(planned=planned, until=arrived))
    assert done.error is None
    kinds = [(event["type"], event.get("name") or event.get("state"), event.get("state")) for event in done.events]
    uploading = kinds.index(("stage", "uploading", "started"))
    compiled = max(index for index, kind in enumerate(kinds) if kind == ("stage", "compiling", "finished"))
    assert uploading < compiled
    assert ("upload", "opened", "opened") in kinds


def test_an_unused_planned_segment_is_named_so(run: Any) -> None:
    planned = [segment("a", noise(1000, 1)), segment("b", noise(50, 2))]
    done: Run = run(Lowering(planned=planned, used={"a": ["a"]}))
    manifest = parse_manifest(
        done.store.read(f"exports/{ID}/manifest.json", 0, done.store.head(f"exports/{ID}/manifest.json").size)
    )  # type: ignore[union-attr]
    assert [name.key for item in manifest.data[0].segments for name in item.names] == ["a", "unused:b"]
    assert manifest.resources.unused_bytes == 50
    (warning,) = [event for event in done.events if event["type"] == "warning"]
    assert (warning["code"], warning["details"]) == ("unused-weights", {"names": ["unused:b"]})


def test_a_failed_stream_stops_the_compile(run: Any) -> None:
    """`lower` returns only because the failed upload asked for a stop."""
    planned = [segment(str(index), noise(PART, index)) for index in range(4)]
    before: Run = run(Lowering(planned=planned), check_error=VerificationFailed("it leaves nothing behind"))
    opening = before.store.calls.index("create_upload") + 1
    done: Run = run(Lowering(planned=planned, until=threading.Event()), faults={opening: Fault.UNAVAILABLE})
    assert [type(error) for error in done.interruption.asked] == [StoreUnavailable]
    assert isinstance(done.error, Stopped)
    assert done.keys == []
    assert list(done.store.list_uploads("")) == []


def test_a_failed_compile_is_reported_as_such_and_the_upload_aborted(run: Any) -> None:
    planned = [segment(str(index), noise(PART, index)) for index in range(4)]
    done: Run = run(Lowering(planned=planned, error=InternalError("boom")))
    assert isinstance(done.error, InternalError)
    assert done.error.stage == "compiling"
    assert done.interruption.asked == []
    assert done.keys == []
    assert list(done.store.list_uploads("")) == []


def test_a_failed_check_takes_everything_away(run: Any) -> None:
    done: Run = run(
        Lowering(planned=[segment("a", noise(PART + 5, 1))]),
        check_error=VerificationFailed("it differs", kind="changed"),
    )
    assert isinstance(done.error, VerificationFailed)
    assert done.error.stage == "verifying"
    assert len(done.check.seen) == 3
    assert done.keys == []


def test_keys_are_those_of_the_contract() -> None:
    spec = ExportSpec.model_validate(
        {
            "id": ID,
            "attempt": 2,
            "createdAt": "x",
            "request": {"recipe": "r", "source": "s", "target": {"backend": "portable"}},
            "store": {"uri": "memory://x"},
        }
    )
    keys = Keys(spec)
    assert keys.manifest == f"exports/{ID}/manifest.json"
    assert keys.absolute(keys.program()) == f"exports/{ID}/2/model.pte"
    assert keys.absolute(keys.file("a.json")) == f"exports/{ID}/2/files/a.json"
    assert keys.data("model.ptd") == f"weights/{ID}-2/model.ptd"
