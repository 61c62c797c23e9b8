"""Listing in pages: rows in the order of their ids, with an opaque cursor to go on from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from sqlalchemy import Select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from policy.signing import decode_base64url, encode_base64url
from strongroom.errors import Misuse

_VERSION: Final = b"\x01"
_ID: Final = re.compile(r"[0-9a-f]{32}")

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Page(Generic[Row]):
    """Some rows, and the cursor of the page after them if there is one."""

    rows: Sequence[Row]
    next_cursor: str | None


def encode_cursor(last_id: str) -> str:
    """The cursor that goes on after `last_id`."""
    return encode_base64url(_VERSION + bytes.fromhex(last_id))


def decode_cursor(cursor: str) -> str:
    """The id to go on after. Raises `Misuse` for what no page gave out."""
    raw = decode_base64url(cursor, "cursor")
    last_id = raw[1:].hex()
    if raw[:1] != _VERSION or _ID.fullmatch(last_id) is None:
        raise Misuse("this cursor was not given out by a listing", field="cursor")
    return last_id


async def read_page(
    session: AsyncSession,
    statement: Select[Row],
    key: InstrumentedAttribute[str],
    cursor: str | None,
    limit: int,
) -> Page[Row]:
    """Up to `limit` rows of `statement`, whose entity has the 32-digit id column `key`."""
    if cursor is not None:
        statement = statement.where(key > decode_cursor(cursor))
    rows = (await session.scalars(statement.order_by(key).limit(limit + 1))).all()
    if len(rows) <= limit:
        return Page(rows, None)
    rows = rows[:limit]
    return Page(rows, encode_cursor(getattr(rows[-1], key.key)))
