"""`S3Client`: boto3 with our settings, and one way to call it: retries counted, errors ours, no secret in any text."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import boto3
import botocore
import botocore.exceptions as bc
from botocore.config import Config

from exporter.contract.errors import InvalidRequest, WeightlessError
from exporter.contract.spec import StoreSpec
from exporter.store.s3_errors import is_expired, is_passing, is_unexplained, retry_after, translate

R = TypeVar("R")
CONNECT_TIMEOUT = 10
"""Seconds for a connection."""
READ_TIMEOUT = 60
"""Seconds without a byte from the store."""
POOL = 64
"""Connections kept; more threads than this wait for one another."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential waits with full jitter: before retry n, up to min(cap, base * 2**n) seconds.

    `attempts` counts the first try. The worst case waits about a minute in all.
    """

    attempts: int = 8
    base: float = 0.25
    cap: float = 10.0

    def wait(self, retry: int) -> float:
        """Seconds before the `retry`-th retry, from 1."""
        # Jitter, not security.
        return random.uniform(0, min(self.cap, self.base * 2**retry))  # noqa: S311


class S3Client:
    """Calls of one endpoint. Safe from several threads. Credentials come from boto3's chain, and are refreshed by it.

    `retries` counts what was sent again.
    """

    def __init__(
        self,
        spec: StoreSpec,
        *,
        retry: RetryPolicy | None = None,
        sleep: Callable[[float], None] = time.sleep,
        read_timeout: float = READ_TIMEOUT,
    ) -> None:
        self._spec = spec
        self._retry = retry or RetryPolicy()
        self._sleep = sleep
        self._read_timeout = read_timeout
        self._lock = threading.Lock()
        self._client: Any = None
        self._made = 0
        self.retries = 0
        self.endpoint = endpoint_of(spec)
        if self.endpoint is not None:
            _check_endpoint(self.endpoint)

    def client(self) -> Any:
        """The boto3 client, made on first use."""
        with self._lock:
            if self._client is None:
                self._client = self._make()
                self._made += 1
            return self._client

    def _make(self) -> Any:
        try:
            session = boto3.Session()
            region = self._spec.region or session.region_name or ("us-east-1" if self.endpoint else None)
            client = session.client(
                "s3",
                endpoint_url=self.endpoint,
                region_name=region,
                verify=self._spec.ca_bundle,
                config=_config(self._spec, self.endpoint, self._read_timeout),
            )
            # Stream bodies get "Expect: 100-continue", which costs a round trip for each part; some gateways never
            # answer it.
            client.meta.events.register_last("before-call.s3", _drop_expect)
            return client
        except (bc.BotoCoreError, ValueError, OSError) as error:
            raise translate(error, "the set-up", self._spec.uri) from None

    def call(self, operation: str, place: str, **parameters: Any) -> Any:
        """One S3 operation, named as in the API (`PutObject`). `attempts` try it; the last error is translated."""
        return self.attempt(operation, place, lambda client: _method(client, operation)(**parameters))

    def attempt(
        self,
        operation: str,
        place: str,
        action: Callable[[Any], R],
        *,
        attempts: int | None = None,
        stop: Callable[[Exception], WeightlessError | None] | None = None,
    ) -> R:
        """`action(client)`, repeated while it fails with what may pass. `stop` may end it early with its own error.

        The raw `ClientError` of an answer is kept as `details` only: its text could hold what the server echoed.
        """
        limit = attempts or self._retry.attempts
        doubted = False
        for number in range(1, limit + 1):
            try:
                client = self.client()
                return action(client)
            except WeightlessError:
                raise
            except Exception as error:
                verdict = stop(error) if stop else None
                if verdict is not None:
                    raise verdict from None
                if not _ours(error):
                    raise
                # The answer to a HEAD has no body that would say why: once, it may be that a token expired.
                doubt = is_unexplained(error) and not doubted
                doubted = doubted or doubt
                if number == limit or not (doubt or is_passing(error)):
                    raise translate(error, operation, place) from None
                if doubt or is_expired(error):
                    self._forget()
                with self._lock:
                    self.retries += 1
                asked = retry_after(error)
            self._sleep(max(asked, self._retry.wait(number)))
        raise AssertionError("unreachable")

    def _forget(self) -> None:
        """Make a new session for the next call, so that the chain is asked for fresh credentials."""
        with self._lock:
            self._client = None


def _drop_expect(params: dict[str, Any], **_: Any) -> None:
    params["headers"].pop("Expect", None)


def _method(client: Any, operation: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(client, botocore.xform_name(operation))
    return found


def _ours(error: Exception) -> bool:
    """Whether `error` comes from boto3, botocore or the network, and not from a mistake in this code."""
    root = type(error).__module__.split(".")[0]
    return root in ("awscrt", "boto3", "botocore", "http", "socket", "ssl", "urllib3") or isinstance(error, OSError)


def endpoint_of(spec: StoreSpec) -> str | None:
    """The endpoint to speak to: the setting's, else the one in boto3's own variables; None is AWS."""
    return spec.endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None


def _config(spec: StoreSpec, endpoint: str | None, read_timeout: float) -> Config:
    addressing = spec.addressing
    if addressing == "auto" and endpoint is not None:
        # Path style works on every store with an endpoint of its own; virtual hosts need a DNS entry for each bucket.
        addressing = "path"
    s3: Any = {"addressing_style": addressing}
    if endpoint is None or endpoint.lower().startswith("https:"):
        # Every body carries a CRC64NVME or Content-MD5 over TLS: a second hash of it would only cost time.
        s3["payload_signing_enabled"] = False
    return Config(
        signature_version="s3v4",
        connect_timeout=CONNECT_TIMEOUT,
        read_timeout=read_timeout,
        max_pool_connections=POOL,
        retries={"total_max_attempts": 1, "mode": "standard"},
        # The default sends aws-chunked trailers over HTTPS, which R2, GCS, Ceph and others answer 411, 501, 403 or 401.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        tcp_keepalive=True,
        user_agent_extra="weightless",
        s3=s3,
    )


def _check_endpoint(endpoint: str) -> None:
    try:
        split = urlsplit(endpoint)
        port = split.port
    except ValueError:
        split, port = urlsplit(""), 0
    if split.scheme not in ("http", "https") or not split.hostname or port == 0 or split.query or split.fragment:
        raise InvalidRequest("the S3 endpoint is not an http or https URL", hint="Set WEIGHTLESS_S3_ENDPOINT.")
    if split.username or split.password:
        raise InvalidRequest(
            "the S3 endpoint holds credentials", hint="Give credentials to boto3's chain, never in a URL."
        )
