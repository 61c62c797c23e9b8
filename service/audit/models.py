"""Audit events, what they refer to, the tree over them, and the heads that were signed."""

from __future__ import annotations

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from service.db.base import Record
from strongroom.identity import ComponentId

HASH = String(64)
THE_ROW = 1


class AuditCounter(Record):
    """Where the chain and the tree stand. There is one row, locked by whoever appends."""

    __tablename__ = "audit_counter"
    __table_args__ = (CheckConstraint("id = 1", name="one_row"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    size: Mapped[int] = mapped_column(BigInteger)
    hash: Mapped[str] = mapped_column(HASH)
    """The last event's; empty before the first."""
    peaks: Mapped[str] = mapped_column(Text)
    """The tree's complete subtrees, largest first: hexadecimal, back to back."""


class AuditRow(Record):
    """One event. Rows are only ever inserted."""

    __tablename__ = "audit_events"
    __table_args__ = (
        Index(None, "tenant", "seq"),
        Index(None, "tenant", "occurred_at"),
        Index(None, "kind", "seq"),
        Index(None, "target", "seq"),
    )

    seq: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    """From 0: the event's leaf index in the tree."""
    at: Mapped[str] = mapped_column(String(32))
    """When it was recorded: RFC 3339 in UTC, of one width, so that texts order as times do."""
    occurred_at: Mapped[str] = mapped_column(String(32), index=True)
    """When it happened; differs from `at` for what a sidecar's spool brought."""
    kind: Mapped[str] = mapped_column(String(64))
    actor_kind: Mapped[str] = mapped_column(String(32))
    actor: Mapped[str] = mapped_column(String(256))
    tenant: Mapped[ComponentId | None] = mapped_column(String(32))
    subject: Mapped[str] = mapped_column(String(256))
    target: Mapped[str] = mapped_column(String(256))
    outcome: Mapped[str] = mapped_column(String(32))
    reason: Mapped[str] = mapped_column(String(256))
    details: Mapped[str] = mapped_column(Text)
    """Canonical JSON."""
    prev: Mapped[str] = mapped_column(HASH)
    hash: Mapped[str] = mapped_column(HASH)
    """The RFC 9162 leaf hash of the event's canonical JSON."""


class AuditReference(Record):
    """A namespace or component that an event is about. It is part of what the event hashes."""

    __tablename__ = "audit_references"

    seq: Mapped[int] = mapped_column(ForeignKey("audit_events.seq"), primary_key=True)
    reference: Mapped[str] = mapped_column(String(64), primary_key=True, index=True)


class AuditNode(Record):
    """A complete subtree of two leaves or more; leaves are the events' own hashes."""

    __tablename__ = "audit_nodes"

    level: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    index: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    hash: Mapped[str] = mapped_column(HASH)


class AuditHead(Record):
    """A signed head: what the tree was at some size. Copies of it are to be kept elsewhere."""

    __tablename__ = "audit_heads"

    size: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    root: Mapped[str] = mapped_column(HASH)
    at: Mapped[str] = mapped_column(String(32))
    jws: Mapped[str] = mapped_column(Text)
