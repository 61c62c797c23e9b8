"""Revocations in the database. The caller's session commits."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from policy.certificates import EVENT_KIND, Finality, components_digest
from service.auth.actor import Actor
from service.changes import Change
from service.keys.finality import final_at
from service.log.chain import rfc3339
from service.revocation.ask import Ask, key_of, nothing_there
from service.revocation.carry_out import CarriedOut
from service.revocation.models import Axis, Revocation, RevocationSidecar, SidecarState
from service.sidecars import store as sidecars
from service.sidecars.models import Sidecar
from strongroom.canonical import canonical_json
from strongroom.errors import Conflict
from strongroom.identity import COMPONENT_ID_BYTES, ComponentId

_ID_CHARS: Final = 2 * COMPONENT_ID_BYTES
_IN_MAX: Final = 500


@dataclass(frozen=True, slots=True)
class Erased:
    """Whether the erasure is final, and when it is due or was."""

    state: Finality
    at: datetime | None


def components_of(revocation: Revocation) -> tuple[ComponentId, ...]:
    """The components that a revocation destroyed, sorted."""
    packed = revocation.components
    return tuple(
        ComponentId(packed[at : at + _ID_CHARS]) for at in range(0, len(packed), _ID_CHARS)
    )


async def record(
    change: Change,
    ask: Ask,
    done: CarriedOut,
    idempotency_key: str | None,
    erasure_final_s: float,
    scheduled: str | None = None,
) -> Revocation:
    """Store a revocation with the sidecars that it concerns, and audit it.

    `scheduled`: the id under which it had been scheduled.
    """
    caller = caller_of(change.actor)
    destroyed = sorted(done.components)
    revocation = Revocation(
        id=scheduled or secrets.token_hex(16),
        axis=ask.axis,
        tenant=done.tenant,
        target=canonical_json(ask.describe()).decode(),
        reason=ask.reason,
        asked_by=caller,
        idempotency_key=key_of(change.actor, idempotency_key),
        request=ask.digest(),
        committed_at=rfc3339(change.at),
        epoch=done.entry.epoch,
        seq=done.entry.seq,
        components="".join(destroyed),
        final_at=change.at + timedelta(seconds=erasure_final_s) if destroyed else None,
    )
    change.session.add(revocation)
    await change.session.flush()
    for sidecar in await _concerned(change.session, done):
        change.session.add(
            RevocationSidecar(
                revocation=revocation.id,
                sidecar=sidecar.id,
                state=SidecarState.PENDING,
                at=revocation.committed_at,
                loads_fenced=0,
                saves_fenced=0,
                namespaces_dropped=0,
                bytes_reclaimed=0,
            )
        )
    await change.audit(
        EVENT_KIND,
        tenant=done.tenant,
        target=revocation.id,
        reason=ask.reason,
        details={
            "axis": str(ask.axis),
            "target": ask.describe(),
            "epoch": done.entry.epoch,
            "seq": done.entry.seq,
            "entry_hash": done.entry.hash(),
            "components_digest": components_digest(destroyed),
            "components_total": len(destroyed),
            "by": caller,
        },
        references=done.entry.components,
    )
    await change.session.flush()
    return revocation


def caller_of(actor: Actor) -> str:
    """Who asked, as it is recorded."""
    return f"{actor.kind}:{actor.id}"


async def _concerned(session: AsyncSession, done: CarriedOut) -> Sequence[Sidecar]:
    """The sidecars that may hold what is revoked.

    One that is being revoked itself may serve until that is in force, and is among them.
    """
    if done.sidecar is not None:
        return [await sidecars.get(session, done.sidecar)]
    leaving = await session.scalars(
        sidecars.serving(select(Sidecar), done.tenant)
        .join(RevocationSidecar, RevocationSidecar.sidecar == Sidecar.id)
        .join(Revocation, Revocation.id == RevocationSidecar.revocation)
        .where(
            Sidecar.revoked_at.is_not(None),
            Revocation.axis == Axis.SIDECAR,
            Revocation.effective_at.is_(None),
            RevocationSidecar.state == SidecarState.PENDING,
        )
    )
    return [*await sidecars.concerned(session, done.tenant), *leaving.unique()]


async def find_repeated(
    session: AsyncSession, actor: Actor, idempotency_key: str | None, ask: Ask
) -> Revocation | None:
    """The revocation that this very request has made already.

    Raises `Conflict` if the key was used for another request.
    """
    if idempotency_key is None:
        return None
    found = await session.scalar(
        select(Revocation).where(
            Revocation.asked_by == caller_of(actor),
            Revocation.idempotency_key == key_of(actor, idempotency_key),
        )
    )
    if found is not None and found.request != ask.digest():
        raise Conflict("this key was used for another revocation", field="Idempotency-Key")
    return found


async def get(session: AsyncSession, revocation: str, tenant: str | None) -> Revocation:
    """A revocation that a caller of `tenant` may see; None sees every one. Raises `Missing`."""
    found = await session.get(Revocation, revocation)
    if found is None or (tenant is not None and found.tenant != tenant):
        raise nothing_there()
    return found


async def standings(
    session: AsyncSession, revocation: str
) -> Sequence[tuple[RevocationSidecar, str]]:
    """Where each sidecar stands, with its name."""
    rows = await session.execute(
        select(RevocationSidecar, Sidecar.name)
        .join(Sidecar, Sidecar.id == RevocationSidecar.sidecar)
        .where(RevocationSidecar.revocation == revocation)
        .order_by(RevocationSidecar.sidecar)
        .execution_options(populate_existing=True)
    )
    return [(row, name) for row, name in rows]


async def erased(session: AsyncSession, revocation: Revocation) -> Erased:
    """Final once every KEK version that had wrapped one of the secrets is destroyed."""
    ids = components_of(revocation)
    if not ids:
        return Erased(Finality.NONE, None)
    moments: list[datetime] = []
    for start in range(0, len(ids), _IN_MAX):
        moment = await final_at(session, ids[start : start + _IN_MAX])
        if moment is None:
            return Erased(Finality.PENDING, revocation.final_at)
        moments.append(moment)
    return Erased(Finality.FINAL, max(moments))
