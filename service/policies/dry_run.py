"""What a proposed policy would change, told before anything is changed.

Both policies are built for this alone, on the thread that builds, and every question is asked of
both. Subjects are the tenant's living ones, and users whom a rule or role names; resources are its
groups, private ones too, and for other kinds what the rules name.

A change of rules destroys no component. Its entry in the log kills every grant of the tenant, so
its namespaces have to be granted anew; blocks stay. What nobody could be granted any more is
counted as abandoned, and so are its bytes, as far as the residency catalogue knows.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from policy.cases import Failure
from policy.decide import Decisions
from policy.impact import Impact, Side, comparing
from policy.rules import ANY
from service.grants.models import Namespace, NamespaceComponent
from service.policies.activate import Prepared
from service.policies.enforcers import TenantPolicy
from service.policies.source import building, group_resource
from service.residency import catalogue
from strongroom.identity import ComponentId

NO_REPORT: Final = "not known: no sidecar has reported what lies where"
TOO_MANY: Final = "not known: too many questions to tell"
AS_REPORTED: Final = "as sidecars reported last: a hint"
_IN_MAX: Final = 500


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a dry run found."""

    impact: Impact
    failures: tuple[Failure, ...]
    namespaces: int
    abandoned: int | None


def imagining(prepared: Prepared, now: datetime) -> Generator[None, None, Impact]:
    """The impact of what was prepared, in steps."""
    source = prepared.source
    enforcer = yield from building(source.tenant, source.revision, prepared.before, source.standing)
    before = TenantPolicy(enforcer, source.standing.private, Decisions())
    after = prepared.policy
    named = {
        name
        for content in (prepared.before, prepared.after)
        for name in (
            *(rule.subject for rule in content.rules),
            *(link.member for link in content.links),
        )
        if name.startswith("user:")
    }
    subjects = {f"user:{name}" for name, _ in source.standing.principals} | named
    resources = {group_resource(group) for group, _ in source.standing.groups} | {
        rule.resource
        for content in (prepared.before, prepared.after)
        for rule in content.rules
        if not rule.resource.endswith(f":{ANY}")
    }
    owners = {group: subject for subject, group in source.standing.private.items()}
    return (
        yield from comparing(
            Side(before.enforcer, before.decide),
            Side(after.enforcer, after.decide, owners),
            sorted(subjects),
            sorted(resources),
            now,
        )
    )


async def count_namespaces(session: AsyncSession, tenant: ComponentId) -> int:
    """Namespaces of `tenant` that were ever granted."""
    count = await session.scalar(
        select(func.count()).select_from(Namespace).where(Namespace.tenant == tenant)
    )
    return int(count or 0)


async def count_abandoned(session: AsyncSession, tenant: ComponentId, impact: Impact) -> int | None:
    """Namespaces that depend on a group that nobody may read any more."""
    if not impact.complete:
        return None
    groups = _groups(impact)
    found: set[str] = set()
    for start in range(0, len(groups), _IN_MAX):
        rows = await session.scalars(
            select(NamespaceComponent.namespace)
            .join(Namespace, Namespace.id == NamespaceComponent.namespace)
            .where(
                Namespace.tenant == tenant,
                NamespaceComponent.component.in_(groups[start : start + _IN_MAX]),
            )
            .distinct()
        )
        found.update(rows.all())
    return len(found)


async def count_bytes(
    session: AsyncSession, tenant: ComponentId, impact: Impact
) -> tuple[int | None, str]:
    """Bytes held in what `count_abandoned` counts, and what that number is."""
    groups = _groups(impact)
    if impact.complete and not groups:
        return 0, "nothing becomes unreadable"
    if not impact.complete or len(groups) > catalogue.COMPONENTS_MAX:
        return None, TOO_MANY
    if not await catalogue.is_kept(session):
        return None, NO_REPORT
    return (await catalogue.of_components(session, groups, tenant)).bytes, AS_REPORTED


def _groups(impact: Impact) -> list[ComponentId]:
    return sorted(
        ComponentId(resource.removeprefix("group:"))
        for resource in impact.abandoned
        if resource.startswith("group:")
    )
