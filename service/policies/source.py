"""What a tenant's policy is built from: read in the caller's snapshot, typed where it is built.

Besides the stored rules and roles, a group's members may read what the group may read: one rule a
named group and `everyone`, and a link for each membership. Rows come in small parts, and are made
into rules by the thread that builds, so that a tenant of many rules does not hold up the loop.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from policy.enforcer import TenantEnforcer
from policy.permissions import Permission
from policy.rules import STEP, Effect, Link, Rule
from service.rules.store import Content, Stored, in_parts, read_stored
from service.tenancy.models import Group, GroupKind, Membership, Principal, Tenant
from strongroom.identity import ComponentId


def group_resource(group: str) -> str:
    """A group as the resource of a decision."""
    return f"group:{group}"


@dataclass(frozen=True, slots=True)
class Standing:
    """Who is in a tenant, beside its policy."""

    groups: tuple[tuple[ComponentId, GroupKind], ...]
    """The living ones."""
    principals: tuple[tuple[str, ComponentId], ...]
    """Names of living subjects, and their private groups."""
    memberships: tuple[tuple[ComponentId, str], ...]
    """Groups and names of their members."""

    @property
    def private(self) -> dict[str, str]:
        """`user:<name>` to the resource that its private group is."""
        return {f"user:{name}": group_resource(group) for name, group in self.principals}

    def rules(self) -> Iterable[Rule]:
        """What members may read."""
        for group, kind in self.groups:
            if kind is not GroupKind.PRIVATE:
                resource = group_resource(group)
                yield Rule(f"group:{group}", Permission.GROUP_READ, resource, Effect.ALLOW)

    def links(self) -> Iterable[Link]:
        """Who is a member of what."""
        for group, name in self.memberships:
            yield Link(f"user:{name}", f"group:{group}")
        for group, kind in self.groups:
            if kind is GroupKind.EVERYONE:
                for name, _ in self.principals:
                    yield Link(f"user:{name}", f"group:{group}")


@dataclass(frozen=True, slots=True)
class Source:
    """A tenant at one revision, as it was read."""

    tenant: ComponentId
    revision: int
    stored: Stored
    standing: Standing

    def building(self) -> Generator[None, None, TenantEnforcer]:
        """The enforcer, in steps. Raises `Corrupt` for a row that is no rule."""
        content = yield from self.stored.typing()
        return (yield from building(self.tenant, self.revision, content, self.standing))


def building(
    tenant: ComponentId, revision: int, content: Content, standing: Standing
) -> Generator[None, None, TenantEnforcer]:
    """The enforcer of a policy among who is in the tenant, in steps."""
    rules, links = list(content.rules), list(content.links)
    for number, rule in enumerate(standing.rules()):
        rules.append(rule)
        if number % STEP == STEP - 1:
            yield
    for number, link in enumerate(standing.links()):
        links.append(link)
        if number % STEP == STEP - 1:
            yield
    return (yield from TenantEnforcer.building(tenant, revision, rules, links))


async def load(session: AsyncSession, tenant: Tenant) -> Source:
    """Everything that decides about `tenant` in this session's snapshot."""
    stored = await read_stored(session, tenant.id)
    return Source(tenant.id, tenant.revision, stored, await load_standing(session, tenant))


async def load_standing(session: AsyncSession, tenant: Tenant) -> Standing:
    """Who is in `tenant`."""
    groups = await in_parts(
        session,
        select(Group.id, Group.kind).where(Group.tenant == tenant.id, Group.removed_at.is_(None)),
    )
    principals = await in_parts(
        session,
        select(Principal.name, Principal.private_group).where(
            Principal.tenant == tenant.id, Principal.removed_at.is_(None)
        ),
    )
    memberships = await in_parts(
        session,
        select(Membership.group, Principal.name)
        .join(Principal, Principal.id == Membership.principal)
        .where(Membership.tenant == tenant.id, Principal.removed_at.is_(None)),
    )
    return Standing(
        tuple((row.id, row.kind) for row in groups),
        tuple((row.name, row.private_group) for row in principals),
        tuple((row.group, row.name) for row in memberships),
    )
