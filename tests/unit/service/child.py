"""A tiny exporter for tests of the executor: it speaks the protocol and does what its source's name says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

seq = 0


def say(kind: str, **fields: Any) -> None:
    global seq
    seq += 1
    line = {"v": 1, "seq": seq, "time": "2026-01-01T00:00:00.000Z", "type": kind, **fields}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def finish(uri: str) -> None:
    digest = "sha256:" + "0" * 64
    say("finished", manifestUri=uri, manifestDigest=digest, bytesUploaded=1, bytesReused=0)


def fail(code: str, retryable: bool = False) -> None:
    error = {"code": code, "message": code, "hint": "", "retryable": retryable, "stage": "capturing", "details": {}}
    say("failed", error=error)


def stopped(*_: object) -> None:
    fail("cancelled")
    sys.exit(143)


def doctor() -> None:
    options = {"type": "object", "properties": {"seconds": {"type": "number"}}, "additionalProperties": False}
    recipe = {"name": "fake", "description": "", "optionsSchema": options, "example": {}, "available": True}
    off = {**recipe, "name": "off", "available": False, "reason": "torch is missing"}
    backends = [{"name": "xnnpack", "available": True}, {"name": "cuda", "available": False, "reason": "no GPU"}]
    gpus = [
        {"index": i, "name": "g", "memoryBytes": 1, "arch": "sm_90"} for i in range(int(os.environ.get("LC_GPUS", 0)))
    ]
    print(json.dumps({"v": 1, "recipes": [recipe, off], "backends": backends, "gpus": gpus}))


def run() -> None:
    spec = json.load(sys.stdin)
    what = spec["request"]["source"].rpartition("/")[2]
    seconds = spec["request"]["options"].get("seconds", 0.0)
    if what == "ignores-term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, stopped)
    say("stage", name="capturing", state="started")
    print("a line of the log", file=sys.stderr, flush=True)
    if what == "upload":
        say("upload", uploadId="u1", uri=spec["store"]["uri"] + "/weights/x/model.ptd", partSize=5, state="opened")
    if what == "commit":
        folder = Path(spec["store"]["uri"].removeprefix("file://")) / "exports" / spec["id"]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "manifest.json").write_bytes(b"{}")
    if what == "stray":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    if what == "environment":
        print(json.dumps(dict(os.environ)), file=sys.stderr, flush=True)
    if what == "sample":
        limit = int(spec["request"]["budgets"]["hostMemory"])
        say("resources", hostAnonBytes=limit, hostRssBytes=limit, gpuBytes=0, diskWrittenBytes=0)
    steps = max(1, int(seconds / 0.05))
    for step in range(steps):
        say("progress", stage="capturing", done=step, total=steps, unit="bytes")
        if seconds:
            time.sleep(0.05)
    if what in ("kill", "commit", "sample", "upload"):
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "silent":
        return
    if what in ("disk-full", "unsupported-model"):
        fail(what, retryable=what == "disk-full")
        sys.exit(1)
    finish(f"{spec['store']['uri']}/exports/{spec['id']}/manifest.json")


if __name__ == "__main__":
    {"doctor": doctor, "run": run}[sys.argv[1]]()
