"""Changes of who is in a tenant, whole: rows, secrets, revision, log and audit in one.

Every change of memberships kills the grants that were minted before it, since a deny rule of
a group may newly apply. Removing a principal or a group also destroys its component.
"""

from __future__ import annotations

from collections.abc import Sequence

from service.changes import Change
from service.keys import components
from service.rules import store as rules
from service.tenancy import store
from service.tenancy.models import Group, GroupKind, Principal, Tenant
from strongroom.errors import Conflict
from strongroom.identity import ComponentId
from strongroom.log import InvalidationKind


async def create_tenant(change: Change, name: str) -> Tenant:
    """A new tenant."""
    tenant = await store.create_tenant(change.session, name)
    await change.audit("tenant.created", tenant=tenant.id, target=tenant.id)
    return tenant


async def finish_review(change: Change, tenant: Tenant, reason: str) -> int:
    """An operator has looked at who may do what in a tenant: grants are given again."""
    if not tenant.review_required:
        raise Conflict("this tenant needs no review", field="tenant")
    epoch, why = tenant.review_epoch, tenant.review_reason
    tenant.review_required, tenant.review_epoch, tenant.review_reason = False, "", ""
    await change.session.flush()
    revision = await store.bump_revision(change.session, tenant.id)
    await change.audit(
        "tenant.reviewed",
        tenant=tenant.id,
        target=tenant.id,
        reason=reason,
        details={"epoch": epoch, "why": why, "revision": revision},
    )
    return revision


async def create_principal(change: Change, tenant: ComponentId, name: str) -> Principal:
    """A new subject with its private group."""
    principal = await store.create_principal(change.session, tenant, name)
    await store.bump_revision(change.session, tenant)
    await change.audit(
        "principal.created", tenant=tenant, subject=name, target=principal.private_group
    )
    return principal


async def remove_principal(change: Change, principal: Principal, reason: str = "") -> int:
    """Remove a subject: its grants die and its private group's secret is destroyed."""
    tenant, name = principal.tenant, principal.name
    group = await store.remove_principal(change.session, principal)
    destroyed = await components.destroy(change.session, [group])
    revision = await store.bump_revision(change.session, tenant)
    await rules.remove_subjects(
        change, tenant, [f"user:{name}", f"group:{group}"], revision, reason
    )
    await change.invalidate(
        kind=InvalidationKind.SUBJECT,
        tenant=tenant,
        subject=name,
        components=destroyed,
    )
    await change.audit(
        "principal.removed", tenant=tenant, subject=name, target=group, reason=reason
    )
    return revision


async def create_group(change: Change, tenant: ComponentId, name: str) -> Group:
    """A new named group."""
    group = await store.create_group(change.session, tenant, name)
    await change.audit("group.created", tenant=tenant, target=group.id, details={"name": name})
    return group


async def remove_group(change: Change, group: Group, reason: str = "") -> int:
    """Remove a named group: whatever depends on it becomes underivable."""
    if group.kind is not GroupKind.NAMED:
        raise Conflict("this group goes with its owner", field="group")
    await store.remove_group(change.session, group)
    destroyed = await components.destroy(change.session, [group.id])
    revision = await store.bump_revision(change.session, group.tenant)
    await rules.remove_subjects(change, group.tenant, [f"group:{group.id}"], revision, reason)
    await _kill_older(change, group.tenant, revision, destroyed)
    await change.audit("group.removed", tenant=group.tenant, target=group.id, reason=reason)
    return revision


async def add_membership(change: Change, group: Group, principal: Principal) -> int:
    """Put a principal into a group."""
    added = await store.add_membership(change.session, group, principal)
    if not added:
        return (await store.get_tenant(change.session, group.tenant)).revision
    revision = await store.bump_revision(change.session, group.tenant)
    await _kill_older(change, group.tenant, revision)
    await change.audit(
        "membership.added", tenant=group.tenant, subject=principal.name, target=group.id
    )
    return revision


async def remove_membership(
    change: Change, group: Group, principal: Principal, reason: str = ""
) -> int:
    """Take a principal out of a group."""
    await store.remove_membership(change.session, group, principal)
    revision = await store.bump_revision(change.session, group.tenant)
    await _kill_older(change, group.tenant, revision)
    await change.audit(
        "membership.removed",
        tenant=group.tenant,
        subject=principal.name,
        target=group.id,
        reason=reason,
    )
    return revision


async def _kill_older(
    change: Change,
    tenant: ComponentId,
    revision: int,
    destroyed: Sequence[ComponentId] = (),
) -> None:
    await change.invalidate(
        kind=InvalidationKind.TENANT_REVISION,
        tenant=tenant,
        min_revision=revision,
        components=destroyed,
    )
