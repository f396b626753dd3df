"""The status pages in the system's Chromium, and their HTML as a client without a browser gets it."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.live_service import ROOT, LiveService, free_port, running

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SCREENSHOTS = ROOT / "out" / "screenshots"
HOSTILE = "\"><img src=x onerror=window.pwned=1><script>window.pwned=1</script>{{7*7}}'|`\\"
GiB = 2**30


class Window:
    """A page of the browser, and everything that it complained about."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.on("console", lambda message: self.complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: self.complaints.append(dialog.message))

    def screenshot(self, name: str) -> Path:
        """Keep a picture of the whole page."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = SCREENSHOTS / name
        self.page.screenshot(path=path, full_page=True)
        return path


@pytest.fixture
def window(browser: Browser) -> Iterator[Window]:
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    yield Window(context.new_page())
    context.close()


@pytest.mark.chromium
@pytest.mark.slow
def test_page_follows_a_real_export_from_queued_to_succeeded(real: LiveService, window: Window) -> None:
    ask = {"recipe": "exported-program", "labels": {"pr": "123"}}
    first = real.submit(**ask)
    second = real.submit(**ask, target={"backend": "xnnpack"})
    page = window.page
    page.goto(f"{real.url}/exports/{second['id']}")
    state = page.locator(".head .state")
    assert state.inner_text() == "queued"
    # Nothing reloads the page from here on: its own script does.
    page.evaluate("window.sameDocument = true")
    page.wait_for_selector(".state-running", timeout=180_000)
    page.wait_for_selector(".head .state-succeeded", timeout=180_000)
    assert page.evaluate("window.sameDocument")
    export = real.export(second["id"])
    assert page.locator(".digest").first.inner_text() == export["manifest"]["digest"]
    assert page.locator(".files tbody tr").first.inner_text().startswith("model.pte")
    page.wait_for_function("document.querySelector('img.chart').naturalWidth > 0")
    assert window.screenshot("export.png").stat().st_size > 10_000
    page.goto(real.url)
    for export in (first, second):
        assert page.locator(f'.list a[href="/exports/{export["id"]}"]').count() == 1
    window.screenshot("list.png")
    assert window.complaints == []


@pytest.mark.chromium
def test_page_shows_hostile_text_as_text(scripted: LiveService, window: Window) -> None:
    export = scripted.submit(
        source=f"file://{scripted.folder}/models/{HOSTILE.replace(chr(92), '')}.pt2",
        labels={"note": HOSTILE, "bidi": "a\u202eb\x1b[31mc\x07"},
        options={
            "text": HOSTILE,
            "log": f"{HOSTILE}\n\x1b[31m::error::no\n",
            "events": [{"type": "warning", "code": HOSTILE, "message": HOSTILE, "details": {}}],
            "failure": failure(HOSTILE),
        },
    )
    scripted.wait_for(export["id"])
    for address in (f"/exports/{export['id']}", "/"):
        window.page.goto(scripted.url + address)
        assert window.page.evaluate("window.pwned") is None
        assert HOSTILE in window.page.locator("main").inner_text()
    html = scripted.get(f"/exports/{export['id']}", "text/html")[2].decode()
    assert "<img src=x" not in html
    assert "<script>" not in html
    assert "\x1b" not in html
    assert "\u202e" not in html
    assert "bidi=abc<" in html
    assert "49" not in re.sub(
        r"exp_\w+|[0-9a-f-]{12,}|\d\d:\d\d", "", window.page.locator(".labels").first.inner_text()
    )
    assert window.complaints == []


@pytest.mark.chromium
@pytest.mark.parametrize("width", [360, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_its_screen(scripted: LiveService, browser: Browser, width: int, scheme: Any) -> None:
    export = finished_export(scripted)
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    window = Window(context.new_page())
    for name, address in (("export", f"/exports/{export['id']}"), ("list", "/")):
        window.page.goto(scripted.url + address)
        assert window.page.evaluate("document.documentElement.scrollWidth") <= width
        window.screenshot(f"{name}-{width}-{scheme}.png")
    context.close()
    assert window.complaints == []


@pytest.mark.chromium
@pytest.mark.slow
def test_page_outlives_a_restart_of_the_service(tmp_path: Path, window: Window) -> None:
    port = free_port()
    with running(tmp_path, port=port) as service:
        export = service.submit(options={"seconds": 12})
        service.wait_for(export["id"], "running")
        window.page.goto(f"{service.url}/exports/{export['id']}")
        window.page.evaluate("window.sameDocument = true")
    with running(tmp_path, port=port):
        window.page.wait_for_selector(".head .state-succeeded", timeout=60_000)
    assert window.page.evaluate("window.sameDocument")


@pytest.mark.chromium
def test_page_cancels_an_export(scripted: LiveService, window: Window) -> None:
    export = scripted.submit(options={"seconds": 120})
    scripted.wait_for(export["id"], "running")
    window.page.goto(f"{scripted.url}/exports/{export['id']}")
    window.page.get_by_role("button", name="Cancel").click()
    window.page.wait_for_selector(".head .state-cancelled", timeout=20_000)
    assert scripted.export(export["id"])["state"] == "cancelled"


def test_pages_allow_no_inline_code_and_load_nothing_from_elsewhere(scripted: LiveService) -> None:
    export = finished_export(scripted)
    for address in ("/", f"/exports/{export['id']}"):
        status, headers, body = scripted.get(address, "text/html,application/xhtml+xml,*/*;q=0.8")
        assert status == 200
        policy = headers["content-security-policy"]
        assert "unsafe" not in policy
        assert "default-src 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        html = body.decode()
        assert not re.search(r"<[^>]+\s(style|on\w+)=", html)
        assert all(not found.strip() for found in re.findall(r"<script[^>]*>(.*?)</script>", html, re.DOTALL))
        linked = re.findall(r'(?:src|href)="([^"]+)"', html)
        assert [address for address in linked if not address.startswith(("/", "#"))] == []
    for name in ("weightless.css", "live.js", "icon.svg"):
        status, headers, body = scripted.get(f"/static/{name}")
        assert status == 200
        assert re.findall(rb"https?://(?!www\.w3\.org/)", body) == []
    assert scripted.get("/static/../render.py")[0] == 404
    assert scripted.get("/static/memory.css")[0] == 404


def test_same_address_answers_json_to_clients(scripted: LiveService) -> None:
    export = finished_export(scripted)
    for accept, kind in (("*/*", "json"), ("application/json", "json"), ("text/html", "html")):
        headers = scripted.get(f"/exports/{export['id']}", accept)[1]
        assert kind in headers["content-type"]
        assert "accept" in headers["vary"].lower()


def test_list_filters_and_turns_pages(scripted: LiveService) -> None:
    ids = [scripted.submit(options={"failure": failure("no")}, labels={"n": str(n)})["id"] for n in range(3)]
    for export_id in ids:
        scripted.wait_for(export_id)
    older = scripted.get(f"/?state=failed&before={ids[1]}", "text/html")[2].decode()
    assert ids[0] in older
    assert ids[1] not in older
    assert ids[0] not in scripted.get("/?state=succeeded", "text/html")[2].decode()
    assert ids[0] not in scripted.get("/?recipe=another", "text/html")[2].decode()
    for odd in ("/?state=nonsense", "/?before=%27--", "/?recipe=%3Cscript%3E"):
        assert scripted.get(odd, "text/html")[0] == 200


def test_pictures_are_wellformed_and_run_nothing(scripted: LiveService) -> None:
    export = finished_export(scripted)
    for name in ("memory.svg", "badge.svg"):
        status, headers, body = scripted.get(f"/exports/{export['id']}/{name}")
        assert status == 200
        assert headers["content-type"] == "image/svg+xml"
        assert "unsafe" not in headers["content-security-policy"]
        root = ElementTree.fromstring(body)
        assert not [node for node in root.iter() if node.tag.endswith("script") or "href" in str(node.attrib)]
    text = " ".join(ElementTree.fromstring(scripted.get(f"/exports/{export['id']}/memory.svg")[2]).itertext())
    assert "host anonymous" in text
    assert "GPU budget 1.00 GiB" in text
    assert "compiling" in text


def test_unknown_export_has_no_page_and_no_pictures(scripted: LiveService) -> None:
    missing = "/exports/exp_00000000000000000000000000"
    for address in (missing, f"{missing}/memory.svg", f"{missing}/badge.svg", "/exports/..%2F..%2Fetc/memory.svg"):
        status, headers, body = scripted.get(address, "text/html,*/*;q=0.8")
        assert status == 404
        assert headers["content-type"].startswith("text/html")
        assert "unsafe" not in headers["content-security-policy"]
        assert b"All exports" in body
        assert scripted.get(address, "application/json")[1]["content-type"] == "application/problem+json"


def test_error_page_shows_hostile_text_as_text(scripted: LiveService) -> None:
    status, _, body = scripted.get("/recipes/%3Cimg%20src=x%20onerror=alert(1)%3E", "text/html")
    assert status == 404
    assert b"<img" not in body
    assert b"&lt;img src=x" in body


def failure(text: str) -> dict[str, Any]:
    """The body of a failed event with `text` in every field that has any."""
    details = {"method": text, "operators": [text, text]}
    return {"code": "unsupported-model", "message": text, "hint": text, "stage": "compiling", "details": details}


def finished_export(service: LiveService) -> dict[str, Any]:
    """A scripted export that has stages, samples and budgets, and has succeeded."""
    events: list[dict[str, Any]] = []
    for stage in ("capturing", "compiling"):
        events.append({"type": "stage", "name": stage, "state": "started"})
        sample = {"hostAnonBytes": GiB, "hostRssBytes": 2 * GiB, "gpuBytes": GiB // 2, "diskWrittenBytes": 4096}
        events += [{"type": "resources", **sample}] * 3
        events.append({"type": "stage", "name": stage, "state": "finished"})
    export = service.submit(
        options={"events": events, "seconds": 1, "segments": 250, "tensor": "model.layers.{}." + "very_long_name." * 9},
        budgets={"hostMemory": "4GiB", "gpuMemory": "1GiB"},
        labels={"long": "x" * 256},
    )
    found = service.wait_for(export["id"])
    assert found["state"] == "succeeded", found
    return found
