"""Stores that fail, budgets, kills: whatever happens, nothing half-made stays visible."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exporter.contract.objects import Upload
from exporter.contract.spec import StoreSpec
from exporter.store.memory import Fault, MemoryStore
from exporter.store.open import open_store
from tests.integration.conftest import EXPORT_ID, Outcome, Process, make_spec

Export = Callable[..., Outcome]
Start = Callable[..., Process]


class Spoiling:
    """A store that changes one data file as soon as it is complete."""

    def __init__(self, store: MemoryStore, spoil: Callable[[bytes], bytes]) -> None:
        self._store = store
        self._spoil = spoil

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def head(self, key: str) -> Any:
        """Called by the check before it reads: the moment to change what is stored."""
        found = self._store.head(key)
        if found is not None and key.endswith(".ptd"):
            content = self._spoil(self._store.read(key, 0, found.size))
            self._store.put(key, content, media_type="x")
            self._spoil = lambda same: same
        return self._store.head(key)


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.REJECTED, Fault.FULL])
def test_a_store_that_fails_at_each_call(export_here: Export, conv_pt2: Path, fault: Fault) -> None:
    good = export_here("exported-program", conv_pt2, "portable", verify=False)
    writes = [number for number, name in enumerate(good.store.calls, 1) if name not in ("head", "read", "list")]
    assert len(writes) >= 3
    codes = {Fault.UNAVAILABLE: "store-unavailable", Fault.REJECTED: "store-rejected", Fault.FULL: "disk-full"}

    for number in writes:
        outcome = export_here("exported-program", conv_pt2, "portable", verify=False, faults={number: fault})
        assert outcome.error is not None, number
        assert outcome.error.code == codes[fault]
        assert outcome.keys == [], number


def test_a_lost_reply_at_the_commit_is_a_success(export_here: Export, conv_pt2: Path) -> None:
    good = export_here("exported-program", conv_pt2, "portable", verify=False)
    commit = max(number for number, name in enumerate(good.store.calls, 1) if name == "put")
    faults = {commit: Fault.LOST_REPLY}
    outcome = export_here("exported-program", conv_pt2, "portable", verify=False, faults=faults)
    assert outcome.error is None
    assert outcome.manifest.data


class OvertakenStore:
    """A store into which another attempt commits just before a key with `suffix` is written."""

    def __init__(self, store: MemoryStore, suffix: str, manifest: bytes) -> None:
        self._store = store
        self._suffix = suffix
        self._manifest = manifest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put(self, key: str, body: Any, **settings: Any) -> Any:
        """Called by the export for its program, files and manifest."""
        if key.endswith(self._suffix):
            self._suffix = "/"
            self._store.put(f"exports/{EXPORT_ID}/manifest.json", self._manifest, media_type="x")
        return self._store.put(key, body, **settings)


@pytest.mark.parametrize("when", ["before", "model.pte", "manifest.json"])
def test_another_attempt_that_committed_first_wins(export_here: Export, conv_pt2: Path, when: str) -> None:
    winner = export_here("exported-program", conv_pt2, "portable", verify=False).manifest
    other = winner.model_copy(update={"export": winner.export.model_copy(update={"attempt": 2})}).canonical()

    def taken(store: MemoryStore) -> Any:
        if when != "before":
            return OvertakenStore(store, when, other)
        store.put(f"exports/{EXPORT_ID}/manifest.json", other, media_type="x")
        return store

    outcome = export_here("exported-program", conv_pt2, "portable", verify=False, change_store=taken)
    assert outcome.error is not None
    assert outcome.error.code == "illegal-state"
    assert outcome.error.stage == ("resolving" if when == "before" else "committing")
    assert outcome.keys == [f"exports/{EXPORT_ID}/manifest.json"]
    assert outcome.manifest.export.attempt == 2


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.REJECTED])
def test_a_store_that_refuses_is_told_before_the_model_is_captured(
    export_here: Export, conv_pt2: Path, fault: Fault
) -> None:
    outcome = export_here("exported-program", conv_pt2, "portable", faults={1: fault})
    assert outcome.error is not None
    assert outcome.error.stage == "resolving"
    assert not [event for event in outcome.events if event.get("name") == "capturing"]


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (lambda content: content[:-1], "truncated"),
        (
            lambda content: (
                content[: len(content) // 3] + bytes(len(content) // 3) + content[-(-2 * len(content) // 3) :]
            ),
            "",
        ),
        (lambda content: content[:-70] + bytes(b ^ 255 for b in content[-70:-6]) + content[-6:], "changed"),
    ],
    ids=["cut", "zeroed", "flipped"],
)
def test_what_the_store_spoils_is_never_committed(
    export_here: Export, conv_pt2: Path, spoil: Callable[[bytes], bytes], kind: str
) -> None:
    outcome = export_here("exported-program", conv_pt2, "portable", change_store=lambda store: Spoiling(store, spoil))
    assert outcome.error is not None
    assert outcome.error.code == "verification-failed"
    assert outcome.error.stage == "verifying"
    assert not kind or outcome.error.details["kind"] == kind
    assert outcome.keys == []


def finish(process: Process) -> tuple[list[dict[str, Any]], int]:
    """All events and the exit status."""
    events = list(process.events())
    return events, process.child.wait(timeout=60)


def stored_files(folder: Path) -> list[str]:
    """All but the index of stored weights."""
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return [name for name in files if not name.startswith("weights/by-layout/")]


def test_a_process_writes_events_alone_to_its_output(export_process: Start, conv_pt2: Path, tmp_path: Path) -> None:
    spec = make_spec("exported-program", conv_pt2, "portable", f"file://{tmp_path}/store")
    process = export_process(spec)
    events, status = finish(process)
    assert status == 0, process.log.read_text()[-2000:]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert events[-1]["type"] == "finished"
    assert any(event["type"] == "resources" and event["hostAnonBytes"] > 0 for event in events)
    assert stored_files(tmp_path / "store") == [
        f"exports/{EXPORT_ID}/1/model.pte",
        f"exports/{EXPORT_ID}/manifest.json",
        f"weights/{EXPORT_ID}-1/model.ptd",
    ]
    assert list((tmp_path / "scratch").iterdir()) == []


def test_framed_lines_and_a_spec_that_is_none(export_process: Start, tmp_path: Path) -> None:
    spec = make_spec("exported-program", tmp_path, "portable", "memory://x").model_copy(update={"attempt": 0})
    process = export_process(spec, "--framed")
    assert process.child.stdout is not None
    line = process.child.stdout.read()
    assert process.child.wait(timeout=60) == 2
    assert line.startswith(b"\x1e{")
    assert json.loads(line[1:])["error"]["code"] == "invalid-request"


@pytest.mark.parametrize("moment", ["resolving", "compiling", "verifying"])
def test_sigterm_cleans_up_and_ends_with_143(
    export_process: Start, transformer_pt2: Path, tmp_path: Path, moment: str
) -> None:
    spec = make_spec("exported-program", transformer_pt2, "xnnpack", f"file://{tmp_path}/store")
    process = export_process(spec)
    events = process.events()
    for event in events:
        if event["type"] == "stage" and event["name"] == moment:
            break
    process.child.send_signal(signal.SIGTERM)
    before = time.monotonic()
    last = list(events)[-1]
    assert process.child.wait(timeout=60) == 143
    assert time.monotonic() - before < 10  # the bound of the contract, not a measurement
    assert last["type"] == "failed"
    assert last["error"]["code"] == "cancelled"
    assert stored_files(tmp_path / "store") == []
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize(
    ("budgets", "code", "name"),
    [
        ({"hostMemory": "64MiB"}, "budget-exceeded", "hostMemory"),
        ({"wallTime": 1}, "deadline-exceeded", "wallTime"),
    ],
)
def test_a_budget_stops_the_export(
    export_process: Start, conv_pt2: Path, tmp_path: Path, budgets: dict[str, Any], code: str, name: str
) -> None:
    spec = make_spec("exported-program", conv_pt2, "portable", f"file://{tmp_path}/store", budgets=budgets)
    events, status = finish(export_process(spec))
    assert status == 1
    error = events[-1]["error"]
    assert error["code"] == code
    assert error["stage"]
    assert error["details"]["budget"] == name
    assert error["details"]["used"] >= error["details"]["limit"]
    assert stored_files(tmp_path / "store") == []


def test_after_a_kill_the_recorded_upload_can_be_aborted(export_process: Start, tmp_path: Path) -> None:
    import torch

    from tests.integration.conftest import save_program

    torch.manual_seed(8)
    path = save_program(torch.nn.Linear(3000, 3000), (torch.randn(1, 3000),), tmp_path / "big.pt2")
    spec = make_spec("exported-program", path, "portable", f"file://{tmp_path}/store")
    process = export_process(spec)
    opened = next(event for event in process.events() if event["type"] == "upload")
    process.child.kill()
    process.child.wait()
    assert opened["state"] == "opened"
    store = open_store(StoreSpec(uri=spec.store.uri))
    assert store.head(f"exports/{EXPORT_ID}/manifest.json") is None
    key = store.key_of(opened["uri"])
    assert key == f"weights/{EXPORT_ID}-1/model.ptd"
    store.abort_upload(Upload(key, opened["uploadId"]))
    store.delete(key)  # a kill may have come after the upload was complete
    assert [item for item in stored_files(tmp_path / "store") if "exports" not in item] == []
