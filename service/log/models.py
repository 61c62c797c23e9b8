"""The counter row, and the entries.

The counter row is the log's one lock: whoever appends holds it until commit, so that seq has
no gaps and commit order is seq order.
"""

from __future__ import annotations

from sqlalchemy import CheckConstraint, ForeignKey, Index, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from service.db.base import COMPONENT, Record, choice
from strongroom.identity import ComponentId
from strongroom.log import InvalidationKind

EPOCH = String(32)
HASH = String(64)
THE_ROW = 1


class LogCounter(Record):
    """Where the log stands. There is one row."""

    __tablename__ = "log_counter"
    __table_args__ = (CheckConstraint("id = 1", name="one_row"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    position: Mapped[int] = mapped_column()
    """Entries of all epochs together."""
    epoch: Mapped[str] = mapped_column(EPOCH)
    seq: Mapped[int] = mapped_column()
    hash: Mapped[str] = mapped_column(HASH)


class LogRow(Record):
    """One signed entry. `kind` to `sidecar` repeat what `jws` says, to be searched by."""

    __tablename__ = "log_entries"
    __table_args__ = (
        UniqueConstraint("epoch", "seq"),
        Index(None, "epoch", "tenant", "kind", "subject"),
    )

    position: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    epoch: Mapped[str] = mapped_column(EPOCH)
    seq: Mapped[int] = mapped_column()
    at: Mapped[str] = mapped_column(String(32))
    kind: Mapped[InvalidationKind] = mapped_column(choice(InvalidationKind, "kind"))
    tenant: Mapped[str] = mapped_column(String(32))
    subject: Mapped[str] = mapped_column(String(256))
    min_revision: Mapped[int] = mapped_column()
    sidecar: Mapped[str] = mapped_column(String(64))
    hash: Mapped[str] = mapped_column(HASH)
    jws: Mapped[str] = mapped_column(Text)


class LogComponent(Record):
    """The entry that retired a component."""

    __tablename__ = "log_components"

    position: Mapped[int] = mapped_column(ForeignKey("log_entries.position"), primary_key=True)
    component: Mapped[ComponentId] = mapped_column(COMPONENT, primary_key=True, index=True)
