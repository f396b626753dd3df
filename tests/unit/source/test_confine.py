"""One test for each line of "URLs of users" in the design: what a source may name, and what is opened in the end."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.contract.errors import (
    InvalidRequest,
    SourceAccessDenied,
    SourceNotFound,
    SourceUnsafe,
    WeightlessError,
)
from exporter.contract.spec import SourcePolicy
from exporter.source.confine import check_source, file_roots, open_regular, regular_files
from exporter.source.local import LocalReader, LocalTree


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with a model in it, and a secret beside it."""
    folder = tmp_path / "models"
    (folder / "bert").mkdir(parents=True)
    (folder / "bert" / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "models-private").mkdir()
    (tmp_path / "models-private" / "secret").write_bytes(b"secret")
    return folder


@pytest.fixture
def policy(root: Path) -> SourcePolicy:
    return SourcePolicy(roots=(str(root), "s3://models/team-a"))


def test_paths_and_file_uris_under_a_root_are_allowed(root: Path, policy: SourcePolicy) -> None:
    for uri in (f"{root}/bert", f"file://{root}/bert", f"file://localhost{root}/bert", f"{root}/bert/../bert/./"):
        assert check_source(uri, policy).path == str(root / "bert")
    assert check_source(str(root), policy).path == str(root)
    assert check_source(f"file://{root}/be%72t", policy).path == str(root / "bert")


@pytest.mark.parametrize(
    "place",
    [
        "{root}/../models-private/secret",
        "file://{root}/../models-private/secret",
        "file://{root}/%2e%2e/models-private/secret",
        "file://{root}/%2E%2E%2Fmodels-private%2Fsecret",
        "file://{root}/bert/..%2f../models-private/secret",
        "{root}-private/secret",
        "file://{root}-private/secret",
        "/etc/passwd",
        "/etc",
        "/",
        "file:///etc",
        "file:///etc/passwd",
        "file:/etc/passwd",
        "FILE:///etc/passwd",
        "/proc/self/environ",
        "file:///proc/self/mem",
        "file://elsewhere{root}/bert",
        "../../../../../../etc/passwd",
        "~/.ssh/id_rsa",
    ],
)
def test_a_local_place_outside_the_roots_is_denied(place: str, root: Path, policy: SourcePolicy) -> None:
    with pytest.raises(SourceAccessDenied) as caught:
        check_source(place.format(root=root), policy)
    assert caught.value.hint


@pytest.mark.parametrize(
    "uri",
    [
        "http://169.254.169.254/latest/meta-data/",
        "https://169.254.169.254",
        "http://[fd00:ec2::254]/",
        "http://metadata.google.internal/computeMetadata/v1/",
        "https://example.org/model.pt2",
        "ftp://example.org/model",
        "gs://bucket/key",
        "s3a://models/team-a",
        "data:text/plain,x",
        "gopher://127.0.0.1:6379/_x",
        "jar:file:///etc!/x",
    ],
)
def test_no_other_scheme_is_read(uri: str, policy: SourcePolicy) -> None:
    with pytest.raises(SourceAccessDenied, match="only file, s3 and hf") as caught:
        check_source(uri, policy)
    assert "s3://" in caught.value.hint


@pytest.mark.parametrize("uri", ["", "file:", "file://", "file:///a%00b", "a\0b", "x\ny", "file:///models?x=1"])
def test_a_uri_that_cannot_be_read_is_refused(uri: str, policy: SourcePolicy) -> None:
    with pytest.raises((InvalidRequest, SourceAccessDenied)):
        check_source(uri, policy)


@settings(max_examples=500, deadline=None)
@given(
    scheme=st.sampled_from(["", "/", "file:", "file://", "file:///", "s3://", "s3:", "hf://", "http://", "x:"]),
    rest=st.text(st.sampled_from("ab/.%2eE5cfF\\@:?#[]~ \x00\n\u00e9\ud800-"), max_size=24),
)
def test_whatever_is_given_is_allowed_or_refused(scheme: str, rest: str) -> None:
    policy = SourcePolicy(roots=("/nowhere/models", "s3://abc/ab"), hf=True)
    try:
        place = check_source(scheme + rest, policy)
    except (InvalidRequest, SourceAccessDenied):
        return
    assert place.scheme == "hf" or (place.bucket == "abc" and (place.path + "/").startswith("ab/"))


