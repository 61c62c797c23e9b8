"""Reading and appending log rows. The caller's session commits.

Locks: `lock` takes the counter row until commit. It is taken before the audit head's row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.log.models import THE_ROW, LogComponent, LogCounter, LogRow
from strongroom.errors import Unavailable
from strongroom.grant import GrantClaims
from strongroom.identity import ComponentId
from strongroom.log import InvalidationKind, LogEntry, LogHead

SEQ_MAX: Final = 2**31 - 1
"""What the column holds."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One entry as it lies in the database."""

    position: int
    epoch: str
    seq: int
    jws: str


async def head(session: AsyncSession) -> LogHead:
    """Where the log stands. Raises `Unavailable` before the service has started a log."""
    found = await find_head(session)
    if found is None:
        raise Unavailable("the invalidation log has not been started")
    return found


async def find_head(session: AsyncSession) -> LogHead | None:
    """Where the log stands; None in an empty database."""
    row = (
        await session.execute(select(LogCounter.epoch, LogCounter.seq, LogCounter.hash))
    ).one_or_none()
    return None if row is None else LogHead(row.epoch, row.seq, row.hash)


async def shared_head(session: AsyncSession) -> tuple[LogHead, int]:
    """Where the log stands, and its position; until this transaction ends nobody commits more."""
    row = await session.scalar(
        select(LogCounter).with_for_update(read=True).execution_options(populate_existing=True)
    )
    if row is None:
        raise Unavailable("the invalidation log has not been started")
    return LogHead(row.epoch, row.seq, row.hash), row.position


async def lock(session: AsyncSession) -> LogCounter | None:
    """Take the counter row until commit; None in an empty database."""
    return await session.scalar(
        select(LogCounter).with_for_update().execution_options(populate_existing=True)
    )


async def append(session: AsyncSession, entry: LogEntry, jws: str) -> int:
    """Store `entry`, which follows the counter (or begins an epoch), and move the counter.

    Returns its position among the entries of all epochs.
    """
    counter = await lock(session)
    if counter is None:
        counter = LogCounter(id=THE_ROW, position=0, epoch=entry.epoch, seq=0, hash="")
        session.add(counter)
    counter.position += 1
    counter.epoch, counter.seq, counter.hash = entry.epoch, entry.seq, entry.hash()
    session.add(
        LogRow(
            position=counter.position,
            epoch=entry.epoch,
            seq=entry.seq,
            at=entry.at,
            kind=entry.kind,
            tenant=entry.tenant,
            subject=entry.subject,
            min_revision=entry.min_revision,
            sidecar=entry.sidecar,
            hash=entry.hash(),
            jws=jws,
        )
    )
    await session.flush()
    session.add_all(
        LogComponent(position=counter.position, component=component)
        for component in entry.components
    )
    await session.flush()
    return counter.position


async def page(session: AsyncSession, epoch: str, after: int, limit: int) -> Sequence[Stored]:
    """Up to `limit` entries of `epoch` with a seq above `after`, in order."""
    rows = await session.execute(
        select(LogRow.position, LogRow.epoch, LogRow.seq, LogRow.jws)
        .where(LogRow.epoch == epoch, LogRow.seq > min(after, SEQ_MAX))
        .order_by(LogRow.seq)
        .limit(limit)
    )
    return [Stored(*row) for row in rows]


async def all_after(session: AsyncSession, position: int, limit: int) -> Sequence[Stored]:
    """Up to `limit` entries of every epoch after `position`, in order."""
    rows = await session.execute(
        select(LogRow.position, LogRow.epoch, LogRow.seq, LogRow.jws)
        .where(LogRow.position > position)
        .order_by(LogRow.position)
        .limit(limit)
    )
    return [Stored(*row) for row in rows]


async def at(session: AsyncSession, epoch: str, seq: int) -> Stored | None:
    """The entry at (epoch, seq)."""
    row = (
        await session.execute(
            select(LogRow.position, LogRow.epoch, LogRow.seq, LogRow.jws).where(
                LogRow.epoch == epoch, LogRow.seq == seq
            )
        )
    ).one_or_none()
    return None if row is None else Stored(*row)


async def retired(session: AsyncSession, components: Sequence[ComponentId]) -> bool:
    """Whether an entry of any epoch names one of `components`."""
    found = await session.scalar(
        select(LogComponent.component).where(LogComponent.component.in_(components)).limit(1)
    )
    return found is not None


async def kills(session: AsyncSession, now: LogHead, grant: GrantClaims) -> str | None:
    """Why the log up to `now` kills `grant` (for the audit only), or None.

    Components are not looked at: their secrets are, by whoever needs them.
    """
    if grant.epoch != now.epoch:
        return "epoch"
    if grant.seq > now.seq:
        return "future"
    of_tenant = (LogRow.epoch == now.epoch, LogRow.tenant == grant.tenant)
    subject_seq = await session.scalar(
        select(func.max(LogRow.seq)).where(
            *of_tenant, LogRow.kind == InvalidationKind.SUBJECT, LogRow.subject == grant.sub
        )
    )
    if subject_seq is not None and grant.seq < subject_seq:
        return "subject"
    revision = await session.scalar(
        select(func.max(LogRow.min_revision)).where(
            *of_tenant, LogRow.kind == InvalidationKind.TENANT_REVISION
        )
    )
    if revision is not None and grant.revision < revision:
        return "revision"
    return None
