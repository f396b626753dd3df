"""Create the tables

Revision: 0001; follows .
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "counters",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("label", sa.String(length=64), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", "label", name=op.f("pk_counters")),
    )
    op.create_table(
        "executors",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("host", sa.String(length=256), nullable=False),
        sa.Column("slots", sa.Integer(), nullable=False),
        sa.Column("busy", sa.Integer(), nullable=False),
        sa.Column("draining", sa.Boolean(), nullable=False),
        sa.Column("report", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("reported_at", sa.Double(), nullable=True),
        sa.Column("heartbeat_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_executors")),
    )
    op.create_table(
        "exports",
        sa.Column("id", sa.String(length=30), nullable=False),
        sa.Column("owner", sa.String(length=128), nullable=False),
        sa.Column("repository", sa.String(length=256), nullable=True),
        sa.Column("recipe", sa.String(length=64), nullable=False),
        sa.Column("requirement", sa.String(length=32), nullable=False),
        sa.Column("caller", sa.JSON(), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("stage", sa.String(length=32), nullable=True),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("prefix", sa.String(length=256), nullable=False),
        sa.Column("concurrent", sa.Integer(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("lost", sa.Integer(), nullable=False),
        sa.Column("faults", sa.Integer(), nullable=False),
        sa.Column("not_before", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("cancel_requested_at", sa.Double(), nullable=True),
        sa.Column("executor", sa.String(length=256), nullable=True),
        sa.Column("executor_id", sa.String(length=64), nullable=True),
        sa.Column("lease_owner", sa.String(length=128), nullable=True),
        sa.Column("lease_until", sa.Double(), nullable=True),
        sa.Column("progress", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("peaks", sa.JSON(), nullable=False),
        sa.Column("bytes_uploaded", sa.BigInteger(), nullable=False),
        sa.Column("bytes_reused", sa.BigInteger(), nullable=False),
        sa.Column("error", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("error_code", sa.String(length=32), nullable=True),
        sa.Column("manifest_uri", sa.Text(), nullable=True),
        sa.Column("manifest_digest", sa.String(length=80), nullable=True),
        sa.Column("parent", sa.String(length=30), nullable=True),
        sa.Column("last_event", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_exports")),
    )
    with op.batch_alter_table("exports", schema=None) as batch_op:
        batch_op.create_index(
            "ix_exports_claim", ["state", "priority", "owner", "id", "not_before", "requirement"], unique=False
        )
        batch_op.create_index("ix_exports_owner", ["owner", "id"], unique=False)
        batch_op.create_index("ix_exports_owner_state", ["owner", "state"], unique=False)
        batch_op.create_index("ix_exports_position", ["state", "priority", "id"], unique=False)
        batch_op.create_index("ix_exports_recipe", ["recipe", "id"], unique=False)
        batch_op.create_index("ix_exports_repository", ["repository", "id"], unique=False)
        batch_op.create_index("ix_exports_state", ["state", "id"], unique=False)

    op.create_table(
        "idempotency",
        sa.Column("owner", sa.String(length=128), nullable=False),
        sa.Column("key", sa.String(length=256), nullable=False),
        sa.Column("body_digest", sa.String(length=80), nullable=False),
        sa.Column("export_id", sa.String(length=30), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("owner", "key", name=op.f("pk_idempotency")),
    )
    with op.batch_alter_table("idempotency", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_idempotency_created_at"), ["created_at"], unique=False)

    op.create_table(
        "tokens",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tokens")),
    )
    op.create_table(
        "attempts",
        sa.Column("export_id", sa.String(length=30), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("executor", sa.String(length=256), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("error", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("last_seq", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["export_id"], ["exports.id"], name=op.f("fk_attempts_export_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("export_id", "number", name=op.f("pk_attempts")),
    )
    op.create_table(
        "deliveries",
        sa.Column("id", sa.String(length=30), nullable=False),
        sa.Column("export_id", sa.String(length=30), nullable=False),
        sa.Column("event_id", sa.Integer(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("next_at", sa.Double(), nullable=True),
        sa.Column("delivered_at", sa.Double(), nullable=True),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["export_id"], ["exports.id"], name=op.f("fk_deliveries_export_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_deliveries")),
        sa.UniqueConstraint("export_id", "event_id", name=op.f("uq_deliveries_export_id_event_id")),
    )
    with op.batch_alter_table("deliveries", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_deliveries_export_id"), ["export_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_deliveries_next_at"), ["next_at"], unique=False)

    op.create_table(
        "events",
        sa.Column("export_id", sa.String(length=30), nullable=False),
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=True),
        sa.Column("type", sa.String(length=16), nullable=False),
        sa.Column("time", sa.String(length=32), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["export_id"], ["exports.id"], name=op.f("fk_events_export_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("export_id", "id", name=op.f("pk_events")),
        sa.UniqueConstraint("export_id", "attempt", "seq", name=op.f("uq_events_export_id_attempt_seq")),
    )
    op.create_table(
        "labels",
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("value", sa.String(length=256), nullable=False),
        sa.Column("export_id", sa.String(length=30), nullable=False),
        sa.ForeignKeyConstraint(["export_id"], ["exports.id"], name=op.f("fk_labels_export_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("key", "value", "export_id", name=op.f("pk_labels")),
    )
    with op.batch_alter_table("labels", schema=None) as batch_op:
        batch_op.create_index("ix_labels_export_id", ["export_id"], unique=False)


def downgrade() -> None:
    with op.batch_alter_table("labels", schema=None) as batch_op:
        batch_op.drop_index("ix_labels_export_id")

    op.drop_table("labels")
    op.drop_table("events")
    with op.batch_alter_table("deliveries", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_deliveries_next_at"))
        batch_op.drop_index(batch_op.f("ix_deliveries_export_id"))

    op.drop_table("deliveries")
    op.drop_table("attempts")
    op.drop_table("tokens")
    with op.batch_alter_table("idempotency", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_idempotency_created_at"))

    op.drop_table("idempotency")
    with op.batch_alter_table("exports", schema=None) as batch_op:
        batch_op.drop_index("ix_exports_state")
        batch_op.drop_index("ix_exports_repository")
        batch_op.drop_index("ix_exports_recipe")
        batch_op.drop_index("ix_exports_position")
        batch_op.drop_index("ix_exports_owner_state")
        batch_op.drop_index("ix_exports_owner")
        batch_op.drop_index("ix_exports_claim")

    op.drop_table("exports")
    op.drop_table("executors")
    op.drop_table("counters")
