"""The early check of sources: schemes, roots by whole components, escapes, links."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.contract.errors import SourceAccessDenied
from service.source_rules import check_source, normalised

ROOTS = ("/srv/models", "s3://models/public")


def allowed(uri: str, roots: tuple[str, ...] = ROOTS, *, hf: bool = False) -> bool:
    try:
        check_source(uri, roots, hf=hf)
    except SourceAccessDenied:
        return False
    return True


@pytest.mark.parametrize(
    "uri",
    [
        "file:///srv/models",
        "file:///srv/models/",
        "file:///srv/models/a/b.pt2",
        "file:///srv/models/../models/a",
        "file:///srv/models/a%20b",
        "FILE:///srv/models/a",
        "s3://models/public",
        "s3://models/public/m.pt2",
        "s3://models/public/x/../m.pt2",
    ],
)
def test_inside(uri: str) -> None:
    assert allowed(uri)


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "/srv/models/a",
        "file://srv/models/a",
        "file:/srv/models/a",
        "file:///srv/modelsx",
        "file:///srv",
        "file:///",
        "file:///srv/models/..",
        "file:///srv/models/../../etc/passwd",
        "file:///srv/models/%2e%2e/x",
        "file:///srv/models/%2E%2E%2Fx",
        "file:///srv/models/%252e%252e/x",
        "file:///srv/models/%" + "25" * 20 + "2e/x",
        "file:///srv/models/%ff",
        "file:///srv/models/a%00b",
        "file:///srv/models\\..\\x",
        "s3://models",
        "s3://models/publicx/m",
        "s3://models/public/../private/m",
        "s3://models/public/%2e%2e/private",
        "s3://other/public/m",
        "s3://models/../other/public/m",
        "s3:///public",
        "s3://MODELS/public",
        "hf://meta/x",
        "http://169.254.169.254/",
        "https://models/public",
        "data:,x",
    ],
)
def test_outside(uri: str) -> None:
    assert not allowed(uri)


@pytest.mark.parametrize(
    ("uri", "good"),
    [
        ("hf://a/b", True),
        ("hf://a/b@main", True),
        ("hf://a/b@refs/pr/1", True),
        ("hf://a/b@main/model.safetensors", True),
        ("hf://a/../b", False),
        ("hf://a/b?x=1", False),
        ("hf://", False),
    ],
)
def test_hub(uri: str, good: bool) -> None:
    assert allowed(uri, hf=True) is good
    assert not allowed(uri, hf=False)


def test_a_link_that_leads_out_is_outside(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "out").symlink_to("/etc")
    (root / "in").symlink_to(root)
    assert allowed(f"file://{root}/in/x", (str(root),))
    assert not allowed(f"file://{root}/out/passwd", (str(root),))
    link = tmp_path / "link"
    link.symlink_to(root)
    assert allowed(f"file://{link}/x", (str(link),))
    assert not allowed(f"file://{link}/x", (str(root),))


def test_no_roots_allow_nothing() -> None:
    assert not allowed("file:///srv/models/a", ())


def test_policies_see_the_normalised_form() -> None:
    assert normalised("s3://models/public/../private/m") == "s3://models/private/m"
    assert normalised("file:///srv/x/%2e%2e/y") == "file:///srv/y"
    assert normalised("hf://a/b@c") == "hf://a/b@c"


@given(
    st.lists(st.sampled_from(["..", ".", "%2e%2e", "%2E.", "%252e%252e", "a", "/", "%2f", "models", "srv"]), max_size=8)
)
def test_what_passes_stays_inside_however_it_is_written(parts: list[str]) -> None:
    uri = "file:///srv/models/" + "/".join(parts)
    if allowed(uri):
        assert (normalised(uri).removeprefix("file://") + "/").startswith("/srv/models/")
