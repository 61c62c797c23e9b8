"""Key leases: the namespaces of one grant, sealed to one sidecar.

Rules (DESIGN sections 4 and 6), all read in the lease's own transaction, which holds the
log's counter row so that nothing is retired while it runs:
- the grant verifies, is of this epoch, and neither its subject nor its revision is retired;
- the sidecar is enrolled for the grant's tenant;
- each namespace is the one that was recorded for exactly the grant's components;
- every component still has its secret.
Whatever fails, the sidecar is told the same; the audit is told which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from policy import grants
from policy.signing import Signer, Verifier
from service.auth.actor import Actor, ActorKind
from service.changes import Changes
from service.grants.models import NamespaceComponent
from service.keys import components
from service.keys.models import Purpose
from service.keys.uses import KeyUses
from service.log import store as log_store
from service.sidecars.sealing import seal, sign_lease
from service.sidecars.serving import NONCE_CHARS
from service.sidecars.store import Enrolled, is_current
from strongroom.control import KeyLeaseInfo, KeyLeaseRequest, LeasedNamespace
from strongroom.derivation import namespace_secret
from strongroom.errors import Corrupt, Missing, Misuse, Refused
from strongroom.grant import GrantClaims
from strongroom.identity import ComponentId, NamespaceId
from strongroom.log import LogHead

_IN_MAX: Final = 500
_REFUSED: Final = "no key is leased for this grant"


@dataclass(frozen=True, slots=True)
class Denied:
    """No lease; `reason` is for the audit alone."""

    reason: str


@dataclass(frozen=True, slots=True)
class KeyLeaseDesk:
    """Everything that a key lease needs. `lease_ms` is how long its keys may be used."""

    changes: Changes
    signer: Signer
    verifier: Verifier
    issuer: str
    lease_ms: int

    async def lease(self, sidecar: Enrolled, request: KeyLeaseRequest, now_s: int) -> str:
        """The signed `KeyLeaseClaims`. Raises `Refused`."""
        if len(request.nonce) not in NONCE_CHARS:
            raise Misuse("a nonce has 16 to 128 characters", field="nonce", limit=128)
        actor = Actor(ActorKind.SIDECAR, sidecar.id)
        try:
            grant = grants.verify(request.grant, self.verifier, now_s=now_s, issuer=self.issuer)
        except Refused as error:
            await self._record_refusal(actor, None, "grant")
            raise Refused(_REFUSED) from error
        async with self.changes.begin(actor) as change:
            head = await log_store.head(change.session)
            outcome = await self._attempt(change.session, sidecar, grant, head, request.nonce)
            await change.audit(
                "key.leased",
                tenant=grant.tenant if sidecar.may_lease(grant.tenant) else None,
                subject=grant.sub,
                target=grant.jti,
                outcome="refused" if isinstance(outcome, Denied) else "ok",
                reason=outcome.reason if isinstance(outcome, Denied) else "",
                details={"epoch": head.epoch, "seq": head.seq, "spans": len(grant.spans)},
                references={span.namespace for span in grant.spans},
            )
        if isinstance(outcome, Denied):
            raise Refused(_REFUSED)
        return outcome

    async def _record_refusal(self, actor: Actor, tenant: ComponentId | None, reason: str) -> None:
        async with self.changes.begin(actor) as change:
            await change.audit("key.leased", tenant=tenant, outcome="refused", reason=reason)

    async def _attempt(
        self,
        session: AsyncSession,
        sidecar: Enrolled,
        grant: GrantClaims,
        head: LogHead,
        nonce: str,
    ) -> str | Denied:
        # Read again: since its proof was checked the sidecar may have been revoked, or may have
        # exchanged its keys.
        current = await is_current(session, sidecar)
        dead = await log_store.kills(session, head, grant)
        recorded = await _recorded(session, grant)
        alive = await components.alive(session, _named(grant))
        # Every question was asked before the first answer counts, and each is answered by one
        # number: what is refused takes as long whatever it is refused for.
        denied = _denied(current, sidecar, grant, dead)
        if denied is not None:
            return denied
        namespaces = await _namespaces(session, grant) if recorded else None
        if namespaces is None:
            return Denied("namespace")
        if not alive:
            return Denied("component")
        uses = KeyUses(Actor(ActorKind.SIDECAR, sidecar.id), Purpose.KEY_LEASE, grant.tenant)
        sealed = await self._seal(session, sidecar, head, namespaces, nonce, uses)
        await uses.record(session, grant.jti)
        return sealed

    async def _seal(
        self,
        session: AsyncSession,
        sidecar: Enrolled,
        head: LogHead,
        namespaces: Mapping[NamespaceId, Sequence[ComponentId]],
        nonce: str,
        uses: KeyUses,
    ) -> str | Denied:
        ids = list(dict.fromkeys(c for owned in namespaces.values() for c in owned))
        try:
            secrets = await components.secrets(session, ids, uses)
        except Missing:
            return Denied("component")
        except Corrupt:
            return Denied("corrupt")
        # The buffers are read as bytes, and copied into nothing that outlives this call.
        by_id = dict(zip(ids, cast("list[bytes]", secrets), strict=True))
        derived: list[bytearray] = []
        try:
            for namespace, owned in namespaces.items():
                ikm = [by_id[component] for component in owned]
                derived.append(bytearray(namespace_secret(ikm, bytes.fromhex(namespace))))
            info = KeyLeaseInfo(
                sidecar=sidecar.id,
                nonce=nonce,
                epoch=head.epoch,
                seq=head.seq,
                lease_ms=self.lease_ms,
                namespaces=[
                    LeasedNamespace(namespace, [str(component) for component in owned])
                    for namespace, owned in namespaces.items()
                ],
            )
            return sign_lease(info, seal(derived, sidecar.hpke_key, info), self.signer)
        except Misuse:
            return Denied("size")
        finally:
            components.overwrite([*secrets, *derived])


def _denied(
    current: bool, sidecar: Enrolled, grant: GrantClaims, dead: str | None
) -> Denied | None:
    if not current:
        return Denied("sidecar")
    if not sidecar.may_lease(grant.tenant):
        return Denied("tenant")
    if not grant.spans:
        return Denied("spans")
    return None if dead is None else Denied(dead)


def _named(grant: GrantClaims) -> frozenset[ComponentId]:
    """Every component that the grant names."""
    return frozenset((*grant.base, *(added for span in grant.spans for added in span.adds)))


async def _recorded(session: AsyncSession, grant: GrantClaims) -> bool:
    """Whether there are components of all of the grant's namespaces; not yet, whether those."""
    names = list(dict.fromkeys(span.namespace for span in grant.spans))
    found = 0
    for start in range(0, len(names), _IN_MAX):
        found += (
            await session.scalar(
                select(func.count(NamespaceComponent.namespace.distinct())).where(
                    NamespaceComponent.namespace.in_(names[start : start + _IN_MAX])
                )
            )
            or 0
        )
    return found == len(names)


async def _namespaces(
    session: AsyncSession, grant: GrantClaims
) -> dict[NamespaceId, list[ComponentId]] | None:
    """The grant's namespaces, once each, with their components in canonical order.

    None if one is not recorded, or is recorded with other components than the grant names.
    """
    wanted = {
        span.namespace: frozenset(grant.components(number))
        for number, span in enumerate(grant.spans)
    }
    found: dict[NamespaceId, list[ComponentId]] = {namespace: [] for namespace in wanted}
    names = list(wanted)
    for start in range(0, len(names), _IN_MAX):
        rows = await session.execute(
            select(NamespaceComponent.namespace, NamespaceComponent.component)
            .where(NamespaceComponent.namespace.in_(names[start : start + _IN_MAX]))
            .order_by(NamespaceComponent.namespace, NamespaceComponent.position)
        )
        for namespace, component in rows:
            found[namespace].append(component)
    for namespace, expected in wanted.items():
        if frozenset(found[namespace]) != expected:
            return None
    return found
