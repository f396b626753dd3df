"""Lets a browser, which cannot send a bearer token by itself, sign in with one.

The token lies in a cookie that no script can read and no other site can send (HttpOnly, SameSite=Strict), and becomes
the Authorization header of the same request. Nothing else changes: who a token is and what it may do is decided where
it always is. A page that answers 401 becomes the form that asks for a token.
"""

from __future__ import annotations

from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.web.render import CSP, login_html

COOKIE = "weightless_token"
MAX_TOKEN = 3800
"""Characters of a token that fits a cookie; browsers refuse 4 KiB."""


class BrowserLogin:
    """ASGI middleware: cookie in, Authorization header on; 401 of a page out, form instead."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        token = None if "authorization" in headers else cookie_token(headers.get("cookie", ""))
        if token is not None and trusted(scope["method"], headers):
            scope = {**scope, "headers": [*scope["headers"], (b"authorization", f"Bearer {token}".encode("ascii"))]}
        if scope["method"] != "GET" or "text/html" not in headers.get("accept", ""):
            await self._app(scope, receive, send)
            return
        await self._with_form(scope, receive, send, refused=token is not None)

    async def _with_form(self, scope: Scope, receive: Receive, send: Send, *, refused: bool) -> None:
        replaced = False

        async def sent(message: Message) -> None:
            nonlocal replaced
            if message["type"] == "http.response.start" and message["status"] == 401:
                replaced = True
                base = str(scope.get("root_path", "")).rstrip("/")
                page = HTMLResponse(login_html(refused=refused, base=base), 401, {"Content-Security-Policy": CSP})
                page.headers.update({"Cache-Control": "no-store", "WWW-Authenticate": "Bearer"})
                await page(scope, receive, send)
            elif not replaced:
                await send(message)

        await self._app(scope, receive, sent)


def cookie_token(header: str) -> str | None:
    """The token in a Cookie header; None where there is none that could be one."""
    try:
        morsel = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return None
    return None if morsel is None or not acceptable(morsel.value) else morsel.value


def acceptable(token: str) -> bool:
    """Whether the text can stand in a cookie and in an Authorization header."""
    return (
        0 < len(token) <= MAX_TOKEN and token.isascii() and all(char.isalnum() or char in "._-~+/=" for char in token)
    )


def trusted(method: str, headers: Headers) -> bool:
    """Whether a request with the cookie comes from our own pages: reads always, anything else only if it says so.

    SameSite=Strict keeps other sites' requests from carrying the cookie; sites beside ours on the same domain are what
    is asked about here.
    """
    if method in ("GET", "HEAD"):
        return True
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc == headers.get("host")
