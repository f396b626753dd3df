"""Latency of POST /exports and GET /exports/{id} at a steady rate, with a full table and many open event streams.

    python tests/bench/service.py [--seconds 10] [--rate 200] [--rows 100000] [--streams 500] [--database sqlite]

The load is open-loop: requests start when they are due, so that a slow answer does not slow the load, and a latency
counts from the moment that a request was due. Half of the requests are POSTs. Server and generator have one core each
where there are two. The generator's own ceiling is the same load on GET /healthz, which does nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from service.database import Database
from service.jobs import Export, State, new_id
from service.rows import values_of
from service.tables import events, exports
from tests.integration.service_process import ServiceProcess
from tests.postgres_server import PostgresServer, find_programs

RESULT = Path(__file__).parent / "results" / "service.json"


class Connection:
    """One keep-alive connection that sends a prepared request and reads the answer: little work for the generator."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Status and body."""
        self._writer.write(request)
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        start = head.index(b"content-length:") + 15
        length = int(head[start : head.index(b"\r\n", start)])
        return int(head[9:12]), await self._reader.readexactly(length)


class Load:
    """A pool of connections to one server."""

    def __init__(self, port: int, body: bytes) -> None:
        self._port = port
        self._idle: list[Connection] = []
        host = b"Host: 127.0.0.1\r\n"
        self.post = b"POST /exports HTTP/1.1\r\n" + host + b"Content-Type: application/json\r\n"
        self.post += f"Content-Length: {len(body)}\r\n\r\n".encode() + body
        self.health = b"GET /healthz HTTP/1.1\r\n" + host + b"\r\n"
        self.host = host

    def get(self, export_id: str) -> bytes:
        """The request for one export."""
        return b"GET /exports/" + export_id.encode() + b" HTTP/1.1\r\n" + self.host + b"\r\n"

    async def ask(self, request: bytes, due: float) -> tuple[int, bytes, float]:
        """Status, body, and seconds since the request was due."""
        if self._idle:
            connection = self._idle.pop()
        else:
            connection = Connection(*await asyncio.open_connection("127.0.0.1", self._port))
        status, body = await connection.ask(request)
        took = time.perf_counter() - due
        self._idle.append(connection)
        return status, body, took

    async def steady(self, rate: int, seconds: float, kinds: list[str], ids: list[str]) -> dict[str, list[float]]:
        """Latencies by kind of request, each kind in turn."""
        taken: dict[str, list[float]] = {kind: [] for kind in kinds}
        wrong: list[tuple[str, int, bytes]] = []

        async def one(kind: str, due: float) -> None:
            request = self.post if kind == "post" else self.health if kind == "health" else self.get(ids[-1])
            status, body, took = await self.ask(request, due)
            taken[kind].append(took)
            if status != (202 if kind == "post" else 200):
                wrong.append((kind, status, body[:300]))
            elif kind == "post":
                ids.append(json.loads(body)["id"])

        begun = time.perf_counter()
        tasks = []
        for number in range(int(rate * seconds)):
            due = begun + number / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(one(kinds[number % len(kinds)], due)))
        await asyncio.gather(*tasks)
        if wrong:
            raise SystemExit(f"{len(wrong)} requests were not answered as expected: {wrong[0]}")
        return taken


async def open_streams(port: int, ids: list[str]) -> list[asyncio.StreamWriter]:
    """An event stream on each export, read and thrown away."""
    writers = []
    for export_id in ids:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET /exports/{export_id}/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writers.append(writer)
    return writers


def fill(url: str, rows: int, queued: int, template: dict[str, Any]) -> list[str]:
    """Put finished and queued exports into the table; the ids of the queued ones."""
    database = Database(url)
    database.migrate()
    waiting: list[str] = []
    now = time.time()
    for start in range(0, rows, 2000):
        batch, lines = [], []
        for number in range(start, min(rows, start + 2000)):
            export = Export(
                id=new_id(), owner="local", caller={"kind": "local"}, request=template, created_at=now, last_event=1
            )
            if number >= queued:
                export = export.evolve(lease_owner=None).move(State.CANCELLED, finished_at=now)
            else:
                waiting.append(export.id)
            batch.append(values_of(export))
            data = json.dumps({"v": 1, "seq": 1, "type": "state", "from": None, "to": "queued", "attempt": 0})
            lines.append({"export_id": export.id, "id": 1, "attempt": 0, "type": "state", "time": "", "data": data})
        with database.write() as connection:
            connection.execute(exports.insert(), batch)
            connection.execute(events.insert(), lines)
    database.dispose()
    return waiting