def test_an_overlong_name_is_not_found(root: Path, policy: SourcePolicy) -> None:
    place = check_source(f"{root}/{'a' * 300}", policy)
    with pytest.raises(SourceNotFound):
        LocalTree("x", place.path, file_roots(policy))


def test_an_s3_prefix_is_matched_by_whole_components(policy: SourcePolicy) -> None:
    for uri in ("s3://models/team-a", "s3://models/team-a/", "s3://models/team-a/bert/model.pt2"):
        place = check_source(uri, policy)
        assert place.bucket == "models"
        assert place.path.startswith("team-a")
        assert not place.path.endswith("/")


@pytest.mark.parametrize(
    "uri",
    [
        "s3://models",
        "s3://models/",
        "s3://models/team-ab",
        "s3://models/team-b/x",
        "s3://models/team-a/../team-b/x",
        "s3://models/team-a/%2e%2e/team-b/x",
        "s3://models/team-a/%252e%252e/team-b/x",
        "s3://models/team-a%2f..%2fteam-b",
        "s3://models/team-a/./x",
        "s3://models/team-a//x",
        "s3://models/team-a/x%2fy",
        "s3://models/team-a\\..\\team-b",
        "s3://models-2/team-a/x",
        "s3://other/team-a",
        "S3://models/team-b",
    ],
)
def test_an_s3_place_outside_the_prefixes_is_denied(uri: str, policy: SourcePolicy) -> None:
    with pytest.raises(SourceAccessDenied):
        check_source(uri, policy)


@pytest.mark.parametrize(
    "uri",
    [
        "s3://key:secret@models/team-a",
        "s3://models:9000/team-a",
        "s3://Models/team-a",
        "s3://169.254.169.254:80/x",
        "s3:///team-a",
        "s3://..",
        "s3:models/team-a",
        "s3://models/team-a?endpoint=http://evil",
        "s3://models/team-a#x",
    ],
)
def test_an_s3_uri_has_a_bucket_and_a_key_only(uri: str, policy: SourcePolicy) -> None:
    with pytest.raises(InvalidRequest):
        check_source(uri, policy)


def test_a_whole_bucket_may_be_a_root() -> None:
    policy = SourcePolicy(roots=("s3://models/",))
    assert check_source("s3://models/anything/below", policy).path == "anything/below"


def test_hub_sources_need_the_switch(policy: SourcePolicy) -> None:
    with pytest.raises(SourceAccessDenied, match="switched off"):
        check_source("hf://meta-models/tiny@main", policy)
    place = check_source("hf://meta-models/tiny@refs/pr/1", SourcePolicy(hf=True))
    assert (place.path, place.revision) == ("meta-models/tiny", "refs/pr/1")
    assert check_source("hf://gpt2", SourcePolicy(hf=True)).revision is None


@pytest.mark.parametrize(
    "uri",
    [
        "hf://",
        "hf://a/b/c",
        "hf://../x",
        "hf://a/..",
        "hf://a/b@",
        "hf://a/b@../x",
        "hf://u:p@host/x",
        "hf://a/b?x=1",
        "hf:a",
    ],
)
def test_a_hub_uri_is_a_repository_and_a_revision(uri: str) -> None:
    with pytest.raises(InvalidRequest):
        check_source(uri, SourcePolicy(hf=True))


def test_an_empty_root_is_no_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    with pytest.raises(SourceAccessDenied):
        check_source("bert", SourcePolicy(roots=("",)))


def test_without_roots_no_file_and_no_object_is_allowed(root: Path) -> None:
    for uri in (str(root), "s3://models/team-a"):
        with pytest.raises(SourceAccessDenied):
            check_source(uri, SourcePolicy())


def test_a_link_out_of_the_root_is_denied(root: Path, policy: SourcePolicy) -> None:
    (root / "out").symlink_to(root.parent / "models-private")
    (root / "passwd").symlink_to("/etc/passwd")
    for name in ("out", "out/secret", "passwd"):
        with pytest.raises(SourceAccessDenied):
            check_source(f"{root}/{name}", policy)


def test_a_link_within_the_root_is_followed(root: Path, policy: SourcePolicy) -> None:
    (root / "latest").symlink_to(root / "bert")
    assert check_source(f"{root}/latest/model.safetensors", policy).path == str(root / "bert" / "model.safetensors")


