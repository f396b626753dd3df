"""Two services over one PostgreSQL database: one queue, each export run once, a dead replica's exports taken over."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.service_process import ServiceProcess
from tests.postgres_server import PostgresServer, find_programs

pytestmark = pytest.mark.postgres


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[list[ServiceProcess]]:
    programs = find_programs()
    if programs is None:
        pytest.skip("PostgreSQL's server programs are not installed (apt-get install postgresql)")
    with PostgresServer(programs) as server:
        url = server.database()
        services = []
        for name in ("a", "b"):
            folder = tmp_path / name
            folder.mkdir()
            shared = {"database_url": url, "store": f"file://{tmp_path}/store", "source_roots": str(tmp_path)}
            services.append(ServiceProcess(folder, slots="2", lease_seconds="3", **shared))
        try:
            for service in services:
                service.start(ready=False)
            for service in services:
                service.wait_ready()
            yield services
        finally:
            for service in services:
                service.close()


def test_replicas_share_a_queue_and_survive_each_other(replicas: list[ServiceProcess]) -> None:
    first, second = replicas
    exports = [first.submit("fine", seconds=1.0) for _ in range(8)]
    for export in exports:
        done = second.wait(export)
        assert (done["state"], done["attempt"]) == ("succeeded", 1)
        assert list(first.events(export))[-1][2]["to"] == "succeeded"
    ran = [sum((service.folder / "data" / "jobs" / export).exists() for service in replicas) for export in exports]
    assert ran == [1] * 8
    assert all(list((service.folder / "data" / "jobs").glob("exp_*")) for service in replicas)

    long = [first.submit("fine", seconds=6.0) for _ in range(4)]
    deadline = time.monotonic() + 30
    while any(first.get(export)["state"] != "running" for export in long):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    second.kill()
    for process in second.exporters():
        process.kill()
    states = {export: first.wait(export) for export in long}
    assert {done["state"] for done in states.values()} == {"succeeded"}
    attempts = sorted(done["attempt"] for done in states.values())
    assert attempts == [1, 1, 2, 2]
    codes = {done["attempts"][0]["error"]["code"] for done in states.values() if done["attempt"] == 2}
    assert codes == {"executor-lost"}