def quantile(values: list[float], share: float) -> float:
    """Milliseconds at a share of the sorted values."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] * 1000


@contextmanager
def database_url(kind: str, folder: Path) -> Iterator[str]:
    """URL of a new database."""
    if kind == "sqlite":
        yield f"sqlite:///{folder / 'bench.db'}"
        return
    programs = find_programs()
    if programs is None:
        raise SystemExit("PostgreSQL's server programs are not installed")
    with PostgresServer(programs) as server:
        yield server.database()


async def measure(service: ServiceProcess, args: argparse.Namespace, ids: list[str]) -> dict[str, Any]:
    """The ceiling first, then the load with streams open."""
    load = Load(service.port, json.dumps(service.body()).encode())
    await load.steady(args.rate, 2.0, ["post", "get"], ids[:1])
    ceiling = await load.steady(args.rate, min(5.0, args.seconds), ["health"], [])
    streams = await open_streams(service.port, ids[: args.streams])
    before = service.memory()
    taken = await load.steady(args.rate, args.seconds, ["post", "get"], ids[:1])
    after = service.memory()
    for writer in streams:
        writer.close()
    return {"taken": taken, "ceiling": ceiling["health"], "memory": (before, after)}


def row(kind: str, args: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    """One line of the result."""
    figures: dict[str, Any] = {}
    for name, values in (*found["taken"].items(), ("ceiling", found["ceiling"])):
        for label, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
            figures[f"{name}_{label}_ms"] = round(quantile(values, share), 3)
    figures |= {"requests_per_s": args.rate, "rows": args.rows, "streams": args.streams, "seconds": args.seconds}
    figures["server_rss_growth_mib"] = round((found["memory"][1] - found["memory"][0]) / 2**20, 1)
    samples = {
        f"{name}_ms": [round(value * 1000, 3) for value in values[:: max(1, len(values) // 500)]]
        for name, values in found["taken"].items()
    }
    return {"case": kind, "side": "ours", "figures": figures, "samples": samples}


def main() -> None:
    """Measure each database and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rate", type=int, default=200)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--database", nargs="+", choices=["sqlite", "postgres"], default=["sqlite", "postgres"])
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    rows = []
    for kind in args.database:
        if kind == "postgres" and find_programs() is None:
            sys.stderr.write("postgres: skipped, its server programs are not installed\n")
            continue
        folder = Path(tempfile.mkdtemp(prefix="bench-"))
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            url = stack.enter_context(database_url(kind, folder))
            service = ServiceProcess(folder, database_url=url, slots="0", log_level="warning")
            stack.callback(service.close)
            template = {**service.body(), "options": {}, "budgets": {}, "labels": {}, "priority": 0}
            ids = fill(url, args.rows, max(args.streams, 1), template)
            service.start()
            if len(cores) > 1:
                service.pin({cores[0]})
                os.sched_setaffinity(0, {cores[-1]})
            rows.append(row(kind, args, asyncio.run(measure(service, args, ids))))
            os.sched_setaffinity(0, set(cores))
        print(json.dumps(rows[-1]["figures"]))
    result = {
        "name": "service",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": {"cpu": platform.processor() or platform.machine(), "cores": len(cores), "load": os.getloadavg()[0]},
        "versions": {name: version(name) for name in ("fastapi", "uvicorn", "sqlalchemy", "psycopg", "pydantic")},
        "command": f"python tests/bench/service.py --seconds {args.seconds:g} --rate {args.rate} --rows {args.rows}"
        f" --streams {args.streams} --database {' '.join(args.database)}",
        "rows": rows,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
