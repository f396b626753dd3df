"""An OIDC issuer on loopback with its own RSA keys: real HTTP, real signatures, and a record of every request."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

AUDIENCE = "https://weightless.example"


def b64(data: bytes) -> str:
    """base64url without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def new_key(bits: int = 2048) -> rsa.RSAPrivateKey:
    """A fresh RSA key."""
    return rsa.generate_private_key(public_exponent=65537, key_size=bits)


@cache
def _signing_key() -> rsa.RSAPrivateKey:
    """The first key of every issuer of this process: making one takes a tenth of a second."""
    return new_key()


def jwk(key: rsa.RSAPrivateKey, kid: str, **fields: Any) -> dict[str, Any]:
    """The public half as a JSON Web Key."""
    numbers = key.public_key().public_numbers()
    n = numbers.n.to_bytes((numbers.n.bit_length() + 7) // 8, "big")
    return {"kty": "RSA", "use": "sig", "alg": "RS256", "kid": kid, "n": b64(n), "e": "AQAB", **fields}


def sign(key: rsa.RSAPrivateKey, header: Mapping[str, Any] | bytes, claims: Mapping[str, Any] | bytes) -> str:
    """A token of exactly these bytes, signed with RSASSA-PKCS1-v1_5 and SHA-256 whatever the header says."""
    parts = [part if isinstance(part, bytes) else json.dumps(part).encode() for part in (header, claims)]
    text = ".".join(b64(part) for part in parts)
    return f"{text}.{b64(key.sign(text.encode(), padding.PKCS1v15(), hashes.SHA256()))}"


class Issuer:
    """The issuer's keys and answers, changed by tests; `requests` are the paths that were asked for."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.key = _signing_key()
        self.keys: list[dict[str, Any]] = [jwk(self.key, "key-1")]
        self.discovery: dict[str, Any] = {"issuer": url, "jwks_uri": f"{url}/keys"}
        self.status = 200
        self.requests: list[str] = []

    def claims(self, now: float | None = None, **changes: Any) -> dict[str, Any]:
        """Claims in the form that GitHub sends; a change to None leaves the claim out."""
        now = time.time() if now is None else now
        claims = {
            "iss": self.url,
            "aud": AUDIENCE,
            "sub": "repo:octo-org/models:ref:refs/heads/main",
            "iat": int(now),
            "nbf": int(now) - 5,
            "exp": int(now) + 300,
            "jti": "5e6d1f0a-0c1d-4f6c-9f3f-1f6a2c1c7b11",
            "repository": "octo-org/models",
            "repository_id": "123456",
            "repository_owner": "octo-org",
            "repository_owner_id": "777",
            "ref": "refs/heads/main",
            "ref_type": "branch",
            "ref_protected": "true",
            "event_name": "push",
            "actor": "octocat",
            "run_id": "42",
            "job_workflow_ref": "octo-org/models/.github/workflows/export.yml@refs/heads/main",
            **changes,
        }
        return {name: value for name, value in claims.items() if value is not None}

    def token(
        self,
        now: float | None = None,
        *,
        header: Mapping[str, Any] | None = None,
        key: rsa.RSAPrivateKey | None = None,
        **changes: Any,
    ) -> str:
        """A signed token; `header` fields are added, `changes` are to the claims."""
        full = {"typ": "JWT", "alg": "RS256", "kid": "key-1", **(header or {})}
        full = {name: value for name, value in full.items() if value is not None}
        return sign(key or self.key, full, self.claims(now, **changes))

    def answer(self, path: str) -> tuple[int, Any]:
        """Status and body for a path."""
        if path == "/.well-known/openid-configuration":
            return self.status, self.discovery
        return (self.status, {"keys": self.keys}) if path == "/keys" else (404, {})


@contextmanager
def running_issuer() -> Iterator[Issuer]:
    """An issuer that serves until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            issuer.requests.append(self.path)
            status, body = issuer.answer(self.path)
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            if status in (301, 302, 307):
                self.send_header("Location", f"{issuer.url}/elsewhere")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    issuer = Issuer(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield issuer
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
