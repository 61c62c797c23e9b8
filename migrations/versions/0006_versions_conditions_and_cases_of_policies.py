"""Versions, conditions and test cases of policies; the sensitivity of documents.

Rules and roles that are there become version 1 of their tenant's policy. On the way down only the
newest version stays. There is no condition there: an allow that had one goes, since without it
it would allow more; a deny stays without it, and denies more.

Revision ID: 0006
Revises: 0005
"""

from __future__ import annotations

import secrets
from datetime import UTC, datetime

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_NEWEST = sa.text("removed_in IS NULL")


def upgrade() -> None:
    op.create_table(
        "policy_versions",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("tenant", sa.String(length=32), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column(
            "origin",
            sa.Enum(
                "edited",
                "imported",
                "rolled_back",
                "subject_removed",
                "tests_changed",
                "migrated",
                name="origin",
                native_enum=False,
                create_constraint=True,
                length=32,
            ),
            nullable=False,
        ),
        sa.Column("author_kind", sa.String(length=32), nullable=False),
        sa.Column("author", sa.String(length=128), nullable=False),
        sa.Column("reason", sa.String(length=256), nullable=False),
        sa.Column("source", sa.Integer(), nullable=True),
        sa.Column("added", sa.Integer(), nullable=False),
        sa.Column("removed", sa.Integer(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name=op.f("fk_policy_versions_tenant")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_policy_versions")),
        sa.UniqueConstraint("tenant", "number", name=op.f("uq_policy_versions_tenant_number")),
    )
    op.create_table(
        "policy_cases",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("tenant", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("subject", sa.String(length=160), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("resource", sa.String(length=192), nullable=False),
        sa.Column("expect", _effect("expect"), nullable=False),
        sa.Column("context", sa.String(length=256), nullable=False),
        sa.Column("added_in", sa.Integer(), nullable=False),
        sa.Column("removed_in", sa.Integer(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name=op.f("fk_policy_cases_tenant")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_policy_cases")),
    )
    _newest_once("policy_cases", "name")
    _remake(
        "policy_rules",
        [
            sa.Column("subject", sa.String(length=160), nullable=False),
            sa.Column("action", sa.String(length=64), nullable=False),
            sa.Column("resource", sa.String(length=160), nullable=False),
            sa.Column("effect", _effect("effect"), nullable=False),
            sa.Column("condition", sa.String(length=1024), nullable=False),
            sa.Column("added_in", sa.Integer(), nullable=False),
            sa.Column("removed_in", sa.Integer(), nullable=True),
        ],
        [],
        {"condition": "''", "added_in": "1", "removed_in": "NULL"},
    )
    _newest_once("policy_rules", "subject", "action", "resource", "effect", "condition")
    op.create_index("ix_policy_rules_tenant_removed_in", "policy_rules", ["tenant", "removed_in"])
    _remake(
        "policy_roles",
        [
            sa.Column("subject", sa.String(length=160), nullable=False),
            sa.Column("role", sa.String(length=160), nullable=False),
            sa.Column("added_in", sa.Integer(), nullable=False),
            sa.Column("removed_in", sa.Integer(), nullable=True),
        ],
        [],
        {"added_in": "1", "removed_in": "NULL"},
    )
    _newest_once("policy_roles", "subject", "role")
    op.create_index("ix_policy_roles_tenant_removed_in", "policy_roles", ["tenant", "removed_in"])
    _first_versions()
    # As one statement, since SQLite adds a CHECK to a table only together with its column.
    op.execute(
        "ALTER TABLE document_versions ADD COLUMN sensitivity VARCHAR(32) DEFAULT 'restricted'"
        " NOT NULL CONSTRAINT ck_document_versions_sensitivity CHECK"
        " (sensitivity IN ('public', 'internal', 'confidential', 'restricted'))"
    )


def downgrade() -> None:
    op.drop_column("document_versions", "sensitivity")
    op.execute("DELETE FROM policy_roles WHERE removed_in IS NOT NULL")
    op.execute(
        "DELETE FROM policy_rules WHERE removed_in IS NOT NULL"
        " OR (effect = 'allow' AND condition <> '')"
    )
    op.execute(
        "DELETE FROM policy_rules WHERE EXISTS (SELECT 1 FROM policy_rules AS o"
        " WHERE o.tenant = policy_rules.tenant AND o.subject = policy_rules.subject"
        " AND o.action = policy_rules.action AND o.resource = policy_rules.resource"
        " AND o.effect = policy_rules.effect AND o.condition < policy_rules.condition)"
    )
    for table in ("policy_roles", "policy_rules"):
        op.drop_index(f"ix_{table}_tenant_removed_in", table_name=table)
        _drop_newest_once(table)
    _remake(
        "policy_roles",
        [
            sa.Column("subject", sa.String(length=160), nullable=False),
            sa.Column("role", sa.String(length=160), nullable=False),
        ],
        [
            sa.UniqueConstraint(
                "tenant", "subject", "role", name=op.f("uq_policy_roles_tenant_subject_role")
            )
        ],
        {},
    )
    _remake(
        "policy_rules",
        [
            sa.Column("subject", sa.String(length=160), nullable=False),
            sa.Column("action", sa.String(length=64), nullable=False),
            sa.Column("resource", sa.String(length=160), nullable=False),
            sa.Column("effect", _effect("effect"), nullable=False),
        ],
        [
            sa.UniqueConstraint(
                "tenant",
                "subject",
                "action",
                "resource",
                "effect",
                name=op.f("uq_policy_rules_tenant_subject_action_resource_effect"),
            )
        ],
        {},
    )
    _drop_newest_once("policy_cases")
    op.drop_table("policy_cases")
    op.drop_table("policy_versions")


def _effect(name: str) -> sa.Enum:
    return sa.Enum("allow", "deny", name=name, native_enum=False, create_constraint=True, length=32)


def _newest_once(table: str, *columns: str) -> None:
    op.create_index(
        f"uq_{table}_newest",
        table,
        ["tenant", *columns],
        unique=True,
        sqlite_where=_NEWEST,
        postgresql_where=_NEWEST,
    )


def _drop_newest_once(table: str) -> None:
    op.drop_index(
        f"uq_{table}_newest", table_name=table, sqlite_where=_NEWEST, postgresql_where=_NEWEST
    )


def _remake(
    table: str,
    columns: list[sa.Column[object]],
    constraints: list[sa.UniqueConstraint],
    filled: dict[str, str],
) -> None:
    """Make `table` anew with its rows: SQLite cannot drop a constraint of a table.

    `filled` are the SQL values of columns that the old table had not.
    """
    op.execute(f"CREATE TABLE {table}_kept AS SELECT * FROM {table}")  # noqa: S608
    op.drop_table(table)
    op.create_table(
        table,
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("tenant", sa.String(length=32), nullable=False),
        *columns,
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name=op.f(f"fk_{table}_tenant")),
        sa.PrimaryKeyConstraint("id", name=op.f(f"pk_{table}")),
        *constraints,
    )
    names = ["id", "tenant", *(column.name for column in columns), "created_at"]
    values = [filled.get(name, name) for name in names]
    op.execute(
        f"INSERT INTO {table} ({', '.join(names)}) SELECT {', '.join(values)} FROM {table}_kept"  # noqa: S608
    )
    op.drop_table(f"{table}_kept")


def _first_versions() -> None:
    versions = sa.table(
        "policy_versions",
        *(
            sa.column(name)
            for name in (
                "id", "tenant", "number", "origin", "author_kind", "author", "reason", "source",
                "added", "removed", "revision",
            )
        ),
        sa.column("created_at", sa.DateTime(timezone=True)),
    )  # fmt: skip
    bind = op.get_bind()
    counted = bind.execute(
        sa.text(
            "SELECT tenant, COUNT(*) AS added FROM"
            " (SELECT tenant FROM policy_rules UNION ALL SELECT tenant FROM policy_roles) AS t"
            " GROUP BY tenant"
        )
    ).all()
    for tenant, added in counted:
        at = bind.execute(
            sa.text("SELECT revision FROM tenants WHERE id = :tenant"), {"tenant": tenant}
        ).scalar_one()
        bind.execute(
            versions.insert().values(
                id=secrets.token_hex(16),
                tenant=tenant,
                number=1,
                origin="migrated",
                author_kind="system",
                author="migration",
                reason="what there was before there were versions",
                source=None,
                added=added,
                removed=0,
                revision=at,
                created_at=datetime.now(UTC),
            )
        )
