"""A scripted S3 server over TLS. It checks what clients send, and misbehaves where it is told to."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from tests.stores.stub.personality import STRICT, Fault, Personality
from tests.stores.stub.state import Refusal, StubObject, StubState, StubUpload, crc_text

BUCKET = "bucket"
Reply = tuple[int, dict[str, str], bytes]


class StubServer:
    """Serves `https://127.0.0.1:port`; `faults` maps request numbers (from 1) to what goes wrong there."""

    def __init__(self, certificate: Path, personality: Personality = STRICT) -> None:
        self.state = StubState(personality)
        self.faults: dict[int, Fault] = {}
        self.fault_for: Callable[[int, str], Fault | None] = lambda number, operation: None
        self.log: list[str] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.pause = 0.05
        self.retry_after = ""
        self.stopping = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"stub": self}))
        self._http.daemon_threads = True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        self._context = context
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """The URL to give to clients."""
        return f"https://127.0.0.1:{self._http.server_address[1]}"

    def wrap(self, connection: socket.socket) -> ssl.SSLSocket:
        """TLS for one connection, in the connection's own thread."""
        return self._context.wrap_socket(connection, server_side=True)

    def note(self, operation: str, path: str, headers: dict[str, str]) -> Fault | None:
        """Count a request; what goes wrong with it."""
        with self.state.lock:
            self.log.append(operation)
            self.paths.append(path)
            self.headers.append(headers)
            number = len(self.log)
        return self.faults.get(number) or self.fault_for(number, operation)

    def close(self) -> None:
        """Stop serving."""
        self.stopping.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Break(Exception):
    """Close the connection without an answer."""


class _Handler(BaseHTTPRequestHandler):
    stub: StubServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 30

    def setup(self) -> None:
        self.request = self.stub.wrap(self.request)
        super().setup()

    def handle(self) -> None:
        with contextlib.suppress(OSError, _Break):
            super().handle()

    def finish(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().finish()
        self.request.close()

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_any(self) -> None:
        split = urlsplit(self.path)
        bucket, _, key = unquote(split.path).lstrip("/").partition("/")
        query = {name: values[0] for name, values in parse_qs(split.query, keep_blank_values=True).items()}
        headers = {name.lower(): value for name, value in self.headers.items()}
        if headers.get("expect") == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        body = self.rfile.read(int(headers.get("content-length", 0)))
        operation = _operation(self.command, key, query, headers)
        fault = self.stub.note(operation, self.path, headers)
        self._answer(*self._faulty(fault, operation, bucket, key, query, headers, body), fault)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_any

    def _faulty(
        self, fault: Fault | None, operation: str, bucket: str, key: str, query: Any, headers: Any, body: bytes
    ) -> Reply:
        if fault is Fault.UNAVAILABLE:
            status, headers, body = _error(503, "SlowDown")
            return status, headers | ({"retry-after": self.stub.retry_after} if self.stub.retry_after else {}), body
        if fault is Fault.INTERNAL:
            return _error(500, "InternalError")
        if fault is Fault.RESET:
            raise _Break
        if fault is Fault.SILENT:
            self.stub.stopping.wait(20)
            raise _Break
        if fault is Fault.EXPIRED:
            return _error(403, "ExpiredToken")
        if fault is Fault.DENIED:
            return _error(403, "AccessDenied")
        if fault is Fault.ERROR_200:
            return 200, {"content-type": "application/xml"}, _error(500, "InternalError")[2]
        if fault is Fault.GARBAGE:
            return 200, {"content-type": "application/xml"}, b"<html><p>welcome to the proxy"
        if fault is Fault.CORRUPT and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        try:
            if bucket != BUCKET:
                raise Refusal(404, "NoSuchBucket")
            if not headers.get("authorization", "").startswith("AWS4-HMAC-SHA256") and "X-Amz-Signature" not in query:
                raise Refusal(403, "AccessDenied")
            self._wait_for_part_1(operation, query)
            with self.stub.state.lock:
                reply = _ROUTES[operation](self.stub.state, key, query, headers, body)
        except Refusal as refusal:
            reply = _error(refusal.status, refusal.code)
        if fault is Fault.LOST_REPLY:
            raise _Break
        if fault is Fault.SLOW:
            self.stub.stopping.wait(self.stub.pause)
        if fault is Fault.WRONG_ETAG and "etag" in reply[1]:
            reply[1]["etag"] = f'"{"0" * 32}"'
        return reply

    def _wait_for_part_1(self, operation: str, query: Mapping[str, str]) -> None:
        if self.stub.state.personality.parts_in_order and operation == "UploadPart" and query["partNumber"] != "1":
            self.stub.stopping.wait(20)
            raise _Break

    def _answer(self, status: int, headers: dict[str, str], body: bytes, fault: Fault | None) -> None:
        self.send_response(status)
        headers = {"content-length": str(len(body)), "x-amz-request-id": "tx0", **headers}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if fault is Fault.TRUNCATED else body)
        if fault is Fault.TRUNCATED:
            raise _Break


