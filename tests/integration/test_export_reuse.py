"""Unchanged weights are sent once: exports that share a stored file, races for it, and what a killed one leaves."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from exporter.artifact.gc import Sweep
from exporter.artifact.location import locate_manifest
from exporter.artifact.owners import Owner
from exporter.artifact.pull import pull
from exporter.artifact.reap import reap
from exporter.artifact.verify import verify
from exporter.attempt import Rollback
from exporter.check.ports import StoredArtifact
from exporter.check.smoke import SmokeCheck
from exporter.contract.errors import IllegalState, StoreRejected
from exporter.contract.events import EventLog
from exporter.contract.manifest import Manifest, Verification, parse_manifest
from exporter.contract.objects import MiB
from exporter.contract.spec import ExportSpec, StoreSpec
from exporter.lowering.portable import portable_lowering
from exporter.lowering.xnnpack import xnnpack_lowering
from exporter.meter import Meter
from exporter.pipeline import Parts, export
from exporter.recipes.registry import find_recipe, parse_options
from exporter.reporting import Stages
from exporter.source.captured import Captured
from exporter.source.resolve import resolve
from exporter.store.open import open_store
from exporter.toolchain import toolchain
from tests.integration.conftest import CalmInterruption, Process, make_spec, save_program
from tests.stores.stub.server import BUCKET, serving, write_certificate

Start = Callable[..., Process]
PART = 5 * MiB
LATER = 10 * 86_400


def id_of(number: int) -> str:
    """An export's id."""
    return f"exp_01J00000000000000000000{number:03d}"


