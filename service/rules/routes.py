"""Rules, roles and decisions over HTTP.

Every change of rules kills the grants that were minted before it.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Path
from sqlalchemy import select

from policy.decide import Allow, explain
from policy.permissions import Permission
from policy.rules import Link, Rule, check_rules
from service.auth.scope import Scoped, scoped
from service.changes import Change
from service.db.pages import read_page
from service.http_page import PagingDep
from service.rules import store
from service.rules.enforcers import load
from service.rules.models import RoleRow, RuleRow
from service.rules.schemas import (
    DecisionAnswer,
    DecisionBody,
    RoleAnswer,
    RoleBody,
    RolePage,
    RuleAnswer,
    RuleBody,
    RulePage,
)
from service.runtime import RuntimeDep
from service.tenancy import store as tenancy
from service.tenancy.models import Tenant
from service.tenancy.schemas import RevisionAnswer
from strongroom.errors import Conflict
from strongroom.log import InvalidationKind

router = APIRouter(prefix="/v1/tenants/{tenant}", tags=["policy"])

RowId = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]
Reader = Annotated[Scoped, Depends(scoped(Permission.RULE_READ))]
Writer = Annotated[Scoped, Depends(scoped(Permission.RULE_WRITE))]


async def _settle(change: Change, tenant: Tenant, kind: str, told: str) -> int:
    """Check the whole new state, then bump, invalidate and audit."""
    source = await load(change.session, tenant)
    check_rules(source.rules, source.links)
    revision = await tenancy.bump_revision(change.session, tenant.id)
    await change.invalidate(
        kind=InvalidationKind.TENANT_REVISION, tenant=tenant.id, min_revision=revision
    )
    await change.audit(kind, tenant=tenant.id, details={"what": told, "revision": revision})
    return revision


@router.post("/rules", status_code=HTTPStatus.CREATED, summary="Add a rule")
async def add_rule(runtime: RuntimeDep, scope: Writer, body: RuleBody) -> RuleAnswer:
    """A rule that allows or denies. A deny wins over every allow."""
    rule = Rule(body.subject, body.action, body.resource, body.effect)
    async with runtime.changes.begin(scope.actor) as change:
        tenant = await tenancy.get_tenant(change.session, scope.tenant)
        row = await store.add_rule(change.session, scope.tenant, rule)
        await _settle(change, tenant, "rule.added", str(rule))
    return RuleAnswer.model_validate(row)


@router.get("/rules", summary="List rules")
async def list_rules(runtime: RuntimeDep, scope: Reader, paging: PagingDep) -> RulePage:
    """The rules of a tenant."""
    statement = select(RuleRow).where(RuleRow.tenant == scope.tenant)
    async with runtime.sessions() as session:
        await tenancy.get_tenant(session, scope.tenant)
        page = await read_page(session, statement, RuleRow.id, paging)
    return RulePage(
        items=[RuleAnswer.model_validate(row) for row in page.rows],
        next_cursor=page.next_cursor,
    )


@router.delete("/rules/{rule}", summary="Remove a rule")
async def remove_rule(runtime: RuntimeDep, scope: Writer, rule: RowId) -> RevisionAnswer:
    """Remove a rule, by id."""
    async with runtime.changes.begin(scope.actor) as change:
        tenant = await tenancy.get_tenant(change.session, scope.tenant)
        row = await store.remove_rule(change.session, scope.tenant, rule)
        told = f"{row.effect} {row.subject} {row.action} on {row.resource}"
        revision = await _settle(change, tenant, "rule.removed", told)
    return RevisionAnswer(revision=revision)


@router.post("/roles", status_code=HTTPStatus.CREATED, summary="Assign a role")
async def assign_role(runtime: RuntimeDep, scope: Writer, body: RoleBody) -> RoleAnswer:
    """Give a role to a user, a group or another role."""
    link = Link(body.subject, body.role)
    async with runtime.changes.begin(scope.actor) as change:
        tenant = await tenancy.get_tenant(change.session, scope.tenant)
        row = await store.add_role(change.session, scope.tenant, link)
        await _settle(change, tenant, "role.assigned", f"{link.member} in {link.parent}")
    return RoleAnswer.model_validate(row)


@router.get("/roles", summary="List role assignments")
async def list_roles(runtime: RuntimeDep, scope: Reader, paging: PagingDep) -> RolePage:
    """The role assignments of a tenant."""
    statement = select(RoleRow).where(RoleRow.tenant == scope.tenant)
    async with runtime.sessions() as session:
        await tenancy.get_tenant(session, scope.tenant)
        page = await read_page(session, statement, RoleRow.id, paging)
    return RolePage(
        items=[RoleAnswer.model_validate(row) for row in page.rows],
        next_cursor=page.next_cursor,
    )


@router.delete("/roles/{role}", summary="Remove a role assignment")
async def remove_role(runtime: RuntimeDep, scope: Writer, role: RowId) -> RevisionAnswer:
    """Remove a role assignment, by id."""
    async with runtime.changes.begin(scope.actor) as change:
        tenant = await tenancy.get_tenant(change.session, scope.tenant)
        row = await store.remove_role(change.session, scope.tenant, role)
        revision = await _settle(change, tenant, "role.removed", f"{row.subject} in {row.role}")
    return RevisionAnswer(revision=revision)


@router.post("/decisions", summary="Ask for a decision")
async def decide(
    runtime: RuntimeDep,
    scope: Annotated[Scoped, Depends(scoped(Permission.DECISION_READ))],
    body: DecisionBody,
) -> DecisionAnswer:
    """Whether a subject may do something, and which rule says so. Nothing is granted by it."""
    async with runtime.database.snapshots() as session:
        tenant = await tenancy.get_tenant(session, scope.tenant)
        if body.min_revision is not None and tenant.revision < body.min_revision:
            raise Conflict(
                "this state of the tenant's authorization is not here",
                field="min_revision",
                limit=tenant.revision,
            )
        policy = await runtime.enforcers.at(session, tenant)
    decision = policy.decide(body.subject, body.action, body.resource)
    return DecisionAnswer(
        allowed=isinstance(decision, Allow),
        reason=explain(decision),
        rule=None if decision.rule is None else str(decision.rule),
        revision=policy.revision,
    )
