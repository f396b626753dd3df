"""Files behind links that a service signed: ranged GETs without a login, new links when the old ones have expired.

A link's query is a credential. It is never shown, and no redirect is followed with it.
"""

from __future__ import annotations

import contextlib
import random
import re
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import httpx2

from exporter.artifact.ports import Blob
from exporter.contract.errors import InvalidRequest, NotFound, StoreRejected, StoreUnavailable

RETRIES = 6
"""Further tries of a ranged GET: waits of 0.2 s, doubling, jittered, at most 10 s."""
_RANGE = re.compile(r"bytes (?:(\d{1,19})-(\d{1,19})|\*)/(\d{1,19})")
_T = TypeVar("_T")
_PASSING = frozenset({408, 429, 500, 502, 503, 504})


def tls_context(ca_bundle: str | None) -> ssl.SSLContext:
    """Trust in the system's certificates and in those of `ca_bundle`: a store behind links may have a CA of its own.

    `InvalidRequest` where the bundle cannot be read.
    """
    context = ssl.create_default_context()
    if ca_bundle is not None:
        try:
            context.load_verify_locations(cafile=ca_bundle)
        except (OSError, ssl.SSLError) as error:
            raise InvalidRequest(
                f"the CA bundle {ca_bundle} cannot be read", hint="Check WEIGHTLESS_S3_CA_BUNDLE."
            ) from error
    return context


def shown(url: str) -> str:
    """A link without its signature."""
    return url.split("?", 1)[0]


@dataclass
class SignedLinks:
    """Links by file name; `renew` asks the service for them, once for all threads when they have expired."""

    renew: Callable[[], Mapping[str, str]]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _links: Mapping[str, str] | None = None

    def get(self, name: str, stale: str | None = None) -> str | None:
        """The link to `name`; another one than `stale`, if that is given and was the newest."""
        with self._lock:
            if self._links is None or (stale is not None and self._links.get(name) == stale):
                self._links = self.renew()
            return self._links.get(name)


class LinkOrigin:
    """The files of one export, by the links of its service; URLs of the manifest are not followed."""

    def __init__(self, links: SignedLinks, http: httpx2.Client, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._links = links
        self._http = http
        self._sleep = sleep

    def locate(self, name: str, urls: Sequence[str]) -> Blob:
        """The file `name`; `NotFound` where the service has no link to it or the link leads nowhere."""
        url = self._links.get(name)
        if url is None:
            raise NotFound(f"{name} is not stored: the service has no link to it", file=name)
        blob = LinkBlob(name, self._links, self._http, self._sleep)
        blob.measure()
        return blob


class LinkBlob:
    """One file behind a link."""

    crc64nvme: str | None = None

    def __init__(
        self, name: str, links: SignedLinks, http: httpx2.Client, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._name = name
        self._links = links
        self._http = http
        self._sleep = sleep
        self.size = 0

    @property
    def uri(self) -> str:
        """The link without its signature."""
        return shown(self._links.get(self._name) or self._name)

    def measure(self) -> None:
        """Ask for the size, by a range of one byte: links are signed for GET alone."""
        self.size = self._retried(self._total)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` in one ranged GET, repeated after faults that pass."""
        if len(buffer):
            self._retried(lambda url: self._fill(url, offset, buffer))

    def _retried(self, call: Callable[[str], _T]) -> _T:
        wait, renewed = 0.2, False
        for tries in range(RETRIES + 1):
            url = self._links.get(self._name)
            if url is None:
                raise NotFound(f"{self._name} is not stored: the service has no link to it", file=self._name)
            try:
                return call(url)
            except _Expired as error:
                if renewed and tries >= 2:
                    raise StoreRejected(f"{shown(url)} refused the link: {error}") from error
                self._links.get(self._name, stale=url)
                renewed = True
            except StoreUnavailable:
                if tries == RETRIES:
                    raise
                self._sleep(min(wait, 10.0) * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
                wait *= 2
        raise StoreUnavailable(f"{self._name} could not be read")

    def _total(self, url: str) -> int:
        with self._open(url, 0, 1) as response:
            match = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if response.status_code in (206, 416) and match:
                return int(match.group(3))
            length = response.headers.get("Content-Length", "")
            if response.status_code == 200 and length.isdigit():
                return int(length)
            raise StoreRejected(f"{shown(url)} does not say how large it is")

    def _fill(self, url: str, offset: int, buffer: memoryview) -> None:
        with self._open(url, offset, len(buffer)) as response:
            match = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
            whole = response.status_code == 200 and offset == 0 and len(buffer) == self.size
            if not whole and (response.status_code != 206 or not match or match.group(1) != str(offset)):
                raise StoreRejected(f"{shown(url)} does not serve ranges")
            done = 0
            for chunk in response.iter_raw():
                if done + len(chunk) > len(buffer):
                    raise StoreUnavailable(f"{shown(url)} sent more than was asked for")
                buffer[done : done + len(chunk)] = chunk
                done += len(chunk)
            if done != len(buffer):
                raise StoreUnavailable(f"{shown(url)} sent {done} of {len(buffer)} bytes")

    def _open(self, url: str, offset: int, length: int) -> _Answer:
        headers = {"Range": f"bytes={offset}-{offset + length - 1}", "Accept-Encoding": "identity"}
        return _Answer(self._http, url, headers)


class _Expired(Exception):
    """A link was refused; a fresh one may not be."""


class _Answer:
    def __init__(self, http: httpx2.Client, url: str, headers: Mapping[str, str]) -> None:
        self._url = url
        self._stream = http.stream("GET", url, headers=headers, follow_redirects=False)

    def __enter__(self) -> httpx2.Response:
        try:
            response = self._stream.__enter__()
        except (httpx2.TransportError, httpx2.InvalidURL) as error:
            raise StoreUnavailable(f"{shown(self._url)} cannot be reached: {type(error).__name__}") from error
        status = response.status_code
        if status in (200, 206, 416):
            return response
        self._stream.__exit__(None, None, None)
        if status in (400, 401, 403):
            raise _Expired(f"status {status}")
        if status == 404:
            raise NotFound(f"nothing is stored at {shown(self._url)}")
        if status in _PASSING:
            raise StoreUnavailable(f"{shown(self._url)} answered {status}")
        raise StoreRejected(f"{shown(self._url)} answered {status}")

    def __exit__(self, *details: object) -> None:
        with contextlib.suppress(httpx2.TransportError):
            self._stream.__exit__(None, None, None)
        if isinstance(details[1], httpx2.TransportError):
            raise StoreUnavailable(f"{shown(self._url)} broke off: {type(details[1]).__name__}") from details[1]
