"""The table of tokens: each with its exact decision and reason code, against a real issuer on loopback."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from exporter.contract.errors import Unauthenticated
from service.issuer_keys import IssuerKeys
from service.oidc import OidcVerifier
from tests.oidc_issuer import AUDIENCE, Issuer, b64, jwk, new_key, running_issuer, sign

NOW = 1_800_000_000.25
OTHER = new_key()
WEAK = new_key(1024)
Make = Callable[[Issuer], str]


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    with running_issuer() as running:
        running.keys += [
            jwk(WEAK, "weak"),
            jwk(OTHER, "for-encryption", use="enc"),
            jwk(OTHER, "for-rs512", alg="RS512"),
            {"kty": "oct", "kid": "symmetric", "k": b64(b"secret")},
            {"kty": "RSA", "kid": "broken", "n": "!", "e": "AQAB"},
            "not a key",  # type: ignore[list-item]
        ]
        yield running


def verifier(issuer: Issuer) -> OidcVerifier:
    return OidcVerifier(issuer.url, AUDIENCE, IssuerKeys(issuer.url, clock=lambda: NOW), clock=lambda: NOW)


def token(header: dict[str, Any] | None = None, key: rsa.RSAPrivateKey | None = None, **changes: Any) -> Make:
    return lambda issuer: issuer.token(NOW, header=header, key=key, **changes)


def raw(header: bytes | dict[str, Any], claims: bytes | dict[str, Any] | None = None) -> Make:
    return lambda issuer: sign(issuer.key, header, issuer.claims(NOW) if claims is None else claims)


def edited(edit: Callable[[list[str]], list[str]]) -> Make:
    return lambda issuer: ".".join(edit(issuer.token(NOW).split(".")))


def hs256(issuer: Issuer) -> str:
    """The classic confusion: the public key used as an HMAC secret."""
    secret = json.dumps(issuer.keys[0]).encode()
    text = (
        f"{b64(json.dumps({'alg': 'HS256', 'kid': 'key-1'}).encode())}.{b64(json.dumps(issuer.claims(NOW)).encode())}"
    )
    return f"{text}.{b64(hmac.new(secret, text.encode(), hashlib.sha256).digest())}"


def claims_json(issuer: Issuer, old: str, new: str) -> bytes:
    text = json.dumps(issuer.claims(NOW))
    assert old in text
    return text.replace(old, new, 1).encode()


def substituted(old: str, new: str) -> Make:
    header = {"alg": "RS256", "kid": "key-1"}
    return lambda issuer: sign(issuer.key, header, claims_json(issuer, old, new))


def last_bits_changed(parts: list[str]) -> list[str]:
    """Another text for the same signature bytes: the last character's unused bits are set."""
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    last = alphabet[alphabet.index(parts[2][-1]) + 1]
    changed = parts[2][:-1] + last
    assert base64.urlsafe_b64decode(changed + "==") == base64.urlsafe_b64decode(parts[2] + "==")
    return [parts[0], parts[1], changed]


GOOD: dict[str, Make] = {
    "as-github-sends-it": token(),
    "audience-list": token(aud=["https://other.example", AUDIENCE]),
    "ids-as-numbers": token(repository_id=123456, repository_owner_id=777),
    "sub-of-an-environment": token(sub="repo:octo-org/models:environment:production"),
    "sub-customised": token(sub="repository_owner_id:777:job_workflow_ref:x"),
    "sub-absent": token(sub=None),
    "sub-no-text": token(sub=["a", "b"]),
    "five-seconds-ahead": token(iat=NOW + 5, nbf=NOW + 5),
    "iat-at-the-leeway": token(iat=NOW + 60),
    "nbf-at-the-leeway": token(nbf=NOW + 60),
    "expired-within-the-leeway": token(exp=NOW - 59),
    "fractional-seconds": token(exp=NOW + 0.5),
    "jku-is-ignored": token({"jku": "http://127.0.0.1:9/keys"}),
    "jwk-is-ignored": token({"jwk": jwk(OTHER, "key-1")}),
    "ref-protected-as-boolean": token(ref_protected=True),
    "claims-of-the-future": token(something_new={"a": [1, 2, 3]}),
    "no-typ": token({"typ": None}),
    "no-event": token(event_name=None),
}

