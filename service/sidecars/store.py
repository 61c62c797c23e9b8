"""Sidecars in the database. The caller's session commits."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import Select, case, delete, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from policy.signing import encode_base64url
from service.auth.errors import Unauthenticated
from service.db.base import now
from service.sidecars.models import FormerKey, JoinToken, JoinTokenTenant, Sidecar, SidecarTenant
from service.tenancy import store as tenancy
from strongroom.control import EnrolRequest
from strongroom.errors import Conflict, Missing, Refused
from strongroom.identity import ComponentId

_TOKEN_PREFIX = "srj_"  # noqa: S105 - what makes a token recognisable to secret scanners
_TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class Enrolled:
    """A live sidecar. `tenants` None: every tenant."""

    id: str
    name: str
    signing_key: bytes
    hpke_key: bytes
    tenants: frozenset[str] | None

    def may_lease(self, tenant: str) -> bool:
        """Whether it is enrolled for `tenant`."""
        return self.tenants is None or tenant in self.tenants


def token_digest(token: str) -> str:
    """What is stored of a join token; 256 random bits need no slow hash."""
    return hashlib.sha256(b"strongroom/join/v1" + token.encode()).hexdigest()


async def create_join_token(
    session: AsyncSession, tenants: Sequence[str], life_s: float
) -> tuple[str, JoinToken]:
    """A token to enrol with once, and its row. No tenants: every tenant."""
    for tenant in tenants:
        await tenancy.get_tenant(session, tenant)
    token = _TOKEN_PREFIX + secrets.token_urlsafe(_TOKEN_BYTES)
    moment = now()
    row = JoinToken(
        digest=token_digest(token),
        every_tenant=not tenants,
        created_at=moment,
        expires_at=moment + timedelta(seconds=life_s),
    )
    session.add(row)
    await session.flush()
    session.add_all(
        JoinTokenTenant(digest=row.digest, tenant=ComponentId(tenant))
        for tenant in dict.fromkeys(tenants)
    )
    await session.flush()
    return token, row


async def take_join_token(session: AsyncSession, token: str) -> JoinToken:
    """Use up a join token. Raises `Refused` for one that is unknown, used or expired."""
    row = await session.scalar(
        select(JoinToken).where(JoinToken.digest == token_digest(token)).with_for_update()
    )
    moment = now()
    if row is None or row.used_at is not None or row.expires_at <= moment:
        raise Refused("the join token is not valid", field="join_token")
    row.used_at = moment
    return row


async def enrol(session: AsyncSession, request: EnrolRequest, token: JoinToken) -> Sidecar:
    """A new sidecar with the keys of `request` and the tenants of `token`."""
    if await was_ever_used(session, request.signing_key):
        raise Conflict("a sidecar was enrolled with this key before", field="signing_key")
    sidecar = Sidecar(
        id=secrets.token_hex(16),
        name=request.name,
        signing_key=request.signing_key,
        hpke_key=request.hpke_key,
        every_tenant=token.every_tenant,
        enrolled_at=now(),
        leases=0,
        epoch="",
        applied_seq=0,
        fenced_seq=0,
        reclaimed_seq=0,
    )
    session.add(sidecar)
    await session.flush()
    tenants = (
        await session.scalars(
            select(JoinTokenTenant.tenant).where(JoinTokenTenant.digest == token.digest)
        )
    ).all()
    session.add_all(SidecarTenant(sidecar=sidecar.id, tenant=tenant) for tenant in tenants)
    await session.execute(delete(JoinTokenTenant).where(JoinTokenTenant.digest == token.digest))
    await session.flush()
    return sidecar


async def tenants_of(session: AsyncSession, sidecar: str) -> list[str]:
    """The tenants that a sidecar is enrolled for; empty for one that is for all."""
    rows = await session.scalars(
        select(SidecarTenant.tenant)
        .where(SidecarTenant.sidecar == sidecar)
        .order_by(SidecarTenant.tenant)
    )
    return [str(tenant) for tenant in rows]


async def was_ever_used(session: AsyncSession, signing_key: str) -> bool:
    """Whether a sidecar has or had this key."""
    now_used = select(Sidecar.id).where(Sidecar.signing_key == signing_key)
    once_used = select(FormerKey.sidecar).where(FormerKey.signing_key == signing_key)
    return await session.scalar(now_used.union_all(once_used).limit(1)) is not None


async def is_current(session: AsyncSession, proven: Enrolled) -> bool:
    """Whether the sidecar is live, and the key that proved the call still its key."""
    found = await session.scalar(
        select(Sidecar.signing_key).where(Sidecar.id == proven.id, Sidecar.revoked_at.is_(None))
    )
    return found == encode_base64url(proven.signing_key)


async def require_current(session: AsyncSession, proven: Enrolled) -> None:
    """Raise `Unauthenticated` unless `is_current`: in the call's own transaction."""
    if not await is_current(session, proven):
        raise Unauthenticated("the proof is not valid")


def serving(statement: Select[Sidecar], tenant: str | None) -> Select[Sidecar]:
    """Only the sidecars that are enrolled for `tenant`; None: for any."""
    if tenant is None:
        return statement
    enrolled = select(SidecarTenant.sidecar).where(SidecarTenant.tenant == tenant)
    return statement.where(or_(Sidecar.every_tenant.is_(True), Sidecar.id.in_(enrolled)))


async def get(session: AsyncSession, sidecar: str, tenant: str | None = None) -> Sidecar:
    """A sidecar, live or revoked; one that is enrolled for `tenant` if that is given.

    Raises `Missing`.
    """
    row = await session.scalar(serving(select(Sidecar).where(Sidecar.id == sidecar), tenant))
    if row is None:
        raise Missing("there is no such sidecar", field="sidecar")
    return row


async def concerned(session: AsyncSession, tenant: str | None) -> Sequence[Sidecar]:
    """The live sidecars that may hold what is `tenant`'s; None: what all tenants share."""
    statement = select(Sidecar).where(Sidecar.revoked_at.is_(None)).order_by(Sidecar.id)
    return (await session.scalars(serving(statement, tenant))).all()


async def revoke(session: AsyncSession, sidecar: Sidecar) -> None:
    """Its proofs count no more, from the commit on."""
    sidecar.revoked_at = now()
    await session.flush()


async def next_lease(session: AsyncSession, proven: Enrolled, epoch: str, applied_seq: int) -> int:
    """Count one more serving lease, and return its number."""
    number = await session.scalar(
        update(Sidecar)
        .where(
            Sidecar.id == proven.id,
            Sidecar.signing_key == encode_base64url(proven.signing_key),
            Sidecar.revoked_at.is_(None),
        )
        .values(
            leases=Sidecar.leases + 1,
            leased_at=now(),
            epoch=epoch,
            applied_seq=applied_seq,
            # What was done about another epoch's entries says nothing about this one's.
            fenced_seq=case((Sidecar.epoch == epoch, Sidecar.fenced_seq), else_=0),
            reclaimed_seq=case((Sidecar.epoch == epoch, Sidecar.reclaimed_seq), else_=0),
        )
        .returning(Sidecar.leases)
        .execution_options(synchronize_session=False)
    )
    if number is None:
        raise Refused("this sidecar may not serve")
    return int(number)
