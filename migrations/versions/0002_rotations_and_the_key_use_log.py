"""Rotations that are resumed, the key-use log, and when a KEK version takes nothing new.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_PURPOSES = ("grant_salt", "key_lease", "rotation", "check")


def upgrade() -> None:
    op.add_column(
        "kek_versions", sa.Column("retired_at", sa.DateTime(timezone=True), nullable=True)
    )
    # What was destroyed takes nothing new either.
    op.execute("UPDATE kek_versions SET retired_at = destroyed_at WHERE destroyed_at IS NOT NULL")
    op.create_index("ix_components_kek_kek_version", "components", ["kek", "kek_version"])
    op.create_table(
        "kek_rotations",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("kek", sa.String(length=64), nullable=False),
        sa.Column("target", sa.Integer(), nullable=False),
        sa.Column("components_total", sa.BigInteger(), nullable=False),
        sa.Column("asked_by", sa.String(length=256), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("failure", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_kek_rotations")),
    )
    op.create_index("ix_kek_rotations_kek", "kek_rotations", ["kek"])
    op.create_index(
        "uq_kek_rotations_kek_open",
        "kek_rotations",
        ["kek"],
        unique=True,
        sqlite_where=sa.text("finished_at IS NULL"),
        postgresql_where=sa.text("finished_at IS NULL"),
    )
    op.create_table(
        "key_uses",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("component", sa.String(length=32), nullable=False),
        sa.Column("kek", sa.String(length=64), nullable=False),
        sa.Column("kek_version", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.String(length=32), nullable=True),
        sa.Column(
            "purpose",
            sa.Enum(
                *_PURPOSES,
                name="purpose",
                native_enum=False,
                create_constraint=True,
                length=32,
            ),
            nullable=False,
        ),
        sa.Column("actor_kind", sa.String(length=32), nullable=False),
        sa.Column("actor", sa.String(length=256), nullable=False),
        sa.Column("reference", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_key_uses")),
    )
    op.create_index("ix_key_uses_component_id", "key_uses", ["component", "id"])
    op.create_index("ix_key_uses_tenant_id", "key_uses", ["tenant", "id"])


def downgrade() -> None:
    op.drop_table("key_uses")
    op.drop_table("kek_rotations")
    op.drop_index("ix_components_kek_kek_version", "components")
    op.drop_column("kek_versions", "retired_at")
