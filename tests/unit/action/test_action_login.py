"""Why a job has no token, and which pull requests come from forks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from export_action.job import absolute, from_fork, login_hint

FORK = {"pull_request": {"head": {"repo": {"id": 2}}, "base": {"repo": {"id": 1}}}}


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (FORK, True),
        ({"pull_request": {"head": {"repo": None}, "base": {"repo": {"id": 1}}}}, True),
        ({"pull_request": {"head": {"repo": {"id": 1}}, "base": {"repo": {"id": 1}}}}, False),
        ({"ref": "refs/heads/main"}, False),
        ({"pull_request": None}, False),
        ([], False),
        ("{", False),
        (None, False),
    ],
)
def test_action_knows_a_fork(tmp_path: Path, event: Any, expected: bool) -> None:
    path = tmp_path / "event.json"
    if event is not None:
        path.write_text(event if isinstance(event, str) else json.dumps(event))
    assert from_fork({"GITHUB_EVENT_PATH": str(path)}) is expected


def test_action_says_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "event.json"
    path.write_text(json.dumps(FORK))
    assert "fork" in str(login_hint({"GITHUB_EVENT_PATH": str(path)}))
    assert "id-token: write" in str(login_hint({}))
    assert login_hint({"ACTIONS_ID_TOKEN_REQUEST_URL": "https://t", "ACTIONS_ID_TOKEN_REQUEST_TOKEN": "t"}) is None


@pytest.mark.parametrize(
    ("manifest", "url", "expected"),
    [
        ("s3://b/p/exports/exp_1/manifest.json", "1/model.pte", "s3://b/p/exports/exp_1/1/model.pte"),
        ("file:///s/exports/exp_1/manifest.json", "s3://b/w.ptd", "s3://b/w.ptd"),
        ("file:///s/exports/exp_2/manifest.json", "../../weights/exp_1-1/w.ptd", "file:///s/weights/exp_1-1/w.ptd"),
    ],
)
def test_action_resolves_urls_against_the_manifest(manifest: str, url: str, expected: str) -> None:
    assert absolute(manifest, url) == expected
