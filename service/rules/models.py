"""A tenant's policy as rows: rules, roles and test cases, each with the versions that it is in.

A row is in the versions from `added_in` to before `removed_in` (None: in the newest). What is
removed stays, so that any version can be read again and any two compared. Rows are typed when
they come in (`policy.rules`), and again when they are loaded.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from sqlalchemy import ForeignKey, Index, String, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from policy.conditions import CONDITION_CHARS_MAX
from policy.rules import Effect
from service.db.base import COMPONENT, Instant, Record, choice
from strongroom.identity import ComponentId
from strongroom.limits import NAME_CHARS_MAX

SUBJECT = String(160)
"""`user:`, `group:` or `role:` and a name."""
_NEWEST = text("removed_in IS NULL")


def _newest_once(name: str, *columns: str) -> Index:
    """One row of its kind in the newest version."""
    return Index(
        name, "tenant", *columns, unique=True, sqlite_where=_NEWEST, postgresql_where=_NEWEST
    )


class Origin(StrEnum):
    """What made a version."""

    EDITED = "edited"
    """One rule or role was added or removed."""
    IMPORTED = "imported"
    ROLLED_BACK = "rolled_back"
    SUBJECT_REMOVED = "subject_removed"
    """With a principal or a group went what was about it."""
    TESTS_CHANGED = "tests_changed"
    """Test cases alone: nobody's rights changed."""
    MIGRATED = "migrated"
    """What there was before there were versions."""


class VersionRow(Record):
    """One version of a tenant's policy; number 0, which is empty, has no row."""

    __tablename__ = "policy_versions"
    __table_args__ = (UniqueConstraint("tenant", "number"),)

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant: Mapped[ComponentId] = mapped_column(COMPONENT, ForeignKey("tenants.id"))
    number: Mapped[int] = mapped_column()
    origin: Mapped[Origin] = mapped_column(choice(Origin, "origin"))
    author_kind: Mapped[str] = mapped_column(String(32))
    author: Mapped[str] = mapped_column(String(NAME_CHARS_MAX))
    reason: Mapped[str] = mapped_column(String(256))
    source: Mapped[int | None] = mapped_column()
    """Of a rollback: the version whose rules and roles it has again."""
    added: Mapped[int] = mapped_column()
    removed: Mapped[int] = mapped_column()
    """Rules, roles and test cases that the version before had not, or had."""
    revision: Mapped[int] = mapped_column()
    """Of the tenant, from which it counts."""
    created_at: Mapped[datetime] = mapped_column(Instant)


class RuleRow(Record):
    """One rule: `subject` may, or may not, do `action` to `resource` where `condition` holds."""

    __tablename__ = "policy_rules"
    __table_args__ = (
        _newest_once(
            "uq_policy_rules_newest", "subject", "action", "resource", "effect", "condition"
        ),
        Index("ix_policy_rules_tenant_removed_in", "tenant", "removed_in"),
    )

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant: Mapped[ComponentId] = mapped_column(COMPONENT, ForeignKey("tenants.id"))
    subject: Mapped[str] = mapped_column(SUBJECT)
    action: Mapped[str] = mapped_column(String(64))
    resource: Mapped[str] = mapped_column(SUBJECT)
    effect: Mapped[Effect] = mapped_column(choice(Effect, "effect"))
    """The database, too, knows no third one."""
    condition: Mapped[str] = mapped_column(String(CONDITION_CHARS_MAX))
    """As `policy.conditions.encode_condition` has it; empty: always."""
    added_in: Mapped[int] = mapped_column()
    removed_in: Mapped[int | None] = mapped_column()
    created_at: Mapped[datetime] = mapped_column(Instant)


class RoleRow(Record):
    """`subject` holds `role` in this tenant."""

    __tablename__ = "policy_roles"
    __table_args__ = (
        _newest_once("uq_policy_roles_newest", "subject", "role"),
        Index("ix_policy_roles_tenant_removed_in", "tenant", "removed_in"),
    )

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant: Mapped[ComponentId] = mapped_column(COMPONENT, ForeignKey("tenants.id"))
    subject: Mapped[str] = mapped_column(SUBJECT)
    role: Mapped[str] = mapped_column(SUBJECT)
    added_in: Mapped[int] = mapped_column()
    removed_in: Mapped[int | None] = mapped_column()
    created_at: Mapped[datetime] = mapped_column(Instant)


class CaseRow(Record):
    """A test case that is stored beside the policy: a question, and the answer it must get."""

    __tablename__ = "policy_cases"
    __table_args__ = (_newest_once("uq_policy_cases_newest", "name"),)

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant: Mapped[ComponentId] = mapped_column(COMPONENT, ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(String(NAME_CHARS_MAX))
    subject: Mapped[str] = mapped_column(SUBJECT)
    action: Mapped[str] = mapped_column(String(64))
    resource: Mapped[str] = mapped_column(String(192))
    expect: Mapped[Effect] = mapped_column(choice(Effect, "expect"))
    context: Mapped[str] = mapped_column(String(256))
    """As `policy.cases.encode_context` has it."""
    added_in: Mapped[int] = mapped_column()
    removed_in: Mapped[int | None] = mapped_column()
    created_at: Mapped[datetime] = mapped_column(Instant)
