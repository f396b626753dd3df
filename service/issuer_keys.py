"""The public keys of one OIDC issuer: found from its own address, cached, and asked for again under a limit.

Requests go to the issuer's origin alone: nothing in a token chooses an address. Bounds: a document is at most 256 KiB,
a set at most 100 keys, and 1,024 unknown key ids are remembered.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx2
import jwt
import structlog
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from exporter.contract.errors import InvalidRequest, RateLimited
from service.database import Clock

log = structlog.get_logger(__name__)

FRESH_SECONDS = 3600.0
"""Age at which a key set is fetched again, by one request; others go on with what is known."""
STALE_SECONDS = 24 * 3600.0
"""Age up to which known keys are trusted while the issuer does not answer."""
RETRY_SECONDS = 10.0
"""Wait after a fetch that failed."""
UNKNOWN_SECONDS = 300.0
"""How long a key id that a fresh set did not have stays unknown."""
REFETCHES = 5
"""Fetches for unknown key ids that may follow one another at once; one more each `REFETCH_SECONDS`."""
REFETCH_SECONDS = 30.0
TIMEOUT = 5.0
"""Seconds without an answer from the issuer; a whole document may take three times as long."""
MAX_DOCUMENT = 256 * 1024
MAX_KEYS = 100
MAX_UNKNOWN = 1024
MAX_WAITING = 16
"""Requests that may wait for the issuer at once; the server has 40 threads."""
MIN_KEY_BITS = 2048
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Unreadable(Exception):
    """The issuer did not give its keys. Stays in this module."""


class IssuerKeys:
    """The issuer's keys by key id. Safe to call from several threads; one of them at a time asks the issuer."""

    def __init__(self, issuer: str, *, clock: Clock = time.time) -> None:
        parts = urlsplit(issuer)
        # A proxy of the environment is for the world, not for an issuer on this machine.
        self._local = parts.hostname in _LOOPBACK
        if parts.scheme != "https" and not (parts.scheme == "http" and self._local):
            raise InvalidRequest("WEIGHTLESS_OIDC_ISSUER is an https:// URL", hint="Keys read over http can be forged.")
        self._issuer = issuer
        self._clock = clock
        self._keys: Mapping[str, RSAPublicKey] = {}
        self._fetched: float | None = None
        self._failed: float | None = None
        self._address: str | None = None
        self._unknown: OrderedDict[str, float] = OrderedDict()
        self._allowance = float(REFETCHES)
        self._counted = clock()
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(MAX_WAITING)

    def find(self, kid: str) -> RSAPublicKey | None:
        """The key, None where the issuer has no such key. `RateLimited` (503) where nobody can tell."""
        age = self._age()
        if FRESH_SECONDS <= age < STALE_SECONDS and kid in self._keys and self._lock.acquire(blocking=False):
            try:
                self._refresh()
            finally:
                self._lock.release()
        if self._age() < STALE_SECONDS and (key := self._keys.get(kid)) is not None:
            return key
        # Requests that wait for a slow issuer must not use up the server's threads.
        if not self._places.acquire(blocking=False):
            raise _undecided()
        try:
            with self._lock:
                return self._find_anew(kid)
        finally:
            self._places.release()

    def _find_anew(self, kid: str) -> RSAPublicKey | None:
        age, now = self._age(), self._clock()
        if age < STALE_SECONDS:
            if (key := self._keys.get(kid)) is not None:
                return key
            if now < self._unknown.get(kid, 0.0):
                return None
            if not self._waiting(now) and not self._take_allowance(now):
                return None
        if not self._refresh():
            raise _undecided()
        key = self._keys.get(kid)
        if key is None:
            self._unknown[kid] = now + UNKNOWN_SECONDS
            while len(self._unknown) > MAX_UNKNOWN:
                self._unknown.popitem(last=False)
        return key

    def _age(self) -> float:
        return float("inf") if self._fetched is None else self._clock() - self._fetched

    def _waiting(self, now: float) -> bool:
        return self._failed is not None and now - self._failed < RETRY_SECONDS

    def _take_allowance(self, now: float) -> bool:
        """A token bucket: a flood of invented key ids becomes a trickle of requests."""
        self._allowance = min(REFETCHES, self._allowance + (now - self._counted) / REFETCH_SECONDS)
        self._counted = now
        if self._allowance < 1:
            return False
        self._allowance -= 1
        return True

    def _refresh(self) -> bool:
        """Fetch the set; what was known stays where that fails."""
        if self._waiting(self._clock()):
            return False
        try:
            self._keys = self._fetch()
        except Unreadable as error:
            self._failed, self._address = self._clock(), None
            log.error("the issuer's keys cannot be fetched", issuer=self._issuer, error=str(error))
            return False
        self._fetched, self._failed = self._clock(), None
        self._unknown.clear()
        return True

    def _fetch(self) -> Mapping[str, RSAPublicKey]:
        with httpx2.Client(timeout=TIMEOUT, follow_redirects=False, trust_env=not self._local) as client:
            if self._address is None:
                self._address = self._discover(client)
            return _rsa_keys(_document(client, self._address))

    def _discover(self, client: httpx2.Client) -> str:
        found = _document(client, f"{self._issuer}/.well-known/openid-configuration")
        if found.get("issuer") != self._issuer:
            raise Unreadable("its discovery document is another issuer's")
        address = found.get("jwks_uri")
        if not isinstance(address, str) or _origin(address) != _origin(self._issuer):
            raise Unreadable("its discovery document names keys at another origin")
        return address


