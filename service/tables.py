"""The database's tables, as `migrations/` creates them. Times are seconds since the epoch (double precision)."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

exports = Table(
    "exports",
    metadata,
    Column("id", String(30), primary_key=True),
    Column("owner", String(128), nullable=False),
    Column("repository", String(256)),
    Column("recipe", String(64), nullable=False),
    Column("requirement", String(32), nullable=False),
    Column("caller", JSON, nullable=False),
    Column("request", JSON, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("state", String(16), nullable=False),
    Column("stage", String(32)),
    Column("priority", Integer, nullable=False),
    Column("prefix", String(256), nullable=False),
    Column("concurrent", Integer),
    Column("attempt", Integer, nullable=False),
    Column("lost", Integer, nullable=False),
    Column("faults", Integer, nullable=False),
    Column("not_before", Double, nullable=False),
    Column("started_at", Double),
    Column("finished_at", Double),
    Column("expires_at", Double),
    Column("cancel_requested_at", Double),
    Column("executor", String(256)),
    Column("executor_id", String(64)),
    Column("lease_owner", String(128)),
    Column("lease_until", Double),
    Column("progress", JSON(none_as_null=True)),
    Column("peaks", JSON, nullable=False),
    Column("bytes_uploaded", BigInteger, nullable=False),
    Column("bytes_reused", BigInteger, nullable=False),
    Column("error", JSON(none_as_null=True)),
    Column("error_code", String(32)),
    Column("manifest_uri", Text),
    Column("manifest_digest", String(80)),
    Column("parent", String(30)),
    Column("last_event", Integer, nullable=False),
    # The claim reads this index alone; the position in the queue, the lists and the lease checks have theirs.
    Index("ix_exports_claim", "state", "priority", "owner", "id", "not_before", "requirement"),
    Index("ix_exports_position", "state", "priority", "id"),
    Index("ix_exports_state", "state", "id"),
    Index("ix_exports_owner", "owner", "id"),
    Index("ix_exports_owner_state", "owner", "state"),
    Index("ix_exports_repository", "repository", "id"),
    Index("ix_exports_recipe", "recipe", "id"),
)

labels = Table(
    "labels",
    metadata,
    Column("key", String(64), primary_key=True),
    Column("value", String(256), primary_key=True),
    Column("export_id", ForeignKey("exports.id", ondelete="CASCADE"), primary_key=True),
    Index("ix_labels_export_id", "export_id"),
)

attempts = Table(
    "attempts",
    metadata,
    Column("export_id", ForeignKey("exports.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("executor", String(256), nullable=False),
    Column("started_at", Double, nullable=False),
    Column("finished_at", Double),
    Column("error", JSON(none_as_null=True)),
    Column("last_seq", Integer, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("export_id", ForeignKey("exports.id", ondelete="CASCADE"), primary_key=True),
    Column("id", Integer, primary_key=True),
    Column("attempt", Integer, nullable=False),
    Column("seq", Integer),
    Column("type", String(16), nullable=False),
    Column("time", String(32), nullable=False),
    Column("data", Text, nullable=False),
    # NULLs (rows of the service itself) are distinct in both databases.
    UniqueConstraint("export_id", "attempt", "seq"),
)

idempotency = Table(
    "idempotency",
    metadata,
    Column("owner", String(128), primary_key=True),
    Column("key", String(256), primary_key=True),
    Column("body_digest", String(80), nullable=False),
    Column("export_id", String(30), nullable=False),
    Column("created_at", Double, nullable=False, index=True),
)

executors = Table(
    "executors",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("kind", String(16), nullable=False),
    Column("host", String(256), nullable=False),
    Column("slots", Integer, nullable=False),
    Column("busy", Integer, nullable=False),
    Column("draining", Boolean, nullable=False),
    Column("report", JSON(none_as_null=True)),
    Column("started_at", Double, nullable=False),
    Column("reported_at", Double),
    Column("heartbeat_at", Double, nullable=False),
)

counters = Table(
    "counters",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("label", String(64), primary_key=True),
    Column("value", Double, nullable=False),
)

deployment = Table(
    "deployment",
    metadata,
    Column("number", Integer, primary_key=True),
    Column("id", String(32), nullable=False),
)

tokens = Table(
    "tokens",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("digest", String(64), nullable=False),
    Column("name", String(128), nullable=False),
    Column("scopes", JSON, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("revoked_at", Double),
)

deliveries = Table(
    "deliveries",
    metadata,
    Column("id", String(30), primary_key=True),
    Column("export_id", ForeignKey("exports.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("event_id", Integer, nullable=False),
    Column("url", Text, nullable=False),
    Column("body", Text, nullable=False),
    Column("tries", Integer, nullable=False),
    Column("next_at", Double, index=True),
    Column("delivered_at", Double),
    Column("status", Integer),
    Column("error", Text),
    UniqueConstraint("export_id", "event_id"),
)
