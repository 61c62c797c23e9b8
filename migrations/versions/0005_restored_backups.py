"""Which backups were restored, for a start to settle with the journal.

Revision ID: 0005
Revises: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "restorations",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("backup", sa.String(length=32), nullable=False),
        sa.Column("made_at", sa.String(length=32), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("restored_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("settled_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_restorations")),
    )


def downgrade() -> None:
    op.drop_table("restorations")
