"""Tenants, principals, groups and memberships over HTTP."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query
from sqlalchemy import select

from policy.permissions import Permission
from service.auth.actor import Actor, ActorKind
from service.auth.errors import Forbidden
from service.auth.scope import Scoped, permitted, scoped
from service.db.pages import read_page
from service.http_page import PagingDep
from service.runtime import RuntimeDep
from service.schemas import NAME_PATTERN
from service.tenancy import changes, store
from service.tenancy.models import Group, Membership, Principal, Tenant
from service.tenancy.schemas import (
    GroupAnswer,
    GroupBody,
    GroupPage,
    MemberAnswer,
    MemberPage,
    MembershipAnswer,
    MembershipBody,
    PrincipalAnswer,
    PrincipalBody,
    PrincipalPage,
    ReviewBody,
    RevisionAnswer,
    TenantAnswer,
    TenantBody,
    TenantPage,
)
from strongroom.limits import NAME_CHARS_MAX

router = APIRouter(prefix="/v1/tenants", tags=["tenancy"])

PrincipalName = Annotated[
    str, Path(pattern=NAME_PATTERN, max_length=NAME_CHARS_MAX, examples=["alice"])
]
GroupId = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]
Reader = Annotated[Scoped, Depends(scoped(Permission.TENANT_READ))]
Writer = Annotated[Scoped, Depends(scoped(Permission.TENANT_WRITE))]


@router.post("", status_code=HTTPStatus.CREATED, summary="Create a tenant")
async def create_tenant(
    runtime: RuntimeDep,
    actor: Annotated[Actor, Depends(permitted(Permission.TENANT_CREATE))],
    body: TenantBody,
) -> TenantAnswer:
    """A new tenant, with its own key-encryption key and its `everyone` group."""
    async with runtime.changes.begin(actor) as change:
        tenant = await changes.create_tenant(change, body.name)
    return TenantAnswer.model_validate(tenant)


@router.get("", summary="List tenants")
async def list_tenants(
    runtime: RuntimeDep,
    actor: Annotated[Actor, Depends(permitted(Permission.TENANT_READ))],
    paging: PagingDep,
    name: Annotated[str | None, Query(pattern=NAME_PATTERN, max_length=NAME_CHARS_MAX)] = None,
) -> TenantPage:
    """The living tenants that the caller may see."""
    statement = select(Tenant).where(Tenant.removed_at.is_(None))
    if actor.tenant is not None:
        statement = statement.where(Tenant.id == actor.tenant)
    if name is not None:
        statement = statement.where(Tenant.name == name)
    async with runtime.sessions() as session:
        page = await read_page(session, statement, Tenant.id, paging)
    return TenantPage(
        items=[TenantAnswer.model_validate(row) for row in page.rows],
        next_cursor=page.next_cursor,
    )


@router.get("/{tenant}", summary="Read a tenant")
async def read_tenant(runtime: RuntimeDep, scope: Reader) -> TenantAnswer:
    """A tenant and the revision of its authorization."""
    async with runtime.sessions() as session:
        return TenantAnswer.model_validate(await store.get_tenant(session, scope.tenant))


async def _reviewer(scope: Writer) -> Scoped:
    if scope.actor.kind is not ActorKind.OPERATOR:
        raise Forbidden("only an operator finishes a review", field="authorization")
    return scope


Reviewer = Annotated[Scoped, Depends(_reviewer)]


@router.post("/{tenant}/review", summary="Finish the review of a tenant")
async def finish_review(runtime: RuntimeDep, scope: Reviewer, body: ReviewBody) -> RevisionAnswer:
    """Let a restored tenant's grants be given again, once its rules and members are as they were.

    Only an operator may say so: whoever gained by the restore is not asked.
    """
    async with runtime.changes.begin(scope.actor) as change:
        tenant = await store.get_tenant(change.session, scope.tenant)
        revision = await changes.finish_review(change, tenant, body.reason)
    return RevisionAnswer(revision=revision)


@router.post("/{tenant}/principals", status_code=HTTPStatus.CREATED, summary="Create a principal")
async def create_principal(
    runtime: RuntimeDep, scope: Writer, body: PrincipalBody
) -> PrincipalAnswer:
    """A new subject, with a private group that holds nobody else."""
    async with runtime.changes.begin(scope.actor) as change:
        await store.get_tenant(change.session, scope.tenant)
        principal = await changes.create_principal(change, scope.tenant, body.name)
    return PrincipalAnswer.model_validate(principal)


@router.get("/{tenant}/principals", summary="List principals")
async def list_principals(runtime: RuntimeDep, scope: Reader, paging: PagingDep) -> PrincipalPage:
    """The living subjects of a tenant."""
    statement = select(Principal).where(
        Principal.tenant == scope.tenant, Principal.removed_at.is_(None)
    )
    async with runtime.sessions() as session:
        await store.get_tenant(session, scope.tenant)
        page = await read_page(session, statement, Principal.id, paging)
    return PrincipalPage(
        items=[PrincipalAnswer.model_validate(row) for row in page.rows],
        next_cursor=page.next_cursor,
    )


@router.get("/{tenant}/principals/{principal}", summary="Read a principal")
async def read_principal(
    runtime: RuntimeDep, scope: Reader, principal: PrincipalName
) -> PrincipalAnswer:
    """A subject, by name."""
    async with runtime.sessions() as session:
        await store.get_tenant(session, scope.tenant)
        found = await store.get_principal(session, scope.tenant, principal)
    return PrincipalAnswer.model_validate(found)


@router.delete("/{tenant}/principals/{principal}", summary="Remove a principal")
async def remove_principal(
    runtime: RuntimeDep, scope: Writer, principal: PrincipalName
) -> RevisionAnswer:
    """Remove a subject: its grants die, and its private group's secret is destroyed."""
    async with runtime.changes.begin(scope.actor) as change:
        await store.get_tenant(change.session, scope.tenant)
        found = await store.get_principal(change.session, scope.tenant, principal)
        revision = await changes.remove_principal(change, found)
    return RevisionAnswer(revision=revision)


