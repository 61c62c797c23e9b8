"""Emptying regions: what is worth keeping moves on, what is not leaves, and nothing comes back."""

from __future__ import annotations

import asyncio
import errno
import random  # noqa: TID251 - a seeded generator, so that a failure repeats
import sys
import time
from pathlib import Path

import pytest

from storage.block import BlockAddress
from storage.faulty import Call, Fail, Faulty, Made
from storage.header import HEADER_BYTES, read_placement
from storage.memory import aligned
from storage.retention import Retention
from storage.tiers import flow, thinning
from storage.tiers.nvme import NvmeTier
from storage.tiers.regions import Dead, Region
from strongroom.errors import Missing, Unavailable
from tests.storage.nvme_support import admit, check_balance, check_empties, put_many
from tests.storage.support import component, context, sealed
from tests.storage.test_recovery import RECORD, REGION, body, forget_dead, opened, patch, put

PER_REGION = (REGION - 4096) // RECORD
KEEP = Retention(priority=90)


def region_of(tier: NvmeTier, number: int) -> Region:
    row = tier._index.get(context(number).address)
    assert row is not None
    return tier._catalogue.where(row.place)[0]


async def half_dead(tier: NvmeTier, count: int) -> dict[int, bytes]:
    """Fill the tier; of every region two blocks live, all others are dropped."""
    kept = {}
    for number in range(count):
        data = await put(tier, context(number, room=number), sequence=number + 1)
        if number % PER_REGION < 2:
            kept[number] = data
        else:
            tier.drop(context(number).address)
    return kept


