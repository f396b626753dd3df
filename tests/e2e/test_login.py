"""Signing in with a browser, where the service wants tokens."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from tests.e2e.live_service import LiveService, running

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    with running(tmp_path_factory.mktemp("login"), WEIGHTLESS_AUTH="token") as service:
        yield service


@pytest.fixture(scope="module")
def token(guarded: LiveService) -> str:
    """A token that may do everything of its own."""
    return guarded.run("token", "create", "browser", "--scope", "read", "--scope", "submit", "--scope", "cancel")


def call(service: LiveService, method: str, path: str, **headers: str) -> tuple[int, str]:
    """Status and body of a request with exactly these headers."""
    connection = http.client.HTTPConnection(urlsplit(service.url).netloc, timeout=30)
    try:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=names)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.mark.chromium
def test_a_browser_signs_in_and_sees_its_exports(guarded: LiveService, token: str, browser: Browser) -> None:
    context = browser.new_context()
    page = context.new_page()
    complaints: list[str] = []
    page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.accept()))
    page.goto(guarded.url)
    assert page.get_by_role("heading").inner_text() == "Sign in"
    page.get_by_label("Token").fill("wl_wrong")
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_selector("[role=alert]")
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_selector("text=No exports yet")
    (cookie,) = context.cookies()
    assert cookie["httpOnly"]
    assert cookie["sameSite"] == "Strict"
    assert page.evaluate("document.cookie") == ""
    assert complaints == []
    context.close()


def test_json_clients_still_get_a_problem(guarded: LiveService) -> None:
    status, body = call(guarded, "GET", "/exports", Accept="application/json")
    assert status == 401
    assert json.loads(body)["code"] == "unauthenticated"


def test_form_stands_in_for_a_page_that_is_refused(guarded: LiveService) -> None:
    for path in ("/", "/exports/exp_00000000000000000000000000", "/recipes"):
        status, body = call(guarded, "GET", path, Accept="text/html")
        assert status == 401
        assert "Sign in" in body


def test_cookie_reads_but_changes_nothing_for_another_site(guarded: LiveService, token: str) -> None:
    cookie = f"weightless_token={token}"
    missing = "/exports/exp_00000000000000000000000000"
    assert call(guarded, "GET", "/exports", Cookie=cookie)[0] == 200
    assert call(guarded, "POST", f"{missing}/cancel", Cookie=cookie, Sec_Fetch_Site="same-origin")[0] == 404
    assert call(guarded, "POST", f"{missing}/cancel", Cookie=cookie, Origin=guarded.url)[0] == 404
    for headers in (
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Origin": "https://example.org"},
        {"Origin": "null"},
        {},
    ):
        assert call(guarded, "POST", f"{missing}/cancel", Cookie=cookie, **headers)[0] == 401


@pytest.mark.parametrize("value", ["", "a b", "a;b", "x" * 5000, "\x7f", '"', "wl_x\\r\\nX-Evil: 1"])
def test_cookie_that_is_no_token_is_ignored(guarded: LiveService, value: str) -> None:
    status, body = call(guarded, "GET", "/exports", Cookie=f"weightless_token={value}")
    assert status == 401
    assert json.loads(body)["reason"] == "missing"


def test_header_wins_over_the_cookie(guarded: LiveService, token: str) -> None:
    status, _ = call(guarded, "GET", "/exports", Cookie=f"weightless_token={token}", Authorization="Bearer wl_wrong")
    assert status == 401
