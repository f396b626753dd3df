"""Upload and pull rates: ours beside s5cmd, boto3's upload_fileobj and cp, on the same bytes and the same server.

    python -m tests.bench.store                     a smoke: 256 MiB, two rounds
    python -m tests.bench.store --size 2048 --rounds 3 --small --peers

Servers: `file` (a directory, beside `cp` and fsync), `null` (tests/bench/nullstore.py, discards bytes: the clients'
own limit), `ceph` (a RADOS gateway, where S3_ENDPOINT_TLS and its credentials are in the environment). All S3 is TLS.
`raw` is the server's own ceiling: presigned PUTs and GETs over raw sockets. A ratio counts only where the slower side
is under 70% of it. Each side is a process of its own; sides alternate from round to round; the figures are the best
round's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "store.json"
ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20
SIDES = {
    "file": ["ours-upload", "cp-upload"],
    "null": ["ours-upload", "s5cmd-upload", "boto3-upload", "raw-upload"],
    "ceph": [
        *("ours-upload", "s5cmd-upload", "boto3-upload", "raw-upload"),
        *("ours-pull", "s5cmd-pull", "boto3-pull", "raw-pull"),
    ],
}
PEERS = ("s3torchconnector", "tensorizer")
"""Further writers, with --peers, where they are installed; to Ceph only."""
PEER_SECONDS = 60
"""Seconds after which such a writer is left out."""


def main() -> int:
    """Measure, print a line for each side, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=256, help="MiB of weights")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="also the same bytes in 2,000 segments")
    parser.add_argument("--peers", action="store_true", help=f"also {' and '.join(PEERS)}, where installed")
    parser.add_argument("--servers", default="file,null,ceph")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 2, help="of the null server")
    parser.add_argument("--work", type=Path, help="folder for the bytes; default: a temporary one")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))  # run as a file, not as a module
    for peer in PEERS if options.peers else ():
        if reason := _missing(peer):
            print(f"{peer}: left out, {reason}", file=sys.stderr)
            continue
        SIDES["ceph"].insert(3, f"{peer}-upload")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.work) as name:
        work = Path(name)
        source = work / "weights.bin"
        with source.open("wb") as file:
            for _ in range(options.size):
                file.write(os.urandom(MIB))
        cases = {f"{options.size}MiB": _sizes(options.size * MIB, 48 * MIB)}
        if options.small:
            cases[f"{options.size}MiB-2000-segments"] = _sizes(options.size * MIB, options.size * MIB // 2000)
        for server in options.servers.split(","):
            if server == "ceph" and "S3_ENDPOINT_TLS" not in os.environ:
                print("ceph: left out, S3_ENDPOINT_TLS is not set", file=sys.stderr)
                continue
            with _server(server, work, options.processes) as (place, environment):
                for case, sizes in cases.items():
                    rows += _measure(f"{server}-{case}", server, place, environment, sizes, source, work, options)
    _beside_s5cmd(rows)
    _write(rows, options)
    return 0


def _beside_s5cmd(rows: list[dict[str, Any]]) -> None:
    """The `file` rows get their ratio to s5cmd, which speaks only S3: sending the same bytes to the null server, else
    to Ceph, on the same machine. `s5cmd_server` names it."""
    for row in rows:
        server, _, case = row["case"].partition("-")
        if server != "file" or row["side"] != "ours":
            continue
        for other in ("null", "ceph"):
            for peer in rows:
                if (
                    peer["case"] == f"{other}-{case}"
                    and peer["side"] == "s5cmd"
                    and "s5cmd_server" not in row["figures"]
                ):
                    ratio = peer["figures"]["wall_s"] / row["figures"]["wall_s"]
                    row["figures"] |= {"ratio_to_s5cmd": ratio, "s5cmd_server": other}


def _missing(peer: str) -> str:
    """Why a peer cannot take part, empty where it can."""
    done = subprocess.run([sys.executable, "-c", f"import {peer}"], capture_output=True, text=True, check=False)
    return done.stderr.strip().rpartition("\n")[2]


def _sizes(total: int, each: int) -> list[int]:
    sizes = [each] * (total // each)
    return [*sizes, total - sum(sizes)] if total % each else sizes


@contextlib.contextmanager
def _server(server: str, work: Path, processes: int) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """The place to write to, and the environment of its clients."""
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {"OMP_NUM_THREADS": "1", "AWS_EC2_METADATA_DISABLED": "true"}
    if server == "file":
        yield {"uri": f"file://{work}/store"}, environment
    elif server == "ceph":
        place = {"endpoint": os.environ["S3_ENDPOINT_TLS"], "ca_bundle": os.environ["S3_CA_BUNDLE"]}
        client = _bucket(place)
        try:
            yield {"uri": "s3://bench", **place}, environment
        finally:
            for page in client.get_paginator("list_objects_v2").paginate(Bucket="bench"):
                for item in page.get("Contents", []):
                    client.delete_object(Bucket="bench", Key=item["Key"])
    else:
        from tests.stores.stub.server import write_certificate

        server_pem, trust_pem = write_certificate(work)
        command = [sys.executable, "-m", "tests.bench.nullstore", "--processes", str(processes)]
        with subprocess.Popen([*command, "--certificate", str(server_pem)], stdout=subprocess.PIPE, cwd=ROOT) as null:
            assert null.stdout is not None
            port = int(null.stdout.readline())
            environment |= {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}
            try:
                yield (
                    {
                        "uri": "s3://bench",
                        "endpoint": f"https://127.0.0.1:{port}",
                        "ca_bundle": str(trust_pem),
                    },
                    environment,
                )
            finally:
                null.terminate()


def _bucket(place: dict[str, Any]) -> Any:
    """A plain client, and the bucket made."""
    import boto3

    client = boto3.Session().client(
        "s3", endpoint_url=place["endpoint"], region_name="us-east-1", verify=place["ca_bundle"]
    )
    client.create_bucket(Bucket="bench")
    return client


def _measure(
    case: str,
    server: str,
    place: dict[str, Any],
    environment: dict[str, str],
    sizes: list[int],
    source: Path,
    work: Path,
    options: Any,
) -> list[dict[str, Any]]:
    samples: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES[server]}
    for turn in range(options.rounds):
        order = SIDES[server] if turn % 2 == 0 else _turned(SIDES[server])
        for side in order:
            out = work / "out"
            job = {
                "place": place,
                "key": f"{case}-{side.split('-')[0]}.ptd",
                "path": str(source),
                "sizes": sizes,
                "manifest": str(work / "manifest.json"),
                "out": str(out),
            }
            try:
                figures = _run(side, job, environment)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
                if side.split("-")[0] not in PEERS:
                    raise
                print(f"{case:32} {side:14} failed and is left out", file=sys.stderr)
                continue
            samples[side].append(figures)
            print(f"{case:32} {side:14} {options.size / figures['wall_s']:8.0f} MiB/s", file=sys.stderr)
            shutil.rmtree(out, ignore_errors=True)
    shutil.rmtree(work / "store", ignore_errors=True)
    return _rows(case, samples, options.size)


def _turned(sides: list[str]) -> list[str]:
    """Uploads in reverse, then pulls in reverse: a pull needs its upload."""
    uploads = [side for side in sides if side.endswith("upload")]
    return uploads[::-1] + [side for side in sides if side.endswith("pull")][::-1]


def _run(side: str, job: dict[str, Any], environment: dict[str, str]) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.store_sides", side],
        input=json.dumps(job).encode(),
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=environment,
        check=True,
        timeout=PEER_SECONDS if side.split("-")[0] in PEERS else None,
    )
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def _rows(case: str, samples: dict[str, list[dict[str, float]]], size: int) -> list[dict[str, Any]]:
    best = {side: min(taken, key=lambda item: item["wall_s"]) for side, taken in samples.items() if taken}
    rows = []
    for side, figures in best.items():
        name, _, way = side.partition("-")
        rate = size * MIB / 1e6 / figures["wall_s"]
        row = {f"{way}_mb_s": rate, **figures}
        peer = best.get(f"s5cmd-{way}")
        ceiling = best.get(f"raw-{way}")
        if name == "ours" and peer is not None:
            row["ratio_to_s5cmd"] = peer["wall_s"] / figures["wall_s"]
            if ceiling is not None:
                slower = max(peer["wall_s"], figures["wall_s"])
                row["slower_share_of_ceiling"] = ceiling["wall_s"] / slower
                row["ratio_counts"] = ceiling["wall_s"] / slower < 0.7
        if name == "ours" and f"cp-{way}" in best:
            row["ratio_to_cp"] = best[f"cp-{way}"]["wall_s"] / figures["wall_s"]
        taken = samples[side]
        rows.append(
            {
                "case": f"{case} {way}",
                "side": name,
                "figures": row,
                "samples": {key: [item[key] for item in taken] for key in figures},
            }
        )
    return rows


def _write(rows: list[dict[str, Any]], options: Any) -> None:
    versions = {}
    for name in ("boto3", "botocore", "awscrt", "s5cmd", *PEERS):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    with contextlib.suppress(OSError):
        versions["ceph"] = subprocess.run(
            ["radosgw", "--version"], capture_output=True, text=True, check=False
        ).stdout.strip()
    result = {
        "name": "store",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "load": round(os.getloadavg()[0], 1),
            "machine": platform.machine(),
        },
        "versions": {"python": platform.python_version(), **versions},
        "servers": {
            "file": "a directory on the local disk; peer: cp and fsync",
            "null": f"tests/bench/nullstore.py over TLS, {options.processes} processes, same host",
            "ceph": "one-node Ceph RADOS gateway over TLS, BlueStore on a file, same host",
        },
        "command": " ".join(["python -m tests.bench.store", *sys.argv[1:]]),
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    sys.exit(main())