def program(path: Path, changed: bool = False) -> Path:
    """A `.pt2` with 20 MiB of weights in four layers of 5 MiB; `changed`: one of them has other values."""
    torch.manual_seed(11)
    sizes = [(1024, 1280), (1280, 1024)] * 2
    module = torch.nn.Sequential(*(torch.nn.Linear(*size, bias=False) for size in sizes))
    if changed:
        with torch.no_grad():
            module[3].weight.neg_()
    return save_program(module, (torch.randn(1, 1024),), path)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model, and the same with one layer changed."""
    folder = tmp_path_factory.mktemp("models")
    return program(folder / "first.pt2"), program(folder / "changed.pt2", changed=True)


@dataclass
class Meanwhile:
    """Lets something happen between the last upload and the publication; checks nothing itself."""

    happen: Callable[[], object]

    def prepare(self, captured: Captured) -> None: ...

    def verify(self, artifact: StoredArtifact) -> Sequence[Verification]:
        self.happen()
        return [Verification(method=item.name, status="skipped", reason="test") for item in artifact.program.methods]


def run_here(
    spec: ExportSpec, store: Any, events: EventLog, scratch: Path, meanwhile: Callable[[], object] | None
) -> None:
    """An export with the parts that the program would build."""
    request, interruption = spec.request, CalmInterruption()
    meter = Meter(events, request.budgets, scratch, interruption.request)
    recipe = find_recipe(request.recipe)
    options = parse_options(recipe, request.options)
    lowering = xnnpack_lowering() if request.target.backend == "xnnpack" else portable_lowering()
    export(
        spec,
        Parts(
            store=store,
            resolve=partial(resolve, policy=spec.sources, objects=lambda name: pytest.fail(name)),
            capture=partial(recipe.capture, options=options, target=request.target),
            lowering=lowering,
            check=Meanwhile(meanwhile) if meanwhile else SmokeCheck(store, scratch) if request.verify_ else None,
            events=events,
            stages=Stages(events, meter, interruption),
            meter=meter,
            interruption=interruption,
            rollback=Rollback(store),
            toolchain=toolchain(),
        ),
    )


class Place:
    """A store that processes and this test share."""

    def __init__(self, spec: StoreSpec, environment: dict[str, str], start: Start, scratch: Path) -> None:
        self.spec = spec
        self.environment = environment
        self._start = start
        self._scratch = scratch
        self.store = open_store(spec)

    def spec_of(self, number: int, source: Path, backend: str, **request: Any) -> ExportSpec:
        """The spec of an export into this store."""
        given = {"verify": False, **request}
        spec = make_spec("exported-program", source, backend, self.spec.uri, **given)
        return spec.model_copy(update={"id": id_of(number), "store": self.spec})

    def begin(self, number: int, source: Path, **request: Any) -> Process:
        """Start an export in a process of its own."""
        return self._start(self.spec_of(number, source, "portable", **request), environment=self.environment)

    def end(self, process: Process) -> dict[str, Any]:
        """Wait for it; its last event."""
        events = list(process.events())
        assert process.child.wait(60) == 0, process.log.read_text()[-2000:]
        return events[-1]

    def export(
        self,
        number: int,
        source: Path,
        backend: str = "portable",
        *,
        meanwhile: Callable[[], object] | None = None,
        **request: Any,
    ) -> dict[str, Any]:
        """Run an export in this process; its last event. `meanwhile` happens once its files are in the store."""
        spec = self.spec_of(number, source, backend, **request)
        lines: list[bytes] = []
        run_here(spec, self.store, EventLog(lines.append), self._scratch, meanwhile)
        last: dict[str, Any] = json.loads(lines[-1])
        return last

    def manifest(self, number: int) -> Manifest:
        """The manifest of an export."""
        key = f"exports/{id_of(number)}/manifest.json"
        return parse_manifest(self.store.read(key, 0, self.store.head(key).size))  # type: ignore[union-attr]

    def data_keys(self) -> list[str]:
        """Every stored data file."""
        return [item.key for item in self.store.list("weights/") if item.key.endswith(".ptd")]

    def leases(self) -> list[str]:
        """Every lease."""
        return [item.key for item in self.store.list("weights/") if "/leases/" in item.key]


@contextmanager
def directory(tmp_path: Path) -> Iterator[tuple[StoreSpec, dict[str, str]]]:
    yield StoreSpec(uri=f"file://{tmp_path}/store", part_size=PART, max_buffer=4 * PART), {}


@contextmanager
def stub(tmp_path: Path) -> Iterator[tuple[StoreSpec, dict[str, str]]]:
    server, trust = write_certificate(tmp_path)
    with serving(server) as running:
        yield bucket(running.endpoint, str(trust)), {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"}


@contextmanager
def gateway(tmp_path: Path) -> Iterator[tuple[StoreSpec, dict[str, str]]]:
    if not os.environ.get("S3_ENDPOINT_TLS"):
        pytest.skip("no Ceph RADOS gateway: S3_ENDPOINT_TLS is not set")
    keys = {name: os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    spec = bucket(os.environ["S3_ENDPOINT_TLS"], os.environ["S3_CA_BUNDLE"])
    import boto3

    client = boto3.Session(region_name="us-east-1").client("s3", endpoint_url=spec.endpoint, verify=spec.ca_bundle)
    client.create_bucket(Bucket=BUCKET)
    client.close()
    yield spec, keys


def bucket(endpoint: str, trust: str) -> StoreSpec:
    """A place of its own in a bucket."""
    uri = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    return StoreSpec(uri=uri, endpoint=endpoint, ca_bundle=trust, part_size=PART, max_buffer=4 * PART)


@pytest.fixture(params=[directory, stub, pytest.param(gateway, marks=pytest.mark.rgw)], ids=lambda kind: kind.__name__)
def place(
    request: pytest.FixtureRequest, tmp_path: Path, export_process: Start, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    with request.param(tmp_path) as (spec, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield Place(spec, environment, export_process, tmp_path)


@pytest.fixture
def folder(tmp_path: Path, export_process: Start) -> Iterator[Place]:
    with directory(tmp_path) as (spec, environment):
        yield Place(spec, environment, export_process, tmp_path)


def check(place: Place, number: int, folder: Path) -> None:
    """The export can be verified and pulled, by its manifest alone."""
    found = locate_manifest(
        place.store.uri(f"exports/{id_of(number)}/manifest.json"),
        lambda uri: open_store(place.spec.model_copy(update={"uri": uri})),
    )
    assert all(item.ok for item in verify(found.manifest, found.origin))
    pull(found.manifest, found.origin, folder)
    assert (folder / "model.ptd").stat().st_size == found.manifest.data[0].size


def test_weights_are_sent_once(place: Place, models: tuple[Path, Path], tmp_path: Path) -> None:
    same, changed = models
    first = place.export(1, same)
    size = place.manifest(1).data[0].size
    assert (first["bytesUploaded"], first["bytesReused"]) == (size, 0)

    second = place.export(2, same)
    assert (second["bytesUploaded"], second["bytesReused"]) == (0, size)
    assert place.data_keys() == [f"weights/{id_of(1)}-1/model.ptd"]
    one, two = place.manifest(1), place.manifest(2)
    assert two.data == one.data
    assert two.resources.bytes_reused == size
    assert two.data[0].weight_set is not None
    relative = f"../../weights/{id_of(1)}-1/model.ptd"
    assert two.data[0].urls == ((relative,) if place.spec.uri.startswith("file:") else (place.store.uri(relative[6:]),))

    third = place.export(3, changed)
    assert third["bytesUploaded"] + third["bytesReused"] == size
    # A layer as large as a part lies in at most two.
    assert 0 < third["bytesUploaded"] <= 2 * PART

    fourth = place.export(4, same, reuseWeights=False)
    assert (fourth["bytesUploaded"], fourth["bytesReused"]) == (size, 0)
    assert place.leases() == []
    assert list(place.store.list_uploads("")) == []
    for number in (1, 2, 3, 4):
        check(place, number, tmp_path / f"pulled-{number}")


def test_the_first_export_may_go(place: Place, models: tuple[Path, Path], tmp_path: Path) -> None:
    place.export(1, models[0])
    place.export(2, models[0])
    for item in list(place.store.list(f"exports/{id_of(1)}/")):
        place.store.delete(item.key)
    for days in (0, 20, 40):
        swept = sweep(place, known=[id_of(2)], now=time.time() + days * 86_400)
        assert not any(key.startswith("weights/") for key in swept.deleted)
    check(place, 2, tmp_path / "pulled")
    for item in list(place.store.list(f"exports/{id_of(2)}/")):
        place.store.delete(item.key)
    assert sweep(place, known=[], now=time.time() + LATER).marked
    sweep(place, known=[], now=time.time() + 2 * LATER)
    assert list(place.store.list("weights/")) == []


def sweep(place: Place, *, known: list[str], now: float) -> Any:
    return Sweep(place.store, active=[], known=known, cutoff=None, now=now, wait=3600, grace=60).run()


def test_xnnpack_weights_are_reused_too(folder: Place, conv_pt2: Path) -> None:
    size = folder.export(1, conv_pt2, "xnnpack")["bytesUploaded"]
    second = folder.export(2, conv_pt2, "xnnpack", verify=True)
    assert (second["bytesUploaded"], second["bytesReused"]) == (0, size)


def test_a_race_for_one_weight_set(place: Place, models: tuple[Path, Path], tmp_path: Path) -> None:
    """The second export begins and ends while the first, which has sent all, is not committed yet."""
    place.export(1, models[0], meanwhile=lambda: place.export(2, models[0]))
    assert place.data_keys() == [f"weights/{id_of(2)}-1/model.ptd"]
    assert place.manifest(1).data == place.manifest(2).data
    assert place.leases() == []
    for number in (1, 2):
        check(place, number, tmp_path / f"pulled-{number}")


def test_two_processes_race_for_one_weight_set(folder: Place, models: tuple[Path, Path], tmp_path: Path) -> None:
    place = folder
    both = [place.begin(number, models[0]) for number in (1, 2)]
    ends = [place.end(process) for process in both]
    assert [event["type"] for event in ends] == ["finished", "finished"]
    assert len(place.data_keys()) == 1
    assert place.manifest(1).data == place.manifest(2).data
    assert place.leases() == []
    for number in (1, 2):
        check(place, number, tmp_path / f"pulled-{number}")


def test_a_failed_export_takes_its_index_entry_away(folder: Place, conv_pt2: Path) -> None:
    key = f"exports/{id_of(1)}/manifest.json"
    folder.export(2, conv_pt2)
    other = folder.manifest(2).canonical()
    for item in list(folder.store.list("")):
        folder.store.delete(item.key)
    folder.store.put(key, other, media_type="application/json")  # the commit finds that it is not the first
    with pytest.raises(IllegalState):
        folder.export(1, conv_pt2)
    assert [item.key for item in folder.store.list("")] == [key]


def test_a_failed_export_leaves_what_another_one_holds(folder: Place, conv_pt2: Path, tmp_path: Path) -> None:
    """The first publishes its weights and fails at its commit; the second found and checked them in between."""
    store, key = folder.store, f"exports/{id_of(1)}/manifest.json"
    put, holds, failed = store.put, threading.Event(), threading.Event()

    def second() -> None:
        folder.export(2, conv_pt2, meanwhile=lambda: (holds.set(), failed.wait(60)))

    thread = threading.Thread(target=second)

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name == key:
            thread.start()
            assert holds.wait(60)
            raise StoreRejected("the commit is refused")
        return put(name, *arguments, **options)

    store.put = refuse  # type: ignore[method-assign, assignment]
    with pytest.raises(StoreRejected):
        folder.export(1, conv_pt2)
    assert [item.key for item in store.list("weights/by-layout/")] == []
    failed.set()
    thread.join(60)
    check(folder, 2, tmp_path / "pulled")


def kill_and_look(place: Place, source: Path, number: int, moment: float, sign: signal.Signals) -> None:
    """End an export after a part of its events (`moment`, 0 to 1): no upload of it is left, no half-made manifest."""
    foreign = place.store.create_upload("other/file", media_type="x", metadata={}, part_size=PART)
    stranger = f"weights/{id_of(999)}-1/model.ptd"
    unknown = place.store.create_upload(stranger, media_type="x", metadata={}, part_size=PART)
    process = place.begin(number, source, reuseWeights=False)
    events = process.events()
    finished = False
    for seen, event in enumerate(events):
        finished = event["type"] == "finished"
        if seen >= moment * EVENTS:
            break
    time.sleep(moment * 7 % 0.05)
    process.child.send_signal(sign)
    finished = any([finished, *(event["type"] == "finished" for event in events)])
    process.child.wait(60)
    reap(
        place.store,
        running=[],
        known=[id_of(number)],
        dead=[Owner(id_of(number), 1)],
        now=time.time(),
        grace=3600,
    )
    open_uploads = {(upload.key, upload.id) for upload in place.store.list_uploads("")}
    assert open_uploads == {(foreign.key, foreign.id), (unknown.key, unknown.id)}
    manifest = place.store.head(f"exports/{id_of(number)}/manifest.json")
    if manifest is not None:
        check(place, number, Path(process.log).parent / f"pulled-{number}")
    else:
        assert not finished
    for upload in (foreign, unknown):
        place.store.abort_upload(upload)


EVENTS = 24
"""About as many event lines as such an export has."""
MOMENTS = [(0.1, signal.SIGTERM), (0.55, signal.SIGKILL), (0.7, signal.SIGTERM), (0.9, signal.SIGKILL)]


@pytest.mark.parametrize(("moment", "sign"), MOMENTS)
def test_a_killed_export_leaves_no_upload(
    folder: Place, models: tuple[Path, Path], moment: float, sign: signal.Signals
) -> None:
    kill_and_look(folder, models[0], 1, moment, sign)


@pytest.mark.soak
def test_twenty_random_moments(place: Place, models: tuple[Path, Path]) -> None:
    seed = int(os.environ.get("SEED", str(random.randrange(2**32))))
    print(json.dumps({"seed": seed}))
    chosen = random.Random(seed)
    for number in range(20):
        sign = signal.SIGKILL if number % 2 else signal.SIGTERM
        kill_and_look(place, models[0], number + 1, chosen.random(), sign)
