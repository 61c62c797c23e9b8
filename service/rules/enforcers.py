"""Each tenant's policy in memory, at the revision that a snapshot of the database has.

Rules:
- A policy is loaded in the caller's snapshot, built aside on one worker thread, and swapped
  whole. It is kept by revision: another revision is another policy.
- Besides the stored rules, a group's members may read what the group may read: one rule a
  named group and `everyone`, and a link for each membership. Deny wins as ever.
- A subject may read its own private group, unless a rule denies it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from policy.decide import Allow, Decision, Decisions, Deny
from policy.enforcer import TenantEnforcer
from policy.permissions import Permission
from policy.rules import Effect, Link, Rule, parse_rule
from service.rules.models import RoleRow, RuleRow
from service.tenancy.models import Group, GroupKind, Membership, Principal, Tenant
from strongroom.errors import Corrupt, Misuse
from strongroom.identity import ComponentId

TENANTS_MAX: Final = 1024
"""Policies kept in memory; the least recently used goes first."""


def group_resource(group: str) -> str:
    """A group as the resource of a decision."""
    return f"group:{group}"


@dataclass(frozen=True, slots=True)
class PolicySource:
    """What a tenant's policy is built from."""

    tenant: ComponentId
    revision: int
    rules: tuple[Rule, ...]
    links: tuple[Link, ...]
    private: Mapping[str, str]
    """`user:<name>` to the resource that its private group is."""


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """A tenant's decisions at one revision."""

    enforcer: TenantEnforcer
    private: Mapping[str, str]
    decisions: Decisions

    @property
    def revision(self) -> int:
        """The tenant's revision that this is the policy of."""
        return self.enforcer.revision

    def decide(self, subject: str, action: Permission, resource: str) -> Decision:
        """Whether `subject` may do `action` to `resource`."""
        decision = self.decisions.decide(self.enforcer, subject, action, resource)
        if (
            isinstance(decision, Deny)
            and decision.rule is None
            and action is Permission.GROUP_READ
            and self.private.get(subject) == resource
        ):
            return Allow(Rule(subject, action, resource, Effect.ALLOW))
        return decision


class Enforcers:
    """Every tenant's newest policy. Belongs to one event loop."""

    def __init__(self) -> None:
        self._decisions = Decisions()
        self._newest: OrderedDict[ComponentId, TenantPolicy] = OrderedDict()
        self._builder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="policy-build")

    async def at(self, session: AsyncSession, tenant: Tenant) -> TenantPolicy:
        """The policy of `tenant` at its revision in this session, which must be a snapshot."""
        known = self._newest.get(tenant.id)
        if known is not None and known.revision == tenant.revision:
            self._newest.move_to_end(tenant.id)
            return known
        source = await load(session, tenant)
        loop = asyncio.get_running_loop()
        enforcer = await loop.run_in_executor(
            self._builder,
            TenantEnforcer,
            source.tenant,
            source.revision,
            source.rules,
            source.links,
        )
        built = TenantPolicy(enforcer, source.private, self._decisions)
        known = self._newest.get(tenant.id)
        if known is None or known.revision < built.revision:
            self._newest[tenant.id] = built
            self._newest.move_to_end(tenant.id)
            if len(self._newest) > TENANTS_MAX:
                self._newest.popitem(last=False)
        return built

    def close(self) -> None:
        """Stop the worker."""
        self._builder.shutdown(wait=True)
        self._newest.clear()


async def load(session: AsyncSession, tenant: Tenant) -> PolicySource:
    """Everything that decides about `tenant`. Raises `Corrupt` for a row that is no rule."""
    rules = await session.execute(
        select(RuleRow.subject, RuleRow.action, RuleRow.resource, RuleRow.effect).where(
            RuleRow.tenant == tenant.id
        )
    )
    roles = await session.execute(
        select(RoleRow.subject, RoleRow.role).where(RoleRow.tenant == tenant.id)
    )
    groups = (
        await session.execute(
            select(Group.id, Group.kind).where(
                Group.tenant == tenant.id,
                Group.removed_at.is_(None),
                Group.kind != GroupKind.PRIVATE,
            )
        )
    ).all()
    subjects = (
        await session.execute(
            select(Principal.id, Principal.name, Principal.private_group).where(
                Principal.tenant == tenant.id, Principal.removed_at.is_(None)
            )
        )
    ).all()
    memberships = await session.execute(
        select(Membership.group, Principal.name)
        .join(Principal, Principal.id == Membership.principal)
        .where(Membership.tenant == tenant.id, Principal.removed_at.is_(None))
    )
    try:
        stored = {parse_rule(row.subject, row.action, row.resource, row.effect) for row in rules}
        links = {Link(row.subject, row.role) for row in roles}
    except Misuse as error:
        raise Corrupt("a stored rule is no rule", field="rule") from error
    everyone = [group.id for group in groups if group.kind is GroupKind.EVERYONE]
    stored.update(_readable_by_members(group.id) for group in groups)
    links.update(Link(f"user:{row.name}", f"group:{row.group}") for row in memberships)
    links.update(
        Link(f"user:{subject.name}", f"group:{group}") for subject in subjects for group in everyone
    )
    return PolicySource(
        tenant=tenant.id,
        revision=tenant.revision,
        rules=tuple(stored),
        links=tuple(links),
        private={f"user:{row.name}": group_resource(row.private_group) for row in subjects},
    )


def _readable_by_members(group: ComponentId) -> Rule:
    return Rule(f"group:{group}", Permission.GROUP_READ, group_resource(group), Effect.ALLOW)
