"""Who is calling: anybody on loopback, a bearer token, or a workflow's OIDC token. Tokens are never echoed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from exporter.contract.errors import Unauthenticated
from service.database import Clock
from service.oidc import NUMERIC
from service.policy import Caller
from service.tokens import TokenTable

LOCAL = Caller(kind="local", owner="local", view={"kind": "local"})
MAX_TOKEN = 16 * 1024


class TokenVerifier(Protocol):
    """Turns an OIDC token into its claims; `Unauthenticated` with a reason where it is not good."""

    def verify(self, token: str) -> Mapping[str, Any]:
        """The claims of a token that is ours, fresh and signed by the issuer."""


class Authenticator:
    """Reads the Authorization header by the modes that are switched on."""

    def __init__(
        self,
        *,
        anonymous: bool = False,
        tokens: TokenTable | None = None,
        oidc: TokenVerifier | None = None,
        clock: Clock = time.time,
    ) -> None:
        self._anonymous = anonymous
        self._tokens = tokens
        self._oidc = oidc
        self._clock = clock

    @property
    def anonymous(self) -> bool:
        """Whether everybody is let in without a token."""
        return self._anonymous

    def caller(self, authorization: str | None) -> Caller:
        """The caller; `Unauthenticated` with a reason code."""
        if self._anonymous:
            return LOCAL
        if authorization is None or not authorization.strip():
            raise refused("missing", "there is no bearer token")
        scheme, _, token = authorization.strip().partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token or len(token) > MAX_TOKEN or not token.isascii():
            raise refused("malformed", "the Authorization header is not Bearer and a token")
        if token.startswith("wl_") and self._tokens is not None:
            return self._by_token(self._tokens, token)
        if self._oidc is not None:
            return github_caller(self._oidc.verify(token))
        raise refused("malformed", "the token has a form that is not accepted here")

    def _by_token(self, table: TokenTable, token: str) -> Caller:
        row = table.find(token)
        if row is None:
            raise refused("unknown-key", "the token is not known")
        if row.revoked_at is not None:
            raise refused("revoked", "the token was revoked")
        if row.expires_at is not None and row.expires_at <= self._clock():
            raise refused("expired", "the token has expired")
        return Caller(
            kind="token",
            owner=f"token:{row.id}",
            view={"kind": "token", "actor": row.name},
            token_id=row.id,
            scopes=frozenset(row.scopes),  # type: ignore[arg-type]
        )


def github_caller(claims: Mapping[str, Any]) -> Caller:
    """The caller that an OIDC token's claims name; the numeric repository id owns its exports."""
    if claims.get("repository_id") is None:
        raise refused("claim-missing", "the token has no repository_id claim")
    repository_id = str(claims["repository_id"])
    if not NUMERIC.fullmatch(repository_id):
        raise refused("malformed", "the token's repository_id claim is not a number")
    repository = _text(claims.get("repository"))
    run_id = str(claims.get("run_id", ""))
    server = str(claims.get("iss", ""))
    view: dict[str, Any] = {"kind": "github", "repository": repository, "ref": _text(claims.get("ref"))}
    if repository and run_id.isdigit():
        host = "https://github.com" if server.endswith("githubusercontent.com") else None
        view["runUrl"] = f"{host}/{repository}/actions/runs/{run_id}" if host else None
    view["actor"] = _text(claims.get("actor"))
    return Caller(
        kind="github",
        owner=f"repository:{int(repository_id)}",
        view={name: value for name, value in view.items() if value},
        claims=claims,
    )


def refused(reason: str, message: str) -> Unauthenticated:
    """The error for a token that is no good, with its reason code."""
    return Unauthenticated(message, reason=reason)


def _text(value: Any) -> str | None:
    return value[:256] if isinstance(value, str) and value.isprintable() else None
