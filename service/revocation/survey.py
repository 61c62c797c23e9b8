"""What a revocation would take, told before it takes anything. It reads, and changes nothing.

Counted is what still lives: a namespace that lost another component before is not taken again.
Subjects are those who could read it by belonging to its access group; what the tenant's rules
deny them besides is the policy's question (`/policy/dry-run`). Blocks and bytes are what sidecars
reported to the residency catalogue, a hint; where none ever did they are unknown, and that is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, assert_never

from sqlalchemy import ColumnElement, distinct, exists, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from service.auth.actor import Actor
from service.grants.models import NamespaceComponent
from service.keys import components
from service.keys.models import Component
from service.registry.models import SHARED
from service.residency import catalogue
from service.residency.catalogue import Resident
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
from service.sidecars.models import Sidecar
from service.tenancy.models import Group, GroupKind, Membership, Principal
from strongroom.identity import ComponentId

UNKNOWN_NOTE: Final = "unknown: no sidecar has reported what lies where"
TOO_MANY_NOTE: Final = "unknown: too many components to ask the residency catalogue about"
HINT_NOTE: Final = "as sidecars last reported: a hint, no proof"
_IN_MAX: Final = 500


class GrantsHit(StrEnum):
    """Which grants that were minted before are dead after."""

    SUBJECT = "subject"
    """Every one of this subject."""
    TENANT = "tenant"
    """Every one in the tenant: each asks anew."""
    DEPENDENT = "dependent"
    """Those that name a namespace which is taken."""
    SIDECAR = "sidecar"
    """None: but no grant opens anything at this sidecar any more."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What would be taken, now."""

    tenant: ComponentId | None
    components: tuple[ComponentId, ...]
    """Those whose secrets would be destroyed, sorted."""
    namespaces: int
    subjects: int
    grants: GrantsHit
    sidecars: tuple[Sidecar, ...]
    """Those that would be waited for."""
    held: Resident | None
    """What would be reclaimed; None: unknown."""
    held_note: str


async def survey(session: AsyncSession, actor: Actor, ask: Ask) -> Survey:
    """What `ask` would take. Raises what carrying it out would raise."""
    target = await find(session, actor, ask)
    tenant = tenant_of(target)
    ids = components_of(target)
    living: set[ComponentId] = set()
    for start in range(0, len(ids), _IN_MAX):
        living |= await components.living(session, ids[start : start + _IN_MAX])
    if isinstance(target, SidecarTarget):
        concerned: Sequence[Sidecar] = [target.sidecar]
    else:
        concerned = await sidecars.concerned(session, tenant)
    held, note = await _held(session, target, sorted(living))
    return Survey(
        held=held,
        held_note=note,
        tenant=tenant,
        components=tuple(sorted(living)),
        namespaces=await _namespaces(session, target, sorted(living)),
        subjects=await _subjects(session, target),
        grants=_grants(target),
        sidecars=tuple(concerned),
    )


def _grants(target: Target) -> GrantsHit:
    match target:
        case SubjectTarget():
            return GrantsHit.SUBJECT
        case MembershipTarget() | GroupTarget() | TenantTarget():
            return GrantsHit.TENANT
        case DocumentTarget() | VersionTarget() | ArtefactTarget():
            return GrantsHit.DEPENDENT
        case SidecarTarget():
            return GrantsHit.SIDECAR
        case _:
            assert_never(target)


async def _namespaces(session: AsyncSession, target: Target, ids: Sequence[ComponentId]) -> int:
    """Namespaces that can be derived now, and could not be after."""
    if isinstance(target, TenantTarget):
        # Every namespace of a tenant depends on the tenant's own component.
        ids = [target.tenant.id]
    other = aliased(NamespaceComponent)
    dead = exists().where(
        other.namespace == NamespaceComponent.namespace,
        other.component == Component.id,
        Component.wrapped.is_(None),
    )
    found: set[str] = set()
    for start in range(0, len(ids), _IN_MAX):
        among = NamespaceComponent.component.in_(ids[start : start + _IN_MAX])
        if len(ids) <= _IN_MAX:
            counted = select(func.count(distinct(NamespaceComponent.namespace)))
            return await session.scalar(counted.where(among, ~dead)) or 0
        rows = await session.scalars(
            select(NamespaceComponent.namespace).where(among, ~dead).distinct()
        )
        found.update(rows)
    return len(found)


async def _held(
    session: AsyncSession, target: Target, ids: Sequence[ComponentId]
) -> tuple[Resident | None, str]:
    """What lies where of what would be taken, and how far that can be believed."""
    if not await catalogue.is_kept(session):
        return None, UNKNOWN_NOTE
    if isinstance(target, TenantTarget):
        return await catalogue.of_tenant(session, target.tenant.id), HINT_NOTE
    if len(ids) > catalogue.COMPONENTS_MAX:
        return None, TOO_MANY_NOTE
    return await catalogue.of_components(session, ids, tenant_of(target)), HINT_NOTE


async def _subjects(session: AsyncSession, target: Target) -> int:
    """Living subjects who could read it, by their groups."""
    match target:
        case SubjectTarget() | MembershipTarget():
            return 1
        case GroupTarget(group):
            return await _members(session, [group.id])
        case DocumentTarget(_, versions):
            return await _members(session, sorted({version.group for version in versions}))
        case VersionTarget(version):
            return await _members(session, [version.group])
        case ArtefactTarget(artefact):
            everybody = artefact.scope == SHARED
            return await _principals(
                session, *(() if everybody else (Principal.tenant == artefact.scope,))
            )
        case TenantTarget(tenant, _):
            return await _principals(session, Principal.tenant == tenant.id)
        case SidecarTarget():
            return 0
        case _:
            assert_never(target)


async def _members(session: AsyncSession, groups: Sequence[ComponentId]) -> int:
    found: set[str] = set()
    for start in range(0, len(groups), _IN_MAX):
        part = groups[start : start + _IN_MAX]
        open_to_all = select(Group.tenant).where(
            Group.id.in_(part), Group.kind == GroupKind.EVERYONE
        )
        named = select(Membership.principal).where(Membership.group.in_(part))
        rows = await session.scalars(
            select(Principal.id).where(
                Principal.removed_at.is_(None),
                or_(
                    Principal.private_group.in_(part),
                    Principal.tenant.in_(open_to_all),
                    Principal.id.in_(named),
                ),
            )
        )
        found.update(rows)
    return len(found)


async def _principals(session: AsyncSession, *where: ColumnElement[bool]) -> int:
    counted = select(func.count()).select_from(Principal)
    return await session.scalar(counted.where(Principal.removed_at.is_(None), *where)) or 0
