"""Restored backups that a start has to settle with the journal."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import String
from sqlalchemy.orm import Mapped, mapped_column

from service.db.base import Instant, Record


class Restoration(Record):
    """One backup that was put into this database."""

    __tablename__ = "restorations"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    backup: Mapped[str] = mapped_column(String(32))
    made_at: Mapped[str] = mapped_column(String(32))
    position: Mapped[int] = mapped_column()
    """Where the log stood in it: the journal reaches at least as far."""
    restored_at: Mapped[datetime] = mapped_column(Instant)
    settled_at: Mapped[datetime | None] = mapped_column(Instant)
    """When a start had compared it with the journal."""
