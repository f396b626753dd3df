"""Webhooks: what is to be sent is stored with its event, signed, and sent until it arrives or is given up.

A user's URL must not become a way into the operator's network: https only; either the operator named the host
(WEIGHTLESS_WEBHOOK_HOSTS), or every address that it resolves to is a public one, and the connection goes to an address
that was checked. No redirects, ten seconds, the answer's body is dropped.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from urllib.parse import SplitResult, urlsplit

import structlog

from exporter.contract.errors import InvalidRequest, WeightlessError
from service.database import Clock
from service.delivery_table import Delivery, DeliveryTable

log = structlog.get_logger(__name__)

SECONDS = 10.0
"""How long one delivery may take in all."""
POLL_SECONDS = 1.0
BACKOFF = (10.0, 60.0, 300.0, 1800.0)
"""Seconds until the next try, by tries so far; then a delivery is given up."""
_NAT64 = ipaddress.ip_network("64:ff9b::/32")

Resolve = Callable[[str, int], Sequence[str]]
"""The addresses of a host."""


class Refused(Exception):
    """A webhook's address may not be connected to. Stays in this module's callers' hands as text."""


def check_url(url: str, hosts: Sequence[str]) -> SplitResult:
    """The parts of a webhook's URL; `InvalidRequest` for one that can be refused without asking a resolver."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = 0
    host = (parts.hostname or "").rstrip(".")
    if parts.scheme != "https" or not host or "@" in parts.netloc or port == 0 or not url.isascii():
        raise _invalid("a webhook is https://host/path, without a user name")
    if hosts:
        if host not in {item.lower() for item in hosts}:
            raise _invalid("the webhook's host is not one of those that the operator allows")
        return parts
    with suppress(ValueError):
        if not is_public(host):
            raise _invalid("the webhook's address is not a public one")
    return parts


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet; `ValueError` where it is no address."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo[1] if found.teredo else None)
        if inner is not None:
            return is_public(str(inner))
        if found in _NAT64:
            return False
    return found.is_global and not found.is_multicast and not found.is_reserved


def signature(key: bytes, moment: int, body: bytes) -> str:
    """Value of the Weightless-Signature header."""
    mac = hmac.new(key, f"{moment}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={moment},v1={mac}"


def resolve(host: str, port: int) -> Sequence[str]:
    """The system's answer for a host."""
    return [str(item[4][0]) for item in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class WebhookSender:
    """Sends what is due, in one thread. Replicas share the work: a delivery is taken before it is sent."""

    def __init__(
        self,
        table: DeliveryTable,
        key: bytes,
        hosts: Sequence[str],
        *,
        context: ssl.SSLContext | None = None,
        resolver: Resolve = resolve,
        clock: Clock = time.time,
    ) -> None:
        self._table = table
        self._key = key
        self._hosts = tuple(hosts)
        self._context = context or ssl.create_default_context()
        self._resolve = resolver
        self._clock = clock
        self._stop = threading.Event()

    def run(self) -> None:
        """Send until stopped."""
        while not self._stop.wait(POLL_SECONDS):
            try:
                while not self._stop.is_set() and self.send_due():
                    pass
            except WeightlessError as error:
                log.warning("webhooks wait for the database", error=error.message)

    def stop(self) -> None:
        """End `run`; what is not sent is sent by the next process."""
        self._stop.set()

    def send_due(self) -> bool:
        """Send one delivery that is due; False where there is none."""
        delivery = self._table.take()
        if delivery is None:
            return False
        status, problem = self._send(delivery)
        if status is not None and 200 <= status < 300:
            self._table.delivered(delivery, status)
        else:
            wait = BACKOFF[delivery.tries] if delivery.tries < len(BACKOFF) else None
            self._table.failed(delivery, status, problem or f"the answer was {status}", wait)
        log.info("webhook", export=delivery.export_id, delivery=delivery.id, status=status, error=problem)
        return True

    def _send(self, delivery: Delivery) -> tuple[int | None, str | None]:
        """(status, None), or (None, what went wrong)."""
        moment = int(self._clock())
        body = delivery.body.encode()
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "weightless",
            "Weightless-Delivery": delivery.id,
            "Weightless-Signature": signature(self._key, moment, body),
        }
        try:
            parts = check_url(delivery.url, self._hosts)
            connection = self._connection(parts)
        except (InvalidRequest, Refused) as error:
            return None, str(error)
        except OSError as error:
            return None, f"the host cannot be found: {type(error).__name__}"
        # Timeouts of the socket are for each read; this one is for all of them.
        deadline = threading.Timer(SECONDS, connection.abort)
        deadline.daemon = True
        deadline.start()
        try:
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("POST", target, body=body, headers=headers)
            return connection.getresponse().status, None
        except (OSError, http.client.HTTPException, ValueError) as error:
            return None, f"the delivery failed: {type(error).__name__}"
        finally:
            deadline.cancel()
            connection.close()

    def _connection(self, parts: SplitResult) -> PinnedConnection:
        host, port = parts.hostname or "", parts.port or 443
        addresses = self._resolve(host, port)
        if not addresses:
            raise Refused("the host has no address")
        if not self._hosts and not all(is_public(address) for address in addresses):
            raise Refused("the host has an address that is not a public one")
        return PinnedConnection(host, port, addresses[0], self._context)


class PinnedConnection(http.client.HTTPSConnection):
    """TLS to the address that was checked, with the certificate checked for the host's name."""

    def __init__(self, host: str, port: int, address: str, context: ssl.SSLContext) -> None:
        super().__init__(host, port, timeout=SECONDS, context=context)
        self._address = address
        self._tls = context

    def connect(self) -> None:
        """Connect without asking a resolver again."""
        plain = socket.create_connection((self._address, self.port), timeout=SECONDS)
        try:
            self.sock = self._tls.wrap_socket(plain, server_hostname=self.host)
        except BaseException:
            plain.close()
            raise

    def abort(self) -> None:
        """Make whatever waits on the socket fail now."""
        if self.sock is not None:
            with suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(
        message, hint="Webhooks go to public hosts, or to WEIGHTLESS_WEBHOOK_HOSTS.", field="webhook.url"
    )
