"""Finding events in the order of their time, page by page.

Every listing is ordered by (occurred_at, seq). A page costs what it holds, however many events fit:
the position goes into the index condition, and nothing is counted or skipped over. Events that
refer to one of many ids are found by a short ordered look-up for each id, some dozens a statement;
what earlier ones found bounds the later ones.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from sqlalchemy import (
    ColumnElement,
    Select,
    SQLColumnExpression,
    and_,
    select,
    tuple_,
    union_all,
)
from sqlalchemy.ext.asyncio import AsyncSession

from service.audit import store
from service.audit.events import AuditEvent
from service.audit.models import AuditReference, AuditRow
from strongroom.errors import Misuse

Candidates: TypeAlias = "Select[int, str, str]"
"""Selects seq, at and occurred_at of events, joined with `AuditRow`."""
_AT_ONCE: Final = 48
"""Look-ups in one statement: SQLite allows 500 terms, PostgreSQL plans each."""


@dataclass(frozen=True, slots=True)
class Position:
    """An event's place among all: when it happened, then its place in the chain."""

    occurred_at: str
    seq: int

    def encode(self) -> bytes:
        """For a cursor."""
        return struct.pack(">q", self.seq) + self.occurred_at.encode()

    @classmethod
    def decode(cls, raw: bytes) -> Position:
        """From `encode`. Raises `Misuse`."""
        try:
            (seq,) = struct.unpack(">q", raw[:8])
            return cls(raw[8:].decode("ascii"), seq)
        except (struct.error, UnicodeError) as error:
            raise Misuse("this cursor was not given out by this listing", field="cursor") from error


@dataclass(frozen=True, slots=True)
class Search:
    """Events for which every condition holds; with `candidates`, those of them alone."""

    conditions: tuple[ColumnElement[bool], ...] = ()
    candidates: tuple[Candidates, ...] | None = None
    in_chain_order: bool = False
    """By seq alone, for whoever follows the chain."""

    def also(self, *conditions: ColumnElement[bool]) -> Search:
        """This search, and more conditions."""
        return Search((*self.conditions, *conditions), self.candidates, self.in_chain_order)


@dataclass(frozen=True, slots=True)
class Found:
    """Some events, and the position to go on after if there are more."""

    events: tuple[AuditEvent, ...]
    last: Position | None


def referring(*conditions: ColumnElement[bool]) -> Candidates:
    """Events with a reference for which the conditions hold."""
    return (
        select(AuditReference.seq, AuditReference.at, AuditReference.occurred_at)
        .join(
            AuditRow,
            and_(AuditRow.seq == AuditReference.seq, AuditRow.at == AuditReference.at),
        )
        .where(*conditions)
    )


def about(references: Iterable[str]) -> tuple[Candidates, ...]:
    """Events that refer to one of `references`."""
    return tuple(referring(AuditReference.reference == each) for each in references)


async def find(
    session: AsyncSession,
    search: Search,
    after: Position | None,
    limit: int,
    *,
    newest_first: bool = False,
) -> Found:
    """Up to `limit` events after a position."""
    if search.candidates is None:
        statement = page_of(search, after, limit, newest_first=newest_first)
        rows: Sequence[AuditRow] = (await session.scalars(statement)).all()
    else:
        rows = await _among(session, search, after, limit, newest_first=newest_first)
    more, rows = len(rows) > limit, rows[:limit]
    references = await store.references_of(session, [row.seq for row in rows])
    events = tuple(store.event_of(row, references[row.seq]) for row in rows)
    return Found(events, Position(rows[-1].occurred_at, rows[-1].seq) if more else None)


def page_of(
    search: Search, after: Position | None, limit: int, *, newest_first: bool
) -> Select[AuditRow]:
    """The statement of one page of a search without candidates, and one event beyond it."""
    statement = select(AuditRow).where(*search.conditions).limit(limit + 1)
    key: tuple[SQLColumnExpression[Any], ...] = (AuditRow.occurred_at, AuditRow.seq)
    if search.in_chain_order:
        key = (AuditRow.seq,)
        if after is not None:
            beyond = AuditRow.seq < after.seq if newest_first else AuditRow.seq > after.seq
            statement = statement.where(beyond)
    elif after is not None:
        statement = statement.where(
            _beyond(AuditRow.occurred_at, AuditRow.seq, after, newest_first=newest_first)
        )
    return statement.order_by(*(part.desc() if newest_first else part.asc() for part in key))


async def _among(
    session: AsyncSession,
    search: Search,
    after: Position | None,
    limit: int,
    *,
    newest_first: bool,
) -> Sequence[AuditRow]:
    candidates = search.candidates or ()
    best: dict[int, str] = {}
    last: Position | None = None
    for start in range(0, len(candidates), _AT_ONCE):
        statement = candidates_of(
            candidates[start : start + _AT_ONCE],
            search.conditions,
            after,
            last,
            limit,
            newest_first=newest_first,
        )
        best.update((row.seq, row.occurred_at) for row in await session.execute(statement))
        if len(best) > limit:
            kept = sorted(((moment, seq) for seq, moment in best.items()), reverse=newest_first)[
                : limit + 1
            ]
            best = {seq: moment for moment, seq in kept}
            last = Position(*kept[-1])
    rows = (await session.scalars(select(AuditRow).where(AuditRow.seq.in_(list(best))))).all()
    return sorted(rows, key=lambda row: (row.occurred_at, row.seq), reverse=newest_first)


def candidates_of(
    candidates: Sequence[Candidates],
    conditions: Sequence[ColumnElement[bool]],
    after: Position | None,
    last: Position | None,
    limit: int,
    *,
    newest_first: bool,
) -> Select[int, str]:
    """One statement for some candidates: between two positions, the first of each."""
    parts = []
    for candidate in candidates:
        columns = candidate.selected_columns
        moment, seq = columns.occurred_at, columns.seq
        statement = candidate.where(*conditions)
        if after is not None:
            statement = statement.where(_beyond(moment, seq, after, newest_first=newest_first))
        if last is not None:
            statement = statement.where(_beyond(moment, seq, last, newest_first=not newest_first))
        key = (moment.desc(), seq.desc()) if newest_first else (moment, seq)
        part = statement.order_by(*key).limit(limit + 1).subquery()
        parts.append(select(part.c.seq, part.c.occurred_at))
    every = union_all(*parts).subquery()
    return select(every.c.seq, every.c.occurred_at)


def _beyond(
    moment: SQLColumnExpression[str],
    seq: SQLColumnExpression[int],
    place: Position,
    *,
    newest_first: bool,
) -> ColumnElement[bool]:
    here, there = tuple_(moment, seq), tuple_(place.occurred_at, place.seq)
    return here < there if newest_first else here > there
