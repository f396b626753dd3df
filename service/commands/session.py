"""How a command reaches the service and the store: URL, a token for each call, store settings from the environment."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Annotated
from urllib.parse import urlsplit, urlunsplit

import httpx2
import typer

from exporter.contract.errors import InternalError, Unauthenticated
from service.client import Client, ServiceUnreachable, TokenSource

DEFAULT_URL = "http://127.0.0.1:8080"

Url = Annotated[
    str,
    typer.Option(
        "--url", envvar="WEIGHTLESS_URL", metavar="URL", help="The service. The login is in WEIGHTLESS_TOKEN.",
        show_envvar=True,
    ),
]  # fmt: skip


def open_client(url: str, environment: Mapping[str, str] | None = None) -> Client:
    """A client of the service at `url`, with the login that the environment has."""
    return Client(url, token_source(url, os.environ if environment is None else environment))


def same_origin(one: str, other: str) -> bool:
    """Whether two URLs lead to the same scheme, host and port."""
    first, second = urlsplit(one), urlsplit(other)
    defaults = {"http": 80, "https": 443}
    return (first.scheme, first.hostname, first.port or defaults.get(first.scheme)) == (
        second.scheme,
        second.hostname,
        second.port or defaults.get(second.scheme),
    )


def token_source(url: str, environment: Mapping[str, str]) -> TokenSource:
    """Where tokens come from: `WEIGHTLESS_TOKEN`, else the OIDC endpoint of a GitHub Actions job, else nowhere."""
    fixed = environment.get("WEIGHTLESS_TOKEN")
    if fixed:
        return lambda: fixed
    endpoint = environment.get("ACTIONS_ID_TOKEN_REQUEST_URL")
    secret = environment.get("ACTIONS_ID_TOKEN_REQUEST_TOKEN")
    if endpoint and secret:
        audience = environment.get("WEIGHTLESS_OIDC_AUDIENCE") or url
        return lambda: github_token(endpoint, secret, audience)
    return lambda: None


def github_token(endpoint: str, secret: str, audience: str) -> str:
    """A fresh OIDC token of this GitHub Actions job; it lives for about five minutes."""
    parts = urlsplit(endpoint)
    query = httpx2.QueryParams(parts.query).set("audience", audience)
    url = urlunsplit(parts._replace(query=str(query)))
    answer = _asked(url, secret)
    try:
        value = answer.json().get("value") if answer.is_success else None
    except (ValueError, AttributeError):
        value = None
    if not isinstance(value, str) or not value:
        raise Unauthenticated(
            f"GitHub gave no OIDC token (status {answer.status_code})",
            hint="Give the job `permissions: id-token: write`; pull requests from forks never get one.",
            reason="missing",
        )
    return value


def _asked(url: str, secret: str) -> httpx2.Response:
    """GitHub's answer; a fault that passes is asked about again, twice."""
    for wait in (0.5, 2.0, None):
        try:
            answer = httpx2.get(url, headers={"Authorization": f"Bearer {secret}"}, timeout=30.0)
        except httpx2.TransportError as error:
            if wait is None:
                reason = type(error).__name__
                raise ServiceUnreachable(
                    f"GitHub's token endpoint cannot be reached: {reason}", hint="Run the job again."
                ) from error
        else:
            if wait is None or answer.status_code not in (429, 500, 502, 503, 504):
                return answer
        time.sleep(wait)
    raise InternalError("a retry loop ended without an answer")
