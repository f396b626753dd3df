"""What a stream leaves behind when its process is told to end, or is killed, at any moment."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from exporter.contract.objects import Upload
from tests.stores.conftest import StubFactory
from tests.stores.stub.personality import CEPH
from tests.stores.stub.server import BUCKET

WRITER = """
import json, signal, sys, time
from exporter.contract.errors import Cancelled
from exporter.contract.spec import StoreSpec
from exporter.store.open import open_store
from exporter.stream.multipart import WeightStream
from exporter.contract.segments import Segment, SegmentName

class Told:
    def opened(self, upload, uri, part_size):
        print(json.dumps({"opened": upload.id, "key": upload.key}), flush=True)
    def completed(self, upload, uri, part_size):
        print(json.dumps({"completed": upload.id}), flush=True)
    def aborted(self, upload, uri, part_size):
        print(json.dumps({"aborted": upload.id}), flush=True)
    def sent(self, done, total): ...

def stop(*_):
    raise Cancelled("told to stop")

signal.signal(signal.SIGTERM, stop)
store = open_store(StoreSpec(**json.loads(sys.argv[1])))
part = 5 << 20

def segment(n):
    def read():
        for _ in range(3):
            time.sleep(0.004)
            yield bytes([n]) * (1 << 20)
    return Segment((SegmentName(f"s{n}"),), 3 << 20, read)

try:
    store.head("warm")
    print(json.dumps({"ready": True}), flush=True)
    with WeightStream(store, sys.argv[2], part_size=part, max_buffer=4 * part, listener=Told()) as weights:
        weights.open([])
        weights.send(segment(n) for n in range(20))
        weights.finish(name="m.ptd", layout="flat-tensor/fqn", used=None)
    store.put("exports/manifest.json", b"{}", media_type="application/json", if_absent=True)
except Cancelled:
    sys.exit(143)
"""


def run(spec: dict[str, str], key: str, kill: signal.Signals, wait: float) -> tuple[int, list[dict[str, Any]]]:
    """Start a writer, signal it `wait` seconds after it is ready; its status and what it told."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, json.dumps(spec), key],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as writer:
        assert writer.stdout is not None
        assert b"ready" in writer.stdout.readline()
        time.sleep(wait)
        writer.send_signal(kill)
        out, err = writer.communicate(timeout=30)
    assert b"Traceback" not in err, err.decode()[-2000:]
    return writer.returncode, [json.loads(line) for line in out.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("kill", [signal.SIGTERM, signal.SIGKILL], ids=lambda item: item.name)
def test_no_upload_is_orphaned_and_no_half_object_is_seen(
    stub: StubFactory, certificate: tuple[Path, Path], kill: signal.Signals
) -> None:
    server, store = stub(CEPH, min_part=5 << 20)
    spec = {"uri": f"s3://{BUCKET}/p", "endpoint": server.endpoint, "ca_bundle": str(certificate[1])}
    foreign = server.state.create("foreign/upload", {})
    chance = random.Random(7)
    outcomes = set()
    for turn in range(8):
        key = f"weights/exp-{turn}/m.ptd"
        status, told = run(spec, key, kill, chance.uniform(0.0, 0.6))
        outcomes.add(status)
        ended = {event["completed"] for event in told if "completed" in event}
        left = set(server.state.uploads) - {foreign}
        recorded = {event["opened"]: event["key"] for event in told if "opened" in event}
        if kill is signal.SIGTERM:
            assert status in (0, 143)
            assert left == set()
        else:
            # What has a part was recorded before it, so that it can be given back at once. An upload whose id was not
            # told yet when the kill came has none, and is left to the reaper's listing.
            for identifier in left:
                assert identifier in recorded or not server.state.uploads[identifier].parts
                store.abort_upload(Upload(recorded.get(identifier, key), identifier))
        assert set(server.state.uploads) == {foreign}
        stored = server.state.objects.get(f"p/{key}")
        assert stored is None or len(stored.body) == (5 << 20) + 20 * (3 << 20)
        assert stored is not None or not ended
        server.state.objects.clear()
    assert outcomes - {0}, "every run was over before its signal: nothing was tested"
