"""MANIFEST on the command line: an export id, a path, `file://`, `s3://`, or the service's URL of an export."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx2

from exporter.artifact.links import LinkOrigin, SignedLinks, tls_context
from exporter.artifact.location import locate_manifest
from exporter.artifact.ports import Origin, StoreReads
from exporter.contract.errors import InvalidRequest, NotFound, StoreRejected, VerificationFailed
from exporter.contract.manifest import Manifest, digest, parse_manifest
from exporter.contract.spec import EXPORT_ID
from exporter.store.open import open_store
from service.client import Client
from service.commands.session import open_client, same_origin

_API = re.compile(r"(?P<base>.*)/exports/(?P<id>[^/]+)(?:/manifest)?/?")


@dataclass(frozen=True, slots=True)
class Resolved:
    """A manifest, the digest of its bytes, where it is, and the origin of its files."""

    manifest: Manifest
    content: bytes
    uri: str
    origin: Origin

    @property
    def digest(self) -> str:
        """``sha256:`` of the manifest's bytes as stored."""
        return digest(self.content)


def open_reads(uri: str) -> StoreReads:
    """A store for reading, spoken to as the environment's `WEIGHTLESS_S3_*` say."""
    from service.settings import load_settings

    return open_store(load_settings().store_spec().model_copy(update={"uri": uri}))


@contextmanager
def resolve(target: str, url: str, allowed: Sequence[str] = (), expected: str | None = None) -> Iterator[Resolved]:
    """The manifest that `target` names; its files can be read inside the `with` block.

    `VerificationFailed` where its digest is not `expected`.
    """
    with ExitStack() as stack:
        yield _resolved(target, url, allowed, expected, stack)


def _resolved(target: str, url: str, allowed: Sequence[str], expected: str | None, stack: ExitStack) -> Resolved:
    if EXPORT_ID.fullmatch(target):
        found = _from_service(target, url, url, stack)
    elif target.startswith(("http://", "https://")):
        match = _API.fullmatch(urlsplit(target)._replace(query="", fragment="").geturl())
        if match is None:
            raise InvalidRequest(f"{target} is not the URL of an export", hint="It ends in /exports/ and the id.")
        found = _from_service(match["id"], match["base"], url, stack)
    else:
        located = locate_manifest(target, open_reads, allowed)
        found = Resolved(located.manifest, located.content, located.uri, located.origin)
    if expected is not None and found.digest != expected:
        raise VerificationFailed(
            f"the manifest's digest is {found.digest}, not {expected}", hint="It is not the one that was named."
        )
    return found


def _from_service(export_id: str, base: str, configured: str, stack: ExitStack) -> Resolved:
    # The login belongs to the configured service; another host in a URL does not get it.
    client = open_client(base) if same_origin(base, configured) else Client(base)
    with client:
        export = client.export(export_id)
        content = client.manifest(export_id)
        stored = export.get("manifest") or {}
        if stored.get("digest") not in (None, digest(content)):
            raise VerificationFailed(f"the manifest's digest is not {stored['digest']}, as the service says")
        uri = str(stored.get("uri", f"{base}/exports/{export_id}/manifest"))
        if uri.startswith("file://"):
            return _beside(content, uri)
        links = client.downloads(export_id)
    http = stack.enter_context(_http())
    origin = LinkOrigin(SignedLinks(lambda: _links(client, export_id, links)), http)
    return Resolved(parse_manifest(content), content, uri, origin)


def _beside(content: bytes, uri: str) -> Resolved:
    """The files of a service that keeps them in a directory of this same machine."""
    try:
        located = locate_manifest(uri, open_reads)
    except NotFound as error:
        raise StoreRejected(
            f"the service keeps its files in a directory of its own machine: {uri}",
            hint="Run this command there, or give the service an s3:// store.",
        ) from error
    if located.content != content:
        raise VerificationFailed(f"the manifest at {uri} is not the one that the service sent")
    return Resolved(located.manifest, content, located.uri, located.origin)


def _links(client: Client, export_id: str, first: dict[str, str]) -> dict[str, str]:
    if first:
        links = dict(first)
        first.clear()
        return links
    with client.again() as fresh:
        return fresh.downloads(export_id)


def _http() -> httpx2.Client:
    limits = httpx2.Limits(max_connections=64, max_keepalive_connections=64)
    context = tls_context(os.environ.get("WEIGHTLESS_S3_CA_BUNDLE") or None)
    return httpx2.Client(timeout=httpx2.Timeout(60.0, connect=10.0), limits=limits, verify=context)
