"""Rules, roles and decisions over HTTP.

Every change of rules makes a version and kills the grants that were minted before it.
"""

from __future__ import annotations

from dataclasses import replace
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Path
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from policy.conditions import ALWAYS
from policy.decide import Allow, explain
from policy.permissions import Permission
from policy.rules import Link, Rule
from service.auth.scope import Scoped, scoped
from service.db.pages import read_page
from service.http_errors import CONDITIONAL
from service.http_page import PagingDep
from service.policies.activate import Intent, activate
from service.policies.schemas import (
    DecisionAnswer,
    DecisionBody,
    RoleAnswer,
    RoleBody,
    RolePage,
    RuleAnswer,
    RuleBody,
    RulePage,
)
from service.preconditions import MaybeIfMatch
from service.rules import store
from service.rules.models import Origin, RoleRow, RuleRow
from service.rules.store import Content
from service.runtime import Runtime, RuntimeDep
from service.tenancy import store as tenancy
from service.tenancy.schemas import RevisionAnswer
from strongroom.errors import Conflict, Missing

router = APIRouter(prefix="/v1/tenants/{tenant}", tags=["policy"])

RowId = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]
Reader = Annotated[Scoped, Depends(scoped(Permission.RULE_READ))]
Writer = Annotated[Scoped, Depends(scoped(Permission.RULE_WRITE))]


@router.post(
    "/rules",
    status_code=HTTPStatus.CREATED,
    summary="Add a rule",
    responses={412: CONDITIONAL[412]},
)
async def add_rule(
    runtime: RuntimeDep, scope: Writer, body: RuleBody, expected: MaybeIfMatch
) -> RuleAnswer:
    """A rule that allows or denies where its condition holds. A deny wins over every allow."""
    condition = ALWAYS if body.condition is None else body.condition.typed()
    rule = Rule(body.subject, body.action, body.resource, body.effect, condition)

    async def plan(session: AsyncSession, content: Content) -> Content:
        if rule in content.rules:
            row = await store.find_row(session, scope.tenant, rule)
            known = None if row is None else row.id
            raise Conflict(f"this rule is there: {known}", field="rule", limit=known)
        return replace(content, rules=content.rules | {rule})

    await activate(
        runtime,
        scope,
        Intent(Origin.EDITED, plan, "rule.added", str(rule), expected=expected),
    )
    return RuleAnswer.of(await _row_of(runtime, scope, rule))


@router.get("/rules", summary="List rules")
async def list_rules(runtime: RuntimeDep, scope: Reader, paging: PagingDep) -> RulePage:
    """The rules of a tenant."""
    statement = select(RuleRow).where(RuleRow.tenant == scope.tenant, RuleRow.removed_in.is_(None))
    async with runtime.sessions() as session:
        await tenancy.get_tenant(session, scope.tenant)
        page = await read_page(session, statement, RuleRow.id, paging)
    return RulePage(
        items=[RuleAnswer.of(row) for row in page.rows],
        next_cursor=page.next_cursor,
    )


@router.delete("/rules/{rule}", summary="Remove a rule", responses={412: CONDITIONAL[412]})
async def remove_rule(
    runtime: RuntimeDep, scope: Writer, rule: RowId, expected: MaybeIfMatch
) -> RevisionAnswer:
    """Remove a rule, by id."""
    async with runtime.sessions() as session:
        await tenancy.get_tenant(session, scope.tenant)
        told = store.typed_rule(await store.get_rule(session, scope.tenant, rule))

    async def plan(session: AsyncSession, content: Content) -> Content:
        await store.get_rule(session, scope.tenant, rule)
        return replace(content, rules=content.rules - {told})

    done = await activate(
        runtime,
        scope,
        Intent(Origin.EDITED, plan, "rule.removed", str(told), expected=expected),
    )
    return RevisionAnswer(revision=done.revision)


@router.post(
    "/roles",
    status_code=HTTPStatus.CREATED,
    summary="Assign a role",
    responses={412: CONDITIONAL[412]},
)
async def assign_role(
    runtime: RuntimeDep, scope: Writer, body: RoleBody, expected: MaybeIfMatch
) -> RoleAnswer:
    """Give a role to a user, a group or another role."""
    link = Link(body.subject, body.role)

    async def plan(session: AsyncSession, content: Content) -> Content:
        if link in content.links:
            row = await store.find_row(session, scope.tenant, link)
            known = None if row is None else row.id
            raise Conflict(f"this role is assigned: {known}", field="role", limit=known)
        return replace(content, links=content.links | {link})

    told = f"{link.member} in {link.parent}"
    await activate(
        runtime, scope, Intent(Origin.EDITED, plan, "role.assigned", told, expected=expected)
    )
    return RoleAnswer.model_validate(await _row_of(runtime, scope, link))


@router.get("/roles", summary="List role assignments")
async def list_roles(runtime: RuntimeDep, scope: Reader, paging: PagingDep) -> RolePage:
    """The role assignments of a tenant."""
    statement = select(RoleRow).where(RoleRow.tenant == scope.tenant, RoleRow.removed_in.is_(None))
    async with runtime.sessions() as session:
        await tenancy.get_tenant(session, scope.tenant)
        page = await read_page(session, statement, RoleRow.id, paging)
    return RolePage(
        items=[RoleAnswer.model_validate(row) for row in page.rows],
        next_cursor=page.next_cursor,
    )


@router.delete(
    "/roles/{role}", summary="Remove a role assignment", responses={412: CONDITIONAL[412]}
)
async def remove_role(
    runtime: RuntimeDep, scope: Writer, role: RowId, expected: MaybeIfMatch
) -> RevisionAnswer:
    """Remove a role assignment, by id."""
    async with runtime.sessions() as session:
        await tenancy.get_tenant(session, scope.tenant)
        link = store.typed_link(await store.get_role(session, scope.tenant, role))

    async def plan(session: AsyncSession, content: Content) -> Content:
        await store.get_role(session, scope.tenant, role)
        return replace(content, links=content.links - {link})

    told = f"{link.member} in {link.parent}"
    done = await activate(
        runtime, scope, Intent(Origin.EDITED, plan, "role.removed", told, expected=expected)
    )
    return RevisionAnswer(revision=done.revision)


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
    decision = policy.decide(body.subject, body.action, body.resource, body.asked_in())
    return DecisionAnswer(
        allowed=isinstance(decision, Allow),
        reason=explain(decision),
        rule=None if decision.rule is None else str(decision.rule),
        until=decision.until,
        revision=policy.revision,
    )


async def _row_of(runtime: Runtime, scope: Scoped, each: Rule | Link) -> RuleRow | RoleRow:
    """The row that was made just now."""
    async with runtime.sessions() as session:
        row = await store.find_row(session, scope.tenant, each)
    if not isinstance(row, RuleRow | RoleRow):
        raise Missing("it was removed again meanwhile", field="rule")
    return row
