"""Every table of the first version.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:  # noqa: PLR0915 - one statement a table
    op.create_table(
        "audit_counter",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("peaks", sa.Text(), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_audit_counter_one_row")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_counter")),
    )
    op.create_table(
        "audit_events",
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", sa.String(length=32), nullable=False),
        sa.Column("occurred_at", sa.String(length=32), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("actor_kind", sa.String(length=32), nullable=False),
        sa.Column("actor", sa.String(length=256), nullable=False),
        sa.Column("tenant", sa.String(length=32), nullable=True),
        sa.Column("subject", sa.String(length=256), nullable=False),
        sa.Column("target", sa.String(length=256), nullable=False),
        sa.Column("outcome", sa.String(length=32), nullable=False),
        sa.Column("reason", sa.String(length=256), nullable=False),
        sa.Column("details", sa.Text(), nullable=False),
        sa.Column("prev", sa.String(length=64), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_audit_events")),
    )
    op.create_index(op.f("ix_audit_events_kind_seq"), "audit_events", ["kind", "seq"], unique=False)
    op.create_index(
        op.f("ix_audit_events_occurred_at"), "audit_events", ["occurred_at"], unique=False
    )
    op.create_index(
        op.f("ix_audit_events_target_seq"), "audit_events", ["target", "seq"], unique=False
    )
    op.create_index(
        op.f("ix_audit_events_tenant_occurred_at"),
        "audit_events",
        ["tenant", "occurred_at"],
        unique=False,
    )
    op.create_index(
        op.f("ix_audit_events_tenant_seq"), "audit_events", ["tenant", "seq"], unique=False
    )
    op.create_table(
        "audit_heads",
        sa.Column("size", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("root", sa.String(length=64), nullable=False),
        sa.Column("at", sa.String(length=32), nullable=False),
        sa.Column("jws", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("size", name=op.f("pk_audit_heads")),
    )
    op.create_table(
        "audit_nodes",
        sa.Column("level", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("index", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("level", "index", name=op.f("pk_audit_nodes")),
    )
    op.create_table(
        "components",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column(
            "kind",
            sa.Enum(
                "tenant",
                "model",
                "adapter",
                "tokenizer",
                "template",
                "policy",
                "document_version",
                "group",
                name="kind",
                native_enum=False,
                create_constraint=True,
                length=32,
            ),
            nullable=False,
        ),
        sa.Column("tenant", sa.String(length=32), nullable=True),
        sa.Column("kek", sa.String(length=64), nullable=False),
        sa.Column("kek_version", sa.Integer(), nullable=False),
        sa.Column("wrapped", sa.LargeBinary(length=128), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("destroyed_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "(wrapped IS NULL) = (destroyed_at IS NOT NULL)", name=op.f("ck_components_tombstone")
        ),
        sa.ForeignKeyConstraint(["tenant"], ["components.id"], name=op.f("fk_components_tenant")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_components")),
    )
    op.create_index(op.f("ix_components_tenant"), "components", ["tenant"], unique=False)
    op.create_table(
        "idempotent_answers",
        sa.Column("scope", sa.String(length=32), nullable=False),
        sa.Column("actor", sa.String(length=128), nullable=False),
        sa.Column("key", sa.String(length=128), nullable=False),
        sa.Column("request", sa.String(length=64), nullable=False),
        sa.Column("answer", sa.String(length=4096), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("scope", "actor", "key", name=op.f("pk_idempotent_answers")),
    )
    op.create_index(
        op.f("ix_idempotent_answers_created_at"), "idempotent_answers", ["created_at"], unique=False
    )
    op.create_table(
        "join_tokens",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("every_tenant", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("used_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_join_tokens")),
    )
    op.create_table(
        "kek_versions",
        sa.Column("kek", sa.String(length=64), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("destroyed_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("kek", "version", name=op.f("pk_kek_versions")),
    )
    op.create_table(
        "log_counter",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.String(length=32), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_log_counter_one_row")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_log_counter")),
    )
    op.create_table(
        "log_entries",
        sa.Column("position", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.String(length=32), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("at", sa.String(length=32), nullable=False),
        sa.Column(
            "kind",
            sa.Enum(
                "components",
                "subject",
                "tenant_revision",
                "sidecar",
                "epoch",
                name="kind",
                native_enum=False,
                create_constraint=True,
                length=32,
            ),
            nullable=False,
        ),
        sa.Column("tenant", sa.String(length=32), nullable=False),
        sa.Column("subject", sa.String(length=256), nullable=False),
        sa.Column("min_revision", sa.Integer(), nullable=False),
        sa.Column("sidecar", sa.String(length=64), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("jws", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_log_entries")),
        sa.UniqueConstraint("epoch", "seq", name=op.f("uq_log_entries_epoch_seq")),
    )
    op.create_index(
        op.f("ix_log_entries_epoch_tenant_kind_subject"),
        "log_entries",
        ["epoch", "tenant", "kind", "subject"],
        unique=False,
    )
    op.create_table(
        "revocations",
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
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("reason", sa.String(length=1024), nullable=False),
        sa.Column("asked_by", sa.String(length=256), nullable=False),
        sa.Column("idempotency_key", sa.String(length=128), nullable=True),
        sa.Column("request", sa.String(length=64), nullable=False),
        sa.Column("committed_at", sa.String(length=32), nullable=False),
        sa.Column("epoch", sa.String(length=32), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("components", sa.Text(), nullable=False),
        sa.Column("final_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("effective_at", sa.String(length=32), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_revocations")),
        sa.UniqueConstraint(
            "asked_by", "idempotency_key", name=op.f("uq_revocations_asked_by_idempotency_key")
        ),
    )
    op.create_index(op.f("ix_revocations_tenant"), "revocations", ["tenant"], unique=False)
    op.create_table(
        "sidecars",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("signing_key", sa.String(length=43), nullable=False),
        sa.Column("hpke_key", sa.String(length=43), nullable=False),
        sa.Column("every_tenant", sa.Boolean(), nullable=False),
        sa.Column("enrolled_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("leases", sa.BigInteger(), nullable=False),
        sa.Column("leased_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("epoch", sa.String(length=32), nullable=False),
        sa.Column("applied_seq", sa.Integer(), nullable=False),
        sa.Column("fenced_seq", sa.Integer(), nullable=False),
        sa.Column("reclaimed_seq", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sidecars")),
    )
    op.create_table(
        "artefacts",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column(
            "kind",
            sa.Enum(
                "model",
                "adapter",
                "tokenizer",
                "template",
                "policy",
                name="kind",
                native_enum=False,
                create_constraint=True,
                length=32,
            ),
            nullable=False,
        ),
        sa.Column("scope", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("revision", sa.String(length=128), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("removed_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["id"], ["components.id"], name=op.f("fk_artefacts_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_artefacts")),
    )
    op.create_index(
        "uq_artefacts_living_name",
        "artefacts",
        ["scope", "kind", "name", "revision"],
        unique=True,
        sqlite_where=sa.text("removed_at IS NULL"),
        postgresql_where=sa.text("removed_at IS NULL"),
    )
    op.create_table(
        "audit_references",
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("reference", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(
            ["seq"], ["audit_events.seq"], name=op.f("fk_audit_references_seq")
        ),
        sa.PrimaryKeyConstraint("seq", "reference", name=op.f("pk_audit_references")),
    )
    op.create_index(
        op.f("ix_audit_references_reference"), "audit_references", ["reference"], unique=False
    )
    op.create_table(
        "log_components",
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("component", sa.String(length=32), nullable=False),
        sa.ForeignKeyConstraint(
            ["position"], ["log_entries.position"], name=op.f("fk_log_components_position")
        ),
        sa.PrimaryKeyConstraint("position", "component", name=op.f("pk_log_components")),
    )
    op.create_index(
        op.f("ix_log_components_component"), "log_components", ["component"], unique=False
    )
    op.create_table(
        "namespaces",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=32), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["components.id"], name=op.f("fk_namespaces_tenant")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_namespaces")),
    )
    op.create_index(op.f("ix_namespaces_tenant"), "namespaces", ["tenant"], unique=False)
    op.create_table(
        "revocation_sidecars",
        sa.Column("revocation", sa.String(length=32), nullable=False),
        sa.Column("sidecar", sa.String(length=32), nullable=False),
        sa.Column(
            "state",
            sa.Enum(
                "pending",
                "fenced",
                "lease_expired",
                name="state",
                native_enum=False,
                create_constraint=True,
                length=32,
            ),
            nullable=False,
        ),
        sa.Column("at", sa.String(length=32), nullable=False),
        sa.Column("loads_fenced", sa.BigInteger(), nullable=False),
        sa.Column("saves_fenced", sa.BigInteger(), nullable=False),
        sa.Column("namespaces_dropped", sa.BigInteger(), nullable=False),
        sa.Column("bytes_reclaimed", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["revocation"], ["revocations.id"], name=op.f("fk_revocation_sidecars_revocation")
        ),
        sa.ForeignKeyConstraint(
            ["sidecar"], ["sidecars.id"], name=op.f("fk_revocation_sidecars_sidecar")
        ),
        sa.PrimaryKeyConstraint("revocation", "sidecar", name=op.f("pk_revocation_sidecars")),
    )
    op.create_index(
        op.f("ix_revocation_sidecars_sidecar"), "revocation_sidecars", ["sidecar"], unique=False
    )
    op.create_table(
        "spools",
        sa.Column("sidecar", sa.String(length=32), nullable=False),
        sa.Column("spool", sa.String(length=64), nullable=False),
        sa.Column("next_count", sa.BigInteger(), nullable=False),
        sa.Column("prev", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["sidecar"], ["sidecars.id"], name=op.f("fk_spools_sidecar")),
        sa.PrimaryKeyConstraint("sidecar", "spool", name=op.f("pk_spools")),
    )
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("review_required", sa.Boolean(), nullable=False),
        sa.Column("review_epoch", sa.String(length=32), nullable=False),
        sa.Column("review_reason", sa.String(length=256), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("removed_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["id"], ["components.id"], name=op.f("fk_tenants_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
    )
    op.create_index(
        "uq_tenants_living_name",
        "tenants",
        ["name"],
        unique=True,
        sqlite_where=sa.text("removed_at IS NULL"),
        postgresql_where=sa.text("removed_at IS NULL"),
    )
    op.create_table(
        "documents",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("tenant", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("removed_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name=op.f("fk_documents_tenant")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_documents")),
    )
    op.create_index(
        "uq_documents_living_name",
        "documents",
        ["tenant", "name"],
        unique=True,
        sqlite_where=sa.text("removed_at IS NULL"),
        postgresql_where=sa.text("removed_at IS NULL"),
    )
    op.create_table(
        "groups",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("tenant", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=144), nullable=False),
        sa.Column(
            "kind",
            sa.Enum(
                "named",
                "everyone",
                "private",
                name="kind",
                native_enum=False,
                create_constraint=True,
                length=32,
            ),
            nullable=False,
        ),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("removed_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["id"], ["components.id"], name=op.f("fk_groups_id")),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name=op.f("fk_groups_tenant")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_groups")),
    )
    op.create_index(
        "uq_groups_living_name",
        "groups",
        ["tenant", "name"],
        unique=True,
        sqlite_where=sa.text("removed_at IS NULL"),
        postgresql_where=sa.text("removed_at IS NULL"),
    )
    op.create_table(
        "join_token_tenants",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=32), nullable=False),
        sa.ForeignKeyConstraint(
            ["digest"], ["join_tokens.digest"], name=op.f("fk_join_token_tenants_digest")
        ),
        sa.ForeignKeyConstraint(
            ["tenant"], ["tenants.id"], name=op.f("fk_join_token_tenants_tenant")
        ),
        sa.PrimaryKeyConstraint("digest", "tenant", name=op.f("pk_join_token_tenants")),
    )
    op.create_table(
        "namespace_components",
        sa.Column("namespace", sa.String(length=64), nullable=False),
        sa.Column("component", sa.String(length=32), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["component"], ["components.id"], name=op.f("fk_namespace_components_component")
        ),
        sa.ForeignKeyConstraint(
            ["namespace"], ["namespaces.id"], name=op.f("fk_namespace_components_namespace")
        ),
        sa.PrimaryKeyConstraint("namespace", "component", name=op.f("pk_namespace_components")),
    )
    op.create_index(
        op.f("ix_namespace_components_component"),
        "namespace_components",
        ["component"],
        unique=False,
    )
    op.create_table(
        "policy_roles",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("tenant", sa.String(length=32), nullable=False),
        sa.Column("subject", sa.String(length=160), nullable=False),
        sa.Column("role", sa.String(length=160), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name=op.f("fk_policy_roles_tenant")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_policy_roles")),
        sa.UniqueConstraint(
            "tenant", "subject", "role", name=op.f("uq_policy_roles_tenant_subject_role")
        ),
    )
    op.create_table(
        "policy_rules",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("tenant", sa.String(length=32), nullable=False),
        sa.Column("subject", sa.String(length=160), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("resource", sa.String(length=160), nullable=False),
        sa.Column(
            "effect",
            sa.Enum(
                "allow", "deny", name="effect", native_enum=False, create_constraint=True, length=32
            ),
            nullable=False,
        ),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name=op.f("fk_policy_rules_tenant")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_policy_rules")),
        sa.UniqueConstraint(
            "tenant",
            "subject",
            "action",
            "resource",
            "effect",
            name=op.f("uq_policy_rules_tenant_subject_action_resource_effect"),
        ),
    )
    op.create_table(
        "sidecar_tenants",
        sa.Column("sidecar", sa.String(length=32), nullable=False),
        sa.Column("tenant", sa.String(length=32), nullable=False),
        sa.ForeignKeyConstraint(
            ["sidecar"], ["sidecars.id"], name=op.f("fk_sidecar_tenants_sidecar")
        ),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name=op.f("fk_sidecar_tenants_tenant")),
        sa.PrimaryKeyConstraint("sidecar", "tenant", name=op.f("pk_sidecar_tenants")),
    )
    op.create_table(
        "document_versions",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("document", sa.String(length=32), nullable=False),
        sa.Column("tenant", sa.String(length=32), nullable=False),
        sa.Column("group", sa.String(length=32), nullable=False),
        sa.Column("content_digest", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("removed_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["document"], ["documents.id"], name=op.f("fk_document_versions_document")
        ),
        sa.ForeignKeyConstraint(["group"], ["groups.id"], name=op.f("fk_document_versions_group")),
        sa.ForeignKeyConstraint(["id"], ["components.id"], name=op.f("fk_document_versions_id")),
        sa.ForeignKeyConstraint(
            ["tenant"], ["tenants.id"], name=op.f("fk_document_versions_tenant")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_document_versions")),
    )
    op.create_index(
        op.f("ix_document_versions_group"), "document_versions", ["group"], unique=False
    )
    op.create_index(
        op.f("ix_document_versions_tenant"), "document_versions", ["tenant"], unique=False
    )
    op.create_index(
        "uq_document_versions_living_text",
        "document_versions",
        ["document", "content_digest", "group"],
        unique=True,
        sqlite_where=sa.text("removed_at IS NULL"),
        postgresql_where=sa.text("removed_at IS NULL"),
    )
    op.create_table(
        "principals",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("tenant", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("private_group", sa.String(length=32), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("removed_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["private_group"], ["groups.id"], name=op.f("fk_principals_private_group")
        ),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name=op.f("fk_principals_tenant")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_principals")),
        sa.UniqueConstraint("private_group", name=op.f("uq_principals_private_group")),
    )
    op.create_index(
        "uq_principals_living_name",
        "principals",
        ["tenant", "name"],
        unique=True,
        sqlite_where=sa.text("removed_at IS NULL"),
        postgresql_where=sa.text("removed_at IS NULL"),
    )
    op.create_table(
        "memberships",
        sa.Column("group", sa.String(length=32), nullable=False),
        sa.Column("principal", sa.String(length=32), nullable=False),
        sa.Column("tenant", sa.String(length=32), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["group"], ["groups.id"], name=op.f("fk_memberships_group")),
        sa.ForeignKeyConstraint(
            ["principal"], ["principals.id"], name=op.f("fk_memberships_principal")
        ),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name=op.f("fk_memberships_tenant")),
        sa.PrimaryKeyConstraint("group", "principal", name=op.f("pk_memberships")),
    )
    op.create_index(op.f("ix_memberships_principal"), "memberships", ["principal"], unique=False)
    op.create_index(op.f("ix_memberships_tenant"), "memberships", ["tenant"], unique=False)


def downgrade() -> None:  # noqa: PLR0915
    op.drop_index(op.f("ix_memberships_tenant"), table_name="memberships")
    op.drop_index(op.f("ix_memberships_principal"), table_name="memberships")
    op.drop_table("memberships")
    op.drop_index(
        "uq_principals_living_name",
        table_name="principals",
        sqlite_where=sa.text("removed_at IS NULL"),
        postgresql_where=sa.text("removed_at IS NULL"),
    )
    op.drop_table("principals")
    op.drop_index(
        "uq_document_versions_living_text",
        table_name="document_versions",
        sqlite_where=sa.text("removed_at IS NULL"),
        postgresql_where=sa.text("removed_at IS NULL"),
    )
    op.drop_index(op.f("ix_document_versions_tenant"), table_name="document_versions")
    op.drop_index(op.f("ix_document_versions_group"), table_name="document_versions")
    op.drop_table("document_versions")
    op.drop_table("sidecar_tenants")
    op.drop_table("policy_rules")
    op.drop_table("policy_roles")
    op.drop_index(op.f("ix_namespace_components_component"), table_name="namespace_components")
    op.drop_table("namespace_components")
    op.drop_table("join_token_tenants")
    op.drop_index(
        "uq_groups_living_name",
        table_name="groups",
        sqlite_where=sa.text("removed_at IS NULL"),
        postgresql_where=sa.text("removed_at IS NULL"),
    )
    op.drop_table("groups")
    op.drop_index(
        "uq_documents_living_name",
        table_name="documents",
        sqlite_where=sa.text("removed_at IS NULL"),
        postgresql_where=sa.text("removed_at IS NULL"),
    )
    op.drop_table("documents")
    op.drop_index(
        "uq_tenants_living_name",
        table_name="tenants",
        sqlite_where=sa.text("removed_at IS NULL"),
        postgresql_where=sa.text("removed_at IS NULL"),
    )
    op.drop_table("tenants")
    op.drop_table("spools")
    op.drop_index(op.f("ix_revocation_sidecars_sidecar"), table_name="revocation_sidecars")
    op.drop_table("revocation_sidecars")
    op.drop_index(op.f("ix_namespaces_tenant"), table_name="namespaces")
    op.drop_table("namespaces")
    op.drop_index(op.f("ix_log_components_component"), table_name="log_components")
    op.drop_table("log_components")
    op.drop_index(op.f("ix_audit_references_reference"), table_name="audit_references")
    op.drop_table("audit_references")
    op.drop_index(
        "uq_artefacts_living_name",
        table_name="artefacts",
        sqlite_where=sa.text("removed_at IS NULL"),
        postgresql_where=sa.text("removed_at IS NULL"),
    )
    op.drop_table("artefacts")
    op.drop_table("sidecars")
    op.drop_index(op.f("ix_revocations_tenant"), table_name="revocations")
    op.drop_table("revocations")
    op.drop_index(op.f("ix_log_entries_epoch_tenant_kind_subject"), table_name="log_entries")
    op.drop_table("log_entries")
    op.drop_table("log_counter")
    op.drop_table("kek_versions")
    op.drop_table("join_tokens")
    op.drop_index(op.f("ix_idempotent_answers_created_at"), table_name="idempotent_answers")
    op.drop_table("idempotent_answers")
    op.drop_index(op.f("ix_components_tenant"), table_name="components")
    op.drop_table("components")
    op.drop_table("audit_nodes")
    op.drop_table("audit_heads")
    op.drop_index(op.f("ix_audit_events_tenant_seq"), table_name="audit_events")
    op.drop_index(op.f("ix_audit_events_tenant_occurred_at"), table_name="audit_events")
    op.drop_index(op.f("ix_audit_events_target_seq"), table_name="audit_events")
    op.drop_index(op.f("ix_audit_events_occurred_at"), table_name="audit_events")
    op.drop_index(op.f("ix_audit_events_kind_seq"), table_name="audit_events")
    op.drop_table("audit_events")
    op.drop_table("audit_counter")
