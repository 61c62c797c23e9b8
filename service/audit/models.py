"""Audit events, what they refer to, the tree over them, and the heads that were signed."""

from __future__ import annotations

from sqlalchemy import BigInteger, CheckConstraint, Index, LargeBinary, String, Text, text
from sqlalchemy.orm import Mapped, mapped_column
from sqlalchemy.sql.elements import TextClause

from service.audit.events import Category
from service.db.base import Record, choice
from strongroom.identity import ComponentId

HASH = String(64)
MOMENT = String(32).with_variant(String(32, collation="C"), "postgresql")
"""RFC 3339 text of one width, ordered byte by byte whatever the database's language is."""
THE_ROW = 1


def _is(category: str) -> TextClause:
    """The condition of a partial index. A query has to write it in the same words."""
    return text(f"category = '{category}'")


def _partial(category: str, *columns: str) -> Index:
    name = f"ix_audit_events_{category}_{'_'.join(columns)}"
    where = _is(category)
    return Index(name, *columns, postgresql_where=where, sqlite_where=where)


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
    """One event. Rows are only ever inserted, and purged after their retention.

    Every index ends in (occurred_at, seq), the order of every listing, so that a page costs what
    it holds. On PostgreSQL the table is partitioned by month of `at`.
    """

    __tablename__ = "audit_events"
    __table_args__ = (
        Index(None, "occurred_at", "seq"),
        Index(None, "tenant", "occurred_at", "seq"),
        Index(None, "tenant", "subject", "occurred_at", "seq"),
        Index(None, "actor", "occurred_at", "seq"),
        Index(None, "kind", "occurred_at", "seq"),
        Index(None, "target", "occurred_at", "seq"),
        _partial("denied", "occurred_at", "kind", "reason"),
        _partial("denied", "tenant", "occurred_at", "kind", "reason"),
        _partial("key", "tenant", "occurred_at", "seq"),
        _partial("alarm", "occurred_at", "seq"),
        {"postgresql_partition_by": "RANGE (at)"},
    )

    seq: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    """From 0: the event's leaf index in the tree."""
    at: Mapped[str] = mapped_column(MOMENT, primary_key=True)
    """When it was recorded: RFC 3339 in UTC, of one width, so that texts order as times do."""
    occurred_at: Mapped[str] = mapped_column(MOMENT)
    """When it happened; differs from `at` for what a sidecar's spool brought."""
    category: Mapped[Category] = mapped_column(choice(Category, "category"))
    """Follows from kind, outcome and reason."""
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
    """A namespace or component that an event is about. It is part of what the event hashes.

    `at`, `occurred_at` and `category` repeat the event's, to be searched by.
    """

    __tablename__ = "audit_references"
    __table_args__ = (
        Index(None, "reference", "occurred_at", "seq"),
        Index(
            "ix_audit_references_served",
            "occurred_at",
            "reference",
            postgresql_where=_is("served"),
            sqlite_where=_is("served"),
        ),
        Index(
            "ix_audit_references_alien",
            "occurred_at",
            "seq",
            postgresql_where=text("alien"),
            sqlite_where=text("alien"),
        ),
        {"postgresql_partition_by": "RANGE (at)"},
    )

    seq: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    reference: Mapped[str] = mapped_column(String(64), primary_key=True)
    at: Mapped[str] = mapped_column(MOMENT, primary_key=True)
    occurred_at: Mapped[str] = mapped_column(MOMENT)
    category: Mapped[Category] = mapped_column(choice(Category, "category"))
    alien: Mapped[bool] = mapped_column()
    """A served namespace that is another tenant's than the event's, or nobody's."""


class AuditTile(Record):
    """256 complete nodes of one level of the tree (see `merkle`). Written once, never purged."""

    __tablename__ = "audit_tiles"

    level: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    index: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    hashes: Mapped[bytes] = mapped_column(LargeBinary(8192))
    """Of level 0: the leaf hashes of 256 events, which outlive the events."""
    root: Mapped[bytes] = mapped_column(LargeBinary(32))


class AuditHead(Record):
    """A signed head: what the tree was at some size. Copies of it are to be kept elsewhere."""

    __tablename__ = "audit_heads"

    size: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    root: Mapped[str] = mapped_column(HASH)
    at: Mapped[str] = mapped_column(String(32))
    jws: Mapped[str] = mapped_column(Text)


class AuditHold(Record):
    """A legal hold: what it covers is not purged while it stands. It stops no revocation."""

    __tablename__ = "audit_holds"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant: Mapped[ComponentId | None] = mapped_column(String(32), index=True)
    """None: every tenant's events, and those of none."""
    since: Mapped[str | None] = mapped_column(MOMENT)
    """Of what happened from then on; None: whenever."""
    until: Mapped[str | None] = mapped_column(MOMENT)
    reason: Mapped[str] = mapped_column(String(1024))
    placed_by: Mapped[str] = mapped_column(String(256))
    placed_at: Mapped[str] = mapped_column(MOMENT)
    released_by: Mapped[str | None] = mapped_column(String(256))
    released_at: Mapped[str | None] = mapped_column(MOMENT)
