"""Listing in pages: rows in the order of their ids, each page from where the last one ended."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from sqlalchemy import Select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from strongroom.errors import Misuse

_ID: Final = re.compile(r"[0-9a-f]{32}")

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Paging:
    """At most `limit` rows after `place`; `cursor` makes a place into what a caller is given."""

    limit: int
    place: bytes | None
    cursor: Callable[[bytes], str]


@dataclass(frozen=True, slots=True)
class Page(Generic[Row]):
    """Some rows, and the cursor of the page after them if there is one."""

    rows: Sequence[Row]
    next_cursor: str | None


async def read_page(
    session: AsyncSession,
    statement: Select[Row],
    key: InstrumentedAttribute[str],
    paging: Paging,
) -> Page[Row]:
    """A page of `statement`, whose entity has the 32-digit id column `key`."""
    if paging.place is not None:
        last_id = paging.place.hex()
        if _ID.fullmatch(last_id) is None:
            raise Misuse("this cursor was not given out by this listing", field="cursor")
        statement = statement.where(key > last_id)
    rows = (await session.scalars(statement.order_by(key).limit(paging.limit + 1))).all()
    if len(rows) <= paging.limit:
        return Page(rows, None)
    rows = rows[: paging.limit]
    return Page(rows, paging.cursor(bytes.fromhex(getattr(rows[-1], key.key))))
