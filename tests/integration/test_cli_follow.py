"""`submit --wait` through a service that is killed and started again in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from tests.e2e.live_service import ROOT, SCRIPTED, free_port


def start(folder: Path, port: int) -> subprocess.Popen[bytes]:
    """The scripted service on `port`, ready; its exporters outlive it."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "WEIGHTLESS_DATA_DIR": str(folder / "data"),
        "WEIGHTLESS_PORT": str(port),
        "WEIGHTLESS_SOURCE_ROOTS": str(folder),
    }
    with (folder / "service.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, *SCRIPTED], cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    for _ in range(600):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
                return process
        except OSError:
            time.sleep(0.1)
    raise AssertionError((folder / "service.log").read_text()[-2000:])


def test_a_restart_of_the_service_loses_nothing_of_what_is_followed(tmp_path: Path) -> None:
    port = free_port()
    service = start(tmp_path, port)
    steps = [{"type": "warning", "code": "step", "message": f"step {number}"} for number in range(20)]
    options = json.dumps({"seconds": 6, "events": steps})
    try:
        following = subprocess.Popen(
            [
                sys.executable, "-m", "service.cli", "submit", "scripted", "--source", f"file://{tmp_path}/m.pt2",
                "--target", "backend=portable", "--options", options, "--wait", "--timeout", "3m", "--json",
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT), "WEIGHTLESS_URL": f"http://127.0.0.1:{port}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        assert following.stderr is not None
        for line in following.stderr:
            if b"step 19" in line:
                break
        service.kill()
        service.wait()
        time.sleep(0.5)
        service = start(tmp_path, port)
        out, err = following.communicate(timeout=120)
    finally:
        service.send_signal(signal.SIGTERM)
        service.wait(30)
    assert following.returncode == 0, err
    assert json.loads(out)["state"] == "succeeded"
    assert b"step" not in err, "an event was shown twice"
    assert err.count(b"succeeded") == 1
