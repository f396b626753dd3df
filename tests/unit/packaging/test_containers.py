"""Dockerfile and compose.yaml name only what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from service.settings import unknown_variables

ROOT = Path(__file__).parents[3]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())


@pytest.mark.parametrize("name", ["Dockerfile", "compose.yaml", ".env.example"])
def test_settings_exist(name: str) -> None:
    found = set(re.findall(r"\bWEIGHTLESS_[A-Z0-9_]+\b", (ROOT / name).read_text()))
    assert found
    assert unknown_variables(dict.fromkeys(found, "")) == []


def test_every_variable_of_compose_is_explained() -> None:
    used = set(re.findall(r"\$\{([A-Z_]+)", (ROOT / "compose.yaml").read_text())) - {"X"}
    given = set(re.findall(r"^([A-Z_]+)=", (ROOT / ".env.example").read_text(), re.MULTILINE))
    assert used == given


def test_secrets_have_no_default() -> None:
    text = (ROOT / "compose.yaml").read_text()
    for name in ("STORE_PASSWORD", "DATABASE_PASSWORD", "RAY_AUTH_TOKEN"):
        assert re.findall(rf"\$\{{{name}([^}}]*)\}}", text)
        assert all(rest.startswith(":?") for rest in re.findall(rf"\$\{{{name}([^}}]*)\}}", text))


def test_only_the_service_is_published_and_only_on_loopback() -> None:
    published = {name: service.get("ports") for name, service in COMPOSE["services"].items() if service.get("ports")}
    assert published == {"service": ["127.0.0.1:8080:8080"]}
    assert COMPOSE["networks"]["back"] == {"internal": True}


def test_ray_node_says_which_cuda_version_its_image_has() -> None:
    image = re.search(r"^ARG CUDA_IMAGE=\S+:(\d+\.\d+)\.", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert image is not None
    assert f'--resources={{"cuda-{image.group(1)}": 1}}' in COMPOSE["services"]["exporter"]["entrypoint"]


def test_images_run_as_an_ordinary_user_and_write_no_configuration_of_pip() -> None:
    text = (ROOT / "Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    stages = re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]
    named = {re.split(r"\s+", stage.splitlines()[0])[-1]: stage for stage in stages}
    for target in ("service", "exporter"):
        assert re.search(r"^USER 10001:10001$", named[target], re.MULTILINE)
    assert "ARG BASE_IMAGE" in text
    assert not re.search(r"index-url|trusted-host|pip\.conf|PIP_", text)
    assert "torch" not in named["service"]


def test_exporter_image_has_what_a_cuda_export_calls() -> None:
    text = (ROOT / "Dockerfile").read_text().split(" AS exporter", 1)[1]
    for package in ("binutils", "g++", "openssl", "python3-dev"):
        assert re.search(rf"[\s]{re.escape(package)}[\s]", text), package
