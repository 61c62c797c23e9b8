"""Partitions of the audit's tables on PostgreSQL: one a month (UTC), made ahead; the rest in one.

Rules:
- The next months' partitions are made while there is time. If nobody made one in time, its events
  go to the default partition, so that no event is ever refused; they are moved when it is made.
- A partition is dropped by a purge alone, after what must stay was moved to the default partition.
- SQLite has none: there a purge deletes rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from service.audit.models import AuditReference, AuditRow
from service.db.session import POSTGRESQL

AHEAD: Final = 3
"""Months for which there are partitions: this one and the next ones."""
TABLES: Final = (AuditRow.__tablename__, AuditReference.__tablename__)


@dataclass(frozen=True, slots=True, order=True)
class Month:
    """A month in UTC; its bounds are prefixes that order as moments do."""

    year: int
    month: int

    @classmethod
    def of(cls, moment: datetime) -> Month:
        """The month of a moment."""
        moment = moment.astimezone(UTC)
        return cls(moment.year, moment.month)

    def later(self, months: int) -> Month:
        """So many months later."""
        number = self.year * 12 + self.month - 1 + months
        return Month(number // 12, number % 12 + 1)

    @property
    def begin(self) -> str:
        """What is not less than this, and less than `end`, is of this month."""
        return f"{self.year:04d}-{self.month:02d}"

    @property
    def end(self) -> str:
        """The beginning of the next month."""
        return self.later(1).begin

    def table(self, parent: str) -> str:
        """The partition's name."""
        return f"{parent}_{self.year:04d}_{self.month:02d}"


def has_partitions(session: AsyncSession) -> bool:
    """Whether this database has partitions."""
    return session.get_bind().dialect.name == POSTGRESQL


async def months(session: AsyncSession) -> list[Month]:
    """The months that have a partition, oldest first."""
    names = await session.scalars(
        text(
            "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid "
            "WHERE i.inhparent = CAST(:parent AS regclass)"
        ),
        {"parent": TABLES[0]},
    )
    dated = (re.fullmatch(r".*_(\d{4})_(\d{2})", name) for name in names)
    return sorted(Month(int(found[1]), int(found[2])) for found in dated if found)


async def make_ahead(session: AsyncSession, now: datetime) -> list[Month]:
    """Make the partitions of this and the next months that are not there; returns those made."""
    if not has_partitions(session):
        return []
    known = set(await months(session))
    first = Month.of(now)
    made = [month for month in map(first.later, range(AHEAD)) if month not in known]
    for month in made:
        for parent in TABLES:
            await _make(session, parent, month)
    return made


async def _make(session: AsyncSession, parent: str, month: Month) -> None:
    """A table of its own first: what the default partition holds of the month moves into it."""
    table = month.table(parent)
    moved = f"at >= '{month.begin}' AND at < '{month.end}'"
    for statement in (
        f"CREATE TABLE {table} (LIKE {parent} INCLUDING DEFAULTS INCLUDING CONSTRAINTS)",
        f"INSERT INTO {table} SELECT * FROM {parent}_default WHERE {moved}",  # noqa: S608
        f"DELETE FROM {parent}_default WHERE {moved}",  # noqa: S608
        (
            f"ALTER TABLE {parent} ATTACH PARTITION {table} "
            f"FOR VALUES FROM ('{month.begin}') TO ('{month.end}')"
        ),
    ):
        await session.execute(text(statement))


async def drop(session: AsyncSession, month: Month, keep: str) -> tuple[int, int]:
    """Drop a month, moving what `keep` (a condition on events, in SQL) says to the default.

    Returns how many events were there, and how many were kept.
    """
    events, references = (month.table(parent) for parent in TABLES)
    await session.execute(text("SET LOCAL lock_timeout = '10s'"))
    count = await session.scalar(text(f"SELECT count(*) FROM {events}"))  # noqa: S608
    for parent, table in zip(TABLES, (events, references), strict=True):
        await session.execute(text(f"ALTER TABLE {parent} DETACH PARTITION {table}"))
    kept = await session.scalars(
        text(
            f"INSERT INTO {TABLES[0]} SELECT * FROM {events} AS audit_events "  # noqa: S608
            f"WHERE {keep} RETURNING seq"
        )
    )
    seqs: Sequence[int] = kept.all()
    await session.execute(
        text(
            f"INSERT INTO {TABLES[1]} SELECT * FROM {references} "  # noqa: S608
            "WHERE seq = ANY(:seqs)"
        ),
        {"seqs": list(seqs)},
    )
    for table in (events, references):
        await session.execute(text(f"DROP TABLE {table}"))
    return count or 0, len(seqs)