BAD: dict[str, tuple[Make, str]] = {
    # shapes
    "empty": (lambda _: "", "malformed"),
    "one-part": (lambda _: "abc", "malformed"),
    "two-parts": (edited(lambda p: p[:2]), "malformed"),
    "four-parts": (edited(lambda p: [*p, "x"]), "malformed"),
    "encrypted": (edited(lambda p: [*p, "x", "y"]), "malformed"),
    "padded": (edited(lambda p: [p[0], p[1] + "=", p[2]]), "malformed"),
    "space-inside": (edited(lambda p: [p[0], " " + p[1], p[2]]), "malformed"),
    "newline-at-the-end": (edited(lambda p: [p[0], p[1], p[2] + "\n"]), "malformed"),
    "not-base64url": (edited(lambda p: [p[0], p[1] + "+/", p[2]]), "malformed"),
    "header-impossible-length": (edited(lambda p: ["A", p[1], p[2]]), "malformed"),
    "header-not-json": (raw(b"hello"), "malformed"),
    "header-a-list": (raw(b'["RS256"]'), "malformed"),
    "header-not-utf8": (raw(b'{"alg":"RS256","kid":"\xff"}'), "malformed"),
    "header-repeats-alg": (raw(b'{"alg":"none","alg":"RS256","kid":"key-1"}'), "malformed"),
    "header-huge": (token({"x5c": "A" * 4000}), "malformed"),
    "header-crit": (token({"crit": ["exp"]}), "malformed"),
    "header-b64-false": (token({"b64": False}), "malformed"),
    "kid-a-number": (token({"kid": 1}), "malformed"),
    "kid-a-list": (token({"kid": ["key-1"]}), "malformed"),
    "kid-huge": (token({"kid": "k" * 257}), "malformed"),
    "claims-not-json": (raw({"alg": "RS256", "kid": "key-1"}, b"{"), "malformed"),
    "claims-a-text": (raw({"alg": "RS256", "kid": "key-1"}, b'"x"'), "malformed"),
    "claims-nested-deeply": (raw({"alg": "RS256", "kid": "key-1"}, b'{"a":' * 1500 + b"1" + b"}" * 1500), "malformed"),
    "claims-repeat-a-name": (substituted('"ref":', '"repository_id": "1", "ref":'), "malformed"),
    "claims-nan": (substituted("1800000300", "NaN"), "malformed"),
    "claims-infinite": (substituted("1800000300", "1e999"), "malformed"),
    "too-long": (token(padding="x" * 20_000), "malformed"),
    # algorithms
    "alg-none": (lambda i: sign(i.key, {"alg": "none"}, i.claims(NOW)).rpartition(".")[0] + ".", "alg"),
    "alg-none-with-signature": (token({"alg": "none"}), "alg"),
    "alg-absent": (token({"alg": None}), "alg"),
    "alg-lower-case": (token({"alg": "rs256"}), "alg"),
    "alg-hs256-with-public-key": (hs256, "alg"),
    "alg-rs384": (token({"alg": "RS384"}), "alg"),
    "alg-ps256": (token({"alg": "PS256"}), "alg"),
    "alg-es256": (token({"alg": "ES256"}), "alg"),
    "alg-a-list": (token({"alg": ["RS256"]}), "alg"),
    # keys and signatures
    "kid-absent": (token({"kid": None}), "unknown-key"),
    "kid-unknown": (token({"kid": "key-2"}), "unknown-key"),
    "kid-a-path": (token({"kid": "../../etc/passwd"}), "unknown-key"),
    "kid-of-a-weak-key": (token({"kid": "weak"}, key=WEAK), "unknown-key"),
    "kid-of-an-encryption-key": (token({"kid": "for-encryption"}, key=OTHER), "unknown-key"),
    "kid-of-another-algorithm": (token({"kid": "for-rs512"}, key=OTHER), "unknown-key"),
    "kid-of-a-symmetric-key": (token({"kid": "symmetric"}), "unknown-key"),
    "kid-of-a-broken-key": (token({"kid": "broken"}), "unknown-key"),
    "other-key": (token(key=OTHER), "signature"),
    "other-key-in-jwk": (token({"jwk": jwk(OTHER, "key-1")}, key=OTHER), "signature"),
    "no-signature": (edited(lambda p: [p[0], p[1], ""]), "signature"),
    "signature-cut": (edited(lambda p: [p[0], p[1], p[2][:-4]]), "signature"),
    "signature-bit-flipped": (edited(lambda p: [p[0], p[1], ("B" if p[2][0] == "A" else "A") + p[2][1:]]), "signature"),
    "signature-spelled-otherwise": (edited(last_bits_changed), "signature"),
    "claims-of-another-token": (
        lambda i: ".".join(
            [
                i.token(NOW).split(".")[0],
                i.token(NOW, repository_id="1").split(".")[1],
                i.token(NOW).split(".")[2],
            ]
        ),
        "signature",
    ),
    "bad-signature-and-expired": (token(key=OTHER, exp=NOW - 3600), "signature"),
    # issuer and audience
    "issuer-other": (token(iss="https://token.actions.githubusercontent.com"), "issuer"),
    "issuer-with-slash": (lambda i: i.token(NOW, iss=i.url + "/"), "issuer"),
    "issuer-longer": (lambda i: i.token(NOW, iss=i.url + ".evil.example"), "issuer"),
    "issuer-a-list": (lambda i: i.token(NOW, iss=[i.url]), "issuer"),
    "issuer-absent": (token(iss=None), "claim-missing"),
    "audience-other": (token(aud="https://github.com/octo-org"), "audience"),
    "audience-longer": (token(aud=AUDIENCE + "/x"), "audience"),
    "audience-in-capitals": (token(aud=AUDIENCE.upper()), "audience"),
    "audience-empty-list": (token(aud=[]), "audience"),
    "audience-absent": (token(aud=None), "claim-missing"),
    "audience-an-object": (token(aud={AUDIENCE: 1}), "malformed"),
    "audience-mixed-list": (token(aud=[AUDIENCE, 1]), "malformed"),
    # times
    "expired": (token(exp=NOW - 61), "expired"),
    "expired-at-the-leeway": (token(exp=NOW - 60), "expired"),
    "exp-zero": (token(exp=0), "expired"),
    "exp-negative": (token(exp=-1), "expired"),
    "exp-absent": (token(exp=None), "claim-missing"),
    "exp-a-text": (token(exp="1900000000"), "malformed"),
    "exp-a-boolean": (token(exp=True), "malformed"),
    "not-yet-valid": (token(nbf=NOW + 61), "not-yet-valid"),
    "nbf-absent": (token(nbf=None), "claim-missing"),
    "nbf-a-list": (token(nbf=[1]), "malformed"),
    "issued-in-the-future": (token(iat=NOW + 61), "issued-in-future"),
    "iat-absent": (token(iat=None), "claim-missing"),
    "iat-an-object": (token(iat={}), "malformed"),
    # identity
    "repository-id-absent": (token(repository_id=None), "claim-missing"),
    "owner-id-absent": (token(repository_owner_id=None), "claim-missing"),
    "repository-id-a-name": (token(repository_id="octo-org/models"), "malformed"),
    "repository-id-with-zero": (token(repository_id="0123456"), "malformed"),
    "repository-id-with-space": (token(repository_id="123456 "), "malformed"),
    "repository-id-other-digits": (token(repository_id="١٢٣"), "malformed"),
    "repository-id-a-boolean": (token(repository_id=True), "malformed"),
    "repository-id-a-fraction": (token(repository_id=123456.0), "malformed"),
    "repository-id-a-list": (token(repository_id=["123456"]), "malformed"),
    "repository-id-negative": (token(repository_id=-5), "malformed"),
    "owner-id-an-object": (token(repository_owner_id={"id": 777}), "malformed"),
    "ref-a-list": (token(ref=["refs/heads/main"]), "malformed"),
    "event-a-list": (token(event_name=["push"]), "malformed"),
    "environment-an-object": (token(environment={"name": "production"}), "malformed"),
    "workflow-a-number": (token(job_workflow_ref=5), "malformed"),
    "ref-protected-a-number": (token(ref_protected=1.5), "malformed"),
}


@pytest.mark.parametrize("make", GOOD.values(), ids=[f"oidc-good-{name}" for name in GOOD])
def test_good_token(issuer: Issuer, make: Make) -> None:
    text = make(issuer)
    claims = verifier(issuer).verify(text)
    assert str(claims["repository_id"]) == "123456"
    assert claims["iss"] == issuer.url


@pytest.mark.parametrize(("make", "reason"), BAD.values(), ids=[f"oidc-{name}" for name in BAD])
def test_bad_token(issuer: Issuer, make: Make, reason: str) -> None:
    text = make(issuer)
    with pytest.raises(Unauthenticated) as caught:
        verifier(issuer).verify(text)
    assert caught.value.details == {"reason": reason}
    told = json.dumps(caught.value.as_dict())
    for part in text.split("."):
        assert len(part) < 8 or part not in told
    assert "octo" not in told
    assert caught.value.__cause__ is None


def test_the_table_is_long_enough() -> None:
    assert len(GOOD) + len(BAD) >= 40
    reasons = {reason for _, reason in BAD.values()}
    assert reasons == {
        "malformed", "alg", "signature", "unknown-key", "issuer", "audience", "expired", "not-yet-valid",
        "issued-in-future", "claim-missing",
    }  # fmt: skip
