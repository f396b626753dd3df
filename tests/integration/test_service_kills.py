"""kill -9 of the service at random moments: every export ends exactly once, in the right state, and none is lost."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from tests.integration.service_process import ServiceProcess

EXPECTED = {"fine": "succeeded", "unsupported-model": "failed", "commit": "succeeded", "silent": "failed"}


def kill_often(service: ServiceProcess, kills: int, seed: int) -> None:
    """Submit 20 exports, kill the service `kills` times while they run, and check what each came to."""
    rng = random.Random(seed)
    service.start()
    kinds = [rng.choice(list(EXPECTED)) for _ in range(20)]
    seconds = max(1.0, kills * 0.4)
    exports = {}
    for kind in kinds:
        exports[service.submit(kind, seconds=rng.uniform(0.2, seconds), labels={"kind": kind})] = kind
    for _ in range(kills):
        time.sleep(rng.uniform(0.0, 1.0))
        service.kill()
        service.start(ready=False)
    for export_id, kind in exports.items():
        done = service.wait(export_id, seconds=180)
        assert (done["state"], done["attempt"]) == (EXPECTED[kind], 1), (kind, done)
        seen = list(service.events(export_id))
        assert [number for number, _, _ in seen] == list(range(1, len(seen) + 1))
        states = [data["to"] for _, name, data in seen if name == "state"]
        assert states[0] == "queued"
        assert states[-1] == EXPECTED[kind]
        assert sum(state in ("succeeded", "failed", "cancelled") for state in states) == 1
        own = [data["seq"] for _, name, data in seen if name != "state"]
        assert own == list(range(1, len(own) + 1))
        manifests = list((service.folder / "data" / "store").glob(f"exports/{export_id}/manifest.json"))
        assert len(manifests) == (kind == "commit")
    assert service.exporters() == []


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.soak)])
def test_kills_of_the_service(tmp_path: Path, kills: int) -> None:
    service = ServiceProcess(tmp_path, slots="8", lease_seconds="30")
    seed = int(os.environ.get("KILL_SEED", random.randrange(2**32)))
    print(f"KILL_SEED={seed}")
    try:
        kill_often(service, kills, seed)
    finally:
        service.close()


def test_a_killed_exporter_is_retried_under_the_same_id(tmp_path: Path) -> None:
    service = ServiceProcess(tmp_path, slots="2")
    try:
        service.start()
        export_id = service.submit("fine", seconds=5.0)
        service.wait(export_id, "running")
        [victim] = [process for process in service.exporters() if "child.py" in " ".join(process.cmdline()[1:2])]
        victim.kill()
        done = service.wait(export_id)
        assert (done["state"], done["attempt"]) == ("succeeded", 2)
        assert done["attempts"][0]["error"]["code"] == "executor-lost"
    finally:
        service.close()
