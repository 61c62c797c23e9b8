"""When a revocation is in force: every sidecar has acknowledged, or its lease has run out.

Whichever comes first, so always within one lease of the commit (DESIGN section 6). The
deadlines are this process's own (`service.sidecars.expiry`); a process that did not commit the
revocation, or was restarted since, counts a whole lease from when it first looks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from typing import Final

from sqlalchemy import select, update

from policy.certificates import (
    IN_FORCE_KIND,
    SidecarStanding,
    Standing,
    standings_digest,
)
from service.auth.actor import SYSTEM
from service.changes import Change, Changes
from service.db.base import now
from service.db.session import Database
from service.log.chain import rfc3339
from service.revocation import store
from service.revocation.models import Revocation, RevocationSidecar, SidecarState
from service.sidecars.desk import SidecarDesk
from service.sidecars.models import Sidecar

_POLL_S: Final = 0.25
"""Acknowledgements that another process took are looked for this often."""
_REVOCATIONS_MAX: Final = 4096


async def set_deadlines(change: Change, desk: SidecarDesk, revocation: Revocation) -> None:
    """Fix, inside the revocation's own change, when each sidecar is out of its lease."""
    rows = await change.session.execute(
        select(Sidecar.id, Sidecar.leases)
        .join(RevocationSidecar, RevocationSidecar.sidecar == Sidecar.id)
        .where(RevocationSidecar.revocation == revocation.id)
    )
    while len(desk.deadlines) >= _REVOCATIONS_MAX:
        del desk.deadlines[next(iter(desk.deadlines))]
    desk.deadlines[revocation.id] = {
        sidecar: desk.expiry.expires_ns(sidecar, leases) for sidecar, leases in rows
    }


async def wait_in_force(
    database: Database,
    changes: Changes,
    desk: SidecarDesk,
    revocation: str,
    deadline_s: float | None = None,
) -> bool:
    """Return True once the revocation is in force, or False after `deadline_s`.

    Without a deadline that is within one lease. Cancelled, it changes nothing.
    """
    clock = desk.expiry.clock
    ends_ns = None if deadline_s is None else clock() + int(deadline_s * 1e9)
    while True:
        news = desk.acks.listen()
        if await settle(database, changes, desk, revocation):
            return True
        now_ns = clock()
        next_ns = max(desk.deadlines.get(revocation, {}).values(), default=now_ns)
        if ends_ns is not None:
            if now_ns >= ends_ns:
                return False
            next_ns = min(next_ns, ends_ns)
        try:
            async with asyncio.timeout(min(max(next_ns - now_ns, 0) / 1e9, _POLL_S)):
                await news.wait()
        except TimeoutError:
            continue


async def settle(database: Database, changes: Changes, desk: SidecarDesk, revocation: str) -> bool:
    """Whether the revocation is in force; notes it, once, when it has become so."""
    async with database.readers() as session:
        row = await session.get(Revocation, revocation)
        if row is None or row.effective_at is not None:
            return row is not None
        pending = (
            await session.scalars(
                select(RevocationSidecar.sidecar).where(
                    RevocationSidecar.revocation == revocation,
                    RevocationSidecar.state == SidecarState.PENDING,
                )
            )
        ).all()
    now_ns = desk.expiry.clock()
    known = desk.deadlines.setdefault(revocation, {})
    deadlines = {
        sidecar: known.setdefault(sidecar, now_ns + desk.expiry.lease_ns) for sidecar in pending
    }
    for sidecar in known.keys() - deadlines.keys():
        del known[sidecar]
    if any(deadline > now_ns for deadline in deadlines.values()):
        return False
    async with changes.begin(SYSTEM) as change:
        await _note(change, revocation, now_ns, deadlines)
    desk.deadlines.pop(revocation, None)
    return True


def standing_of(row: RevocationSidecar, name: str) -> SidecarStanding:
    """Where a sidecar stood when it could not serve any more, as a certificate says it."""
    return SidecarStanding(
        sidecar=row.sidecar,
        name=name,
        state=Standing(row.state.value),
        at=row.at,
        loads_fenced=row.loads_fenced,
        saves_fenced=row.saves_fenced,
        namespaces_dropped=row.namespaces_dropped,
        bytes_reclaimed=row.bytes_reclaimed,
    )


async def _note(change: Change, revocation: str, now_ns: int, deadlines: Mapping[str, int]) -> None:
    session = change.session
    row = await session.get(Revocation, revocation, populate_existing=True)
    if row is None or row.effective_at is not None:
        return
    # In the order in which acknowledgements lock these rows.
    for sidecar, deadline in sorted(deadlines.items()):
        at = now() - timedelta(microseconds=(now_ns - deadline) / 1000)
        await session.execute(
            update(RevocationSidecar)
            .where(
                RevocationSidecar.revocation == revocation,
                RevocationSidecar.sidecar == sidecar,
                RevocationSidecar.state == SidecarState.PENDING,
            )
            .values(state=SidecarState.LEASE_EXPIRED, at=max(rfc3339(at), row.committed_at))
            .execution_options(synchronize_session=False)
        )
    standings = [standing_of(*each) for each in await store.standings(session, revocation)]
    row.effective_at = max([row.committed_at, *(each.at for each in standings)])
    states = [each.state for each in standings]
    await change.audit(
        IN_FORCE_KIND,
        tenant=row.tenant,
        target=revocation,
        details={
            "fenced": states.count(Standing.FENCED),
            "lease_expired": states.count(Standing.LEASE_EXPIRED),
            "standings_digest": standings_digest(standings),
            "in_force_at": row.effective_at,
        },
    )
