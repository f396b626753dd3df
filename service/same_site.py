"""Keeps other web sites out of a service that lets everybody on this machine in (auth `none`).

A page on the internet can make a browser on this machine send requests here: by a host name of its own that resolves to
127.0.0.1, or by a POST without a body, which needs nobody's leave. The first shows in Host, the second in Origin.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from exporter.contract.errors import InvalidRequest
from service.problems import problem
from service.settings import Settings, is_loopback


class SameSite:
    """ASGI middleware: requests name a loopback host or WEIGHTLESS_PUBLIC_URL's, and come from no other page."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._known = urlsplit(settings.base_url).hostname or ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._ours(f"//{host}"):
            await self._refuse("this service answers to its own name only", scope, receive, send)
        elif origin is not None and scope["method"] not in ("GET", "HEAD") and not self._ours(origin):
            await self._refuse("the request comes from another web site", scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _ours(self, url: str) -> bool:
        try:
            name = urlsplit(url).hostname or ""
        except ValueError:
            return False
        return bool(name) and (name == self._known or is_loopback(name))

    @staticmethod
    async def _refuse(message: str, scope: Scope, receive: Receive, send: Send) -> None:
        hint = "Use http://127.0.0.1, or set WEIGHTLESS_PUBLIC_URL to the address that people use."
        await problem(InvalidRequest(message, hint=hint), status=421)(scope, receive, send)
