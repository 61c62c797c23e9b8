"""Sidecars exchange their keys: when, and which keys they had before.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "sidecars", sa.Column("keys_changed_at", sa.DateTime(timezone=True), nullable=True)
    )
    op.create_table(
        "sidecar_former_keys",
        sa.Column("signing_key", sa.String(length=43), nullable=False),
        sa.Column("sidecar", sa.String(length=32), nullable=False),
        sa.Column("replaced_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["sidecar"], ["sidecars.id"], name=op.f("fk_sidecar_former_keys_sidecar")
        ),
        sa.PrimaryKeyConstraint("signing_key", name=op.f("pk_sidecar_former_keys")),
    )


def downgrade() -> None:
    op.drop_table("sidecar_former_keys")
    op.drop_column("sidecars", "keys_changed_at")
