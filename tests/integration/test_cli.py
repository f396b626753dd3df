"""The command line as users run it: a process of its own, the real service, the real exporter, a tiny program."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import save_tiny_program
from tests.e2e.live_service import REAL, ROOT, LiveService, running

pytestmark = pytest.mark.slow
pytest.importorskip("executorch", reason="the exporter's packages are not installed")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "models").mkdir()
    save_tiny_program(folder / "models" / "model.pt2")
    with running(folder, REAL, WEIGHTLESS_SLOTS="1") as live:
        yield live


class Cli:
    """Runs `weightless` beside a service."""

    def __init__(self, service: LiveService) -> None:
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "WEIGHTLESS_URL": service.url,
            "WEIGHTLESS_DATA_DIR": str(service.folder / "data"),
        }

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "service.cli", *arguments]
        return subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def __call__(self, *arguments: str, status: int = 0) -> tuple[bytes, str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=300)
        assert process.returncode == status, (out[-2000:], err.decode()[-2000:])
        return out, err.decode()

    def json(self, *arguments: str, status: int = 0) -> dict[str, Any]:
        out, _ = self(*arguments, "--json", status=status)
        value = json.loads(out)
        assert isinstance(value, dict)
        return value


@pytest.fixture(scope="module")
def weightless(service: LiveService) -> Cli:
    return Cli(service)


@pytest.fixture(scope="module")
def export(service: LiveService, weightless: Cli) -> dict[str, Any]:
    """One finished export, submitted and waited for by the command line."""
    return weightless.json(
        "submit",
        "exported-program",
        "--source",
        service.source,
        "--target",
        "backend=xnnpack",
        "--label",
        "pr=7",
        "--wait",
    )


def test_submit_and_wait_gives_the_export_and_its_figures(export: dict[str, Any]) -> None:
    assert export["state"] == "succeeded"
    assert export["manifest"]["digest"].startswith("sha256:")
    summary = export["summary"]
    assert summary["segments"] > 0
    assert summary["dataBytes"] > 64 * 32 * 4
    assert {"capturing", "compiling", "uploading"} <= set(summary["stages"])
    assert summary["peaks"]["hostPeakAnonBytes"] > 0


def test_pull_by_id_by_path_and_by_url(
    export: dict[str, Any], weightless: Cli, service: LiveService, tmp_path: Path
) -> None:
    found = weightless.json("pull", export["id"], "-o", str(tmp_path / "a"))
    assert {file["name"] for file in found["files"]} == {"model.pte", "model.ptd"}
    assert found["manifest"]["digest"] == export["manifest"]["digest"]
    uri = export["manifest"]["uri"]
    weightless("pull", uri, "-o", str(tmp_path / "b"), "--digest", export["manifest"]["digest"])
    weightless("pull", f"{service.url}/exports/{export['id']}/manifest", "-o", str(tmp_path / "c"), "--only", "program")
    first = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert first == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["model.pte"]
    out, _ = weightless("pull", export["id"], "--only", "model.ptd", "-o", "-")
    assert out == first["model.ptd"]
    weightless("pull", uri, "-o", str(tmp_path / "d"), "--digest", f"sha256:{'0' * 64}", status=1)
    assert not (tmp_path / "d").exists()


def test_a_pulled_program_is_inspected_without_executorch(
    export: dict[str, Any], weightless: Cli, tmp_path: Path
) -> None:
    weightless("pull", export["id"], "-o", str(tmp_path))
    program = weightless.json("inspect", str(tmp_path / "model.pte"))
    assert program["methods"][0]["delegates"] == ["XnnpackBackend"]
    assert program["methods"][0]["inputs"] == [{"dtype": "float32", "shape": [2, 64]}]
    data = weightless.json("inspect", str(tmp_path / "model.ptd"))
    manifest = weightless.json("inspect", export["id"])["manifest"]
    assert [segment["size"] for segment in data["segments"]] == [s["size"] for s in manifest["data"][0]["segments"]]
    assert {name["key"] for segment in data["segments"] for name in segment["names"]} == {
        name["key"] for segment in manifest["data"][0]["segments"] for name in segment["names"]
    }
    out, _ = weightless("inspect", export["id"])
    assert export["id"].encode() in out


def test_verify_finds_a_flipped_bit_in_the_store(export: dict[str, Any], weightless: Cli, service: LiveService) -> None:
    assert weightless.json("verify", export["id"])["ok"] is True
    (stored,) = (service.folder / "data" / "store" / "weights").glob("*/*.ptd")
    good = stored.read_bytes()
    try:
        stored.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        report = weightless.json("verify", export["id"], status=1)
        assert report["ok"] is False
        (bad,) = [file for file in report["files"] if not file["ok"]]
        assert (bad["name"], bad["badRegions"]) == ("model.ptd", 1)
        _, err = weightless("pull", export["id"], "-o", str(service.folder / "never"), status=1)
        assert "was altered" in err
    finally:
        stored.write_bytes(good)


def test_status_list_and_logs(export: dict[str, Any], weightless: Cli) -> None:
    out, _ = weightless("status", export["id"])
    assert b"succeeded" in out
    assert [item["id"] for item in weightless.json("list", "--label", "pr=7")["items"]] == [export["id"]]
    assert weightless.json("list", "--label", "pr=8")["items"] == []
    weightless("logs", export["id"])
    assert weightless.json("cancel", export["id"])["state"] == "succeeded"
    assert weightless.json("status", "exp_0" + "0" * 25, status=1)["error"]["code"] == "not-found"


def test_a_failed_export_is_1_with_its_reason(weightless: Cli, service: LiveService) -> None:
    (service.folder / "models" / "broken.pt2").write_bytes(b"not an archive")
    failed = weightless.json(
        "submit", "exported-program", "--source", f"file://{service.folder}/models/broken.pt2",
        "--target", "backend=portable", "--wait", status=1,
    )  # fmt: skip
    assert failed["state"] == "failed"
    assert failed["error"]["code"] in {"source-unsafe", "source-not-found"}
    assert failed["error"]["hint"]


def test_refused_at_once(weightless: Cli, service: LiveService) -> None:
    submit = ("submit", "exported-program", "--target", "backend=portable")
    assert (
        weightless.json(*submit, "--source", "file:///etc/passwd", status=4)["error"]["code"] == "source-access-denied"
    )
    assert (
        weightless.json(*submit, "--source", service.source, "-o", "nothing=1", status=2)["error"]["code"]
        == "invalid-request"
    )


def test_interrupted_with_and_without_cancelling(weightless: Cli, service: LiveService) -> None:
    submit = (
        "submit",
        "exported-program",
        "--source",
        service.source,
        "--target",
        "backend=portable",
        "--wait",
        "--json",
    )
    gone = weightless.start(*submit)
    _until_followed(gone)
    gone.send_signal(signal.SIGTERM)
    out, err = gone.communicate(timeout=60)
    assert (gone.returncode, out) == (143, b"")
    left = err.decode().split("weightless status ")[1].split()[0]
    assert service.export(left)["state"] in {"queued", "starting", "running"}

    stopped = weightless.start(*submit, "--cancel-on-interrupt")
    _until_followed(stopped)
    stopped.send_signal(signal.SIGINT)
    out, _ = stopped.communicate(timeout=60)
    assert stopped.returncode == 5
    assert json.loads(out)["state"] == "cancelled"

    assert weightless.json("status", left, "--wait", "--timeout", "1s", status=6)["error"]["code"] == "wait-timeout"
    weightless("cancel", left)
    assert weightless.json("status", left, "--wait", status=5)["state"] == "cancelled"


def _until_followed(process: subprocess.Popen[bytes]) -> None:
    assert process.stderr is not None
    assert b"following exp_" in process.stderr.readline()
    time.sleep(0.2)


def test_gc_beside_the_database(export: dict[str, Any], weightless: Cli, service: LiveService) -> None:
    said = weightless.json("gc", "--older-than", "0s", "--dry-run")
    assert export["id"] in said["expired"]
    assert weightless.json("verify", export["id"])["ok"] is True
    assert weightless.json("gc", "--older-than", "30d")["expired"] == []
    done = weightless.json("gc", "--older-than", "0s")
    assert set(done["expired"]) == set(said["expired"])
    assert weightless.json("status", export["id"], status=1)["error"]["code"] == "not-found"
    assert not list((service.folder / "data" / "store" / "exports").rglob("manifest.json"))


def test_doctor_knows_this_machine_and_its_store(weightless: Cli, tmp_path: Path) -> None:
    weightless.environment = {**weightless.environment, "WEIGHTLESS_STORE": f"file://{tmp_path}/store"}
    report = weightless.json("doctor")
    assert {"xnnpack", "portable"} <= {item["name"] for item in report["backends"] if item["available"]}
    assert {"exported-program", "huggingface"} <= {item["name"] for item in report["recipes"]}
    store = [check for check in report["checks"] if check["name"].startswith("store: ")]
    assert len(store) == 7
    assert all(check["ok"] for check in store), store
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
