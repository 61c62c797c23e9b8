"""Insert what is not there yet, in the words of each database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.base import Record
from service.db.session import SQLITE


async def insert_missing(
    session: AsyncSession, record: type[Record], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Insert `rows`, leaving alone those whose key exists."""
    if not rows:
        return
    if session.get_bind().dialect.name == SQLITE:
        await session.execute(sqlite.insert(record).on_conflict_do_nothing(), list(rows))
    else:
        await session.execute(postgresql.insert(record).on_conflict_do_nothing(), list(rows))
