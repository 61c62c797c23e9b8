"""Tenants, principals, groups and memberships.

A tenant and a group are components: their ids are component ids. A principal's name is free
again once it was removed, but the new principal is another row with another private group.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from sqlalchemy import ForeignKey, Index, String, text
from sqlalchemy.orm import Mapped, mapped_column

from service.db.base import COMPONENT, Instant, Record, choice
from strongroom.identity import ComponentId
from strongroom.limits import NAME_CHARS_MAX

_LIVING = text("removed_at IS NULL")


class GroupKind(StrEnum):
    """Who is in a group: those named, every subject of the tenant, or one subject alone."""

    NAMED = "named"
    EVERYONE = "everyone"
    PRIVATE = "private"


class Tenant(Record):
    """A tenant. `revision` counts the states of its authorization.

    While `review_required`, nothing is granted in it: the database was restored, and who may do
    what may be older than it was. `review_epoch` is the epoch of the log that it fell behind.
    """

    __tablename__ = "tenants"
    __table_args__ = (
        Index(
            "uq_tenants_living_name",
            "name",
            unique=True,
            sqlite_where=_LIVING,
            postgresql_where=_LIVING,
        ),
    )

    id: Mapped[ComponentId] = mapped_column(
        COMPONENT, ForeignKey("components.id"), primary_key=True
    )
    name: Mapped[str] = mapped_column(String(NAME_CHARS_MAX))
    revision: Mapped[int] = mapped_column()
    review_required: Mapped[bool] = mapped_column(default=False)
    review_epoch: Mapped[str] = mapped_column(String(32), default="")
    review_reason: Mapped[str] = mapped_column(String(256), default="")
    created_at: Mapped[datetime] = mapped_column(Instant)
    removed_at: Mapped[datetime | None] = mapped_column(Instant)


class Group(Record):
    """An access group of one tenant."""

    __tablename__ = "groups"
    __table_args__ = (
        Index(
            "uq_groups_living_name",
            "tenant",
            "name",
            unique=True,
            sqlite_where=_LIVING,
            postgresql_where=_LIVING,
        ),
    )

    id: Mapped[ComponentId] = mapped_column(
        COMPONENT, ForeignKey("components.id"), primary_key=True
    )
    tenant: Mapped[ComponentId] = mapped_column(COMPONENT, ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(String(NAME_CHARS_MAX + 16))
    kind: Mapped[GroupKind] = mapped_column(choice(GroupKind, "kind"))
    created_at: Mapped[datetime] = mapped_column(Instant)
    removed_at: Mapped[datetime | None] = mapped_column(Instant)


class Principal(Record):
    """A subject of one tenant, with the group that holds nobody else."""

    __tablename__ = "principals"
    __table_args__ = (
        Index(
            "uq_principals_living_name",
            "tenant",
            "name",
            unique=True,
            sqlite_where=_LIVING,
            postgresql_where=_LIVING,
        ),
    )

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant: Mapped[ComponentId] = mapped_column(COMPONENT, ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(String(NAME_CHARS_MAX))
    private_group: Mapped[ComponentId] = mapped_column(
        COMPONENT, ForeignKey("groups.id"), unique=True
    )
    created_at: Mapped[datetime] = mapped_column(Instant)
    removed_at: Mapped[datetime | None] = mapped_column(Instant)


class Membership(Record):
    """One principal's place in one named group. Private groups and `everyone` need none."""

    __tablename__ = "memberships"

    group: Mapped[ComponentId] = mapped_column(COMPONENT, ForeignKey("groups.id"), primary_key=True)
    principal: Mapped[str] = mapped_column(
        String(32), ForeignKey("principals.id"), primary_key=True, index=True
    )
    tenant: Mapped[ComponentId] = mapped_column(COMPONENT, ForeignKey("tenants.id"), index=True)
    created_at: Mapped[datetime] = mapped_column(Instant)
