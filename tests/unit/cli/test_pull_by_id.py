"""`pull`, `verify` and `inspect` by export id: the service gives manifest and links, and the login stays with it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exporter.contract.manifest import digest
from tests.unit.artifact.conftest import Export, make_export

from .conftest import EXPORT, Ran, Service


class Links:
    """Scripts a service with an S3 store: one server stands for both, links are below /signed/."""

    def __init__(self, service: Service, export: Export) -> None:
        self.service = service
        self.export = export
        self.manifest_digest = digest(export.content)
        self.rounds = 0
        self.expire_first = False
        service.script = self

    def __call__(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Any:
        if path.startswith("/signed/"):
            return self.signed(path, headers)
        if path.endswith("/manifest"):
            return 200, {}, self.export.content
        if path.endswith("/downloads"):
            self.rounds += 1
            links = {
                name: f"{self.service.url}/signed/{name}?X-Amz-Signature=topsecret{self.rounds}"
                for name in self.export.keys
            }
            return 200, {}, json.dumps({"expiresAt": "x", "urls": links}).encode()
        manifest = {"uri": "s3://bucket/exports/manifest.json", "digest": self.manifest_digest}
        return 200, {}, json.dumps({"id": EXPORT, "state": "succeeded", "manifest": manifest}).encode()

    def signed(self, path: str, headers: dict[str, str]) -> Any:
        match = re.fullmatch(r"/signed/(.+)\?X-Amz-Signature=topsecret(\d+)", path)
        assert match is not None
        if self.expire_first and match[2] == "1":
            return 403, {}, b"<Error><Code>AccessDenied</Code></Error>"
        data = self.export.bytes_of(match[1])
        first, last = (int(number) for number in headers["range"].removeprefix("bytes=").split("-"))
        part = data[first : last + 1]
        return 206, {"Content-Range": f"bytes {first}-{first + len(part) - 1}/{len(data)}"}, part


@pytest.fixture
def links(service: Service, monkeypatch: pytest.MonkeyPatch) -> Links:
    monkeypatch.setenv("WEIGHTLESS_TOKEN", "wl_login")
    monkeypatch.setenv("WEIGHTLESS_URL", service.url)
    return Links(service, make_export([300, 70_000]))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


@pytest.mark.parametrize("expired", [False, True])
def test_pull_by_id(weightless: Callable[..., Ran], links: Links, tmp_path: Path, expired: bool) -> None:
    links.expire_first = expired
    ran = weightless("pull", EXPORT, "-o", str(tmp_path / "out"), "--block", "16KiB", "--json")
    assert ran.status == 0, ran.err
    assert contents(tmp_path / "out") == {name: links.export.bytes_of(name) for name in links.export.keys}
    assert ran.json["manifest"]["digest"] == links.manifest_digest
    assert "topsecret" not in ran.out + ran.err
    assert links.rounds == 1 + expired
    for _, path, headers, _ in links.service.seen:
        assert ("authorization" in headers) == (not path.startswith("/signed/")), path


def test_verify_and_inspect_by_id_and_url(weightless: Callable[..., Ran], links: Links) -> None:
    assert weightless("verify", EXPORT, "--json").json["ok"] is True
    assert weightless("verify", f"{links.service.url}/exports/{EXPORT}/manifest").status == 0
    assert weightless("inspect", f"{links.service.url}/exports/{EXPORT}", "--json").json["kind"] == "manifest"
    key = links.export.keys["model.ptd"]
    links.export.store.objects[key] = links.export.store.objects[key][:-1] + b"\0"
    ran = weightless("verify", EXPORT, "--json")
    assert (ran.status, ran.json["ok"]) == (1, False)
    assert "topsecret" not in ran.out + ran.err


def test_a_manifest_that_is_not_the_recorded_one_is_refused(
    weightless: Callable[..., Ran], links: Links, tmp_path: Path
) -> None:
    links.manifest_digest = f"sha256:{'0' * 64}"
    ran = weightless("pull", EXPORT, "-o", str(tmp_path / "out"), "--json")
    assert (ran.status, ran.json["error"]["code"]) == (1, "verification-failed")
    assert not (tmp_path / "out").exists()


def test_a_file_on_standard_output(weightless: Callable[..., Ran], links: Links) -> None:
    ran = weightless("pull", EXPORT, "--only", "tokenizer.json", "-o", "-")
    assert (ran.status, ran.out) == (0, '{"a": 1}')
    assert weightless("pull", EXPORT, "-o", "-").status == 2


def test_a_directory_of_another_machine_is_said_to_be_one(
    weightless: Callable[..., Ran], service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = make_export([64])
    view = {"id": EXPORT, "state": "succeeded", "manifest": {"uri": "file:///srv/nowhere/exports/x/manifest.json"}}
    service.script = lambda method, path, *_: (
        200, {}, export.content if path.endswith("/manifest") else json.dumps(view).encode(),
    )  # fmt: skip
    ran = weightless("pull", EXPORT, "-o", str(tmp_path / "out"), "--url", service.url, "--json")
    assert (ran.status, ran.json["error"]["code"]) == (3, "store-rejected")
    assert "directory of its own machine" in ran.err
