"""Host memory, GPU memory, disk and time of a CUDA export: ours to a `file://` store, upstream's to local disk.

    python -m tests.bench.cuda_memory 2GiB 10GiB --sides ours,upstream,upstream-strict --rounds 2 --work /tmp/bench

Each side runs in a process of its own with the same Inductor settings, sides alternating from round to round. The
parent samples the child's process tree every 100 ms (`Pss_Anon` and `Pss` of smaps_rollup). Results are merged into
tests/bench/results/cuda_memory.json, raw samples included. Checkpoints hold random bf16 weights.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from exporter.meter import folder_bytes, gpu_reader, host_memory, process_tree

RESULTS = Path(__file__).parent / "results" / "cuda_memory.json"
GIB = 2**30
CASES = {"2GiB": 6, "5GiB": 15, "10GiB": 32, "24GiB": 73}
"""Layers of 4096 x 14336 (336 MiB of bf16 each)."""
SETTINGS = {"low_memory_mode": "ON", "max_autotune": "ON", "aot_inductor.compile_wrapper_opt_level": "O0"}


def main() -> int:
    """Measure the cases and write the result file; status 1 if a side failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", help=f"{', '.join(CASES)}, or NAME=LAYERS[:VOCAB]")
    parser.add_argument("--sides", default="ours,upstream,upstream-strict")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--limit-gib", type=float, help="kill a side whose tree passes this much anonymous memory")
    parser.add_argument("--tmpfs-gib", type=float, help="give each side a tmpfs of this size as TMPDIR (needs root)")
    parser.add_argument("--label", default="", help="appended to the case's name in the result file")
    parser.add_argument("--threads", type=int, help="TORCHINDUCTOR_COMPILE_THREADS of every side")
    parser.add_argument("--verify", action="store_true", help="run our artifact on the GPU, inside the measured time")
    parser.add_argument("--kv-length", type=int, default=256, help="length of each layer's key cache (8 KiB a token)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    failed = False
    for case in options.cases:
        name, layers, vocabulary = parse_case(case)
        source = options.work / name / "model.safetensors"
        run_child(["-m", "tests.bench.cuda_side", "generate", str(layers), str(vocabulary), str(source)])
        sides = options.sides.split(",")
        for turn in range(options.rounds):
            for side in sides if turn % 2 == 0 else sides[::-1]:
                figures = measure(side, name, layers, vocabulary, source, options)
                failed |= "failure" in figures
                record(options.out, name + options.label, side, figures, options)
        shutil.rmtree(options.work / name, ignore_errors=True)
    return int(failed)


def parse_case(text: str) -> tuple[str, int, int]:
    """Name, layers and vocabulary (0: no embedding and head) of a case."""
    if text in CASES:
        return text, CASES[text], 0
    name, _, rest = text.partition("=")
    layers, _, vocabulary = rest.partition(":")
    return name, int(layers), int(vocabulary or 0)


def run_child(arguments: list[str]) -> None:
    """Run a Python child to its end; raises if it fails."""
    subprocess.run([sys.executable, *arguments], check=True)


def measure(
    side: str, name: str, layers: int, vocabulary: int, source: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Run one side and sample it. Figures in GiB, bytes and seconds; `failure` where it did not finish."""
    target = options.work / f"{name}-{side}"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    with scratch_folder(target / "tmp", options.tmpfs_gib) as scratch:
        environment = os.environ | {
            "TMPDIR": str(scratch),
            "PYTHONUNBUFFERED": "1",
            "KV_LENGTH": str(options.kv_length),
            "SEGMENTS": "1",
        }
        if options.threads:
            environment["TORCHINDUCTOR_COMPILE_THREADS"] = str(options.threads)
        command = [
            *(sys.executable, "-m", "tests.bench.cuda_side", side, str(layers), str(vocabulary), str(source)),
            *(str(target / "out"), "verify" if options.verify else ""),
        ]
        started = time.monotonic()
        with (target / "log.txt").open("wb") as log:
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment)
            samples = sample(child, scratch, started, options.limit_gib)
            assert child.stdout is not None
            reply = child.stdout.read().decode().strip().splitlines()
        wall = time.monotonic() - started
        figures: dict[str, Any] = {"wall_s": round(wall, 2), **peaks(samples)}
        if child.returncode != 0:
            tail = (target / "log.txt").read_text(errors="replace").strip().splitlines()[-12:]
            figures["failure"] = f"status {child.returncode}"
            print("\n".join(tail), file=sys.stderr)
        else:
            figures |= json.loads(reply[-1])
            # Upstream's segments are hashed for the comparison only: that is no part of its export.
            figures["wall_s"] = round(wall - figures.pop("hash_s", 0.0), 2)
        written = samples["written"][-1] if samples["written"] else 0
        stored = figures.get("stored_bytes", 0)
        figures["disk_weight_bytes"] = max(0, written - stored - max(samples["artefacts"], default=0))
        figures["disk_written_bytes"] = written
    keep_digests(target, figures)
    shutil.rmtree(target, ignore_errors=True)
    figures["samples"] = thin(samples)
    print(
        "SIDE", name, side, json.dumps({key: value for key, value in figures.items() if key != "samples"}), flush=True
    )
    return figures


@contextmanager
def scratch_folder(path: Path, tmpfs_gib: float | None) -> Iterator[Path]:
    """A TMPDIR for one side; on a tmpfs of its own where asked for."""
    path.mkdir()
    if tmpfs_gib:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={int(tmpfs_gib * GIB)}", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        if tmpfs_gib:
            subprocess.run(["umount", "-l", str(path)], check=False)


def sample(
    child: subprocess.Popen[bytes], scratch: Path, started: float, limit_gib: float | None
) -> dict[str, list[Any]]:
    """Sample the child's tree until it ends. Bytes, and seconds since `started`."""
    found: dict[str, list[Any]] = {
        key: [] for key in ("t", "anon", "rss", "anon_self", "rss_self", "gpu", "written", "artefacts", "processes")
    }
    read_gpu, written, next_walk = gpu_reader(), dict[int, int](), 0.0
    while child.poll() is None:
        now = time.monotonic()
        pids = process_tree(child.pid)
        memory = {pid: host_memory(pid) for pid in pids}
        for pid in pids:
            written[pid] = max(written.get(pid, 0), raw_written(pid))
        anon = sum(item[0] for item in memory.values())
        found["t"].append(round(now - started, 2))
        found["anon"].append(anon)
        found["rss"].append(sum(item[1] for item in memory.values()))
        found["anon_self"].append(memory[child.pid][0])
        found["rss_self"].append(memory[child.pid][1])
        found["gpu"].append(read_gpu(set(pids)))
        found["written"].append(sum(written.values()))
        found["processes"].append(len(pids))
        if now >= next_walk:
            found["artefacts"].append(artefact_bytes(scratch))
            next_walk = now + 2
        if limit_gib is not None and anon > limit_gib * GIB:
            for pid in reversed(pids):
                os.kill(pid, signal.SIGKILL)
        time.sleep(max(0.0, 0.1 - (time.monotonic() - now)))
    return found


def raw_written(pid: int) -> int:
    """`write_bytes` of a process: what it caused to be written to the disk layer, also if it was deleted later."""
    try:
        fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().strip().splitlines())
    except OSError:
        return 0
    return int(fields.get("write_bytes", 0))


def artefact_bytes(scratch: Path) -> int:
    """Disk space below the scratch folder, without upstream's files of weights."""
    total = folder_bytes(scratch)
    for pattern in ("**/.cuda_weight_*", "**/.executorch_*"):
        for path in scratch.glob(pattern):
            try:
                total -= 512 * path.stat().st_blocks
            except OSError:
                continue
    return max(0, total)


def peaks(samples: dict[str, list[Any]]) -> dict[str, Any]:
    """The figures that come from samples."""

    def gib(key: str) -> float:
        return round(max(samples[key], default=0) / GIB, 3)

    return {
        "host_anon_peak_gib": gib("anon"),
        "host_rss_peak_gib": gib("rss"),
        "host_anon_peak_self_gib": gib("anon_self"),
        "host_rss_peak_self_gib": gib("rss_self"),
        "gpu_peak_driver_gib": gib("gpu"),
        "processes": max(samples["processes"], default=0),
    }


def thin(samples: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """At most 300 samples of each kind, each the largest of its run, so that no peak is lost."""
    kept = {}
    for key, values in samples.items():
        step = max(1, -(-len(values) // 300))
        kept[key] = [max(values[start : start + step]) for start in range(0, len(values), step)]
    return kept


def keep_digests(target: Path, figures: dict[str, Any]) -> None:
    """Replace the set of (key, size, SHA-256) by its own digest, which is equal where the sets are."""
    import hashlib

    segments = figures.pop("segments", None)
    if segments is not None:
        text = json.dumps(sorted(segments)).encode()
        figures["segment_set"] = f"{len(segments)} keys, sha256:{hashlib.sha256(text).hexdigest()[:16]}"


def record(out: Path, case: str, side: str, figures: dict[str, Any], options: argparse.Namespace) -> None:
    """Merge one run into the result file: figures are medians over the rounds, samples keep every run."""
    result = json.loads(out.read_text()) if out.exists() else {"name": "cuda_memory", "rows": []}
    result |= {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "host": host(),
        "versions": versions(),
        "settings": SETTINGS,
        "command": "python -m tests.bench.cuda_memory " + " ".join(sys.argv[1:]),
    }
    row = next((item for item in result["rows"] if (item["case"], item["side"]) == (case, side)), None)
    if row is None:
        row = {"case": case, "side": side, "figures": {}, "samples": {"runs": []}}
        result["rows"].append(row)
    row["samples"]["runs"].append(figures)
    runs = [run for run in row["samples"]["runs"] if "failure" not in run] or row["samples"]["runs"]
    row["figures"] = {key: middle([run[key] for run in runs if key in run]) for key in runs[0] if key != "samples"}
    row["samples"]["wall_s"] = [run["wall_s"] for run in runs]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


def middle(values: list[Any]) -> Any:
    """The lower median of numbers; the last of anything else."""
    if all(isinstance(value, int | float) for value in values):
        return sorted(values)[(len(values) - 1) // 2]
    return values[-1]


def host() -> dict[str, Any]:
    """What the figures were measured on."""
    name = ""
    try:
        import pynvml

        pynvml.nvmlInit()
        name = str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)))
    except Exception as error:
        name = f"none ({type(error).__name__})"
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    return {"gpu": name, "cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version()}


def versions() -> dict[str, str]:
    """Versions of what took part."""
    found = {}
    for name in ("torch", "executorch", "triton", "torchao", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


if __name__ == "__main__":
    sys.exit(main())
