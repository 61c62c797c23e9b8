"""Policies in memory: built once, bounded, rebuilt, and nobody waits for another tenant's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Generator

import pytest

from policy.permissions import Permission
from policy.rules import Effect, Rule
from service.auth.actor import SYSTEM
from service.changes import Change
from service.db.session import Database
from service.policies.builder import Builder
from service.policies.enforcers import Enforcers, TenantPolicy
from service.rules.models import Origin
from service.rules.store import Edition
from service.tenancy import store as tenancy
from strongroom.errors import Misuse, Unavailable
from strongroom.identity import ComponentId
from tests.service.house import Service

READ = Permission.GROUP_READ
ONE_SQLITE = pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)


@pytest.fixture
async def builder() -> AsyncIterator[Builder]:
    made = Builder()
    yield made
    await asyncio.to_thread(made.close)


async def policy_of(enforcers: Enforcers, database: Database, tenant: str) -> TenantPolicy:
    async with database.snapshots() as session:
        return await enforcers.at(session, await tenancy.get_tenant(session, tenant))


async def with_rules(service: Service, name: str, count: int) -> ComponentId:
    tenant = ComponentId(await service.tenant(name))
    async with service.runtime.changes.begin(SYSTEM) as change:
        await _fill(change, tenant, count)
    return tenant


async def _fill(change: Change, tenant: ComponentId, count: int) -> None:
    edition = Edition(change, tenant, Origin.EDITED)
    for number in range(count):
        await edition.add(Rule(f"user:u{number}", READ, "group:*", Effect.ALLOW))
    await edition.close(await tenancy.bump_revision(change.session, tenant))


async def test_many_who_ask_at_once_wait_for_one_build(service: Service) -> None:
    tenant = await with_rules(service, "acme", 200)
    enforcers, database = service.runtime.enforcers, service.runtime.database
    before = enforcers.statistics().built
    found = await asyncio.gather(*(policy_of(enforcers, database, tenant) for _ in range(5)))
    assert len({id(policy) for policy in found}) == 1
    assert enforcers.statistics().built == before + 1


@ONE_SQLITE
async def test_a_build_that_is_cancelled_does_not_fail_who_waits_for_it(service: Service) -> None:
    tenant = await with_rules(service, "acme", 200)
    enforcers, database = service.runtime.enforcers, service.runtime.database
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(policy_of(enforcers, database, tenant))
        while not enforcers._building:
            await asyncio.sleep(0)
        second = tasks.create_task(policy_of(enforcers, database, tenant))
        await asyncio.sleep(0)
        first.cancel()
    assert second.result().enforcer.tenant == tenant
    assert not enforcers._building


@ONE_SQLITE
async def test_memory_is_bounded_by_number_and_by_bytes_and_what_went_is_built_again(
    service: Service, builder: Builder
) -> None:
    tenants = [await with_rules(service, f"t{n}", 50) for n in range(4)]
    database = service.runtime.database
    few = Enforcers(tenants_max=2, builder=builder)
    for tenant in tenants:
        await policy_of(few, database, tenant)
    assert (few.statistics().tenants, few.statistics().evicted) == (2, 2)
    size = (await policy_of(few, database, tenants[3])).enforcer.size_bytes
    assert few.statistics().bytes == 2 * size
    assert few.statistics().built == 4, "the newest was still there"
    again = await policy_of(few, database, tenants[0])
    assert again.decide("user:u7", READ, f"group:{'b' * 32}").rule is not None
    assert few.statistics().built == 5
    small = Enforcers(bytes_max=size + 1, builder=builder)
    for tenant in tenants:
        await policy_of(small, database, tenant)
    assert (small.statistics().tenants, small.statistics().bytes) == (1, size)


async def test_a_small_build_that_comes_later_is_done_before_a_large_one(builder: Builder) -> None:
    done: list[str] = []
    begun = threading.Event()

    def large() -> Generator[None, None, str]:
        begun.set()
        while "small" not in done:
            yield
        return "large"

    def small() -> Generator[None, None, str]:
        yield
        return "small"

    async def build(steps: Generator[None, None, str]) -> None:
        done.append(await builder.build(steps))

    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        tasks.create_task(build(large()))
        await asyncio.to_thread(begun.wait)
        tasks.create_task(build(small()))
    assert done == ["small", "large"]


async def test_what_a_build_raises_is_raised_where_it_was_asked_for(builder: Builder) -> None:
    def wrong() -> Generator[None, None, str]:
        yield
        raise Misuse("no", field="rules")

    def fine() -> Generator[None, None, str]:
        yield
        return "built"

    with pytest.raises(Misuse):
        await builder.build(wrong())
    assert await builder.build(fine()) == "built"


async def test_a_build_whose_asker_has_gone_is_dropped(builder: Builder) -> None:
    closed, begun = threading.Event(), threading.Event()

    def endless() -> Generator[None, None, str]:
        try:
            while True:
                begun.set()
                yield
        finally:
            closed.set()

    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(builder.build(endless()))
        await asyncio.to_thread(begun.wait)
        asked.cancel()
    assert await asyncio.to_thread(closed.wait, 10)


async def test_nothing_is_built_after_the_end() -> None:
    builder = Builder()
    await asyncio.to_thread(builder.close)
    with pytest.raises(Unavailable):
        await builder.build(iter_none())


def iter_none() -> Generator[None, None, None]:
    yield
