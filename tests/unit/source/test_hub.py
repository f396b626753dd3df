"""hf:// sources against a server on loopback that answers as the hub does."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest
import safetensors.torch
import torch
from huggingface_hub.utils import close_session

from exporter.contract.errors import SourceAccessDenied, SourceNotFound, SourceUnsafe
from exporter.contract.spec import SourcePolicy
from exporter.source.resolve import resolve
from exporter.source.safetensors import SafetensorsWeights
from tests.unit.source.files import Objects

COMMIT = "0123456789abcdef0123456789abcdef01234567"
POLICY = SourcePolicy(hf=True)


class Hub(ThreadingHTTPServer):
    """One repository, `team/tiny`, at one commit; `requests` is what was asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files: dict[str, bytes] = {}
        self.sha = COMMIT
        self.requests: list[tuple[str, str | None]] = []


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.requests.append((self.path, self.headers.get("Range")))
        if match := re.fullmatch(r"/api/models/team/(\w+)(?:/revision/([^?]+))?(?:\?.*)?", self.path):
            self.info(match[1], match[2])
        elif (match := re.fullmatch(rf"/team/tiny/resolve/{COMMIT}/(.+)", self.path)) and match[1] in self.server.files:
            self.file(self.server.files[match[1]])
        else:
            self.reply(404, b"{}", **{"X-Error-Code": "EntryNotFound"})

    def info(self, name: str, revision: str | None) -> None:
        if name == "gated":
            return self.reply(403, b"{}", **{"X-Error-Code": "GatedRepo"})
        if name != "tiny":
            return self.reply(404, b"{}", **{"X-Error-Code": "RepoNotFound"})
        if revision not in (None, "main", COMMIT):
            return self.reply(404, b"{}", **{"X-Error-Code": "RevisionNotFound"})
        siblings = [{"rfilename": name, "size": len(data)} for name, data in self.server.files.items()]
        body = {"id": "team/tiny", "sha": self.server.sha, "siblings": siblings, "private": False, "tags": []}
        return self.reply(200, json.dumps(body).encode())

    def file(self, data: bytes) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if found:
            first, last = int(found[1]), int(found[2])
            part = data[first : last + 1]
            return self.reply(206, part, **{"Content-Range": f"bytes {first}-{last}/{len(data)}"})
        return self.reply(200, data, ETag=f'"{"a" * 40}"', **{"X-Repo-Commit": COMMIT})

    def reply(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub on loopback; offline mode, which all other tests run in, is lifted for it."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(
        huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", endpoint)
    close_session()
    yield server
    close_session()
    server.shutdown()
    server.server_close()
    thread.join()


def none(bucket: str) -> Objects:
    raise AssertionError(bucket)


def test_a_revision_becomes_a_commit_before_anything_is_read(hub: Hub) -> None:
    tensors = {"a": torch.arange(6.0), "b": torch.ones(3)}
    hub.files = {
        "config.json": b'{"model_type": "bert"}',
        "model.safetensors": safetensors.torch.save(tensors),
        "modeling_tiny.py": b"raise SystemExit",
        "../escape.json": b"{}",
    }
    tree = resolve("hf://team/tiny@main", POLICY, none)
    assert tree.revision == COMMIT
    assert tree.uri == f"hf://team/tiny@{COMMIT}"
    assert sorted(tree.files()) == ["config.json", "model.safetensors"]
    weights = SafetensorsWeights(tree)
    assert b"".join(bytes(chunk) for chunk in weights.chunks("a")) == bytes(tensors["a"].numpy().data)
    fetched = [(path, wanted) for path, wanted in hub.requests if "/resolve/" in path]
    assert fetched
    assert all(COMMIT in path and wanted for path, wanted in fetched)


def test_only_small_files_are_written_to_disk(hub: Hub) -> None:
    hub.files = {"config.json": b'{"a": 1}', "model.safetensors": b"\0" * 100}
    tree = resolve("hf://team/tiny", POLICY, none)
    path = tree.local_path("config.json")
    assert path is not None
    assert Path(path).read_bytes() == b'{"a": 1}'
    assert tree.local_path("model.safetensors") is None
    assert tree.local_path("none") is None


def test_what_is_missing_or_closed_says_so(hub: Hub) -> None:
    hub.files = {"config.json": b"{}"}
    for uri in ("hf://team/none", "hf://team/tiny@elsewhere"):
        with pytest.raises(SourceNotFound, match="hub has no"):
            resolve(uri, POLICY, none)
    with pytest.raises(SourceAccessDenied, match="does not let"):
        resolve("hf://team/gated", POLICY, none)
    hub.sha = "main"
    with pytest.raises(SourceNotFound, match="no commit"):
        resolve("hf://team/tiny", POLICY, none)


def test_a_file_that_is_not_as_long_as_the_hub_says_is_refused(hub: Hub) -> None:
    hub.files = {"model.safetensors": b"0123456789"}
    reader = resolve("hf://team/tiny", POLICY, none).open("model.safetensors")
    assert reader.read(2, 3) == b"234"
    with pytest.raises(SourceUnsafe, match="ends at byte 10"):
        reader.read(8, 3)
    hub.files["model.safetensors"] = b"0123"
    with pytest.raises(SourceNotFound, match="instead of 6"):
        reader.read(2, 6)
    del hub.files["model.safetensors"]
    with pytest.raises(SourceNotFound, match="hub has no"):
        reader.read(0, 1)


def test_offline_mode_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    close_session()
    with pytest.raises(SourceNotFound) as caught:
        resolve("hf://team/tiny", POLICY, none)
    assert "HF_HUB_OFFLINE" in caught.value.hint
