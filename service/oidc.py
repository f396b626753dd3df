"""GitHub's OIDC tokens: a token is good if our issuer signed it for us and it is in force now.

Issuer and keys come from the settings alone: a token's `jku`, `x5u`, `jwk` or other issuer is never followed. A token
is judged from cheap to dear, so that only one that claims to be our issuer's can cause a request for keys, and no part
of it is repeated in an error.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import time
from collections.abc import Mapping
from typing import Any, NoReturn, Protocol

import jwt
import structlog
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from exporter.contract.errors import Unauthenticated
from exporter.contract.events import clean_text
from service.database import Clock

log = structlog.get_logger(__name__)

LEEWAY = 60
"""Seconds that the issuer's clock and ours may differ."""
MAX_TOKEN = 16 * 1024
MAX_HEADER = 4 * 1024
"""Characters of the encoded header; GitHub's has about 150."""
MAX_KID = 256
NUMERIC = re.compile(r"[1-9][0-9]{0,18}", re.ASCII)
"""A GitHub id as text: one spelling for each number."""
_SEGMENT = re.compile(r"[A-Za-z0-9_-]*", re.ASCII)
_NEEDED = ("iss", "aud", "exp", "nbf", "iat", "repository_id", "repository_owner_id")
_IDS = ("repository_id", "repository_owner_id")
_TEXTS = (
    "repository",
    "repository_owner",
    "ref",
    "environment",
    "job_workflow_ref",
    "workflow_ref",
    "event_name",
    "actor",
)
"""Claims that a rule or a page may use; where they are present they are text."""


class KeySource(Protocol):
    """Where the issuer's keys come from."""

    def find(self, kid: str) -> RSAPublicKey | None:
        """The key, None where the issuer has no such key; an error that a retry can help where nobody can tell."""


class OidcVerifier:
    """Judges tokens of one issuer for one audience. Satisfies `service.auth.TokenVerifier`."""

    def __init__(self, issuer: str, audience: str, keys: KeySource, *, clock: Clock = time.time) -> None:
        self._issuer = issuer
        self._audience = audience
        self._keys = keys
        self._clock = clock

    def verify(self, token: str) -> Mapping[str, Any]:
        """The claims of a good token; `Unauthenticated` with a reason code for any other."""
        header, claims, signature = _read(token)
        self._check_issuer(claims)
        kid = header.get("kid")
        if kid is None:
            _refuse("unknown-key", "the token names no key")
        if not isinstance(kid, str) or len(kid) > MAX_KID:
            _refuse("malformed", "the token's key id is not a short text")
        key = self._keys.find(kid)
        if key is None:
            _refuse("unknown-key", "the issuer has no such key")
        _check_signature(token, signature, key)
        self._check_claims(claims)
        log.info("oidc token accepted", repositoryId=claims["repository_id"], sub=_shown(claims.get("sub")))
        return claims

    def _check_issuer(self, claims: Mapping[str, Any]) -> None:
        if "iss" not in claims:
            _refuse("claim-missing", "the token has no iss claim")
        if claims["iss"] != self._issuer:
            _refuse("issuer", "the token is of another issuer")

    def _check_claims(self, claims: Mapping[str, Any]) -> None:
        for name in _NEEDED:
            if claims.get(name) is None:
                _refuse("claim-missing", f"the token has no {name} claim")
        self._check_audience(claims["aud"])
        self._check_times(claims)
        check_identity(claims)

    def _check_audience(self, given: Any) -> None:
        names = [given] if isinstance(given, str) else given
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            _refuse("malformed", "the token's aud claim is not text")
        if self._audience not in names:
            _refuse("audience", "the token is for another audience")

    def _check_times(self, claims: Mapping[str, Any]) -> None:
        now = self._clock()
        moments = {name: claims[name] for name in ("exp", "nbf", "iat")}
        for name, value in moments.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                _refuse("malformed", f"the token's {name} claim is not a number of seconds")
        if moments["exp"] <= now - LEEWAY:
            _refuse("expired", "the token has expired")
        if moments["nbf"] > now + LEEWAY:
            _refuse("not-yet-valid", "the token is not in force yet")
        if moments["iat"] > now + LEEWAY:
            _refuse("issued-in-future", "the token was issued in the future")


def check_identity(claims: Mapping[str, Any]) -> None:
    """`Unauthenticated` unless the ids are numbers and each claim that a rule may use has its type."""
    for name in _IDS:
        value = claims.get(name)
        if value is None:
            _refuse("claim-missing", f"the token has no {name} claim")
        if isinstance(value, bool) or not isinstance(value, (str, int)) or not NUMERIC.fullmatch(str(value)):
            _refuse("malformed", f"the token's {name} claim is not a number")
    for name in _TEXTS:
        if not isinstance(claims.get(name, ""), (str, type(None))):
            _refuse("malformed", f"the token's {name} claim is not text")
    if claims.get("ref_protected") not in (None, True, False, "true", "false"):
        _refuse("malformed", "the token's ref_protected claim is neither true nor false")


def _read(token: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Header, claims and encoded signature, nothing of it trusted yet."""
    if len(token) > MAX_TOKEN:
        _refuse("malformed", "the token is too long")
    parts = token.split(".")
    if len(parts) != 3 or not all(_SEGMENT.fullmatch(part) for part in parts):
        _refuse("malformed", "the token is not three base64url parts")
    if len(parts[0]) > MAX_HEADER:
        _refuse("malformed", "the token's header is too long")
    header = _object(parts[0], "header")
    if header.get("alg") != "RS256":
        _refuse("alg", "the token is not signed with RS256")
    if "crit" in header or header.get("b64", True) is not True:
        _refuse("malformed", "the token's header has an extension that is not understood")
    return header, _object(parts[1], "claims"), parts[2]


def _object(segment: str, name: str) -> dict[str, Any]:
    """The JSON object in a part: no repeated names, no NaN or infinity."""
    try:
        found = json.loads(
            _decoded(segment).decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        _refuse("malformed", f"the token's {name} is not a JSON object")
    return found


def _decoded(segment: str) -> bytes:
    """The bytes of a part; `ValueError` unless it is their one encoding."""
    try:
        data = base64.urlsafe_b64decode(segment + "=" * (-len(segment) % 4))
    except binascii.Error as error:
        raise ValueError("not base64url") from error
    if base64.urlsafe_b64encode(data).rstrip(b"=") != segment.encode():
        raise ValueError("not the canonical base64url")
    return data


def _check_signature(token: str, signature: str, key: RSAPublicKey) -> None:
    try:
        _decoded(signature)
        jwt.PyJWS().decode(token, key=key, algorithms=["RS256"])
    except (jwt.PyJWTError, ValueError):
        good = False
    else:
        good = True
    if not good:
        _refuse("signature", "the token's signature is not the issuer's")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is repeated")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError("not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is out of range")
    return value


def _shown(value: Any) -> str | None:
    return clean_text(value)[:256] if isinstance(value, str) else None


def _refuse(reason: str, message: str) -> NoReturn:
    raise Unauthenticated(message, reason=reason)
