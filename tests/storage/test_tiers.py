"""The tier contract: one suite, run by every implementation (storage/tiers/protocol.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from storage.block import BlockContext
from storage.fence import Fenced
from storage.lifecycle import Admit
from storage.tiers.host import HostTier
from storage.tiers.memory import MemoryTier
from storage.tiers.nvme import NvmeTier
from storage.tiers.protocol import Tier
from storage.workers import disk_workers
from strongroom.errors import Missing, Overloaded, QuotaExceeded
from tests.storage.support import FakeClock, component, context, namespace, sealed

PIN_S = 30
CAPACITY = 256 * 1024
RECORD = len(sealed(context())[1])


def admit() -> None:
    """Let it in."""


def refuse() -> None:
    raise Fenced("cut")


@asynccontextmanager
async def memory_tier(clock: FakeClock, tmp_path: Path) -> AsyncIterator[Tier]:
    tier = MemoryTier(CAPACITY, clock, pin_ns=PIN_S * 10**9)
    yield tier
    await tier.close()


@asynccontextmanager
async def host_tier(clock: FakeClock, tmp_path: Path) -> AsyncIterator[Tier]:
    tier = HostTier(CAPACITY, clock, pin_ns=PIN_S * 10**9, lock_memory=False)
    yield tier
    await tier.close()


@asynccontextmanager
async def nvme_tier(clock: FakeClock, tmp_path: Path) -> AsyncIterator[Tier]:
    workers = disk_workers(2, 64)
    tier = await NvmeTier.open(
        tmp_path / "nvme", CAPACITY, CAPACITY // 4, workers, clock, pin_ns=PIN_S * 10**9
    )
    yield tier
    await tier.close()
    workers.close()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=[memory_tier, host_tier, nvme_tier], ids=["memory", "host", "nvme"])
async def tier(
    request: pytest.FixtureRequest, clock: FakeClock, tmp_path: Path
) -> AsyncIterator[Tier]:
    make: Callable[[FakeClock, Path], AbstractAsyncContextManager[Tier]] = request.param
    async with make(clock, tmp_path) as made:
        yield made


async def put(tier: Tier, wanted: BlockContext, sequence: int = 1, admit: Admit = admit) -> bytes:
    header, record = sealed(wanted, sequence=sequence)
    await tier.put(header, record, admit)
    return bytes(record[4096:])


async def body(tier: Tier, wanted: BlockContext) -> bytes:
    async with tier.hold(wanted.address) as record:
        return bytes(record[4096:])


async def test_a_record_comes_back_as_it_went_in(tier: Tier) -> None:
    stored = await put(tier, context())
    assert context().address in tier
    assert await body(tier, context()) == stored
    statistics = tier.statistics()
    assert (statistics.blocks, statistics.stored) == (1, 1)
    assert tier.used() == {component(1): RECORD}


async def test_what_is_absent_is_missing(tier: Tier) -> None:
    assert context().address not in tier
    assert tier.resident(context().address) is None
    with pytest.raises(Missing):
        await body(tier, context())


async def test_ranks_of_one_block_are_two_blocks(tier: Tier) -> None:
    zero = await put(tier, context(rank=0))
    one = await put(tier, context(rank=1))
    assert zero != one
    assert await body(tier, context(rank=0)) == zero
    assert await body(tier, context(rank=1)) == one


async def test_a_refused_put_is_never_visible_and_charges_nothing(tier: Tier) -> None:
    with pytest.raises(Fenced):
        await put(tier, context(), admit=refuse)
    assert context().address not in tier
    assert tier.used() == {}
    stored = await put(tier, context())  # and the address is not poisoned
    assert await body(tier, context()) == stored


async def test_a_record_is_not_visible_before_it_is_admitted(tier: Tier) -> None:
    seen = []
    await put(tier, context(), admit=lambda: seen.append(context().address in tier))
    assert seen == [False]


async def test_a_second_put_replaces_the_first_and_is_charged_once(tier: Tier) -> None:
    await put(tier, context(), sequence=1)
    second = await put(tier, context(), sequence=2)
    assert await body(tier, context()) == second
    assert tier.used() == {component(1): RECORD}
    assert tier.statistics().blocks == 1


async def test_drop_frees_capacity_quota_and_address(tier: Tier) -> None:
    await put(tier, context())
    assert tier.drop(context().address) == RECORD
    assert tier.drop(context().address) == 0
    assert context().address not in tier
    assert tier.used() == {}
    assert tier.statistics().used_bytes == 0


async def test_capacity_that_was_freed_can_be_filled_again_and_again(tier: Tier) -> None:
    for number in range(60):
        wanted = context(number)
        stored = await put(tier, wanted, sequence=number)
        assert await body(tier, wanted) == stored
        assert tier.drop(wanted.address) == RECORD
    assert tier.statistics().evictions == 0


async def test_a_full_tier_evicts_the_least_recently_used(tier: Tier) -> None:
    count = 60
    for number in range(count):
        await put(tier, context(number, room=number), sequence=number)
        if number > 0:
            tier.touch(context(0, room=0).address)
    assert context(0).address in tier, "used all along"
    assert context(1).address not in tier
    assert context(count - 1).address in tier
    assert tier.statistics().evictions > 0
    assert tier.statistics().used_bytes <= tier.statistics().capacity_bytes


async def test_children_are_evicted_before_their_parents(tier: Tier) -> None:
    """Two chains in one tier, each growing where it ends now, at the cost of the other's end."""

    def depth_of(first: int) -> int:
        here = [context(n).address in tier for n in range(first, first + 80)]
        assert here == sorted(here, reverse=True), "no hole: no child outlives its parent"
        return sum(here)

    for number in range(80):
        first = 100 * (number // 4 % 2)
        depth = depth_of(first)
        parent = first + depth - 1 if depth else None
        await put(tier, context(first + depth, parent=parent), sequence=number)
    assert depth_of(0) > 0
    assert depth_of(100) > 0
    assert tier.statistics().evictions > 0


async def test_a_chain_longer_than_the_tier_keeps_its_beginning(tier: Tier) -> None:
    async def grow() -> None:
        for number in range(60):
            await put(tier, context(number, parent=number - 1 if number else None))

    with pytest.raises(Overloaded):
        await grow()
    assert context(0).address in tier
    assert tier.statistics().evictions == 0


async def test_a_pinned_block_is_not_evicted_until_its_pin_runs_out(
    tier: Tier, clock: FakeClock
) -> None:
    stored = await put(tier, context(0))
    async with tier.hold(context(0).address) as record:
        if tier.name != "nvme":  # its holders have a copy, pinned only while it is read
            assert tier.evict(context(0).address) == 0
            assert tier.statistics().pinned == 1
            clock.advance_s(PIN_S + 1)
        assert tier.evict(context(0).address) == RECORD
        assert bytes(record[4096:]) == stored, "its bytes stay until the holder lets go"
    assert tier.statistics().pinned == 0


async def test_a_holders_bytes_stay_when_the_block_is_dropped_and_its_room_taken(
    tier: Tier,
) -> None:
    stored = await put(tier, context(0))
    async with tier.hold(context(0).address) as record:
        tier.drop(context(0).address)
        for number in range(1, 40):
            await put(tier, context(number), sequence=number)
        assert bytes(record[4096:]) == stored
    for number in range(40, 60):
        await put(tier, context(number), sequence=number)


async def test_a_tenant_never_has_more_than_its_quota_and_others_do_not_pay(tier: Tier) -> None:
    """The lowest tier lets its own coldest block make way; one above it loses nothing in silence:
    it refuses until another tier has the block too, which the memory tier knows of none.
    """
    await put(tier, context(4, tenant=2, room=2))
    tier.set_quota(component(1), 2 * RECORD)
    await put(tier, context(1))
    await put(tier, context(2))
    if isinstance(tier, NvmeTier):
        await put(tier, context(3))
        assert context(1).address not in tier
    else:
        with pytest.raises(QuotaExceeded):
            await put(tier, context(3))
        assert context(1).address in tier
        assert tier.statistics().quota_refusals == 1
        tier.drop(context(1).address)
        await put(tier, context(3))
    assert tier.used() == {component(1): 2 * RECORD, component(2): RECORD}
    assert context(4, tenant=2, room=2).address in tier
    refused = tier.statistics().quota_refusals
    with pytest.raises(QuotaExceeded):
        await put(tier, context(5, segments=(3 * RECORD,)))
    assert tier.statistics().quota_refusals == refused + 1
    assert tier.used() == {component(1): 2 * RECORD, component(2): RECORD}


async def test_a_record_that_never_fits_is_overloaded_and_evicts_nobody(tier: Tier) -> None:
    await put(tier, context(1))
    with pytest.raises(Overloaded):
        await put(tier, context(2, segments=(CAPACITY + 1,)))
    assert context(1).address in tier


async def test_namespaces_are_counted_and_dropped_as_a_whole(tier: Tier) -> None:
    await put(tier, context(1, room=1))
    await put(tier, context(2, room=1))
    await put(tier, context(3, room=2, tenant=2))
    assert tier.namespaces() == {namespace(1): 2, namespace(2): 1}
    assert tier.tenants() == {namespace(1): component(1), namespace(2): component(2)}
    assert tier.namespace_of(context(1).address) == namespace(1)
    assert await tier.drop_namespaces([namespace(1), namespace(9)]) == (2, 2 * RECORD)
    assert tier.namespaces() == {namespace(2): 1}
    assert context(3).address in tier


async def test_many_writers_and_readers_at_once_see_whole_records(tier: Tier) -> None:
    async def one(number: int) -> None:
        wanted = context(number)
        stored = await put(tier, wanted, sequence=number)
        assert await body(tier, wanted) == stored

    async with asyncio.TaskGroup() as group:
        for number in range(8):
            group.create_task(one(number))
    assert tier.statistics().blocks == 8
