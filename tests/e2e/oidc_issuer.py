"""An OIDC issuer on loopback with its own RSA key: what GitHub is to a job (token endpoint) and to a service (JWKS)."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa

KEY_ID = "test-key"


@dataclass
class Issuer:
    """The issuer's address, what it puts into tokens, and every token that it gave out."""

    url: str = ""
    request_token: str = "request-token-canary-8c1f"
    claims: dict[str, Any] = field(default_factory=dict)
    issued: list[str] = field(default_factory=list)
    key: rsa.RSAPrivateKey = field(default_factory=lambda: rsa.generate_private_key(65537, 2048))

    def token(self, audience: str) -> str:
        """A fresh token for this job, good for five minutes."""
        now = int(time.time())
        claims = {
            "iss": self.url,
            "aud": audience,
            "sub": "repo:octo/models:ref:refs/heads/main",
            "jti": f"{len(self.issued)}",
            "iat": now,
            "nbf": now - 5,
            "exp": now + 300,
            "repository": "octo/models",
            "repository_id": "123456",
            "repository_owner": "octo",
            "repository_owner_id": "42",
            "ref": "refs/heads/main",
            "ref_protected": "true",
            "event_name": "push",
            "run_id": "7",
            "actor": "octocat",
            **self.claims,
        }
        made = jwt.encode(claims, self.key, "RS256", {"kid": KEY_ID})
        self.issued.append(made)
        return made

    def variables(self) -> Mapping[str, str]:
        """What GitHub puts into the environment of a job with `id-token: write`."""
        return {
            "ACTIONS_ID_TOKEN_REQUEST_URL": f"{self.url}/token?api-version=2.0",
            "ACTIONS_ID_TOKEN_REQUEST_TOKEN": self.request_token,
        }

    def answer(self, address: str, authorization: str | None) -> tuple[int, Any]:
        """Status and JSON body of a request."""
        parts = urlsplit(address)
        if parts.path == "/token":
            if authorization != f"Bearer {self.request_token}":
                return 401, {"message": "no"}
            return 200, {"value": self.token(parse_qs(parts.query)["audience"][0])}
        if parts.path == "/.well-known/openid-configuration":
            return 200, {"issuer": self.url, "jwks_uri": f"{self.url}/.well-known/jwks"}
        if parts.path == "/.well-known/jwks":
            public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self.key.public_key()))
            return 200, {"keys": [{**public, "kid": KEY_ID, "use": "sig", "alg": "RS256"}]}
        return 404, {"message": "nothing here"}


@contextmanager
def issuing() -> Iterator[Issuer]:
    """An issuer that answers until the block ends."""
    issuer = Issuer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = issuer.answer(self.path, self.headers.get("Authorization"))
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *details: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    issuer.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield issuer
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