def _undecided() -> RateLimited:
    return RateLimited(
        "the keys of the OIDC issuer cannot be fetched now, so the token cannot be judged",
        hint="Try again in some seconds. The operator finds the reason in the service's log.",
        retryAfter=int(RETRY_SECONDS),
        httpStatus=503,
    )


def _document(client: httpx2.Client, url: str) -> dict[str, Any]:
    """A JSON object; whatever goes wrong is `Unreadable`."""
    body = bytearray()
    ends = time.monotonic() + 3 * TIMEOUT
    try:
        with client.stream("GET", url, headers={"Accept": "application/json"}) as answer:
            if answer.status_code != 200:
                raise Unreadable(f"{url} answered {answer.status_code}")
            for chunk in answer.iter_bytes():
                body += chunk
                if len(body) > MAX_DOCUMENT or time.monotonic() > ends:
                    raise Unreadable(f"{url} is too large or too slow")
        found = json.loads(body)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise Unreadable(f"{url}: {type(error).__name__}") from error
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{url} is not JSON") from error
    if not isinstance(found, dict):
        raise Unreadable(f"{url} is not a JSON object")
    return found


def _rsa_keys(document: Mapping[str, Any]) -> Mapping[str, RSAPublicKey]:
    """The keys for RS256 signatures by key id; entries for anything else are skipped, none at all is a fault."""
    entries = document.get("keys")
    if not isinstance(entries, list):
        raise Unreadable("its key set has no keys")
    found: dict[str, RSAPublicKey] = {}
    for entry in entries[:MAX_KEYS]:
        if not isinstance(entry, dict) or entry.get("kty") != "RSA" or "d" in entry:
            continue
        kid = entry.get("kid")
        if entry.get("use", "sig") != "sig" or entry.get("alg", "RS256") != "RS256" or not isinstance(kid, str):
            continue
        try:
            key = jwt.algorithms.RSAAlgorithm.from_jwk(entry)
        except (jwt.PyJWTError, ValueError, TypeError, KeyError):
            continue
        if isinstance(key, RSAPublicKey) and key.key_size >= MIN_KEY_BITS:
            found.setdefault(kid, key)
    if not found:
        raise Unreadable("its key set has no RSA key for signatures")
    return found


def _origin(url: str) -> tuple[str, str | None, int | None]:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise Unreadable("its discovery document names no address") from error
    return parts.scheme, parts.hostname, port or {"http": 80, "https": 443}.get(parts.scheme)
