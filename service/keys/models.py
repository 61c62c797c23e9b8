"""Components and the versions of the keys that wrap their secrets.

A component's row is never deleted: once its secret is destroyed it is the tombstone that
keeps the id from being used again.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from service.db.base import COMPONENT, Instant, Record, choice
from strongroom.identity import ComponentId, ComponentKind


class KekVersion(Record):
    """One version of a key-encryption key; destroyed, everything it wrapped is final."""

    __tablename__ = "kek_versions"

    kek: Mapped[str] = mapped_column(String(64), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True)
    created_at: Mapped[datetime] = mapped_column(Instant)
    destroyed_at: Mapped[datetime | None] = mapped_column(Instant)


class Component(Record):
    """One axis value of identities, owner of one secret."""

    __tablename__ = "components"
    __table_args__ = (
        CheckConstraint("(wrapped IS NULL) = (destroyed_at IS NOT NULL)", name="tombstone"),
    )

    id: Mapped[ComponentId] = mapped_column(COMPONENT, primary_key=True)
    kind: Mapped[ComponentKind] = mapped_column(choice(ComponentKind, "kind"))
    tenant: Mapped[ComponentId | None] = mapped_column(
        COMPONENT, ForeignKey("components.id"), index=True
    )
    """None: shared by the installation. A tenant's own component names itself."""
    kek: Mapped[str] = mapped_column(String(64))
    kek_version: Mapped[int] = mapped_column()
    wrapped: Mapped[bytes | None] = mapped_column(LargeBinary(128))
    created_at: Mapped[datetime] = mapped_column(Instant)
    destroyed_at: Mapped[datetime | None] = mapped_column(Instant)