def _operation(method: str, key: str, query: Mapping[str, str], headers: Mapping[str, str]) -> str:
    if method == "POST":
        return "CreateMultipartUpload" if "uploads" in query else "CompleteMultipartUpload"
    if method == "PUT" and "partNumber" in query:
        return "UploadPartCopy" if "x-amz-copy-source" in headers else "UploadPart"
    if method == "GET" and not key:
        return "ListMultipartUploads" if "uploads" in query else "ListObjectsV2"
    if method == "GET" and "uploadId" in query:
        return "ListParts"
    if method == "DELETE":
        return "AbortMultipartUpload" if "uploadId" in query else "DeleteObject"
    return {"PUT": "PutObject", "GET": "GetObject", "HEAD": "HeadObject"}[method]


def _error(status: int, code: str) -> Reply:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>secret-that-a-server-echoes</Message></Error>"
    return status, {"content-type": "application/xml"}, body.encode()


def _xml(name: str, inner: str) -> Reply:
    body = f'<?xml version="1.0"?><{name} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{inner}</{name}>'
    return 200, {"content-type": "application/xml"}, body.encode()


def _time(moment: float) -> str:
    return datetime.datetime.fromtimestamp(moment, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def _put(state: StubState, key: str, query: Any, headers: Any, body: bytes) -> Reply:
    state.check_body(headers, body)
    item = state.put(key, headers, body)
    reply = {"etag": f'"{item.etag}"'}
    if state.personality.checksums == "verify":
        reply["x-amz-checksum-crc64nvme"] = item.crc64nvme
    return 200, reply, b""


def _create(state: StubState, key: str, query: Any, headers: Any, body: bytes) -> Reply:
    identifier = state.create(key, headers)
    status, reply, text = _xml(
        "InitiateMultipartUploadResult", f"<Bucket>{BUCKET}</Bucket><UploadId>{identifier}</UploadId>"
    )
    if state.uploads[identifier].full_crc:
        reply |= {"x-amz-checksum-algorithm": "CRC64NVME", "x-amz-checksum-type": "FULL_OBJECT"}
    return status, reply, text


def _part(state: StubState, key: str, query: Any, headers: Any, body: bytes) -> Reply:
    state.check_body(headers, body)
    etag = state.part(key, query["uploadId"], int(query["partNumber"]), body, headers)
    reply = {"etag": f'"{etag}"'}
    if state.personality.checksums == "verify" and "x-amz-checksum-crc64nvme" in headers:
        reply["x-amz-checksum-crc64nvme"] = headers["x-amz-checksum-crc64nvme"]
    return 200, reply, b""


def _copy(state: StubState, key: str, query: Any, headers: Any, body: bytes) -> Reply:
    if not state.personality.copy_part:
        raise Refusal(501, "NotImplemented")
    source = unquote(headers["x-amz-copy-source"]).removeprefix(f"{BUCKET}/")
    piece = _range(_object(state, source).body, headers["x-amz-copy-source-range"])[0]
    etag = state.part(key, query["uploadId"], int(query["partNumber"]), piece, {"x-amz-checksum-crc64nvme": ""})
    return _xml("CopyPartResult", f"<ETag>&quot;{etag}&quot;</ETag><LastModified>{_time(0)}</LastModified>")


def _complete(state: StubState, key: str, query: Any, headers: Any, body: bytes) -> Reply:
    root = ElementTree.fromstring(body)
    named = [
        (int(part.findtext("{*}PartNumber", "0")), part.findtext("{*}ETag", "").strip('"'))
        for part in root.findall("{*}Part")
    ]
    item = state.complete(key, query["uploadId"], named, headers)
    etag = "" if state.personality.empty_complete_etag else f"&quot;{item.etag}&quot;"
    return _xml("CompleteMultipartUploadResult", f"<Bucket>{BUCKET}</Bucket><ETag>{etag}</ETag>")


def _abort(state: StubState, key: str, query: Any, headers: Any, body: bytes) -> Reply:
    state.upload(key, query["uploadId"])
    del state.uploads[query["uploadId"]]
    return 204, {}, b""


def _delete(state: StubState, key: str, query: Any, headers: Any, body: bytes) -> Reply:
    state.objects.pop(key, None)
    return 204, {}, b""


def _object(state: StubState, key: str) -> StubObject:
    if key not in state.objects:
        raise Refusal(404, "NoSuchKey")
    return state.objects[key]


def _described(state: StubState, item: StubObject) -> dict[str, str]:
    moment = datetime.datetime.fromtimestamp(item.modified, datetime.UTC)
    return {"etag": f'"{item.etag}"', "last-modified": moment.strftime("%a, %d %b %Y %H:%M:%S GMT"), **item.headers}


def _head(state: StubState, key: str, query: Any, headers: Any, body: bytes) -> Reply:
    item = _object(state, key)
    reply = {**_described(state, item), "content-length": str(len(item.body))}
    if headers.get("x-amz-checksum-mode") == "ENABLED" and state.personality.checksums == "verify":
        reply |= {"x-amz-checksum-crc64nvme": item.crc64nvme, "x-amz-checksum-type": "FULL_OBJECT"}
    return 200, reply, b""


def _range(body: bytes, text: str) -> tuple[bytes, str]:
    match = re.fullmatch(r"bytes=(\d+)-(\d+)", text)
    if match is None or int(match[1]) >= len(body):
        raise Refusal(416, "InvalidRange")
    start, end = int(match[1]), min(int(match[2]) + 1, len(body))
    return body[start:end], f"bytes {start}-{end - 1}/{len(body)}"


def _get(state: StubState, key: str, query: Any, headers: Any, body: bytes) -> Reply:
    item = _object(state, key)
    if "range" not in headers:
        return 200, _described(state, item), item.body
    piece, told = _range(item.body, headers["range"])
    return 206, {**_described(state, item), "content-range": told}, piece


def _list(state: StubState, key: str, query: Any, headers: Any, body: bytes) -> Reply:
    after = query.get("continuation-token") or query.get("start-after", "")
    keys = sorted(name for name in state.objects if name.startswith(query.get("prefix", "")) and name > after)
    page = keys[: state.personality.page_size]
    more = len(keys) > len(page)
    encode = (
        (lambda text: "".join(f"%{b:02X}" for b in text.encode())) if query.get("encoding-type") == "url" else escape
    )
    rows = "".join(
        f"<Contents><Key>{encode(name)}</Key><Size>{len(state.objects[name].body)}</Size>"
        f"<LastModified>{_time(state.objects[name].modified)}</LastModified></Contents>"
        for name in page
    )
    token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
    kind = "<EncodingType>url</EncodingType>" if query.get("encoding-type") == "url" else ""
    return _xml("ListBucketResult", f"<IsTruncated>{str(more).lower()}</IsTruncated>{kind}{token}{rows}")


def _list_uploads(state: StubState, key: str, query: Any, headers: Any, body: bytes) -> Reply:
    if not state.personality.list_uploads:
        raise Refusal(501, "NotImplemented")
    found = sorted((upload.key, name, upload) for name, upload in state.uploads.items())
    after = (query.get("key-marker", ""), query.get("upload-id-marker", ""))
    rows: list[tuple[str, str, StubUpload]] = [
        row for row in found if row[0].startswith(query.get("prefix", "")) and (row[0], row[1]) > after
    ]
    page = rows[: state.personality.page_size]
    inner = "".join(
        f"<Upload><Key>{escape(name)}</Key><UploadId>{identifier}</UploadId>"
        f"<Initiated>{_time(upload.started)}</Initiated></Upload>"
        for name, identifier, upload in page
    )
    more = len(rows) > len(page)
    if more:
        inner += f"<NextKeyMarker>{escape(page[-1][0])}</NextKeyMarker>"
        inner += f"<NextUploadIdMarker>{page[-1][1]}</NextUploadIdMarker>"
    return _xml("ListMultipartUploadsResult", f"<IsTruncated>{str(more).lower()}</IsTruncated>{inner}")


def _list_parts(state: StubState, key: str, query: Any, headers: Any, body: bytes) -> Reply:
    upload = state.upload(key, query["uploadId"])
    numbers = [number for number in sorted(upload.parts) if number > int(query.get("part-number-marker", 0))]
    page = numbers[: state.personality.page_size]
    more = len(numbers) > len(page)
    tells = upload.full_crc and state.personality.lists_checksums
    inner = "".join(
        f"<Part><PartNumber>{number}</PartNumber><Size>{len(upload.parts[number][0])}</Size>"
        f"<ETag>&quot;{upload.parts[number][1]}&quot;</ETag>"
        + (f"<ChecksumCRC64NVME>{crc_text(upload.parts[number][0])}</ChecksumCRC64NVME>" if tells else "")
        + "</Part>"
        for number in page
    )
    marker = f"<NextPartNumberMarker>{page[-1]}</NextPartNumberMarker>" if more else ""
    return _xml("ListPartsResult", f"<IsTruncated>{str(more).lower()}</IsTruncated>{marker}{inner}")


_ROUTES: dict[str, Callable[[StubState, str, Any, Any, bytes], Reply]] = {
    "PutObject": _put,
    "CreateMultipartUpload": _create,
    "UploadPart": _part,
    "UploadPartCopy": _copy,
    "CompleteMultipartUpload": _complete,
    "AbortMultipartUpload": _abort,
    "DeleteObject": _delete,
    "HeadObject": _head,
    "GetObject": _get,
    "ListObjectsV2": _list,
    "ListMultipartUploads": _list_uploads,
    "ListParts": _list_parts,
}


@contextlib.contextmanager
def serving(certificate: Path, personality: Personality = STRICT) -> Iterator[StubServer]:
    """A server for the time of a `with` block."""
    server = StubServer(certificate, personality)
    try:
        yield server
    finally:
        server.close()


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1: (key and certificate for the server, certificate to trust)."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "scripted S3")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        .sign(key, hashes.SHA256())
    )
    public = certificate.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    server, trust = folder / "server.pem", folder / "trust.pem"
    server.write_bytes(private + public)
    trust.write_bytes(public)
    return server, trust
