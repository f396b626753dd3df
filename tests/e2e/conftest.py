"""Services, a browser and a runner for the tests of the whole product."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.live_service import REAL, LiveService, running

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = shutil.which("chromium")
_FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    """A service whose exporter does what a request's options say. Two exports at once."""
    with running(tmp_path_factory.mktemp("scripted"), WEIGHTLESS_SLOTS="2") as service:
        yield service


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    """The service as it is shipped, with a tiny model below its source root."""
    pytest.importorskip("executorch", reason="the exporter's packages are not installed")
    folder = tmp_path_factory.mktemp("real")
    (folder / "models").mkdir()
    save_tiny_program(folder / "models" / "model.pt2")
    with running(folder, REAL, WEIGHTLESS_SLOTS="1") as service:
        yield service


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The system's Chromium, headless. Not longer than a module: playwright keeps an event loop running meanwhile."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_FLAGS.split())
        yield browser
        browser.close()


def save_tiny_program(path: Path) -> None:
    """An exported program of two small layers."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)).eval()
    torch.export.save(torch.export.export(model, (torch.randn(2, 64),)), path)
