"""A real Ray cluster on this machine: a head, nodes with invented GPUs, token authentication, nothing left behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2
import psutil

from tests.integration.service_process import free_port

ROOT = Path(__file__).parents[2]
MARK = "WEIGHTLESS_TEST_CLUSTER"
NODE = "WEIGHTLESS_TEST_NODE"
CANARY = "canary-4f1d9a"
"""Part of every secret that a node has; it may appear in nothing that Ray or the service shows."""
STORE_BYTES = 80_000_000


class RayCluster:
    """The cluster's processes are known by a variable in their environment, or by whose children they are."""

    def __init__(self) -> None:
        # Ray's sockets lie below its folder, and their paths have at most 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="wl-ray-", dir="/tmp"))
        self.mark = secrets.token_hex(8)
        self.token = secrets.token_hex(24)
        self.port = free_port()
        self.address = f"http://127.0.0.1:{free_port()}"
        self._nodes = 0

    def start(self) -> None:
        """Start the head: two processors, little memory, no GPU."""
        self._ray(
            "--head", f"--port={self.port}", "--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1",
            f"--dashboard-port={self.address.rpartition(':')[2]}", "--num-cpus=2", "--num-gpus=0",
            f"--memory={2**30}", f"--temp-dir={self.folder}",
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(httpx2.HTTPError):
                if self.get("/api/version").status_code == 200:
                    return
            assert time.monotonic() < deadline, "Ray's dashboard does not answer"
            time.sleep(0.2)

    def add_node(self) -> int:
        """Start a node with two GPUs and CUDA 13.0 by name; its number."""
        self._ray(
            f"--address=127.0.0.1:{self.port}", "--node-ip-address=127.0.0.1", "--num-cpus=2", "--num-gpus=2",
            '--resources={"cuda-13.0": 2}', f"--memory={2**30}",
        )  # fmt: skip
        return self._nodes

    def kill_node(self, number: int) -> None:
        """SIGKILL to everything on a node, as when its machine loses power."""
        for process in self._processes(NODE, f"{self.mark}-{number}"):
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)

    def get(self, path: str) -> httpx2.Response:
        """An answer of Ray's dashboard."""
        return httpx2.get(self.address + path, headers={"Authorization": f"Bearer {self.token}"}, timeout=30)

    def job(self, export_id: str, attempt: int) -> dict[str, Any]:
        """Ray's details of a job."""
        return dict(self.get(f"/api/jobs/{export_id}-{attempt}").json())

    def close(self) -> None:
        """End every process and remove the folder."""
        for _ in range(3):
            for process in self._processes(MARK, self.mark):
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.1)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ray(self, *arguments: str) -> None:
        self._nodes += 1
        (self.folder / "tmp").mkdir(exist_ok=True)
        environment = {
            "PATH": os.defpath,
            "HOME": str(self.folder),
            "TMPDIR": str(self.folder / "tmp"),
            "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "integration" / "ray_node"), str(ROOT)]),
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "RAY_USAGE_STATS_ENABLED": "0",
            MARK: self.mark,
            NODE: f"{self.mark}-{self._nodes}",
            "AWS_SECRET_ACCESS_KEY": f"{CANARY}-aws",
            "WEIGHTLESS_WEBHOOK_KEY": f"{CANARY}-webhook",
            "WEIGHTLESS_DATABASE_URL": f"postgresql://w:{CANARY}@db/w",
            "DATABASE_PASSWORD": f"{CANARY}-password",
        }
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments]
        command += [f"--object-store-memory={STORE_BYTES}", f"--dashboard-agent-listen-port={free_port()}"]
        command += ["--disable-usage-stats", "--min-worker-port=0", "--max-worker-port=0"]
        with (self.folder / "start.log").open("ab") as log:
            done = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=120
            )
        assert done.returncode == 0, (self.folder / "start.log").read_text(errors="replace")[-2000:]

    @staticmethod
    def _processes(name: str, value: str) -> set[psutil.Process]:
        """Processes with a variable, and all their children: an exporter does not keep Ray's variables."""
        found: set[psutil.Process] = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(name) == value:
                    found |= {process, *process.children(recursive=True)}
        return found


def exporter_of(export_id: str) -> psutil.Process:
    """The running exporter of an export."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                line = process.cmdline()
                if "exporter" in line and "run" in line and export_id in process.environ().get("WEIGHTLESS_SPEC", ""):
                    return process
        time.sleep(0.1)
    raise AssertionError(f"no exporter runs for {export_id}")
