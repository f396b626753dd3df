"""Settings: from the environment, strict, frozen, with secrets masked."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from exporter.contract.errors import InvalidRequest
from exporter.contract.spec import SourcePolicy
from service.settings import PREFIX, Settings, is_loopback, load_settings, settings_table

TOKEN = {"AUTH": "token"}
OIDC = {"AUTH": "github-oidc", "OIDC_AUDIENCE": "a", "POLICY": "/p"}


def load(monkeypatch: pytest.MonkeyPatch, **values: str) -> Settings:
    for name, value in values.items():
        monkeypatch.setenv(PREFIX + name, value)
    return load_settings()


def test_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load_settings()
    data = tmp_path / ".weightless"
    assert settings.sqlalchemy_url == f"sqlite:///{data}/weightless.db"
    assert settings.store_uri == f"file://{data}/store"
    assert (settings.host, settings.port, settings.auth) == ("127.0.0.1", 8080, ("none",))
    assert settings.base_url == "http://127.0.0.1:8080"
    assert settings.source_policy == SourcePolicy(roots=(), hf=True)
    assert settings.store_spec("team").uri == f"file://{data}/store/team"


def test_values_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(
        monkeypatch,
        STORE="s3://bucket/prefix/",
        SOURCE_ROOTS="/models, s3://models/public",
        MAX_BUFFER="64MiB",
        DRAIN_SECONDS="2m",
        AUTH="token, github-oidc",
        OIDC_AUDIENCE="a",
        POLICY="/p",
        PART_SIZE="8MiB",
        DATABASE_URL="",
        HOST="0.0.0.0",
        PUBLIC_URL="https://export.example.org/",
    )
    assert settings.store_spec("team").uri == "s3://bucket/prefix/team"
    assert settings.source_roots == ("/models", "s3://models/public")
    assert (settings.max_buffer, settings.drain_seconds, settings.part_size) == (64 * 2**20, 120, 8 * 2**20)
    assert settings.auth == ("token", "github-oidc")
    assert not settings.hf_allowed
    assert settings.base_url == "https://export.example.org"
    assert settings.database_url is None


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"NONSENSE": "1"}, "WEIGHTLESS_NONSENSE"),
        ({"PORT": "70000"}, "WEIGHTLESS_PORT"),
        ({"HOST": "0.0.0.0"}, "loopback"),
        ({"HOST": "example.org"}, "loopback"),
        ({"AUTH": "none,token"}, "auth"),
        ({"AUTH": "basic"}, "WEIGHTLESS_AUTH"),
        ({"AUTH": "github-oidc"}, "WEIGHTLESS_OIDC_AUDIENCE"),
        ({**OIDC, "OIDC_ISSUER": "http://example.org"}, "https"),
        ({"EXECUTOR": "ray"}, "WEIGHTLESS_RAY_ADDRESS"),
        ({"STORE": "ftp://x"}, "WEIGHTLESS_STORE"),
        ({"DATABASE_URL": "mysql://x"}, "WEIGHTLESS_DATABASE_URL"),
        ({"DATABASE_URL": "nonsense"}, "WEIGHTLESS_DATABASE_URL"),
        ({"SOURCE_ROOTS": "models"}, "WEIGHTLESS_SOURCE_ROOTS"),
        ({"PART_SIZE": "-1"}, "WEIGHTLESS_PART_SIZE"),
        ({"PART_SIZE": "0"}, "WEIGHTLESS_PART_SIZE"),
        ({"MAX_BUFFER": "0"}, "WEIGHTLESS_MAX_BUFFER"),
        ({"LEASE_SECONDS": "0"}, "WEIGHTLESS_LEASE_SECONDS"),
        ({"PUBLIC_URL": "javascript:alert(1)"}, "WEIGHTLESS_PUBLIC_URL"),
        ({"S3_CA_BUNDLE": "/no/such/file"}, "WEIGHTLESS_S3_CA_BUNDLE"),
    ],
)
def test_wrong_values_are_named(monkeypatch: pytest.MonkeyPatch, values: dict[str, str], named: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load(monkeypatch, **values)
    assert named in caught.value.message


def test_secrets_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(monkeypatch, DATABASE_URL="postgresql://u:canary@h/d", WEBHOOK_KEY="canary", TOKEN="canary")
    assert "canary" not in repr(settings)
    assert "canary" not in str(settings.model_dump())
    assert settings.sqlalchemy_url == "postgresql://u:canary@h/d"


def test_a_wrong_secret_is_not_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load(monkeypatch, DATABASE_URL="mysql://u:canary@h/d")
    assert "canary" not in caught.value.message


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        Settings().port = 1  # type: ignore[misc]


def test_the_table_has_every_setting_and_a_meaning() -> None:
    rows = [line.strip("| ").split(" | ") for line in settings_table().splitlines()[2:]]
    assert [row[0].strip("`") for row in rows] == [PREFIX + name.upper() for name in Settings.model_fields]
    assert all(len(row) == 3 and row[2] for row in rows)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("x", False)],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
