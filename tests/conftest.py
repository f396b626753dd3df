"""Fixtures that every test may use, and a clean environment for all of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
import structlog


def pytest_configure() -> None:
    """Take settings of the caller's shell away: a test says itself what it sets."""
    for name in list(os.environ):
        if name.startswith("WEIGHTLESS_"):
            del os.environ[name]
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(autouse=True)
def same_logging() -> Iterator[None]:
    """Take back what a program that was run in this process did to logging: it holds the captured standard error."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("uvicorn.access").disabled = False
    structlog.reset_defaults()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests with a reason where there is no NVIDIA driver."""
    if os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/nvidiactl"):  # noqa: PTH110
        return
    skip = pytest.mark.skip(reason="no NVIDIA GPU on this machine")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
