"""What sidecars say that they hold, by namespace and tier.

Nothing is lost on the way down that a sidecar would not say again.

Revision ID: 0008
Revises: 0007
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "residency_reports",
        sa.Column("sidecar", sa.String(length=32), nullable=False),
        sa.Column("run", sa.String(length=32), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["sidecar"], ["sidecars.id"], name=op.f("fk_residency_reports_sidecar")
        ),
        sa.PrimaryKeyConstraint("sidecar", name=op.f("pk_residency_reports")),
    )
    op.create_table(
        "residency",
        sa.Column("sidecar", sa.String(length=32), nullable=False),
        sa.Column("namespace", sa.String(length=64), nullable=False),
        sa.Column(
            "tier",
            sa.Enum(
                "host",
                "nvme",
                "remote",
                name="tier",
                native_enum=False,
                create_constraint=True,
                length=32,
            ),
            nullable=False,
        ),
        sa.Column("blocks", sa.BigInteger(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("blocks > 0 AND bytes >= 0", name=op.f("ck_residency_something")),
        sa.ForeignKeyConstraint(
            ["namespace"], ["namespaces.id"], name=op.f("fk_residency_namespace")
        ),
        sa.ForeignKeyConstraint(["sidecar"], ["sidecars.id"], name=op.f("fk_residency_sidecar")),
        sa.PrimaryKeyConstraint("sidecar", "namespace", "tier", name=op.f("pk_residency")),
    )
    op.create_index("ix_residency_namespace", "residency", ["namespace"])


def downgrade() -> None:
    op.drop_table("residency")
    op.drop_table("residency_reports")