@router.post("/{tenant}/groups", status_code=HTTPStatus.CREATED, summary="Create a group")
async def create_group(runtime: RuntimeDep, scope: Writer, body: GroupBody) -> GroupAnswer:
    """A new access group without members."""
    async with runtime.changes.begin(scope.actor) as change:
        await store.get_tenant(change.session, scope.tenant)
        group = await changes.create_group(change, scope.tenant, body.name)
    return GroupAnswer.model_validate(group)


@router.get("/{tenant}/groups", summary="List groups")
async def list_groups(runtime: RuntimeDep, scope: Reader, paging: PagingDep) -> GroupPage:
    """The living groups of a tenant, private ones and `everyone` included."""
    statement = select(Group).where(Group.tenant == scope.tenant, Group.removed_at.is_(None))
    async with runtime.sessions() as session:
        await store.get_tenant(session, scope.tenant)
        page = await read_page(session, statement, Group.id, paging)
    return GroupPage(
        items=[GroupAnswer.model_validate(row) for row in page.rows],
        next_cursor=page.next_cursor,
    )


@router.get("/{tenant}/groups/{group}", summary="Read a group")
async def read_group(runtime: RuntimeDep, scope: Reader, group: GroupId) -> GroupAnswer:
    """A group, by id."""
    async with runtime.sessions() as session:
        await store.get_tenant(session, scope.tenant)
        return GroupAnswer.model_validate(await store.get_group(session, scope.tenant, group))


@router.delete("/{tenant}/groups/{group}", summary="Remove a group")
async def remove_group(runtime: RuntimeDep, scope: Writer, group: GroupId) -> RevisionAnswer:
    """Remove a group: everything that depends on it becomes unreadable."""
    async with runtime.changes.begin(scope.actor) as change:
        await store.get_tenant(change.session, scope.tenant)
        found = await store.get_group(change.session, scope.tenant, group)
        revision = await changes.remove_group(change, found)
    return RevisionAnswer(revision=revision)


@router.post("/{tenant}/memberships", status_code=HTTPStatus.CREATED, summary="Add a membership")
async def add_membership(
    runtime: RuntimeDep, scope: Writer, body: MembershipBody
) -> MembershipAnswer:
    """Put a principal into a named group. Grants minted before are dead."""
    async with runtime.changes.begin(scope.actor) as change:
        await store.get_tenant(change.session, scope.tenant)
        group = await store.get_group(change.session, scope.tenant, body.group)
        principal = await store.get_principal(change.session, scope.tenant, body.principal)
        revision = await changes.add_membership(change, group, principal)
    return MembershipAnswer(group=group.id, principal=principal.name, revision=revision)


@router.get("/{tenant}/memberships", summary="List memberships")
async def list_memberships(
    runtime: RuntimeDep,
    scope: Reader,
    paging: PagingDep,
    group: Annotated[str, Query(pattern="^[0-9a-f]{32}$", description="The group's id.")],
) -> MemberPage:
    """The members of one named group."""
    async with runtime.sessions() as session:
        await store.get_tenant(session, scope.tenant)
        found = await store.get_group(session, scope.tenant, group)
        members = (
            select(Principal)
            .join(Membership, Membership.principal == Principal.id)
            .where(Membership.group == found.id)
        )
        page = await read_page(session, members, Principal.id, paging)
    return MemberPage(
        items=[MemberAnswer(group=found.id, principal=row.name) for row in page.rows],
        next_cursor=page.next_cursor,
    )


@router.delete("/{tenant}/memberships/{group}/{principal}", summary="Remove a membership")
async def remove_membership(
    runtime: RuntimeDep, scope: Writer, group: GroupId, principal: PrincipalName
) -> RevisionAnswer:
    """Take a principal out of a group. Grants minted before are dead."""
    async with runtime.changes.begin(scope.actor) as change:
        await store.get_tenant(change.session, scope.tenant)
        owner = await store.get_group(change.session, scope.tenant, group)
        member = await store.get_principal(change.session, scope.tenant, principal)
        revision = await changes.remove_membership(change, owner, member)
    return RevisionAnswer(revision=revision)
