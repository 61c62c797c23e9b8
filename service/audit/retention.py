"""Purging audit events after their retention, so that what is left can still be verified.

Rules:
- What goes: events recorded before the cutoff, all of whose leaf hashes lie in complete tiles. The
  tiles and the signed heads stay, so the root, and every proof, is what it was.
- What stays: events under a legal hold; those that revocation certificates rest on; those about
  holds and purges themselves.
- A purge is an audit event. Verification takes an event's absence for a purge only if the chain
  itself says so.
- On PostgreSQL whole months go, their partitions with them; what stays of one moves to the default
  partition. On SQLite rows are deleted.
- A hold that is placed while a purge runs waits for it: both are changes, and changes queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, cast

from sqlalchemy import ColumnElement, CursorResult, Dialect, and_, delete, func, not_, or_, select
from sqlalchemy.dialects import postgresql

from service.audit import holds, partitions, store
from service.audit.merkle import TILE
from service.audit.models import AuditHold, AuditReference, AuditRow
from service.audit.verify import PURGED
from service.changes import Change
from service.log.chain import rfc3339

_EVIDENCE: Final = ("revocation.", "hold.", "certificate.", "log.")
"""Kinds that are never purged."""


@dataclass(frozen=True, slots=True)
class Purged:
    """What a purge did. `before`: no event at or after that seq is gone."""

    events: int
    kept: int
    before: int


async def purge(change: Change, cutoff: datetime) -> Purged | None:
    """Purge what was recorded before `cutoff`; None if there was nothing to purge."""
    session = change.session
    size, _, _ = await store.counter(session)
    most = size - size % TILE
    standing = await holds.standing(session)
    stays = _stays(standing)
    old = and_(AuditRow.at < rfc3339(cutoff), AuditRow.seq < most)
    gone, kept, before, months, bound = 0, 0, 0, [], rfc3339(cutoff)
    if partitions.has_partitions(session):
        # Only what no newer event shares a month with, and whose tiles are complete.
        for month in await partitions.months(session):
            if month.end > rfc3339(cutoff):
                break
            last = await session.scalar(
                select(func.max(AuditRow.seq)).where(
                    AuditRow.at >= month.begin, AuditRow.at < month.end
                )
            )
            if last is not None and last >= most:
                break
            found, stayed = await partitions.drop(session, month, _sql(stays))
            gone, kept = gone + found - stayed, kept + stayed
            before = max(before, (last or 0) + 1)
            months.append(month.begin)
        oldest = await partitions.months(session)
        bound = min(bound, oldest[0].begin) if oldest else bound
        old = and_(old, AuditRow.at < bound)
    leaves = and_(old, not_(stays))
    newest = await session.scalar(select(func.max(AuditRow.seq)).where(leaves))
    if newest is not None:
        before = max(before, newest + 1)
        gone += await _delete(change, leaves)
    if not gone:
        return None
    await change.audit(
        PURGED,
        details={
            "cutoff": rfc3339(cutoff),
            "before": before,
            "events": gone,
            "kept": kept,
            "holds": [hold.id for hold in standing],
            "months": months,
        },
    )
    return Purged(gone, kept, before)


def _stays(standing: Sequence[AuditHold]) -> ColumnElement[bool]:
    evidence = [AuditRow.kind.startswith(prefix, autoescape=True) for prefix in _EVIDENCE]
    return or_(holds.covered(standing), AuditRow.kind == PURGED, *evidence)


def _sql(condition: ColumnElement[bool]) -> str:
    """The condition with its values written out by the dialect, for a partition's statement."""
    dialect: Dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
    compiled = condition.compile(dialect=dialect, compile_kwargs={"literal_binds": True})
    return str(compiled).replace("%%", "%").replace(":", r"\:")


async def _delete(change: Change, condition: ColumnElement[bool]) -> int:
    session = change.session
    seqs = select(AuditRow.seq).where(condition)
    await session.execute(
        delete(AuditReference)
        .where(AuditReference.seq.in_(seqs))
        .execution_options(synchronize_session=False)
    )
    found = await session.execute(
        delete(AuditRow).where(condition).execution_options(synchronize_session=False)
    )
    return cast("CursorResult[Any]", found).rowcount
