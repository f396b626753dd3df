"""The issuer's keys: what is asked, when, and what a caller gets while the issuer is down. Requests are counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from exporter.contract.errors import InvalidRequest, RateLimited, Unauthenticated
from service import issuer_keys
from service.issuer_keys import IssuerKeys
from service.oidc import OidcVerifier
from tests.oidc_issuer import AUDIENCE, Issuer, jwk, new_key, running_issuer

DISCOVERY, KEYS = "/.well-known/openid-configuration", "/keys"
SECOND = new_key()


class Watch:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    with running_issuer() as running:
        yield running


@pytest.fixture
def clock() -> Watch:
    return Watch()


@pytest.fixture
def verifier(issuer: Issuer, clock: Watch) -> OidcVerifier:
    return OidcVerifier(issuer.url, AUDIENCE, IssuerKeys(issuer.url, clock=clock), clock=clock)


def reason(verifier: OidcVerifier, token: str) -> str | None:
    """The refusal's reason code, None for a good token."""
    try:
        verifier.verify(token)
    except Unauthenticated as error:
        return str(error.details["reason"])
    return None


def test_oidc_keys_are_fetched_once(verifier: OidcVerifier, issuer: Issuer, clock: Watch) -> None:
    for _ in range(20):
        assert reason(verifier, issuer.token(clock.now)) is None
        clock.now += 60
    assert issuer.requests == [DISCOVERY, KEYS]


def test_oidc_nothing_is_fetched_for_a_token_that_is_not_our_issuers(verifier: OidcVerifier, issuer: Issuer) -> None:
    elsewhere = f"{issuer.url}/elsewhere"
    hostile = [
        "x.y.z",
        issuer.token(iss=elsewhere, header={"kid": "new"}),
        issuer.token(header={"alg": "none"}),
        issuer.token(header={"kid": None, "jku": elsewhere}),
        issuer.token(iss=elsewhere, header={"jku": elsewhere, "x5u": elsewhere, "jwk": jwk(SECOND, "k")}),
    ]
    assert [reason(verifier, token) for token in hostile] == ["malformed", "issuer", "alg", "unknown-key", "issuer"]
    assert issuer.requests == []


def test_oidc_addresses_in_a_token_are_not_followed(verifier: OidcVerifier, issuer: Issuer, clock: Watch) -> None:
    elsewhere = f"{issuer.url}/elsewhere"
    token = issuer.token(clock.now, key=SECOND, header={"jku": elsewhere, "x5u": elsewhere, "kid": elsewhere})
    assert reason(verifier, token) == "unknown-key"
    assert set(issuer.requests) == {DISCOVERY, KEYS}


def test_oidc_a_new_key_is_found_at_once(verifier: OidcVerifier, issuer: Issuer, clock: Watch) -> None:
    assert reason(verifier, issuer.token(clock.now)) is None
    issuer.keys.append(jwk(SECOND, "key-2"))
    assert reason(verifier, issuer.token(clock.now, key=SECOND, header={"kid": "key-2"})) is None
    assert issuer.requests == [DISCOVERY, KEYS, KEYS]


def test_oidc_an_unknown_key_is_asked_for_once(verifier: OidcVerifier, issuer: Issuer, clock: Watch) -> None:
    assert reason(verifier, issuer.token(clock.now)) is None
    for _ in range(20):
        assert reason(verifier, issuer.token(clock.now, header={"kid": "key-9"})) == "unknown-key"
    assert issuer.requests == [DISCOVERY, KEYS, KEYS]


def test_oidc_a_flood_of_unknown_keys_is_a_trickle_of_requests(
    verifier: OidcVerifier, issuer: Issuer, clock: Watch
) -> None:
    assert reason(verifier, issuer.token(clock.now)) is None
    for number in range(40):
        assert reason(verifier, issuer.token(clock.now, header={"kid": f"no-{number}"})) == "unknown-key"
        assert reason(verifier, issuer.token(clock.now)) is None
    assert issuer.requests.count(KEYS) == 1 + issuer_keys.REFETCHES
    clock.now += issuer_keys.REFETCH_SECONDS
    issuer.keys.append(jwk(SECOND, "key-2"))
    assert reason(verifier, issuer.token(clock.now, key=SECOND, header={"kid": "key-2"})) is None


def test_oidc_a_withdrawn_key_is_refused_after_an_hour(verifier: OidcVerifier, issuer: Issuer, clock: Watch) -> None:
    assert reason(verifier, issuer.token(clock.now)) is None
    issuer.keys[:] = [jwk(SECOND, "key-2")]
    clock.now += issuer_keys.FRESH_SECONDS - 1
    assert reason(verifier, issuer.token(clock.now)) is None
    clock.now += 2
    assert reason(verifier, issuer.token(clock.now)) == "unknown-key"


def test_oidc_known_keys_outlive_an_outage(verifier: OidcVerifier, issuer: Issuer, clock: Watch) -> None:
    assert reason(verifier, issuer.token(clock.now)) is None
    issuer.status = 500
    clock.now += issuer_keys.FRESH_SECONDS + 1
    for _ in range(10):
        assert reason(verifier, issuer.token(clock.now)) is None
    assert len(issuer.requests) == 3
    clock.now += issuer_keys.STALE_SECONDS
    with pytest.raises(RateLimited):
        verifier.verify(issuer.token(clock.now))


