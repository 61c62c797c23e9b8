"""Reading and writing a tenant's rules and roles. The caller's session commits."""

from __future__ import annotations

import secrets

from sqlalchemy import delete, or_, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from policy.rules import Link, Rule
from service.db.base import now
from service.rules.models import RoleRow, RuleRow
from strongroom.errors import Conflict, Missing
from strongroom.identity import ComponentId


async def add_rule(session: AsyncSession, tenant: ComponentId, rule: Rule) -> RuleRow:
    """A new rule. Raises `Conflict`, with the id, if it is there."""
    existing = await session.scalar(
        select(RuleRow.id).where(
            RuleRow.tenant == tenant,
            RuleRow.subject == rule.subject,
            RuleRow.action == rule.action.value,
            RuleRow.resource == rule.resource,
            RuleRow.effect == rule.effect,
        )
    )
    if existing is not None:
        raise Conflict(f"this rule is there: {existing}", field="rule", limit=existing)
    row = RuleRow(
        id=secrets.token_hex(16),
        tenant=tenant,
        subject=rule.subject,
        action=rule.action.value,
        resource=rule.resource,
        effect=rule.effect,
        created_at=now(),
    )
    session.add(row)
    await _flush(session, "rule")
    return row


async def remove_rule(session: AsyncSession, tenant: ComponentId, rule: str) -> RuleRow:
    """Remove one rule, by id. Raises `Missing`."""
    found: RuleRow | None = await session.scalar(
        select(RuleRow).where(RuleRow.id == rule, RuleRow.tenant == tenant)
    )
    if found is None:
        raise Missing("there is no such rule", field="rule")
    await session.delete(found)
    await session.flush()
    return found


async def add_role(session: AsyncSession, tenant: ComponentId, link: Link) -> RoleRow:
    """A new role assignment. Raises `Conflict`, with the id, if it is there."""
    existing = await session.scalar(
        select(RoleRow.id).where(
            RoleRow.tenant == tenant, RoleRow.subject == link.member, RoleRow.role == link.parent
        )
    )
    if existing is not None:
        raise Conflict(f"this role is assigned: {existing}", field="role", limit=existing)
    row = RoleRow(
        id=secrets.token_hex(16),
        tenant=tenant,
        subject=link.member,
        role=link.parent,
        created_at=now(),
    )
    session.add(row)
    await _flush(session, "role")
    return row


async def remove_role(session: AsyncSession, tenant: ComponentId, role: str) -> RoleRow:
    """Remove one role assignment, by id. Raises `Missing`."""
    found: RoleRow | None = await session.scalar(
        select(RoleRow).where(RoleRow.id == role, RoleRow.tenant == tenant)
    )
    if found is None:
        raise Missing("there is no such role assignment", field="role")
    await session.delete(found)
    await session.flush()
    return found


async def remove_subject(session: AsyncSession, tenant: ComponentId, subject: str) -> None:
    """Remove every rule and role of `subject`, and every rule about it."""
    await session.execute(
        delete(RuleRow).where(
            RuleRow.tenant == tenant,
            or_(RuleRow.subject == subject, RuleRow.resource == subject),
        )
    )
    await session.execute(
        delete(RoleRow).where(RoleRow.tenant == tenant, RoleRow.subject == subject)
    )


async def _flush(session: AsyncSession, field: str) -> None:
    try:
        await session.flush()
    except IntegrityError as error:
        raise Conflict(f"this {field} was added just now", field=field) from error
