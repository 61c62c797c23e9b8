"""Revocations that are still to come, and which of those committed are not yet in force.

On the way down what is still to come is lost: carry it out or cancel it before.

Revision ID: 0007
Revises: 0006
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_OPEN = sa.text("effective_at IS NULL")


def upgrade() -> None:
    op.create_table(
        "scheduled_revocations",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column(
            "axis",
            sa.Enum(
                "subject",
                "membership",
                "group",
                "document",
                "document_version",
                "model",
                "adapter",
                "tokenizer",
                "template",
                "policy",
                "tenant",
                "sidecar",
                name="axis",
                native_enum=False,
                create_constraint=True,
                length=32,
            ),
            nullable=False,
        ),
        sa.Column("tenant", sa.String(length=32), nullable=True),
        sa.Column("target", sa.String(length=128), nullable=False),
        sa.Column("group", sa.String(length=32), nullable=True),
        sa.Column("reason", sa.String(length=256), nullable=False),
        sa.Column("actor_kind", sa.String(length=32), nullable=False),
        sa.Column("actor", sa.String(length=256), nullable=False),
        sa.Column("actor_tenant", sa.String(length=32), nullable=True),
        sa.Column("asked_by", sa.String(length=256), nullable=False),
        sa.Column("idempotency_key", sa.String(length=128), nullable=True),
        sa.Column("request", sa.String(length=128), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("due_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column(
            "state",
            sa.Enum(
                "scheduled",
                "carried_out",
                "cancelled",
                "failed",
                name="state",
                native_enum=False,
                create_constraint=True,
                length=32,
            ),
            nullable=False,
        ),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("failure", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_scheduled_revocations")),
        sa.UniqueConstraint(
            "asked_by",
            "idempotency_key",
            name=op.f("uq_scheduled_revocations_asked_by_idempotency_key"),
        ),
    )
    op.create_index(
        op.f("ix_scheduled_revocations_tenant"), "scheduled_revocations", ["tenant"], unique=False
    )
    op.create_index(
        "ix_scheduled_revocations_state_due_at",
        "scheduled_revocations",
        ["state", "due_at"],
        unique=False,
    )
    op.create_index(
        "ix_revocations_open",
        "revocations",
        ["seq"],
        unique=False,
        sqlite_where=_OPEN,
        postgresql_where=_OPEN,
    )


def downgrade() -> None:
    op.drop_index("ix_revocations_open", table_name="revocations")
    op.drop_table("scheduled_revocations")