async def test_what_lives_is_moved_and_nobody_is_evicted_while_there_is_dead_room(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as tier:
        kept = await half_dead(tier, 4 * PER_REGION)
        statistics = tier.statistics()
        assert statistics.moved >= 2
        assert statistics.reclaimed_regions >= 1
        assert statistics.evictions == 0
        for number, data in kept.items():
            assert await body(tier, context(number)) == data
        check_balance(tier)
    async with opened(tmp_path) as tier:
        assert tier.statistics().recovered == len(kept)
        assert tier.statistics().stale == 0, "no old copy was left"
        for number, data in kept.items():
            assert await body(tier, context(number)) == data


async def test_a_moved_records_old_copy_does_not_come_back_when_the_block_is_dropped(
    tmp_path: Path,
) -> None:
    """The old copy lies in a region that could not be renewed: its header is overwritten."""
    faulty = Faulty()
    async with opened(tmp_path, make=faulty.make_files) as tier:
        kept = await half_dead(tier, 3 * PER_REGION)
        await tier.bury_dead()
        assert tier.statistics().unburied == tier.statistics().moved == 0
        old = {number: region_of(tier, number) for number in kept}
        faulty.script(Call.ALLOCATE, Fail(errno.ENOSPC))
        await put(tier, context(100, room=100), sequence=100)
        moved = [number for number in kept if region_of(tier, number) is not old[number]]
        assert moved
        assert tier.statistics().unburied == len(moved)
        for number in moved:
            tier.drop(context(number).address)
        check_balance(tier)
    async with opened(tmp_path) as tier:
        for number in moved:
            assert context(number).address not in tier
        assert tier.statistics().stale == 0


async def test_a_kill_between_move_and_renewal_finds_the_block_once(tmp_path: Path) -> None:
    faulty = Faulty()
    async with opened(tmp_path, make=faulty.make_files) as tier:
        kept = await half_dead(tier, 3 * PER_REGION)
        await tier.bury_dead()
        # The region that was emptied cannot be renewed, and the process dies.
        faulty.script(Call.ALLOCATE, Fail(errno.EIO), times=None)
        await put(tier, context(100, room=100), sequence=100)
        assert tier.statistics().moved >= 2
        forget_dead(tier)
        faulty.clear()
    async with opened(tmp_path) as tier:
        for number, data in kept.items():
            assert await body(tier, context(number)) == data
        assert sum(tier.used().values()) == (len(kept) + 1) * RECORD
        check_empties(tier)


async def test_what_is_worth_most_is_kept_through_many_turns_of_the_log(tmp_path: Path) -> None:
    precious = [context(1000 + number, room=1000 + number) for number in range(3)]
    async with opened(tmp_path) as tier:
        bodies = await put_many(tier, precious, [KEEP] * 3)
        for number in range(20 * PER_REGION):
            await put(tier, context(number, room=number), sequence=number)
        statistics = tier.statistics()
        assert statistics.evictions > 0
        for one, data in zip(precious, bodies, strict=True):
            assert await body(tier, one) == data
        assert statistics.moved >= 3, "they were moved from region to region"
        check_empties(tier)


async def test_without_its_priority_the_same_block_leaves(tmp_path: Path) -> None:
    """The other side of the pair."""
    plain = [context(1000 + number, room=1000 + number) for number in range(3)]
    async with opened(tmp_path) as tier:
        await put_many(tier, plain)
        for number in range(20 * PER_REGION):
            await put(tier, context(number, room=number), sequence=number)
        assert not any(one.address in tier for one in plain)


async def test_no_more_is_evicted_than_one_region_needs(tmp_path: Path) -> None:
    """All regions are full of live blocks: room for one region's records costs few of them."""
    async with opened(tmp_path, regions=8) as tier:
        count = 7 * PER_REGION
        for number in range(count):
            await put(tier, context(number, room=number), sequence=number)
        assert tier.statistics().evictions == 0
        await put(tier, context(999, room=999), sequence=999)
        assert 0 < tier.statistics().evictions <= PER_REGION // 2
        check_empties(tier)


async def test_one_region_costs_no_more_where_what_is_cold_lies_in_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Used in no order: the coldest quarter of one region leaves, and nothing of the others."""
    monkeypatch.setattr(thinning, "_LOOK_MAX", 8)  # few of very many, as in a large tier
    per_region = (2**18 - 4096) // RECORD
    count = 15 * per_region
    async with opened(tmp_path, regions=16, region=2**18) as tier:
        await put_many(tier, [context(number, room=number) for number in range(1, count + 1)])
        order = list(range(1, count + 1))
        random.Random(7).shuffle(order)
        for number in order:
            tier.touch(context(number).address)
        gone: list[BlockAddress] = []
        tier.tell_evicted(gone.append)
        await put(tier, context(9999, room=9999), sequence=9999)
        (region,) = {(int.from_bytes(address.block, "big") - 1) // per_region for address in gone}
        here = [number for number in order if (number - 1) // per_region == region]
        assert [context(number).address for number in here[: len(gone)]] == gone
        assert len(gone) <= per_region // 2
        check_empties(tier)


async def test_choosing_and_thinning_a_region_goes_in_small_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 0
    keep = flow.Pace.keep

    async def counted(pace: flow.Pace) -> None:
        nonlocal steps
        steps += 1
        await keep(pace)

    monkeypatch.setattr(flow.Pace, "keep", counted)
    async with opened(tmp_path, regions=4, region=2**20) as tier:
        per_region = (2**20 - 4096) // RECORD
        wanted = [context(number, room=number) for number in range(3 * per_region)]
        await put_many(tier, wanted)
        await put(tier, context(10_000, room=10_000), sequence=10_000)
        # Each record of the region twice, and each block that leaves.
        assert steps >= tier.statistics().evictions + 2 * per_region


async def test_long_work_pauses_when_its_step_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    others = 0

    async def other() -> None:
        nonlocal others
        others += 1

    pace = flow.Pace()
    async with asyncio.TaskGroup() as group:
        group.create_task(other())
        await pace.keep()
        assert others == 0
        now = flow._STEP_S * 1.1
        await pace.keep()
        assert others == 1


async def test_a_priority_outlives_a_restart_and_a_move(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        await put_many(tier, [context(1)], [KEEP])
        for number in range(2, 20 * PER_REGION):
            await put(tier, context(number, room=number), sequence=number)
        assert tier.statistics().moved > 0
        row = tier._index.get(context(1).address)
        assert row is not None
        region, offset = tier._catalogue.where(row.place)
        head = aligned(HEADER_BYTES)
        tier._devices.files_of(region).read(region, offset, head)
        assert read_placement(head).priority == 90
    async with opened(tmp_path) as tier:
        assert tier.retention_of(context(1).address).priority == 90
        others = [number for number in range(2, 200) if context(number).address in tier]
        assert {tier.retention_of(context(n).address) for n in others} == {Retention()}
        for number in range(300, 300 + 20 * PER_REGION):
            await put(tier, context(number, room=number), sequence=number)
        assert context(1).address in tier


async def test_a_priority_for_a_time_ends_with_the_process_that_knew_when(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        await put_many(tier, [context(1)], [Retention(priority=90, duration_s=60.0)])
    async with opened(tmp_path) as tier:
        assert tier.retention_of(context(1).address) == Retention()


async def test_a_record_whose_header_is_damaged_is_lost_and_no_room_with_it(
    tmp_path: Path,
) -> None:
    """The region tells no more of it when it is emptied; the index forgets it then."""
    async with opened(tmp_path) as tier:
        kept = await half_dead(tier, 3 * PER_REGION)
        victim = 0
        row = tier._index.get(context(victim).address)
        assert row is not None
        region, offset = tier._catalogue.where(row.place)
        patch(tmp_path, offset + 100, b"\xff\xfe", region.number)
        for number in range(100, 100 + 4 * PER_REGION):
            await put(tier, context(number, room=number), sequence=number)
            tier.drop(context(number).address)
        assert context(victim).address not in tier
        assert tier.statistics().lost == 1
        for number in set(kept) - {victim}:
            assert await body(tier, context(number)) == kept[number]
        check_empties(tier)


async def test_a_record_that_cannot_be_read_does_not_stop_reclaiming(tmp_path: Path) -> None:
    """One bad sector would otherwise be asked for again with every write, for ever."""
    faulty = Faulty()
    async with opened(tmp_path, make=faulty.make_files) as tier:
        kept = await half_dead(tier, 3 * PER_REGION)
        row = tier._index.get(context(1).address)
        assert row is not None
        region, offset = tier._catalogue.where(row.place)

        def is_bad(made: Made) -> bool:
            whole = made.nbytes == RECORD
            return whole and made.fd == region.fd and made.offset == offset

        faulty.script(Call.READ, Fail(errno.EIO), where=is_bad, times=None)
        for number in range(100, 100 + 4 * PER_REGION):
            await put(tier, context(number, room=number), sequence=number)
            tier.drop(context(number).address)
        assert context(1).address not in tier
        with pytest.raises(Missing):
            await body(tier, context(1))
        for number in set(kept) - {1}:
            assert await body(tier, context(number)) == kept[number]
        check_empties(tier)


async def test_a_move_that_cannot_be_written_leaves_the_block_where_it_was(tmp_path: Path) -> None:
    faulty = Faulty()
    async with opened(tmp_path, make=faulty.make_files) as tier:
        kept = await half_dead(tier, 3 * PER_REGION)
        faulty.script(Call.WRITE, Fail(errno.EIO), where=lambda made: made.offset > 0)
        with pytest.raises(Unavailable):
            await put(tier, context(100, room=100), sequence=100)
        for number, data in kept.items():
            assert await body(tier, context(number)) == data
        check_balance(tier)
        for number in range(101, 101 + 3 * PER_REGION):
            await put(tier, context(number, room=number), sequence=number)
            tier.drop(context(number).address)
        for number, data in kept.items():
            assert await body(tier, context(number)) == data
        check_empties(tier)


async def test_the_tenant_furthest_above_its_share_pays(tmp_path: Path) -> None:
    async with opened(tmp_path, regions=8) as tier:
        tier.set_share(component(1), 2 * PER_REGION * RECORD, 1.0)
        small = [context(number, tenant=1, room=number) for number in range(PER_REGION)]
        await put_many(tier, small)
        for number in range(100, 100 + 30 * PER_REGION):
            await put(tier, context(number, tenant=2, room=number), sequence=number)
        assert all(one.address in tier for one in small), "it is below its guarantee"
        assert tier.used()[component(1)] == PER_REGION * RECORD
        check_balance(tier)


def test_a_dropped_record_is_remembered_in_eight_bytes_and_a_live_one_in_none() -> None:
    dead = Dead()
    for number in range(100_000):
        dead.add(number * 8192, 8192)
    columns = (dead._starts, dead._lengths)
    assert sum(sys.getsizeof(column) for column in columns) <= 10 * 100_000
    assert dead.pop() == (99_999 * 8192, 8192)
    assert not any(isinstance(getattr(Region(0, 0, 0, 0), name), dict) for name in Region.__slots__)


async def test_bytes_that_were_never_admitted_are_not_found_by_a_restart(tmp_path: Path) -> None:
    def refuse() -> None:
        raise Missing("dropped meanwhile")

    async with opened(tmp_path) as tier:
        header, record = sealed(context(1))
        with pytest.raises(Missing):
            await tier.put(header, record, refuse)
        header, record = sealed(context(2), sequence=2)
        await tier.put(header, record, admit)
    async with opened(tmp_path) as tier:
        assert context(1).address not in tier
        assert context(2).address in tier
