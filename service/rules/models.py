"""A tenant's policy rules and role assignments, as rows.

They are typed when they come in (`policy.rules`), and again when they are loaded.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from policy.rules import Effect
from service.db.base import COMPONENT, Instant, Record, choice
from strongroom.identity import ComponentId

SUBJECT = String(160)
"""`user:`, `group:` or `role:` and a name."""


class RuleRow(Record):
    """One rule: `subject` may, or may not, do `action` to `resource`."""

    __tablename__ = "policy_rules"
    __table_args__ = (UniqueConstraint("tenant", "subject", "action", "resource", "effect"),)

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant: Mapped[ComponentId] = mapped_column(COMPONENT, ForeignKey("tenants.id"))
    subject: Mapped[str] = mapped_column(SUBJECT)
    action: Mapped[str] = mapped_column(String(64))
    resource: Mapped[str] = mapped_column(SUBJECT)
    effect: Mapped[Effect] = mapped_column(choice(Effect, "effect"))
    """The database, too, knows no third one."""
    created_at: Mapped[datetime] = mapped_column(Instant)


class RoleRow(Record):
    """`subject` holds `role` in this tenant."""

    __tablename__ = "policy_roles"
    __table_args__ = (UniqueConstraint("tenant", "subject", "role"),)

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant: Mapped[ComponentId] = mapped_column(COMPONENT, ForeignKey("tenants.id"))
    subject: Mapped[str] = mapped_column(SUBJECT)
    role: Mapped[str] = mapped_column(SUBJECT)
    created_at: Mapped[datetime] = mapped_column(Instant)
