"""What a browser needs and other clients do not: a way to sign in, and errors that a person can read.

A browser cannot send a bearer token by itself. The one that a person pastes lies in a cookie that no script can read
and no other site can send (HttpOnly, SameSite=Strict), and becomes the Authorization header of the same request.
Nothing else changes: who a token is and what it may do is decided where it always is. An error answer to a request for
text/html becomes a page; a 401 becomes the form that asks for a token.
"""

from __future__ import annotations

import json
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.web.render import CSP, error_html, login_html

COOKIE = "weightless_token"
MAX_TOKEN = 3800
"""Characters of a token that fits a cookie; browsers refuse 4 KiB."""


class ForBrowsers:
    """ASGI middleware: a cookie goes in and an Authorization header on; a problem document comes out as a page."""

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
        await self._readable(scope, receive, send, refused=token is not None)

    async def _readable(self, scope: Scope, receive: Receive, send: Send, *, refused: bool) -> None:
        """Answer as the app does, but for problem documents: those are held, rendered, and sent as a page."""
        problem: Message | None = None
        body = b""

        async def sent(message: Message) -> None:
            nonlocal problem, body
            if message["type"] == "http.response.start" and _is_problem(message):
                problem = message
            elif problem is None:
                await send(message)
            else:
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    await _page(problem, body, base, refused=refused)(scope, receive, send)

        base = str(scope.get("root_path", "")).rstrip("/")
        await self._app(scope, receive, sent)


def _is_problem(start: Message) -> bool:
    return Headers(raw=start["headers"]).get("content-type", "").startswith("application/problem+json")


def _page(start: Message, body: bytes, base: str, *, refused: bool) -> HTMLResponse:
    status, headers = start["status"], Headers(raw=start["headers"])
    kept = {name: headers[name] for name in ("www-authenticate", "retry-after") if name in headers}
    if status == 401:
        text = login_html(refused=refused, base=base)
    else:
        problem = json.loads(body)
        text = error_html(status, problem["title"], problem["detail"], problem.get("hint", ""), base)
    policy = {"Content-Security-Policy": CSP, "Cache-Control": "no-store", "Vary": "Accept"}
    return HTMLResponse(text, status, {**policy, **kept})


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