def test_oidc_an_outage_is_not_the_callers_fault(verifier: OidcVerifier, issuer: Issuer, clock: Watch) -> None:
    """Nobody can tell whether the key is good: 503 and Retry-After, not 401; and the issuer is not hammered."""
    issuer.status = 503
    for _ in range(10):
        with pytest.raises(RateLimited) as caught:
            verifier.verify(issuer.token(clock.now))
        assert caught.value.retryable
        assert caught.value.details["httpStatus"] == 503
    assert issuer.requests == [DISCOVERY]
    issuer.status = 200
    clock.now += issuer_keys.RETRY_SECONDS
    assert reason(verifier, issuer.token(clock.now)) is None


def test_oidc_an_unknown_key_in_an_outage_is_not_refused(verifier: OidcVerifier, issuer: Issuer, clock: Watch) -> None:
    assert reason(verifier, issuer.token(clock.now)) is None
    issuer.status = 500
    for _ in range(3):
        with pytest.raises(RateLimited):
            verifier.verify(issuer.token(clock.now, header={"kid": "key-2"}))
        assert reason(verifier, issuer.token(clock.now)) is None
    assert issuer.requests == [DISCOVERY, KEYS, KEYS]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("jwks_uri", "http://127.0.0.1:1/keys"),
        ("jwks_uri", "https://keys.evil.example/keys"),
        ("jwks_uri", "file:///etc/passwd"),
        ("jwks_uri", "http://[::1/keys"),
        ("jwks_uri", None),
        ("jwks_uri", ["/keys"]),
        ("issuer", "https://token.actions.githubusercontent.com"),
        ("issuer", None),
    ],
)
def test_oidc_discovery_stays_on_the_issuers_origin(
    verifier: OidcVerifier, issuer: Issuer, clock: Watch, field: str, value: object
) -> None:
    issuer.discovery[field] = value
    with pytest.raises(RateLimited):
        verifier.verify(issuer.token(clock.now))
    assert issuer.requests == [DISCOVERY]


@pytest.mark.parametrize("status", [301, 307, 404, 500])
def test_oidc_redirects_and_faults_are_not_keys(
    verifier: OidcVerifier, issuer: Issuer, clock: Watch, status: int
) -> None:
    issuer.status = status
    with pytest.raises(RateLimited):
        verifier.verify(issuer.token(clock.now))
    assert "/elsewhere" not in issuer.requests


@pytest.mark.parametrize(
    "body",
    [b"", b"not json", b"[]", b'{"keys": 1}', b'{"keys": []}', b'{"keys": [{"kty": "RSA"}]}', b"[" * 100_000,
     b'{"keys": [], "x": "' + b"A" * issuer_keys.MAX_DOCUMENT + b'"}'],
    ids=["empty", "text", "list", "no-list", "no-key", "no-usable-key", "deep", "huge"],
)  # fmt: skip
def test_oidc_a_broken_key_set_is_an_outage(
    verifier: OidcVerifier, issuer: Issuer, clock: Watch, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = issuer.answer
    monkeypatch.setattr(issuer, "answer", lambda path: (200, body) if path == KEYS else answer(path))
    with pytest.raises(RateLimited):
        verifier.verify(issuer.token(clock.now))


def test_oidc_sixteen_threads_fetch_once(verifier: OidcVerifier, issuer: Issuer, clock: Watch) -> None:
    token = issuer.token(clock.now)
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda _: reason(verifier, token), range(64))) == [None] * 64
    assert issuer.requests == [DISCOVERY, KEYS]


@pytest.mark.parametrize("url", ["http://issuer.example", "ftp://127.0.0.1", "issuer.example", ""])
def test_oidc_an_issuer_is_https(url: str) -> None:
    with pytest.raises(InvalidRequest):
        IssuerKeys(url)


def test_oidc_a_slow_issuer_does_not_hold_every_thread(
    verifier: OidcVerifier, issuer: Issuer, clock: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request asks, some wait, the others are sent away at once; known keys go on meanwhile."""
    assert reason(verifier, issuer.token(clock.now)) is None
    asked, go_on = threading.Event(), threading.Event()
    answer = issuer.answer

    def slow(path: str) -> tuple[int, object]:
        asked.set()
        assert go_on.wait(30)
        return answer(path)

    monkeypatch.setattr(issuer, "answer", slow)
    tokens = [issuer.token(clock.now, header={"kid": f"k-{number}"}) for number in range(30)]

    def outcome(token: str) -> str | None:
        try:
            return reason(verifier, token)
        except RateLimited:
            return "later"

    with ThreadPoolExecutor(30) as pool:
        found = [pool.submit(outcome, token) for token in tokens]
        assert asked.wait(30)
        while sum(future.done() for future in found) < len(tokens) - issuer_keys.MAX_WAITING:
            time.sleep(0.01)
        assert reason(verifier, issuer.token(clock.now)) is None
        go_on.set()
        results = [future.result() for future in found]
    assert results.count("later") == 30 - issuer_keys.MAX_WAITING
    assert results.count("unknown-key") == issuer_keys.MAX_WAITING
