"""Exports on a real Ray cluster of two nodes: success, kills, cancellation, a restart of the service, no secrets."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.ray_cluster import CANARY, RayCluster, exporter_of
from tests.integration.service_process import ServiceProcess

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed (pip install weightless[ray])"
    ),
]
CUDA = {"backend": "cuda", "cudaVersion": "13.0"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    found = RayCluster()
    try:
        found.start()
        found.add_node()
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def service(cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", cluster.token)
        folder = tmp_path_factory.mktemp("ray")
        running = ServiceProcess(
            folder, executor="ray", ray_address=cluster.address, webhook_key=f"{CANARY}-key", lease_seconds="5"
        )
        try:
            running.start()
            yield running
        finally:
            running.close()


def test_ray_describes_both_kinds_of_nodes(service: ServiceProcess) -> None:
    recipes = service.client.get("/recipes").json()
    assert "exported-program" in json.dumps(recipes)
    # The head knows no cuda-13.0, the other node does; two GPUs there are two slots.
    refused = service.client.post("/exports", json=service.body(target={"backend": "cuda", "cudaVersion": "12.9"}))
    assert refused.json()["code"] == "toolchain-mismatch"
    dry = service.client.post("/exports?dryRun=1", json=service.body(target=CUDA)).json()
    assert [(row["kind"], row["slots"]) for row in dry["preflight"]["executors"]] == [("ray", 2)]


def test_ray_runs_a_real_export(service: ServiceProcess) -> None:
    import torch

    source = service.folder / "models" / "tiny.pt2"
    torch.export.save(torch.export.export(torch.nn.Linear(4, 3), (torch.zeros(2, 4),)), source)
    body = {
        "recipe": "exported-program",
        "source": f"file://{source}",
        "target": {"backend": "portable"},
        "verify": False,
    }
    made = service.client.post("/exports", json=body).json()
    done = service.wait(made["id"], seconds=150)
    assert done["state"] == "succeeded", (done, service.client.get(f"/exports/{made['id']}/logs").text)
    manifest = service.client.get(f"/exports/{made['id']}/manifest").json()
    assert manifest["export"]["id"] == made["id"]
    seqs = [data["seq"] for _, kind, data in service.events(made["id"]) if kind != "state"]
    assert seqs == list(range(1, len(seqs) + 1))
    log = service.client.get(f"/exports/{made['id']}/logs").text
    assert f"Running entrypoint for job {made['id']}-1" in log
    assert '"seq"' not in log


def test_ray_a_killed_exporter_is_lost_and_tried_again(service: ServiceProcess) -> None:
    export_id = service.submit(seconds=60)
    service.wait(export_id, "running")
    exporter_of(export_id).kill()
    done = service.wait(export_id)
    assert [attempt.get("error", {}).get("code") for attempt in done["attempts"]] == ["executor-lost", None]
    assert (done["state"], done["id"]) == ("succeeded", export_id)
    assert "SIGKILL" in done["attempts"][0]["error"]["message"]


def test_ray_a_killed_node_is_lost_and_tried_again(service: ServiceProcess, cluster: RayCluster) -> None:
    export_id = service.submit(seconds=60, target=CUDA)
    service.wait(export_id, "running")
    assert exporter_of(export_id).environ()["CUDA_VISIBLE_DEVICES"] in ("0", "1")
    asked = cluster.job(export_id, 1)
    cluster.kill_node(2)
    cluster.add_node()
    done = service.wait(export_id, seconds=90)
    assert [attempt.get("error", {}).get("code") for attempt in done["attempts"]] == ["executor-lost", None]
    assert (done["state"], done["id"]) == ("succeeded", export_id)
    assert cluster.job(export_id, 1)["driver_node_id"] == asked["driver_node_id"]
    assert cluster.job(export_id, 2)["driver_node_id"] != asked["driver_node_id"]


def test_ray_cancels(service: ServiceProcess) -> None:
    export_id = service.submit(seconds=60)
    service.wait(export_id, "running")
    process = exporter_of(export_id)
    started = time.monotonic()
    assert service.client.post(f"/exports/{export_id}/cancel").status_code == 202
    assert service.wait(export_id)["state"] == "cancelled"
    assert time.monotonic() - started < 10
    psutil.wait_procs([process], timeout=5)
    assert not process.is_running()
    # The exporter had time for its last word: the SIGTERM path, not a kill.
    failed = [data for _, kind, data in service.events(export_id) if kind == "failed"]
    assert [data["error"]["code"] for data in failed] == ["cancelled"]


def test_ray_cancels_what_ray_has_no_place_for(service: ServiceProcess) -> None:
    export_id = service.submit(budgets={"hostMemory": "1TiB"})
    service.wait(export_id, "starting")
    service.client.post(f"/exports/{export_id}/cancel")
    assert service.wait(export_id, seconds=15)["state"] == "cancelled"


def test_ray_attempts_are_found_again_after_a_restart(service: ServiceProcess) -> None:
    export_id = service.submit(seconds=6)
    service.wait(export_id, "running")
    process = exporter_of(export_id)
    service.kill()
    service.start()
    done = service.wait(export_id)
    assert (done["state"], done["attempt"], len(done["attempts"])) == ("succeeded", 1, 1)
    assert not process.is_running()
    seqs = [data["seq"] for _, kind, data in service.events(export_id) if kind != "state"]
    assert seqs == list(range(1, len(seqs) + 1))
    log = service.client.get(f"/exports/{export_id}/logs").text
    assert log.count("Running entrypoint for job") == 1


def test_ray_shows_no_secret(service: ServiceProcess, cluster: RayCluster) -> None:
    trap = "$AWS_SECRET_ACCESS_KEY ${AWS_SECRET_ACCESS_KEY} $(id) `id`"
    export_id = service.submit(seconds=4, labels={"trap": trap})
    service.wait(export_id, "running")
    process = exporter_of(export_id)
    environment = process.environ()
    home = Path(environment["HOME"])
    # The store's credentials are the node's own; nothing else of the node or the service is there.
    assert environment["AWS_SECRET_ACCESS_KEY"] == f"{CANARY}-aws"
    assert json.loads(environment["WEIGHTLESS_SPEC"])["request"]["labels"] == {"trap": trap}
    allowed = {name: value for name, value in environment.items() if name != "AWS_SECRET_ACCESS_KEY"}
    assert CANARY not in json.dumps(allowed)
    assert [name for name in environment if name.startswith(("WEIGHTLESS_", "RAY_"))] == ["WEIGHTLESS_SPEC"]
    assert cluster.token not in json.dumps(environment)
    assert home.stat().st_mode & 0o077 == 0
    assert service.wait(export_id)["state"] == "succeeded"
    assert not home.exists()
    shown = [
        cluster.get("/api/jobs/").text,
        json.dumps(cluster.job(export_id, 1)),
        cluster.get(f"/api/jobs/{export_id}-1/logs").text,
        service.client.get(f"/exports/{export_id}").text,
        service.client.get(f"/exports/{export_id}/logs").text,
        service.log(),
    ]
    for text in shown:
        assert CANARY not in text
        assert cluster.token not in text
