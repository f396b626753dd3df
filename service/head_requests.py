"""HEAD, wherever there is GET: the same status and headers, and no body (RFC 9110)."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadRequests:
    """ASGI middleware that asks the app as by GET and stops it as soon as the headers are known.

    Stopped and not drained: the body of an event stream would not end before its export does.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        known = asyncio.Event()

        async def headers_only(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b""})
                known.set()

        answering = asyncio.ensure_future(self._app({**scope, "method": "GET"}, receive, headers_only))
        waiting = asyncio.ensure_future(known.wait())
        try:
            await asyncio.wait({answering, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            answering.cancel()
            with suppress(asyncio.CancelledError):
                await answering
