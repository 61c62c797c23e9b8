"""Finding events in the order of their time, page by page.

Every listing is ordered by (occurred_at, seq). A page costs what it holds, however many events fit:
the position goes into the index condition, and nothing is counted or skipped over. Events that
refer to one of many ids are found by a short ordered look-up for each id, in an index alone, many a
statement; what earlier ones found bounds the later ones. The other conditions are put to what was
found, and the search goes on behind it where they leave too little.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from sqlalchemy import (
    ColumnElement,
    Select,
    SQLColumnExpression,
    String,
    column,
    func,
    literal,
    select,
    true,
    tuple_,
    union_all,
)
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.asyncio import AsyncSession

from service.audit import store
from service.audit.events import AuditEvent, Category
from service.audit.models import AuditReference, AuditRow
from service.db.session import POSTGRESQL
from strongroom.errors import Misuse

_LATERAL_AT_ONCE: Final = 200
_UNION_AT_ONCE: Final = 48
"""Look-ups in one statement; SQLite has no LATERAL, and allows 500 terms."""
_WIDEST: Final = 4096
"""Candidates looked at together, where conditions leave few of them."""


@dataclass(frozen=True, slots=True)
class Referring:
    """Events that refer to one of `ids`, of one category if it is given."""

    ids: tuple[str, ...]
    category: Category | None = None


@dataclass(frozen=True, slots=True)
class Selected:
    """Events that one of the statements selects: seq, at and occurred_at. There are few."""

    statements: tuple[Select[int, str, str], ...]


Candidates: TypeAlias = Referring | Selected


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
    candidates: Candidates | None = None
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
        rows = await _among(
            session, search, search.candidates, after, limit, newest_first=newest_first
        )
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
    candidates: Candidates,
    after: Position | None,
    limit: int,
    *,
    newest_first: bool,
) -> Sequence[AuditRow]:
    found: list[AuditRow] = []
    wide = limit + 1
    while True:
        places = await _first(session, candidates, after, wide, newest_first=newest_first)
        if places:
            rows = await session.scalars(
                select(AuditRow).where(
                    AuditRow.seq.in_([place.seq for place in places]), *search.conditions
                )
            )
            found += sorted(rows, key=lambda row: (row.occurred_at, row.seq), reverse=newest_first)
        if len(found) > limit or len(places) < wide:
            return found
        after, wide = places[-1], min(wide * 4, _WIDEST)


async def _first(
    session: AsyncSession,
    candidates: Candidates,
    after: Position | None,
    limit: int,
    *,
    newest_first: bool,
) -> list[Position]:
    """The first `limit` candidates behind a position."""
    best: set[tuple[str, int]] = set()
    match candidates:
        case Referring(ids, category):
            lateral = session.get_bind().dialect.name == POSTGRESQL
            make = lateral_of if lateral else union_of
            step = _LATERAL_AT_ONCE if lateral else _UNION_AT_ONCE
            last: Position | None = None
            for start in range(0, len(ids), step):
                between = _between(after, last, newest_first=newest_first)
                statement = make(
                    ids[start : start + step], category, between, limit, newest_first=newest_first
                )
                rows = await session.execute(statement)
                best.update((row.occurred_at, row.seq) for row in rows)
                if len(best) >= limit:
                    kept = sorted(best, reverse=newest_first)[:limit]
                    best, last = set(kept), Position(*kept[-1])
        case Selected(statements):
            for selected in statements:
                columns = selected.selected_columns
                some = selected.where(
                    *_between(after, None, newest_first=newest_first)(
                        columns.occurred_at, columns.seq
                    )
                )
                ordered = _ordered(
                    some, columns.occurred_at, columns.seq, limit, newest_first=newest_first
                )
                best.update((row.occurred_at, row.seq) for row in await session.execute(ordered))
    return [Position(*place) for place in sorted(best, reverse=newest_first)[:limit]]


Between = Callable[[Any, Any], list[ColumnElement[bool]]]


def lateral_of(
    ids: Sequence[str],
    category: Category | None,
    between: Between,
    limit: int,
    *,
    newest_first: bool,
) -> Select[Any]:
    """The first of each id, in one plan whatever their number; PostgreSQL."""
    wanted = (
        func.unnest(literal(list(ids), ARRAY(String(64))))
        .table_valued(column("reference", String(64)))
        .render_derived(name="wanted")
    )
    each = _look_up(
        AuditReference.reference == wanted.c.reference,
        category,
        between,
        limit,
        newest_first=newest_first,
    ).lateral("each")
    both = wanted.join(each, true())
    statement: Select[Any] = select(each.c.seq, each.c.occurred_at).select_from(both)
    return _ordered(statement, each.c.occurred_at, each.c.seq, limit, newest_first=newest_first)


def union_of(
    ids: Sequence[str],
    category: Category | None,
    between: Between,
    limit: int,
    *,
    newest_first: bool,
) -> Select[Any]:
    """The first of each id, in one statement; SQLite."""
    parts = []
    for each in ids:
        part = _look_up(
            AuditReference.reference == each, category, between, limit, newest_first=newest_first
        ).subquery()
        parts.append(select(part.c.seq, part.c.occurred_at))
    every = union_all(*parts).subquery()
    return select(every.c.seq, every.c.occurred_at)


def _look_up(
    of_id: ColumnElement[bool],
    category: Category | None,
    between: Between,
    limit: int,
    *,
    newest_first: bool,
) -> Select[Any]:
    moment, seq = AuditReference.occurred_at, AuditReference.seq
    statement: Any = select(seq, moment).where(of_id, *between(moment, seq))
    if category is not None:
        statement = statement.where(AuditReference.category == category)
    return _ordered(statement, moment, seq, limit, newest_first=newest_first)


def _ordered(
    statement: Any, moment: Any, seq: Any, limit: int, *, newest_first: bool
) -> Select[Any]:
    key = (moment.desc(), seq.desc()) if newest_first else (moment, seq)
    ordered: Select[Any] = statement.order_by(*key).limit(limit)
    return ordered


def _between(after: Position | None, last: Position | None, *, newest_first: bool) -> Between:
    """Conditions on the columns of a position: behind `after`, and before `last`."""

    def conditions(moment: Any, seq: Any) -> list[ColumnElement[bool]]:
        found = []
        if after is not None:
            found.append(_beyond(moment, seq, after, newest_first=newest_first))
        if last is not None:
            found.append(_beyond(moment, seq, last, newest_first=not newest_first))
        return found

    return conditions


def _beyond(
    moment: SQLColumnExpression[str],
    seq: SQLColumnExpression[int],
    place: Position,
    *,
    newest_first: bool,
) -> ColumnElement[bool]:
    here, there = tuple_(moment, seq), tuple_(place.occurred_at, place.seq)
    return here < there if newest_first else here > there
