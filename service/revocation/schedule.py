"""Revocations asked for ahead of their time. The caller's session commits.

Rules:
- What is asked is looked for when it is asked, and again at its time: whatever it names then is
  revoked, by the right of whoever asked. If nothing is there then, it has failed, and says so.
- Until its time anybody who may revoke in its tenant may cancel it. What is cancelled, carried out
  or failed stays so.
- Which comes first, the cancelling or the carrying out, the log's lock decides: both are changes.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.auth.actor import Actor, ActorKind
from service.changes import Change
from service.log.chain import rfc3339
from service.revocation.ask import Ask, key_of, nothing_there
from service.revocation.models import ScheduledRevocation, ScheduleState
from service.revocation.store import caller_of
from service.revocation.target import find, tenant_of
from strongroom.errors import Conflict, Misuse
from strongroom.identity import ComponentId

AHEAD_MAX: Final = timedelta(days=3660)
_DUE_MAX: Final = 100


async def create(
    change: Change, ask: Ask, due_at: datetime, idempotency_key: str | None
) -> ScheduledRevocation:
    """Schedule `ask`; the same one under the same key once. Raises `Missing` as revoking does."""
    if not change.at < due_at <= change.at + AHEAD_MAX:
        raise Misuse("a time to come, within ten years", field="at")
    session, actor = change.session, change.actor
    caller, key = caller_of(actor), key_of(actor, idempotency_key)
    request = f"{ask.digest()}@{rfc3339(due_at)}"
    if key is not None:
        known = await session.scalar(
            select(ScheduledRevocation).where(
                ScheduledRevocation.asked_by == caller, ScheduledRevocation.idempotency_key == key
            )
        )
        if known is not None and known.request != request:
            raise Conflict("this key was used for another revocation", field="Idempotency-Key")
        if known is not None:
            return known
    target = await find(session, actor, ask)
    row = ScheduledRevocation(
        id=secrets.token_hex(16),
        axis=ask.axis,
        tenant=tenant_of(target),
        target=ask.target,
        group=ask.group,
        reason=ask.reason,
        actor_kind=actor.kind.value,
        actor=actor.id,
        actor_tenant=actor.tenant,
        asked_by=caller,
        idempotency_key=key,
        request=request,
        created_at=change.at,
        due_at=due_at,
        state=ScheduleState.SCHEDULED,
        failure="",
    )
    session.add(row)
    await session.flush()
    await change.audit(
        "revocation.scheduled",
        tenant=row.tenant,
        target=row.id,
        reason=ask.reason,
        details={"axis": str(ask.axis), "target": ask.describe(), "due_at": rfc3339(due_at)},
    )
    return row


async def cancel(change: Change, scheduled: str, tenant: str | None) -> ScheduledRevocation:
    """Cancel what is still to come. Raises `Missing`, or `Conflict` if it is over."""
    row = await get(change.session, scheduled, tenant)
    if row.state is not ScheduleState.SCHEDULED:
        raise Conflict(f"it is over: {row.state}", field="scheduled")
    await end(change, row, ScheduleState.CANCELLED)
    return row


async def get(session: AsyncSession, scheduled: str, tenant: str | None) -> ScheduledRevocation:
    """One that a caller of `tenant` may see; None sees every one. Raises `Missing`."""
    row = await session.get(ScheduledRevocation, scheduled, populate_existing=True)
    if row is None or (tenant is not None and row.tenant != tenant):
        raise nothing_there()
    return row


async def due(session: AsyncSession, now: datetime) -> Sequence[str]:
    """Those whose time has come, the oldest first; at most so many at once."""
    rows = await session.scalars(
        select(ScheduledRevocation.id)
        .where(
            ScheduledRevocation.state == ScheduleState.SCHEDULED,
            ScheduledRevocation.due_at <= now,
        )
        .order_by(ScheduledRevocation.due_at, ScheduledRevocation.id)
        .limit(_DUE_MAX)
    )
    return rows.all()


async def next_due(session: AsyncSession) -> datetime | None:
    """When the next one's time comes."""
    moment: datetime | None = await session.scalar(
        select(func.min(ScheduledRevocation.due_at)).where(
            ScheduledRevocation.state == ScheduleState.SCHEDULED
        )
    )
    return moment


async def waiting(session: AsyncSession, scheduled: str) -> ScheduledRevocation | None:
    """It, if it is still to be carried out: to be read under the log's lock."""
    row = await session.get(ScheduledRevocation, scheduled, populate_existing=True)
    return row if row is not None and row.state is ScheduleState.SCHEDULED else None


async def end(
    change: Change, row: ScheduledRevocation, state: ScheduleState, failure: str = ""
) -> None:
    """Note what became of it."""
    row.state, row.ended_at, row.failure = state, change.at, failure
    await change.session.flush()
    if state is ScheduleState.CARRIED_OUT:
        return  # `revocation.committed` says so, under the same id
    await change.audit(
        f"revocation.{state}",
        tenant=row.tenant,
        target=row.id,
        outcome="refused" if failure else "ok",
        reason=failure or row.reason,
        details={"axis": str(row.axis), "due_at": rfc3339(row.due_at)},
    )


def ask_of(row: ScheduledRevocation) -> Ask:
    """What was asked."""
    tenant = None if row.tenant is None else ComponentId(row.tenant)
    return Ask(row.axis, row.target, tenant, row.group, row.reason)


def actor_of(row: ScheduledRevocation) -> Actor:
    """Who asked; what it may revoke is looked at again."""
    tenant = None if row.actor_tenant is None else ComponentId(row.actor_tenant)
    return Actor(ActorKind(row.actor_kind), row.actor, tenant)
