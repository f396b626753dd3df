"""An S3 server that keeps nothing: it discards bodies and synthesises reads, in several processes, so that clients are
what a benchmark measures.

It answers as a store that knows CRC64NVME, repeating what the client sent. Sizes of objects are kept as small files.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import ssl
import sys
import tempfile
import threading
import uuid
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

BUFFER = 1 << 20
_ZEROS = bytes(BUFFER)


def serve(listener: socket.socket, context: ssl.SSLContext | None, folder: Path) -> None:
    """Accept connections for ever, one thread each."""
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_connection, args=(connection, context, folder), daemon=True).start()


def _connection(connection: socket.socket, context: ssl.SSLContext | None, folder: Path) -> None:
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = context.wrap_socket(connection, server_side=True) if context else connection
        buffer = bytearray(BUFFER)
        held = b""
        while True:
            while b"\r\n\r\n" not in held:
                data = stream.recv(65536)
                if not data:
                    return
                held += data
            head, _, held = held.partition(b"\r\n\r\n")
            line, *rows = head.decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (row.partition(":") for row in rows)}
            method, target, _ = line.split(" ", 2)
            if headers.get("expect") == "100-continue":
                stream.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            length = int(headers.get("content-length", 0))
            body, held = held[:length], held[length:]
            left = length - len(body)
            keep = method == "POST"
            while left:
                count = stream.recv_into(buffer, min(BUFFER, left))
                if not count:
                    return
                if keep:
                    body += buffer[:count]
                left -= count
            _answer(stream, method, target, headers, length, folder)
    except OSError:
        return
    finally:
        connection.close()


def _answer(
    stream: socket.socket, method: str, target: str, headers: dict[str, str], length: int, folder: Path
) -> None:
    split = urlsplit(target)
    query = parse_qs(split.query, keep_blank_values=True)
    place = folder / quote(unquote(split.path), safe="")
    reply = {"x-amz-request-id": "null", "connection": "keep-alive"}
    body = b""
    status = "200 OK"
    if method == "POST" and "uploads" in query:
        identifier = uuid.uuid4().hex
        (folder / identifier).mkdir()
        if "x-amz-checksum-algorithm" in headers:
            reply |= {"x-amz-checksum-algorithm": "CRC64NVME", "x-amz-checksum-type": "FULL_OBJECT"}
        body = _xml("InitiateMultipartUploadResult", f"<Bucket>b</Bucket><Key>k</Key><UploadId>{identifier}</UploadId>")
    elif method == "POST":
        sizes = [int(part.read_text()) for part in (folder / query["uploadId"][0]).iterdir()]
        place.write_text(str(sum(sizes)))
        body = _xml("CompleteMultipartUploadResult", "<Bucket>b</Bucket><Key>k</Key><ETag>&quot;0&quot;</ETag>")
    elif method == "PUT":
        reply["etag"] = f'"{_md5(headers)}"'
        if "x-amz-checksum-crc64nvme" in headers:
            reply["x-amz-checksum-crc64nvme"] = headers["x-amz-checksum-crc64nvme"]
        if "partNumber" in query:
            (folder / query["uploadId"][0] / query["partNumber"][0]).write_text(str(length))
        else:
            place.write_text(str(length))
    elif method == "DELETE":
        status = "204 No Content"
        place.unlink(missing_ok=True)
    elif split.path.strip("/").count("/") == 0:  # the bucket itself: clients look for its region
        body = b"" if method == "HEAD" else _xml("LocationConstraint", "")
    elif method in ("GET", "HEAD") and not place.exists():
        status = "404 Not Found"
        body = b"" if method == "HEAD" else _xml("Error", "<Code>NoSuchKey</Code>")
    else:
        _read(stream, method, headers, int(place.read_text()), reply)
        return
    _send_head(stream, status, {**reply, "content-length": str(len(body))})
    stream.sendall(body)


def _read(stream: socket.socket, method: str, headers: dict[str, str], size: int, reply: dict[str, str]) -> None:
    reply |= {"etag": '"0"', "accept-ranges": "bytes", "last-modified": "Mon, 30 Nov 2026 12:00:00 GMT"}
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("range", ""))
    start, end, status = 0, size, "200 OK"
    if match:
        start, end = int(match[1]), min(size, int(match[2] or size - 1) + 1)
        reply["content-range"] = f"bytes {start}-{end - 1}/{size}"
        status = "206 Partial Content"
    _send_head(stream, status, {**reply, "content-length": str(end - start)})
    left = 0 if method == "HEAD" else end - start
    while left:
        step = min(left, BUFFER)
        stream.sendall(memoryview(_ZEROS)[:step])
        left -= step


def _md5(headers: dict[str, str]) -> str:
    import base64

    return base64.b64decode(headers["content-md5"]).hex() if "content-md5" in headers else "0" * 32


def _xml(name: str, inner: str) -> bytes:
    return f'<?xml version="1.0"?><{name}>{inner}</{name}>'.encode()


def _send_head(stream: socket.socket, status: str, headers: dict[str, str]) -> None:
    rows = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    stream.sendall(f"HTTP/1.1 {status}\r\n{rows}\r\n".encode())


def main() -> None:
    """Serve until SIGTERM; the first line of output is the port."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--certificate", type=Path, help="PEM file with key and certificate; without: plain HTTP")
    arguments = parser.parse_args()
    context = None
    if arguments.certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(arguments.certificate)
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    children: list[int] = []
    with tempfile.TemporaryDirectory(prefix="nullstore") as folder:
        for _ in range(arguments.processes):
            child = os.fork()
            if child == 0:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                serve(listener, context, Path(folder))
            children.append(child)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        print(listener.getsockname()[1], flush=True)
        try:
            signal.pause()
        finally:
            for child in children:
                os.kill(child, signal.SIGTERM)
                os.waitpid(child, 0)


if __name__ == "__main__":
    main()
