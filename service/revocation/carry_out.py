"""Carrying out one revocation inside a change: rows, secrets, revision and one log entry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, assert_never

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from service.auth.actor import Actor
from service.changes import COMPONENTS_MAX, Change
from service.db.base import now
from service.keys import components
from service.keys.models import Component
from service.registry import store as registry
from service.registry.models import SHARED, Artefact, Document, DocumentVersion
from service.revocation.ask import Ask, nothing_there
from service.revocation.models import Axis
from service.sidecars import store as sidecars
from service.tenancy import changes as tenancy_changes
from service.tenancy import store as tenancy
from service.tenancy.models import Group, GroupKind, Principal
from strongroom.errors import Conflict, Missing
from strongroom.identity import ComponentId
from strongroom.log import InvalidationKind, LogEntry

_IN_MAX: Final = 500


@dataclass(frozen=True, slots=True)
class CarriedOut:
    """The entry that retires it, and every component whose secret was destroyed."""

    entry: LogEntry
    tenant: ComponentId | None
    components: tuple[ComponentId, ...]
    sidecar: str | None = None
    """Set where one sidecar alone is concerned."""


async def carry_out(change: Change, ask: Ask) -> CarriedOut:
    """Do what `ask` says. Raises `Missing` for an unknown target, as for a forbidden one."""
    try:
        return await _carry_out(change, await _with_tenant(change.session, ask))
    except Missing as error:
        raise nothing_there() from error


async def _carry_out(change: Change, ask: Ask) -> CarriedOut:
    match ask.axis:
        case Axis.SUBJECT:
            principal = await _principal(change.session, ask)
            await tenancy_changes.remove_principal(change, principal, ask.reason)
            return _last(change, ask.tenant)
        case Axis.MEMBERSHIP:
            principal = await _principal(change.session, ask)
            group = await tenancy.get_group(change.session, ask.tenant or "", ask.group or "")
            await tenancy_changes.remove_membership(change, group, principal, ask.reason)
            return _last(change, ask.tenant)
        case Axis.GROUP:
            return await _group(change, ask)
        case Axis.DOCUMENT:
            document = await registry.get_document(change.session, ask.tenant or "", ask.target)
            versions = await registry.remove_document(change.session, document)
            return await _destroy(change, ask.tenant, [version.id for version in versions])
        case Axis.DOCUMENT_VERSION:
            version = await registry.get_version(change.session, ask.tenant or "", ask.target)
            await registry.remove_version(change.session, version)
            return await _destroy(change, ask.tenant, [version.id])
        case Axis.MODEL | Axis.ADAPTER | Axis.TOKENIZER | Axis.TEMPLATE | Axis.POLICY:
            return await _artefact(change, ask)
        case Axis.TENANT:
            return await _tenant(change, ask)
        case Axis.SIDECAR:
            return await _sidecar(change, ask)
        case _:
            assert_never(ask.axis)


async def _with_tenant(session: AsyncSession, ask: Ask) -> Ask:
    """`ask` with the tenant that its target belongs to, where that was left open."""
    if ask.tenant is not None:
        return ask
    match ask.axis:
        case Axis.MEMBERSHIP | Axis.GROUP:
            wanted = ask.group or ask.target
            owner = await session.scalar(select(Group.tenant).where(Group.id == wanted))
        case Axis.DOCUMENT:
            owner = await session.scalar(select(Document.tenant).where(Document.id == ask.target))
        case Axis.DOCUMENT_VERSION:
            owner = await session.scalar(
                select(DocumentVersion.tenant).where(DocumentVersion.id == ask.target)
            )
        case _:
            return ask
    if owner is None:
        raise nothing_there()
    return replace(ask, tenant=owner)


async def _principal(session: AsyncSession, ask: Ask) -> Principal:
    return await tenancy.get_principal(session, ask.tenant or "", ask.target)


async def _group(change: Change, ask: Ask) -> CarriedOut:
    group = await tenancy.get_group(change.session, ask.tenant or "", ask.target)
    if group.kind is not GroupKind.NAMED:
        raise Conflict("this group goes with its owner: revoke the subject or the tenant")
    await tenancy_changes.remove_group(change, group, ask.reason)
    return _last(change, ask.tenant)


async def _artefact(change: Change, ask: Ask) -> CarriedOut:
    artefact = await registry.get_artefact(change.session, ask.target, None)
    mine = may_revoke(change.actor, artefact.scope)
    if artefact.kind.value != ask.axis.value or not mine:
        raise nothing_there()
    await registry.remove_artefact(change.session, artefact)
    tenant = None if artefact.scope == SHARED else ComponentId(artefact.scope)
    return await _destroy(change, tenant, [artefact.id])


def may_revoke(actor: Actor, scope: str) -> bool:
    """Whether an artefact of this scope is the actor's to revoke."""
    return actor.tenant is None or actor.tenant == scope


async def _tenant(change: Change, ask: Ask) -> CarriedOut:
    session = change.session
    tenant = await tenancy.get_tenant(session, ask.target)
    await tenancy.remove_tenant(session, tenant)
    moment = now()
    for record, owner in (
        (Group, Group.tenant),
        (Principal, Principal.tenant),
        (Document, Document.tenant),
        (DocumentVersion, DocumentVersion.tenant),
        (Artefact, Artefact.scope),
    ):
        await session.execute(
            update(record)
            .where(owner == tenant.id, record.removed_at.is_(None))
            .values(removed_at=moment)
            .execution_options(synchronize_session=False)
        )
    owned = (
        await session.scalars(
            select(Component.id).where(
                Component.tenant == tenant.id, Component.wrapped.is_not(None)
            )
        )
    ).all()
    await tenancy.bump_revision(session, tenant.id)
    # The tenant's own component is in every namespace of the tenant: naming it retires them
    # all, however many others there are.
    others = [component for component in owned if component != tenant.id]
    return await _destroy(change, tenant.id, [tenant.id, *others])


async def _sidecar(change: Change, ask: Ask) -> CarriedOut:
    sidecar = await sidecars.get(change.session, ask.target)
    if sidecar.revoked_at is not None:
        raise nothing_there()
    await sidecars.revoke(change.session, sidecar)
    entry = await change.invalidate(kind=InvalidationKind.SIDECAR, sidecar=sidecar.id)
    return CarriedOut(entry, None, (), sidecar.id)


async def _destroy(
    change: Change, tenant: ComponentId | None, ids: Sequence[ComponentId]
) -> CarriedOut:
    destroyed: list[ComponentId] = []
    for start in range(0, len(ids), _IN_MAX):
        destroyed += await components.destroy(change.session, ids[start : start + _IN_MAX])
    change.secrets_destroyed = True
    named = destroyed
    if tenant is not None and tenant in destroyed and len(destroyed) > COMPONENTS_MAX:
        named = [tenant]
    entry = await change.invalidate(
        kind=InvalidationKind.COMPONENTS, tenant=tenant or "", components=named
    )
    return CarriedOut(entry, tenant, tuple(destroyed))


def _last(change: Change, tenant: ComponentId | None) -> CarriedOut:
    entry = change.entries[-1]
    return CarriedOut(entry, tenant, entry.components)