def test_a_root_that_is_a_link_stands_for_its_target(root: Path) -> None:
    (root.parent / "alias").symlink_to(root)
    policy = SourcePolicy(roots=(str(root.parent / "alias"),))
    assert check_source(f"{root}/bert", policy).path == str(root / "bert")
    assert check_source(f"{root.parent}/alias/bert", policy).path == str(root / "bert")


def test_a_link_out_of_a_folder_is_denied_by_name(root: Path, policy: SourcePolicy) -> None:
    (root / "bert" / "stolen.safetensors").symlink_to("/etc/passwd")
    with pytest.raises(SourceAccessDenied, match=r"stolen\.safetensors is a link out"):
        LocalTree("x", str(root / "bert"), file_roots(policy))


def test_links_within_the_root_are_followed_to_files_only(root: Path, policy: SourcePolicy) -> None:
    (root / "bert" / "loop").symlink_to(root / "bert")
    (root / "shared.json").write_text("{}")
    (root / "bert" / "config.json").symlink_to(root / "shared.json")
    os.mkfifo(root / "bert" / "pipe.safetensors")
    files = regular_files(str(root / "bert"), file_roots(policy))
    assert sorted(files) == ["config.json", "model.safetensors"]


def test_a_fifo_is_refused_without_waiting(root: Path, policy: SourcePolicy) -> None:
    os.mkfifo(root / "pipe")
    with pytest.raises(SourceUnsafe, match="regular file"):
        LocalTree("x", str(root / "pipe"), file_roots(policy))


def test_a_device_is_refused() -> None:
    with pytest.raises(SourceUnsafe, match="regular file"):
        open_regular("/dev/zero", ["/dev"])


def test_a_socket_is_refused(root: Path, policy: SourcePolicy) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(root / "s"))
        with pytest.raises(SourceUnsafe, match="regular file"):
            open_regular(str(root / "s"), file_roots(policy))


def test_a_file_swapped_for_a_link_after_the_check_is_denied(root: Path, policy: SourcePolicy) -> None:
    tree = LocalTree("x", check_source(f"{root}/bert", policy).path, file_roots(policy))
    victim = root / "bert" / "model.safetensors"
    victim.unlink()
    victim.symlink_to("/etc/passwd")
    with pytest.raises(SourceAccessDenied, match="link"):
        tree.open("model.safetensors")


def test_a_folder_swapped_for_a_link_after_the_check_is_denied(root: Path, policy: SourcePolicy) -> None:
    tree = LocalTree("x", check_source(f"{root}/bert", policy).path, file_roots(policy))
    (root / "bert").rename(root / "old")
    elsewhere = root.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "model.safetensors").write_bytes(b"stolen!")
    (root / "bert").symlink_to(elsewhere)
    with pytest.raises(SourceAccessDenied, match="link"):
        tree.open("model.safetensors")


def test_a_file_that_changed_since_it_was_listed_is_refused(root: Path, policy: SourcePolicy) -> None:
    tree = LocalTree("x", str(root / "bert"), file_roots(policy))
    (root / "bert" / "model.safetensors").write_bytes(b"other bytes")
    with pytest.raises(SourceUnsafe, match="changed"):
        tree.open("model.safetensors")
    (root / "bert" / "model.safetensors").unlink()
    with pytest.raises(SourceNotFound):
        tree.open("model.safetensors")


def test_a_file_cut_short_while_it_is_read_is_refused(root: Path) -> None:
    path = root / "bert" / "model.safetensors"
    reader = LocalReader(open_regular(str(path), [str(root)]), "model.safetensors")
    os.truncate(path, 3)
    with pytest.raises(SourceUnsafe, match="cut short"):
        reader.read(0, 7)
    with pytest.raises(SourceUnsafe, match="cut short"):
        list(reader.chunks(0, 7, 4))


def test_nothing_is_said_about_what_lies_outside(root: Path, policy: SourcePolicy) -> None:
    def message(path: str) -> str:
        with pytest.raises(WeightlessError) as caught:
            check_source(path, policy)
        return caught.value.message

    assert message("/etc/passwd") == message("/etc/no-such-file")


def test_a_missing_file_under_a_root_is_not_found(root: Path, policy: SourcePolicy) -> None:
    place = check_source(f"{root}/none.pt2", policy)
    with pytest.raises(SourceNotFound):
        LocalTree("x", place.path, file_roots(policy))
