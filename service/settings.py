"""The service's settings: read once from the environment, frozen, secrets masked, unknown names refused.

Every variable is `WEIGHTLESS_` and the field's name in capitals. `settings_table()` renders the README's table from
the same model.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from exporter.contract.base import Duration, Size
from exporter.contract.errors import InvalidRequest
from exporter.contract.spec import DEFAULT_MAX_BUFFER, SourcePolicy, StoreSpec

PREFIX = "WEIGHTLESS_"
AuthMode = Literal["none", "token", "github-oidc"]
GITHUB_ISSUER = "https://token.actions.githubusercontent.com"


def _split(value: Any) -> Any:
    if isinstance(value, str):
        return tuple(item.strip() for item in value.split(",") if item.strip())
    return value


def _blank(value: Any) -> Any:
    return None if value == "" else value


def _no_slash(value: str | None) -> str | None:
    return None if value is None else value.rstrip("/")


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Text = Annotated[str | None, BeforeValidator(_blank)]
Url = Annotated[Text, AfterValidator(_no_slash)]


class Settings(BaseSettings):
    """What the operator set. Derived values are properties, so that the fields stay what the environment said."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", env_ignore_empty=True)

    data_dir: Path = Field(Path(".weightless"), description="database, job folders, default store")
    database_url: SecretStr | None = Field(
        None, description="SQLAlchemy URL, SQLite or PostgreSQL", examples=["sqlite:///{data}/weightless.db"]
    )
    store: Text = Field(
        None,
        description="where results go: `file:///dir`, `s3://bucket/prefix`, `memory://` (tests)",
        examples=["file://{data}/store"],
    )
    host: str = Field("127.0.0.1", description="address that the service listens on")
    port: int = Field(8080, ge=0, le=65535, description="port that the service listens on")
    public_url: Url = Field(None, description="the URL put into links, where it is not `http://{host}:{port}`")
    auth: Annotated[tuple[AuthMode, ...], NoDecode, BeforeValidator(_split)] = Field(
        ("none",), description="`none`, `token`, `github-oidc`, or a comma list; `none` is refused off loopback"
    )
    oidc_issuer: Url = Field(GITHUB_ISSUER, description="issuer of OIDC tokens; its JWKS is found from here")
    oidc_audience: Text = Field(None, description="audience that an OIDC token must name; needed for `github-oidc`")
    policy: Path | None = Field(None, description="policy file (YAML); needed for `github-oidc`")
    executor: Literal["local", "ray"] = Field("local", description="where exports run: `local` or `ray`")
    slots: int | None = Field(
        None, ge=0, le=256, description="exports at once on this machine", examples=["GPUs found, else 1"]
    )
    ray_address: Url = Field(None, description="Ray dashboard URL")
    ray_insecure: bool = Field(False, description="allow a Ray address without token authentication")
    source_roots: Names = Field(
        (),
        description="comma list of directories and `s3://` prefixes that a source may name; anything else is refused",
    )
    hf: bool | None = Field(None, description="`hf://` sources", examples=["on with auth `none`, else off"])
    s3_endpoint: Url = Field(None, description="endpoint of the S3 store")
    s3_region: Text = Field(None, description="region of the S3 store")
    s3_ca_bundle: Text = Field(None, description="file of CA certificates for the S3 endpoint")
    s3_kms_key_id: Text = Field(None, description="KMS key for objects written")
    s3_storage_class: Text = Field(None, description="storage class for objects written")
    s3_profile: Literal["auto", "aws", "minio", "r2", "gcs", "ceph", "scaleway"] = Field(
        "auto", description="part limits, conditional writes, checksums: `auto aws minio r2 gcs ceph scaleway`"
    )
    s3_addressing: Literal["auto", "path", "virtual"] = Field("auto", description="`auto path virtual`")
    s3_checksums: Literal["auto", "crc64nvme", "off"] = Field("auto", description="`auto crc64nvme off`")
    part_size: Size | None = Field(None, description="bytes of one part of an upload", examples=["auto"])
    max_buffer: Size = Field(DEFAULT_MAX_BUFFER, description="bytes of part buffers that one export may hold")
    webhook_key: SecretStr | None = Field(None, description="signing key of webhooks; without it none are sent")
    webhook_hosts: Names = Field((), description="comma list of hosts that a webhook may name")
    lease_seconds: int = Field(60, ge=1, le=3600, description="how long a silent scheduler keeps its exports")
    drain_seconds: Duration = Field(
        600, description="how long a stop waits for exports that cannot be re-attached afterwards"
    )
    reap_grace: Duration = Field(3600, description="age from which an upload without a live export is given back")
    retention: Duration | None = Field(
        None, description="age at which finished exports expire; `weightless gc` removes them", examples=["none"]
    )
    presign_max: Duration = Field(3600, description="longest life of a download link")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe log line shown")
    url: Url = Field(None, description="used by the client commands: where the service is")
    token: SecretStr | None = Field(None, description="used by the client commands: bearer token")

    @field_validator("data_dir", mode="after")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @field_validator("database_url", mode="after")
    @classmethod
    def _database(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            try:
                backend = make_url(value.get_secret_value()).get_backend_name()
            except ArgumentError as error:
                raise ValueError("not a SQLAlchemy URL") from error
            if backend not in ("sqlite", "postgresql"):
                raise ValueError("only sqlite and postgresql are supported")
        return value

    @field_validator("part_size", "max_buffer", mode="after")
    @classmethod
    def _some(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("a part and a buffer have more than zero bytes")
        return value

    @field_validator("store", mode="after")
    @classmethod
    def _store(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("file:///", "s3://", "memory://")):
            raise ValueError("a store is file:///dir, s3://bucket/prefix or memory://")
        return value

    @field_validator("public_url", mode="after")
    @classmethod
    def _web_address(cls, value: str | None) -> str | None:
        if value is not None:
            parts = urlsplit(value)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
                raise ValueError("a public URL is http:// or https:// and a host")
        return value

    @field_validator("s3_ca_bundle", mode="after")
    @classmethod
    def _file(cls, value: str | None) -> str | None:
        if value is not None and not Path(value).is_file():
            raise ValueError("there is no such file")
        return value

    @field_validator("source_roots", mode="after")
    @classmethod
    def _roots(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for root in value:
            if not root.startswith(("/", "file:///", "s3://")):
                raise ValueError("a source root is an absolute directory or an s3:// prefix")
        return value

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if not self.auth or len(set(self.auth)) != len(self.auth) or ("none" in self.auth and len(self.auth) > 1):
            raise ValueError("auth is none, or a comma list of token and github-oidc")
        if "none" in self.auth and not is_loopback(self.host):
            raise ValueError("auth none is only for a loopback host; set WEIGHTLESS_AUTH to token or github-oidc")
        if "github-oidc" in self.auth and (self.oidc_audience is None or self.policy is None):
            raise ValueError("auth github-oidc needs WEIGHTLESS_OIDC_AUDIENCE and WEIGHTLESS_POLICY")
        issuer = urlsplit(self.oidc_issuer or "")
        if issuer.scheme != "https" and not (issuer.scheme == "http" and is_loopback(issuer.hostname or "")):
            raise ValueError("the OIDC issuer is an https URL")
        if self.executor == "ray" and self.ray_address is None:
            raise ValueError("executor ray needs WEIGHTLESS_RAY_ADDRESS")
        return self

    @property
    def sqlalchemy_url(self) -> str:
        """The database's URL, password included: for the driver alone."""
        if self.database_url is None:
            return f"sqlite:///{self.data_dir / 'weightless.db'}"
        return self.database_url.get_secret_value()

    @property
    def store_uri(self) -> str:
        """URI of the store, without a slash at its end."""
        uri = self.store or f"file://{self.data_dir / 'store'}"
        return uri if uri == "memory://" else uri.rstrip("/")

    @property
    def base_url(self) -> str:
        """What links start with."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.public_url or f"http://{host}:{self.port}"

    @property
    def hf_allowed(self) -> bool:
        """Whether `hf://` sources are taken."""
        return self.auth == ("none",) if self.hf is None else self.hf

    @property
    def source_policy(self) -> SourcePolicy:
        """What a source may name."""
        return SourcePolicy(roots=self.source_roots, hf=self.hf_allowed)

    def store_spec(self, prefix: str = "") -> StoreSpec:
        """The store as an exporter gets it, below `prefix`."""
        base = self.store_uri
        return StoreSpec(
            uri=f"{base.rstrip('/')}/{prefix}" if prefix else base,
            endpoint=self.s3_endpoint,
            region=self.s3_region,
            ca_bundle=self.s3_ca_bundle,
            kms_key_id=self.s3_kms_key_id,
            storage_class=self.s3_storage_class,
            profile=self.s3_profile,
            addressing=self.s3_addressing,
            checksums=self.s3_checksums,
            part_size=self.part_size,
            max_buffer=self.max_buffer,
        )


def is_loopback(host: str) -> bool:
    """Whether `host` can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def load_settings(**given: Any) -> Settings:
    """Settings from the environment, `given` fields first. `InvalidRequest` names each variable that is wrong."""
    unknown = unknown_variables(os.environ)
    if unknown:
        raise InvalidRequest(
            f"unknown setting: {', '.join(unknown)}", hint="`weightless serve --help` lists the settings."
        )
    try:
        return Settings(**given)
    except ValidationError as error:
        problems = []
        for item in error.errors(include_input=False, include_url=False):
            name = PREFIX + str(item["loc"][0]).upper() if item["loc"] else "settings"
            problems.append(f"{name}: {item['msg'].removeprefix('Value error, ')}")
        raise InvalidRequest("; ".join(problems), hint="`weightless serve --help` lists the settings.") from error


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """The `WEIGHTLESS_*` names that mean nothing, in order."""
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    return sorted(name for name in environment if name.startswith(PREFIX) and name not in known)


def settings_table() -> str:
    """The settings as a Markdown table: variable, default, meaning."""
    lines = ["| variable | default | meaning |", "| --- | --- | --- |"]
    for name, field in Settings.model_fields.items():
        lines.append(f"| `{PREFIX}{name.upper()}` | {_shown_default(field)} | {field.description} |")
    return "\n".join(lines) + "\n"


def _shown_default(field: Any) -> str:
    value = field.examples[0] if field.examples else field.default
    if value is None or value == ():
        return "-"
    if isinstance(value, tuple):
        value = ",".join(value)
    if isinstance(value, bool):
        return "on" if value else "off"
    if value == DEFAULT_MAX_BUFFER:
        value = "192MiB"
    if isinstance(value, Path):
        value = f"./{value}"
    return str(value) if " " in str(value) else f"`{value}`"
