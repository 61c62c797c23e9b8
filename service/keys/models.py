"""Components and the versions of the keys that wrap their secrets.

A component's row is never deleted: once its secret is destroyed it is the tombstone that
keeps the id from being used again.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Index, LargeBinary, String, text
from sqlalchemy.orm import Mapped, mapped_column

from service.db.base import COMPONENT, Instant, Record, choice
from strongroom.identity import ComponentId, ComponentKind


class KekVersion(Record):
    """One version of a key-encryption key; destroyed, everything it wrapped is final."""

    __tablename__ = "kek_versions"

    kek: Mapped[str] = mapped_column(String(64), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True)
    created_at: Mapped[datetime] = mapped_column(Instant)
    retired_at: Mapped[datetime | None] = mapped_column(Instant)
    """Since then nothing new is wrapped under it: a rotation has begun."""
    destroyed_at: Mapped[datetime | None] = mapped_column(Instant)


class KekRotation(Record):
    """One rotation of one KEK, from its beginning to the destruction of the versions before."""

    __tablename__ = "kek_rotations"
    __table_args__ = (
        Index(
            "uq_kek_rotations_kek_open",
            "kek",
            unique=True,
            sqlite_where=text("finished_at IS NULL"),
            postgresql_where=text("finished_at IS NULL"),
        ),
    )

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    kek: Mapped[str] = mapped_column(String(64), index=True)
    target: Mapped[int] = mapped_column()
    """Versions below it end. Of a KEK under which nothing lives, that is every one."""
    components_total: Mapped[int] = mapped_column(BigInteger)
    """Living components under older versions when it began."""
    asked_by: Mapped[str] = mapped_column(String(256))
    started_at: Mapped[datetime] = mapped_column(Instant)
    finished_at: Mapped[datetime | None] = mapped_column(Instant)
    failure: Mapped[str] = mapped_column(String(64))
    """The code of what stopped it last; empty while it goes on. It is tried again."""


class Purpose(StrEnum):
    """What a component's secret was unwrapped for."""

    GRANT_SALT = "grant_salt"
    KEY_LEASE = "key_lease"
    ROTATION = "rotation"
    CHECK = "check"
    """Whether a version opens what it wrapped."""


class KeyUse(Record):
    """One component's secret, unwrapped once. It names who and what for, and holds no secret."""

    __tablename__ = "key_uses"
    __table_args__ = (
        Index("ix_key_uses_component_id", "component", "id"),
        Index("ix_key_uses_tenant_id", "tenant", "id"),
    )

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    """Grows with time: milliseconds since 1970 in 12 digits, then random ones."""
    at: Mapped[datetime] = mapped_column(Instant)
    component: Mapped[str] = mapped_column(COMPONENT)
    """Empty: every living one under that version, in a rotation."""
    kek: Mapped[str] = mapped_column(String(64))
    kek_version: Mapped[int] = mapped_column()
    tenant: Mapped[str | None] = mapped_column(String(32))
    """For whom; None: for the installation."""
    purpose: Mapped[Purpose] = mapped_column(choice(Purpose, "purpose"))
    actor_kind: Mapped[str] = mapped_column(String(32))
    actor: Mapped[str] = mapped_column(String(256))
    reference: Mapped[str] = mapped_column(String(64))
    """The grant's or the rotation's id."""


class Component(Record):
    """One axis value of identities, owner of one secret."""

    __tablename__ = "components"
    __table_args__ = (
        CheckConstraint("(wrapped IS NULL) = (destroyed_at IS NOT NULL)", name="tombstone"),
        Index("ix_components_kek_kek_version", "kek", "kek_version"),
    )

    id: Mapped[ComponentId] = mapped_column(COMPONENT, primary_key=True)
    kind: Mapped[ComponentKind] = mapped_column(choice(ComponentKind, "kind"))
    tenant: Mapped[ComponentId | None] = mapped_column(
        COMPONENT, ForeignKey("components.id"), index=True
    )
    """None: shared by the installation. A tenant's own component names itself."""
    kek: Mapped[str] = mapped_column(String(64))
    kek_version: Mapped[int] = mapped_column()
    wrapped: Mapped[bytes | None] = mapped_column(LargeBinary(512))
    created_at: Mapped[datetime] = mapped_column(Instant)
    destroyed_at: Mapped[datetime | None] = mapped_column(Instant)
