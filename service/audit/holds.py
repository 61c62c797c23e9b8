"""Legal holds: what one covers is not purged while it stands.

A hold covers one tenant's events or all, of a span of time or of all time. It keeps records; it
never stops a revocation. Placing and releasing one are audit events themselves.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import ColumnElement, and_, false, or_, select, true
from sqlalchemy.ext.asyncio import AsyncSession

from service.audit.models import AuditHold, AuditRow
from service.changes import Change
from service.log.chain import rfc3339
from service.tenancy.models import Tenant
from strongroom.errors import Conflict, Missing, Misuse
from strongroom.identity import ComponentId


async def place(
    change: Change,
    tenant: ComponentId | None,
    since: datetime | None,
    until: datetime | None,
    reason: str,
) -> AuditHold:
    """Place a hold, also on what a tenant that has left is remembered by.

    Raises `Missing` for a tenant that there never was.
    """
    if since is not None and until is not None and since >= until:
        raise Misuse("a hold ends after it begins", field="until")
    if tenant is not None and await change.session.get(Tenant, tenant) is None:
        raise Missing("there is no such tenant", field="tenant")
    hold = AuditHold(
        id=secrets.token_hex(16),
        tenant=tenant,
        since=None if since is None else rfc3339(since),
        until=None if until is None else rfc3339(until),
        reason=reason,
        placed_by=change.actor.id,
        placed_at=rfc3339(change.at),
        released_by=None,
        released_at=None,
    )
    change.session.add(hold)
    await change.session.flush()
    await change.audit(
        "hold.placed",
        tenant=tenant,
        target=hold.id,
        reason=reason[:256],
        details={"since": hold.since or "", "until": hold.until or ""},
    )
    return hold


async def release(change: Change, hold_id: str, tenant: ComponentId | None) -> AuditHold:
    """Release a hold. Raises `Missing` for one that `tenant` does not have."""
    hold = await find(change.session, hold_id, tenant)
    if hold.released_at is not None:
        raise Conflict("this hold was released already", field="hold")
    hold.released_by, hold.released_at = change.actor.id, rfc3339(change.at)
    await change.session.flush()
    await change.audit("hold.released", tenant=hold.tenant, target=hold.id)
    return hold


async def find(session: AsyncSession, hold_id: str, tenant: ComponentId | None) -> AuditHold:
    """One hold, as a caller of `tenant` (None: of the installation) may see it."""
    hold = await session.get(AuditHold, hold_id)
    if hold is None or (tenant is not None and hold.tenant != tenant):
        raise Missing("there is no such hold", field="hold")
    return hold


async def standing(session: AsyncSession) -> Sequence[AuditHold]:
    """Every hold that is not released."""
    return (await session.scalars(select(AuditHold).where(AuditHold.released_at.is_(None)))).all()


def covered(holds: Sequence[AuditHold]) -> ColumnElement[bool]:
    """Events that one of `holds` covers."""
    return or_(false(), *(_covered(hold) for hold in holds))


def _covered(hold: AuditHold) -> ColumnElement[bool]:
    return and_(
        true(),
        *([AuditRow.tenant == hold.tenant] if hold.tenant is not None else []),
        *([AuditRow.occurred_at >= hold.since] if hold.since is not None else []),
        *([AuditRow.occurred_at < hold.until] if hold.until is not None else []),
    )
