"""Issuing the certificate of a revocation that is in force.

It is made anew each time, from what is stored: a later one knows more (bytes reclaimed, the
final erasure) and proves the same event under a later signed head.
"""

from __future__ import annotations

import json

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from policy.certificates import (
    CERTIFICATE_VERSION,
    COMPONENTS_MAX,
    EVENT_KIND,
    IN_FORCE_KIND,
    Asked,
    CertificateClaims,
    Erasure,
    EventProof,
    components_digest,
    sign,
)
from policy.signing import Signer
from service.audit import store as audit
from service.audit.models import AuditRow
from service.audit.signed import SignedHead
from service.changes import Change
from service.log import chain
from service.log import store as log_store
from service.revocation import store
from service.revocation.force import standing_of
from service.revocation.models import Revocation
from strongroom.errors import Conflict, Corrupt


async def issue(change: Change, revocation: Revocation, issuer: str, signer: Signer) -> str:
    """The certificate. Raises `Conflict` while the revocation is not in force."""
    session = change.session
    if revocation.effective_at is None:
        raise Conflict("the revocation is not yet in force", field="revocation")
    stored = await log_store.at(session, revocation.epoch, revocation.seq)
    if stored is None:
        raise Corrupt("the record of this revocation is gone")
    destroyed = store.components_of(revocation)
    erased = await store.erased(session, revocation)
    head = await audit.sign_head(session, signer, change.at)
    claims = CertificateClaims(
        version=CERTIFICATE_VERSION,
        id=revocation.id,
        issuer=issuer,
        issued_at=chain.rfc3339(change.at),
        asked=Asked(
            axis=str(revocation.axis),
            tenant=revocation.tenant or "",
            target=json.loads(revocation.target),
            reason=revocation.reason,
            by=revocation.asked_by,
        ),
        committed_at=revocation.committed_at,
        in_force_at=revocation.effective_at,
        epoch=revocation.epoch,
        seq=revocation.seq,
        entry=stored.jws,
        entry_hash=chain.parse(stored.jws).hash(),
        components=destroyed if len(destroyed) <= COMPONENTS_MAX else (),
        components_total=len(destroyed),
        components_digest=components_digest(destroyed),
        final=Erasure(erased.state, chain.rfc3339(erased.at) if erased.at else ""),
        sidecars=tuple(
            standing_of(*each) for each in await store.standings(session, revocation.id)
        ),
        audit=await _proof(session, EVENT_KIND, revocation.id, head),
        in_force=await _proof(session, IN_FORCE_KIND, revocation.id, head),
    )
    await change.audit(
        "certificate.issued",
        tenant=revocation.tenant,
        target=revocation.id,
        details={"final": str(erased.state), "audit_size": head.size},
    )
    return sign(claims, signer)


async def _proof(session: AsyncSession, kind: str, revocation: str, head: SignedHead) -> EventProof:
    seq = await session.scalar(
        select(AuditRow.seq)
        .where(AuditRow.kind == kind, AuditRow.target == revocation)
        .order_by(AuditRow.seq)
        .limit(1)
    )
    if seq is None:
        raise Corrupt("the record of this revocation is gone")
    event = await audit.event(session, seq)
    path = await audit.inclusion_proof(session, seq, head.size)
    return EventProof(
        event=event.payload().decode(),
        index=seq,
        path=tuple(step.hex() for step in path),
        head=head.jws,
    )
