"""Issuing a grant: decide in a snapshot, then record, then sign.

The snapshot is the truth that the grant states, by its log position and revision. Whatever is
revoked after it has a later position, which kills the grant wherever it is presented. The
namespaces and the audit event are written in a change of their own before the grant leaves.
"""

from __future__ import annotations

import secrets
from datetime import UTC, datetime

from policy.grants import mint
from service.auth.actor import Actor
from service.changes import Change
from service.db.base import now
from service.grants import namespaces
from service.grants.decide import Verdict, judge
from service.grants.lease_size import check_lease_size
from service.grants.schemas import GrantAnswer, GrantBody
from service.grants.subject import OnBehalf
from service.keys.components import KeyMoved
from service.keys.models import Purpose
from service.keys.uses import KeyUses
from service.runtime import Runtime
from strongroom.derivation import salt_digest
from strongroom.errors import Missing
from strongroom.grant import GRANT_AUDIENCE, GrantClaims, GrantedSpan, Operation
from strongroom.identity import ComponentId
from strongroom.spans import check_span_ends

_SALT_BYTES = 32


async def issue(runtime: Runtime, actor: Actor, request: GrantBody, who: OnBehalf) -> GrantAnswer:
    """A grant for as much of the prompt as `who` may use, perhaps nothing of it."""
    check_span_ends([span.end for span in request.spans], request.prompt_tokens)
    uses = KeyUses(actor, Purpose.GRANT_SALT, who.tenant)
    at = now()
    try:
        try:
            verdict = await _judge(runtime, request, who, at, uses)
        except KeyMoved:
            # A rotation ended after the snapshot was taken: the next one knows the new version.
            verdict = await _judge(runtime, request, who, at, uses)
    except Missing as error:
        await _record_refusal(runtime, actor, who, error)
        raise
    check_lease_size(verdict.identities)
    # 256 random bits, base64url: as long and as opaque as a derived salt, and used once.
    salt = verdict.salt or secrets.token_urlsafe(_SALT_BYTES)
    claims = _claims(runtime, request, who, verdict, salt, at)
    grant = mint(claims, runtime.signer)
    async with runtime.changes.begin(actor) as change:
        for identity in dict.fromkeys(verdict.identities):
            await namespaces.ensure(change.session, identity)
        await uses.record(change.session, claims.jti)
        await _record(change, who, verdict, claims)
    return GrantAnswer(
        grant=grant,
        salt=salt,
        granted_tokens=claims.spans[-1].end if claims.spans else 0,
        expires_at=datetime.fromtimestamp(claims.exp, UTC),
        revision=verdict.revision,
    )


async def _judge(
    runtime: Runtime, request: GrantBody, who: OnBehalf, at: datetime, uses: KeyUses
) -> Verdict:
    async with runtime.database.snapshots() as session:
        return await judge(session, runtime.enforcers, request, who, at, uses)


def _claims(
    runtime: Runtime, request: GrantBody, who: OnBehalf, verdict: Verdict, salt: str, at: datetime
) -> GrantClaims:
    issued_s = int(at.timestamp())
    # Never beyond a time window of the policy: then it may have to be denied.
    ends_s = issued_s + runtime.settings.grant_life_s
    if verdict.until is not None:
        ends_s = min(ends_s, int(verdict.until.timestamp()))
        issued_s = min(issued_s, ends_s - 1)
    return GrantClaims(
        iss=runtime.settings.issuer,
        aud=GRANT_AUDIENCE,
        jti=secrets.token_hex(16),
        tenant=who.tenant,
        sub=who.subject,
        iat=issued_s,
        exp=ends_s,
        ops=tuple(operation for operation in Operation if operation in request.operations),
        base=verdict.base,
        spans=_spans(request, verdict),
        prompt_tokens=request.prompt_tokens,
        prompt_digest=request.prompt_digest,
        engine=verdict.engine,
        salt_digest=salt_digest(salt),
        revision=verdict.revision,
        epoch=verdict.head.epoch,
        seq=verdict.head.seq,
    )


def _spans(request: GrantBody, verdict: Verdict) -> tuple[GrantedSpan, ...]:
    known = set(verdict.base)
    spans = []
    for span, identity in zip(request.spans, verdict.identities, strict=False):
        adds: list[ComponentId] = [each for each in identity.components() if each not in known]
        known.update(adds)
        spans.append(GrantedSpan(span.end, identity.namespace, tuple(adds)))
    return tuple(spans)


async def _record(change: Change, who: OnBehalf, verdict: Verdict, claims: GrantClaims) -> None:
    denial = verdict.denial
    last = verdict.identities[-1] if verdict.identities else None
    components = last.components() if last is not None else verdict.base
    granted = claims.spans[-1].end if claims.spans else 0
    await change.audit(
        "grant.issued",
        tenant=who.tenant,
        subject=who.subject,
        target=claims.jti,
        outcome="granted" if denial is None else "partial" if claims.spans else "denied",
        reason="" if denial is None else denial.reason,
        details={
            "granted_tokens": granted,
            "prompt_tokens": claims.prompt_tokens,
            "operations": [operation.value for operation in claims.ops],
            "revision": claims.revision,
            "epoch": claims.epoch,
            "seq": claims.seq,
            "expires": claims.exp,
            "proven": who.proven_s is not None,
        },
        references=(*components, *dict.fromkeys(span.namespace for span in claims.spans)),
    )
    if denial is not None:
        await change.audit(
            "grant.denied",
            tenant=who.tenant,
            subject=who.subject,
            target=denial.label,
            outcome="denied",
            reason=denial.reason,
            details={"grant": claims.jti, "span": denial.span, "rule": denial.rule},
        )


async def _record_refusal(runtime: Runtime, actor: Actor, who: OnBehalf, error: Missing) -> None:
    """A subject or artefact that is not there: no grant at all, and an event that says so."""
    async with runtime.changes.begin(actor) as change:
        await change.audit(
            "grant.denied",
            tenant=who.tenant,
            subject=who.subject,
            outcome="denied",
            reason=f"unknown {error.field}",
        )
