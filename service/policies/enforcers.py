"""Each tenant's policy in memory, at the revision that a snapshot of the database has.

Rules:
- A policy is loaded in the caller's snapshot, built aside on one thread (`builder`), and swapped
  whole. It is kept by revision: another revision is another policy.
- Whoever asks for a policy that is being built waits for that build and starts no second one.
- Policies are built when they are asked for. Over a number or a sum of bytes the one that was not
  asked for the longest goes, and is built again when it is needed: only memory depends on it.
- A subject may read its own private group, unless a rule denies it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from sqlalchemy.ext.asyncio import AsyncSession

from policy.conditions import NOWHERE, Context
from policy.decide import Allow, Decision, Decisions, Deny
from policy.enforcer import TenantEnforcer
from policy.permissions import Permission
from policy.rules import Effect, Rule
from service.policies.builder import Builder
from service.policies.source import Source, load
from service.tenancy.models import Tenant
from strongroom.identity import ComponentId

TENANTS_MAX: Final = 4096
BYTES_MAX: Final = 512 * 1024 * 1024


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

    def decide(
        self,
        subject: str,
        action: Permission,
        resource: str,
        context: Context = NOWHERE,
        *,
        remember_denials: bool = True,
    ) -> Decision:
        """Whether `subject` may do `action` to `resource`; see `Decisions.decide`."""
        decision = self.decisions.decide(
            self.enforcer, subject, action, resource, context, remember_denials=remember_denials
        )
        if (
            isinstance(decision, Deny)
            and decision.rule is None
            and action is Permission.GROUP_READ
            and self.private.get(subject) == resource
        ):
            return Allow(Rule(subject, action, resource, Effect.ALLOW), decision.until)
        return decision


@dataclass(frozen=True, slots=True)
class Statistics:
    """What is in memory, and what it took."""

    tenants: int
    bytes: int
    """Estimated from above."""
    built: int
    evicted: int


class Enforcers:
    """Every tenant's newest policy. Belongs to one event loop."""

    def __init__(
        self,
        *,
        tenants_max: int = TENANTS_MAX,
        bytes_max: int = BYTES_MAX,
        builder: Builder | None = None,
    ) -> None:
        self._tenants_max = tenants_max
        self._bytes_max = bytes_max
        self._decisions = Decisions()
        self._newest: OrderedDict[ComponentId, TenantPolicy] = OrderedDict()
        self._building: dict[tuple[ComponentId, int], asyncio.Future[TenantPolicy | None]] = {}
        self.builder = builder or Builder()
        self._statistics = Statistics(0, 0, 0, 0)

    def statistics(self) -> Statistics:
        """What there is now."""
        return self._statistics

    async def at(self, session: AsyncSession, tenant: Tenant) -> TenantPolicy:
        """The policy of `tenant` at its revision in this session, which must be a snapshot."""
        key = (tenant.id, tenant.revision)
        while True:
            known = self._newest.get(tenant.id)
            if known is not None and known.revision == tenant.revision:
                self._newest.move_to_end(tenant.id)
                return known
            under_way = self._building.get(key)
            if under_way is None:
                return await self._build(session, tenant, key)
            built = await asyncio.shield(under_way)
            if built is not None:
                return built

    async def _build(
        self, session: AsyncSession, tenant: Tenant, key: tuple[ComponentId, int]
    ) -> TenantPolicy:
        done = asyncio.get_running_loop().create_future()
        self._building[key] = done
        built: TenantPolicy | None = None
        try:
            source = await load(session, tenant)
            built = await self.policy_of(source)
            self._keep(built)
            return built
        finally:
            # None: it failed or was cancelled, and the next one that waits tries for itself.
            del self._building[key]
            done.set_result(built)

    async def policy_of(self, source: Source) -> TenantPolicy:
        """The policy of `source`, kept nowhere."""
        enforcer = await self.builder.build(source.building())
        return TenantPolicy(enforcer, source.standing.private, self._decisions)

    def _keep(self, built: TenantPolicy) -> None:
        tenant = built.enforcer.tenant
        known = self._newest.get(tenant)
        count = replace(self._statistics, built=self._statistics.built + 1)
        if known is None or known.revision < built.revision:
            self._newest[tenant] = built
            self._newest.move_to_end(tenant)
            size = count.bytes + built.enforcer.size_bytes
            size -= 0 if known is None else known.enforcer.size_bytes
            evicted = count.evicted
            while len(self._newest) > 1 and (
                len(self._newest) > self._tenants_max or size > self._bytes_max
            ):
                _, oldest = self._newest.popitem(last=False)
                size -= oldest.enforcer.size_bytes
                evicted += 1
            count = replace(count, tenants=len(self._newest), bytes=size, evicted=evicted)
        self._statistics = count

    def close(self) -> None:
        """Stop the thread that builds."""
        self.builder.close()
        self._newest.clear()
