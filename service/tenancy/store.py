"""Reading and writing tenants and who is in them. The caller's session commits.

What changes authorization bumps the tenant's revision in the same transaction; a revision is
taken by an UPDATE, so concurrent changes of one tenant queue up behind its row.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection

from sqlalchemy import delete, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.base import now
from service.keys import components
from service.tenancy.models import Group, GroupKind, Membership, Principal, Tenant
from strongroom.errors import Conflict, Missing
from strongroom.identity import ComponentId, ComponentKind

EVERYONE = "everyone"


async def create_tenant(session: AsyncSession, name: str) -> Tenant:
    """A new tenant with its component, its KEK and its `everyone` group."""
    existing = await session.scalar(
        select(Tenant.id).where(Tenant.name == name, Tenant.removed_at.is_(None))
    )
    if existing is not None:
        raise Conflict(f"a tenant has this name: {existing}", field="name")
    component = await components.register(session, ComponentKind.TENANT, None)
    tenant = Tenant(id=component, name=name, revision=1, created_at=now())
    session.add(tenant)
    await _flush(session, "name")
    await _create_group(session, component, EVERYONE, GroupKind.EVERYONE)
    return tenant


async def get_tenant(session: AsyncSession, tenant: str) -> Tenant:
    """The living tenant with this id. Raises `Missing`."""
    found = await session.scalar(
        select(Tenant).where(Tenant.id == tenant, Tenant.removed_at.is_(None))
    )
    if found is None:
        raise Missing("there is no such tenant", field="tenant")
    return found


async def bump_revision(session: AsyncSession, tenant: ComponentId) -> int:
    """Add one to the tenant's revision and return it. Raises `Missing`."""
    revision = await session.scalar(
        update(Tenant)
        .where(Tenant.id == tenant)
        .values(revision=Tenant.revision + 1)
        .returning(Tenant.revision)
        .execution_options(synchronize_session=False)
    )
    if revision is None:
        raise Missing("there is no such tenant", field="tenant")
    return int(revision)


async def require_review(session: AsyncSession, tenant: str, epoch: str, reason: str) -> bool:
    """Let nothing be granted in `tenant` until an operator has looked; False: no such tenant."""
    marked = await session.scalar(
        update(Tenant)
        .where(Tenant.id == tenant, Tenant.removed_at.is_(None))
        .values(review_required=True, review_epoch=epoch, review_reason=reason)
        .returning(Tenant.id)
        .execution_options(synchronize_session=False)
    )
    return marked is not None


async def create_principal(session: AsyncSession, tenant: ComponentId, name: str) -> Principal:
    """A new subject, with the private group that is made with it."""
    existing = await session.scalar(
        select(Principal.id).where(
            Principal.tenant == tenant, Principal.name == name, Principal.removed_at.is_(None)
        )
    )
    if existing is not None:
        raise Conflict(f"a principal has this name: {existing}", field="name")
    group = await _create_group(session, tenant, f"private:{name}", GroupKind.PRIVATE)
    principal = Principal(
        id=secrets.token_hex(16),
        tenant=tenant,
        name=name,
        private_group=group.id,
        created_at=now(),
    )
    session.add(principal)
    await _flush(session, "name")
    return principal


async def find_principal(session: AsyncSession, tenant: str, name: str) -> Principal | None:
    """The living subject with this name, or None."""
    found: Principal | None = await session.scalar(
        select(Principal).where(
            Principal.tenant == tenant, Principal.name == name, Principal.removed_at.is_(None)
        )
    )
    return found


async def get_principal(session: AsyncSession, tenant: str, name: str) -> Principal:
    """The living subject with this name. Raises `Missing`."""
    found = await find_principal(session, tenant, name)
    if found is None:
        raise Missing("there is no such principal", field="principal")
    return found


async def remove_principal(session: AsyncSession, principal: Principal) -> ComponentId:
    """Remove a subject and its memberships; returns its private group, to be destroyed.

    The caller destroys the component and invalidates the subject in the same change.
    """
    moment = now()
    await session.execute(delete(Membership).where(Membership.principal == principal.id))
    await session.execute(
        update(Group).where(Group.id == principal.private_group).values(removed_at=moment)
    )
    principal.removed_at = moment
    await session.flush()
    return principal.private_group


async def create_group(session: AsyncSession, tenant: ComponentId, name: str) -> Group:
    """A new named group without members."""
    existing = await session.scalar(
        select(Group.id).where(
            Group.tenant == tenant, Group.name == name, Group.removed_at.is_(None)
        )
    )
    if existing is not None:
        raise Conflict(f"a group has this name: {existing}", field="name")
    return await _create_group(session, tenant, name, GroupKind.NAMED)


async def get_group(session: AsyncSession, tenant: str, group: str) -> Group:
    """The living group with this id in this tenant. Raises `Missing`."""
    found: Group | None = await session.scalar(
        select(Group).where(Group.id == group, Group.tenant == tenant, Group.removed_at.is_(None))
    )
    if found is None:
        raise Missing("there is no such group", field="group")
    return found


async def find_groups(
    session: AsyncSession, tenant: str, groups: Collection[str]
) -> frozenset[ComponentId]:
    """Those of `groups` that live in this tenant."""
    rows = await session.scalars(
        select(Group.id).where(
            Group.id.in_(groups), Group.tenant == tenant, Group.removed_at.is_(None)
        )
    )
    return frozenset(rows.all())


async def everyone_group(session: AsyncSession, tenant: str) -> ComponentId:
    """The tenant's `everyone` group. Raises `Missing`."""
    found: ComponentId | None = await session.scalar(
        select(Group.id).where(
            Group.tenant == tenant, Group.kind == GroupKind.EVERYONE, Group.removed_at.is_(None)
        )
    )
    if found is None:
        raise Missing("there is no such group", field="group")
    return found


async def remove_group(session: AsyncSession, group: Group) -> None:
    """Remove a group and its memberships; the caller destroys its component."""
    await session.execute(delete(Membership).where(Membership.group == group.id))
    group.removed_at = now()
    await session.flush()


async def remove_tenant(session: AsyncSession, tenant: Tenant) -> None:
    """Mark a tenant as removed; the caller destroys its components."""
    tenant.removed_at = now()
    await session.flush()


async def add_membership(session: AsyncSession, group: Group, principal: Principal) -> bool:
    """Put a principal into a named group; False if it was there already."""
    if group.kind is not GroupKind.NAMED:
        raise Conflict("only a named group takes members", field="group")
    if await session.get(Membership, (group.id, principal.id)) is not None:
        return False
    session.add(
        Membership(group=group.id, principal=principal.id, tenant=group.tenant, created_at=now())
    )
    await _flush(session, "principal")
    return True


async def remove_membership(session: AsyncSession, group: Group, principal: Principal) -> None:
    """Take a principal out of a group. Raises `Missing` if it was not there."""
    membership = await session.get(Membership, (group.id, principal.id))
    if membership is None:
        raise Missing("there is no such membership", field="membership")
    await session.delete(membership)
    await session.flush()


async def _create_group(
    session: AsyncSession, tenant: ComponentId, name: str, kind: GroupKind
) -> Group:
    component = await components.register(session, ComponentKind.GROUP, tenant)
    group = Group(id=component, tenant=tenant, name=name, kind=kind, created_at=now())
    session.add(group)
    await _flush(session, "name")
    return group


async def _flush(session: AsyncSession, field: str) -> None:
    try:
        await session.flush()
    except IntegrityError as error:
        # Two creations of one name at once: the unique index decides.
        raise Conflict(f"this {field} is taken", field=field) from error
