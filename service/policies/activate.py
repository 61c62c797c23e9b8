"""The one way in which a policy changes: prepared aside, tested, then made in one transaction.

Rules:
- What a change would make is built and its test cases are run before the transaction begins, on
  the thread that builds; the transaction then holds the log for a few statements only.
- In the transaction the tenant must still be what was prepared for: same version, same revision.
  If not, the change is prepared anew, a few times.
- A version that changes rules or roles bumps the tenant's revision and is an entry of the log, in
  the same transaction: whatever was granted before it never serves after it. Test cases alone
  change nobody's rights, and kill no grant.
- Nothing is activated while a test case fails (`PolicyTestsFailed`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Final

from sqlalchemy.ext.asyncio import AsyncSession

from policy.cases import Case, Failure, run_cases
from policy.decide import Decisions
from policy.rules import Link, Rule
from service.auth.scope import Scoped
from service.changes import Change
from service.policies.enforcers import TenantPolicy
from service.policies.errors import PolicyTestsFailed
from service.policies.source import Source, building, load
from service.preconditions import Expected, etag_of
from service.rules import store
from service.rules.models import Origin, VersionRow
from service.rules.store import Content
from service.runtime import Runtime
from service.tenancy import store as tenancy
from service.tenancy.models import Tenant
from strongroom.errors import Conflict
from strongroom.identity import ComponentId
from strongroom.log import InvalidationKind

ATTEMPTS: Final = 4
ANYHOW: Final = Expected(None)
"""Whatever the policy is now."""

Plan = Callable[[AsyncSession, Content], Awaitable[Content]]
"""What a policy should be, from what it is; in a session that sees what is there."""


@dataclass(frozen=True, slots=True)
class Intent:
    """What somebody wants to change, and why."""

    origin: Origin
    plan: Plan
    kind: str
    """Of the audit event."""
    told: str
    """What is done, in words, for the audit."""
    reason: str = ""
    source: int | None = None
    expected: Expected = ANYHOW


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a change would make of a tenant that is at this version and revision."""

    version: int
    source: Source
    before: Content
    after: Content
    policy: TenantPolicy
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class Activated:
    """The version in force afterwards; `row` None: nothing was different."""

    version: int
    revision: int
    row: VersionRow | None


def policy_tag(tenant: str, version: int) -> str:
    """The entity tag of a tenant's policy at a version."""
    return etag_of("policy", tenant, version)


async def activate(runtime: Runtime, scope: Scoped, intent: Intent) -> Activated:
    """Carry `intent` out. Raises `Stale`, `PolicyTestsFailed`, `Misuse`, or what its plan does."""
    for _ in range(ATTEMPTS):
        prepared = await prepare(runtime, scope.tenant, intent)
        if prepared.failures:
            raise PolicyTestsFailed(prepared.failures)
        async with runtime.changes.begin(scope.actor) as change:
            tenant = await tenancy.get_tenant(change.session, scope.tenant)
            version = await store.newest(change.session, tenant.id)
            intent.expected.check(policy_tag(tenant.id, version))
            if (version, tenant.revision) != (prepared.version, prepared.source.revision):
                continue
            return await _carry_out(change, tenant, intent, prepared)
    raise Conflict("this tenant was changed by others meanwhile: try again", field="policy")


async def prepare(runtime: Runtime, tenant_id: ComponentId, intent: Intent) -> Prepared:
    """What `intent` would make, with its test cases run; nothing is changed."""
    builder = runtime.enforcers.builder
    async with runtime.database.snapshots() as session:
        tenant = await tenancy.get_tenant(session, tenant_id)
        version = await store.newest(session, tenant.id)
        intent.expected.check(policy_tag(tenant.id, version))
        source = await load(session, tenant)
        before = await builder.build(source.stored.typing())
        after = await intent.plan(session, before)
    policy, failures = await builder.build(_trying(source, after))
    return Prepared(version, source, before, after, policy, failures)


def _trying(
    source: Source, content: Content
) -> Generator[None, None, tuple[TenantPolicy, tuple[Failure, ...]]]:
    revision = source.revision + 1
    enforcer = yield from building(source.tenant, revision, content, source.standing)
    policy = TenantPolicy(enforcer, source.standing.private, Decisions())
    cases = sorted(content.cases, key=lambda case: case.name)
    return policy, (yield from run_cases(cases, policy.decide))


async def _carry_out(
    change: Change, tenant: Tenant, intent: Intent, prepared: Prepared
) -> Activated:
    before, after = prepared.before, prepared.after
    authorization = (before.rules, before.links) != (after.rules, after.links)
    if not authorization and before.cases == after.cases:
        return Activated(prepared.version, tenant.revision, None)
    edition = store.Edition(change, tenant.id, intent.origin, intent.reason, intent.source)
    await _make(change, edition, before, after)
    revision = tenant.revision
    if authorization:
        revision = await tenancy.bump_revision(change.session, tenant.id)
        await change.invalidate(
            kind=InvalidationKind.TENANT_REVISION, tenant=tenant.id, min_revision=revision
        )
    row = await edition.close(revision)
    assert row is not None
    await change.audit(
        intent.kind,
        tenant=tenant.id,
        reason=intent.reason,
        details={
            "what": intent.told,
            "revision": revision,
            "version": row.number,
            "added": row.added,
            "removed": row.removed,
            "cases": len(after.cases),
        },
    )
    return Activated(row.number, revision, row)


async def _make(change: Change, edition: store.Edition, before: Content, after: Content) -> None:
    gone: list[Rule | Link | Case] = [
        *(before.rules - after.rules),
        *(before.links - after.links),
        *(before.cases - after.cases),
    ]
    # What leaves has to be out before what comes in: a case keeps its name.
    await edition.remove_all(gone)
    new: list[Rule | Link | Case] = [
        *(after.rules - before.rules),
        *(after.links - before.links),
        *(after.cases - before.cases),
    ]
    for each in new:
        await edition.add(each)
    await store.flush(change.session, "policy")
