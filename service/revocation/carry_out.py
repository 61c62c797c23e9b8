"""Carrying out one revocation inside a change: rows, secrets, revision and the log's entry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, assert_never

from sqlalchemy import update

from service import changes
from service.changes import Change
from service.db.base import now
from service.keys import components
from service.registry import store as registry
from service.registry.models import Artefact, Document, DocumentVersion
from service.revocation.ask import Ask
from service.revocation.target import (
    ArtefactTarget,
    DocumentTarget,
    GroupTarget,
    MembershipTarget,
    SidecarTarget,
    SubjectTarget,
    Target,
    TenantTarget,
    VersionTarget,
    components_of,
    find,
    tenant_of,
)
from service.sidecars import store as sidecars
from service.tenancy import changes as tenancy_changes
from service.tenancy import store as tenancy
from service.tenancy.models import Group, Principal
from strongroom.identity import ComponentId
from strongroom.log import InvalidationKind, LogEntry

_IN_MAX: Final = 500


@dataclass(frozen=True, slots=True)
class CarriedOut:
    """The entry that retires it (the last, if they are several), and every component whose
    secret was destroyed.
    """

    entry: LogEntry
    tenant: ComponentId | None
    components: tuple[ComponentId, ...]
    sidecar: str | None = None
    """Set where one sidecar alone is concerned."""


async def carry_out(change: Change, ask: Ask) -> CarriedOut:
    """Do what `ask` says. Raises `Missing` for an unknown target, as for a forbidden one."""
    target = await find(change.session, change.actor, ask)
    tenant = tenant_of(target)
    match target:
        case SubjectTarget(principal):
            await tenancy_changes.remove_principal(change, principal, ask.reason)
        case MembershipTarget(principal, group):
            await tenancy_changes.remove_membership(change, group, principal, ask.reason)
        case GroupTarget(group):
            await tenancy_changes.remove_group(change, group, ask.reason)
        case DocumentTarget(document, _):
            await registry.remove_document(change.session, document)
            return await _destroy(change, tenant, target)
        case VersionTarget(version):
            await registry.remove_version(change.session, version)
            return await _destroy(change, tenant, target)
        case ArtefactTarget(artefact):
            await registry.remove_artefact(change.session, artefact)
            return await _destroy(change, tenant, target)
        case TenantTarget():
            await _remove_tenant(change, target)
            return await _destroy(change, tenant, target)
        case SidecarTarget(sidecar):
            await sidecars.revoke(change.session, sidecar)
            entry = await change.invalidate(kind=InvalidationKind.SIDECAR, sidecar=sidecar.id)
            return CarriedOut(entry, None, (), sidecar.id)
        case _:
            assert_never(target)
    entry = change.entries[-1]
    return CarriedOut(entry, tenant, entry.components)


async def _remove_tenant(change: Change, target: TenantTarget) -> None:
    session, tenant = change.session, target.tenant
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
    await tenancy.bump_revision(session, tenant.id)


async def _destroy(change: Change, tenant: ComponentId | None, target: Target) -> CarriedOut:
    ids = components_of(target)
    destroyed: list[ComponentId] = []
    for start in range(0, len(ids), _IN_MAX):
        destroyed += await components.destroy(change.session, ids[start : start + _IN_MAX])
    change.secrets_destroyed = True
    named: Sequence[ComponentId] = destroyed
    if tenant is not None and tenant in destroyed and len(destroyed) > changes.COMPONENTS_MAX:
        named = [tenant]
    # One entry names so many; who has applied the last has applied them all.
    most = changes.COMPONENTS_MAX
    for start in range(0, max(1, len(named)), most):
        await change.invalidate(
            kind=InvalidationKind.COMPONENTS,
            tenant=tenant or "",
            components=named[start : start + most],
        )
    return CarriedOut(change.entries[-1], tenant, tuple(destroyed))
