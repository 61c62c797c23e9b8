"""Several devices as one tier, the day's write budget, and the floor under free space."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest

from storage.faulty import Call, Fail, Faulty, Hold
from storage.tiers.limits import NvmeLimits
from storage.tiers.nvme import NvmeTier
from storage.tiers.regions import RegionFiles
from strongroom.errors import Conflict, Missing, Overloaded, Unavailable
from tests.storage.nvme_support import check_balance, check_empties, put_many, read_all, until
from tests.storage.support import FakeClock, context
from tests.storage.test_recovery import RECORD, REGION, body, opened, put

PER_REGION = (REGION - 4096) // RECORD


class Disks:
    """One `Faulty` a folder, chosen by the folder's name."""

    def __init__(self, tmp_path: Path, *names: str) -> None:
        self.folders = [tmp_path / name for name in names]
        self.disks: Mapping[str, Faulty] = {name: Faulty() for name in names}

    def make_files(
        self, folder: Path, store: bytes, region_bytes: int, count: int, floor_bytes: int
    ) -> RegionFiles:
        disk = self.disks[folder.name]
        return disk.make_files(folder, store, region_bytes, count, floor_bytes)

    def __getitem__(self, name: str) -> Faulty:
        return self.disks[name]


def device_of(tier: NvmeTier, number: int) -> int:
    row = tier._index.get(context(number, room=number).address)
    assert row is not None
    return tier._catalogue.where(row.place)[0].device


async def fill(tier: NvmeTier, count: int) -> dict[int, bytes]:
    return {
        number: await put(tier, context(number, room=number), sequence=number)
        for number in range(count)
    }


async def test_the_log_goes_from_device_to_device(tmp_path: Path) -> None:
    disks = Disks(tmp_path, "a", "b", "c")
    async with opened(disks.folders, regions=12, make=disks.make_files) as tier:
        assert tier.statistics().capacity_bytes == 11 * (REGION - 4096)
        stored = await fill(tier, 6 * PER_REGION)
        used = [device_of(tier, region * PER_REGION) for region in range(6)]
        assert sorted(used) == [0, 0, 1, 1, 2, 2]
        assert all(one != other for one, other in itertools.pairwise(used))
        for number, data in stored.items():
            assert await body(tier, context(number, room=number)) == data
        check_balance(tier)
    async with opened(disks.folders, regions=12, make=disks.make_files) as tier:
        assert tier.statistics().recovered == len(stored)
        for number, data in stored.items():
            assert await body(tier, context(number, room=number)) == data
        check_empties(tier)


async def test_a_flood_leaves_other_tenants_their_part_of_the_write_budget(
    tmp_path: Path,
) -> None:
    """Five writes are tried for each of the other tenant's: both get through alike."""
    clock = FakeClock()
    limits = NvmeLimits(write_bytes_per_day=24 * 8 * RECORD)
    stored = {1: 0, 2: 0}
    async with opened(tmp_path, regions=40, limits=limits, clock=clock) as tier:
        for number in range(600):
            tenant = 2 if number % 6 == 5 else 1
            clock.advance_s(100)
            with contextlib.suppress(Overloaded):
                await put(tier, context(number, tenant=tenant, room=tenant), sequence=number)
                stored[tenant] += 1
        assert stored[2] >= 0.8 * min(100, stored[1])
        assert sum(stored.values()) >= 600 * 100 / 3600 * 8 * 0.9, "none of it was left unused"
        check_empties(tier)


async def test_a_device_that_hangs_holds_up_no_other(tmp_path: Path) -> None:
    disks = Disks(tmp_path, "a", "b")
    async with opened(disks.folders, regions=8, make=disks.make_files) as tier:
        stored = await fill(tier, 4 * PER_REGION)
        on = {d: [n for n in stored if device_of(tier, n) == d] for d in (0, 1)}
        slow = Hold()
        disks["a"].script(Call.READ, slow, times=None)
        threads = tier._devices.workers.threads
        async with asyncio.TaskGroup() as group:
            try:
                for number in on[0][: 2 * threads]:
                    group.create_task(body(tier, context(number, room=number)))
                await until(lambda: tier._devices.workers.depth == tier._devices.calls_max)
                reads = [
                    group.create_task(body(tier, context(number, room=number))) for number in on[1]
                ]
                await until(lambda: all(read.done() for read in reads))
                assert tier.turns.waiting > 0, "of the one that hangs"
            finally:
                slow.let_go.set()
        assert [read.result() for read in reads] == [stored[number] for number in on[1]]
        assert tier.turns.waiting == tier.turns.in_turn == 0
        check_empties(tier)


async def test_writes_to_a_device_that_hangs_leave_the_others_their_threads(
    tmp_path: Path,
) -> None:
    disks = Disks(tmp_path, "a", "b")
    limits = NvmeLimits(transfer_bytes=RECORD)
    async with opened(disks.folders, regions=8, make=disks.make_files, limits=limits) as tier:
        stored = await fill(tier, 4 * PER_REGION + 1)
        newest = device_of(tier, 4 * PER_REGION)
        elsewhere = next(number for number in stored if device_of(tier, number) != newest)
        slow = Hold()
        disks["ab"[newest]].script(Call.WRITE, slow, times=None)
        batch = [context(number, room=number) for number in range(100, 99 + PER_REGION)]
        assert len(batch) >= tier._devices.workers.threads
        async with asyncio.TaskGroup() as group:
            try:
                group.create_task(put_many(tier, batch))
                await until(lambda: tier._devices.workers.depth >= tier._devices.calls_max)
                read = group.create_task(body(tier, context(elsewhere, room=elsewhere)))
                await until(read.done)
            finally:
                slow.let_go.set()
        assert read.result() == stored[elsewhere]
        check_empties(tier)


async def test_a_folder_is_complete_in_itself(tmp_path: Path) -> None:
    """In another order, or without one of them, each keeps what it holds."""
    disks = Disks(tmp_path, "a", "b")
    async with opened(disks.folders, regions=8, make=disks.make_files) as tier:
        stored = await fill(tier, 4 * PER_REGION)
        on_b = {number for number in stored if device_of(tier, number) == 1}
    assert 0 < len(on_b) < len(stored)
    async with opened(disks.folders[::-1], regions=8, make=disks.make_files) as tier:
        for number, data in stored.items():
            assert await body(tier, context(number, room=number)) == data
    async with opened(disks.folders[1:], regions=4, make=disks.make_files) as tier:
        found = {number for number in stored if context(number).address in tier}
        assert found == on_b
        for number in on_b:
            assert await body(tier, context(number, room=number)) == stored[number]


async def test_a_failing_device_takes_only_its_own_blocks_out_of_service(tmp_path: Path) -> None:
    disks = Disks(tmp_path, "a", "b")
    clock = FakeClock()
    async with opened(disks.folders, regions=8, make=disks.make_files, clock=clock) as tier:
        stored = await fill(tier, 4 * PER_REGION)
        on_b = [number for number in stored if device_of(tier, number) == 1]
        on_a = [number for number in stored if device_of(tier, number) == 0]
        disks["b"].script(Call.READ, Fail(errno.EIO), times=None)
        disks["b"].script(Call.WRITE, Fail(errno.EIO), times=None)
        for number in on_b[:3]:
            assert context(number).address in tier
            with pytest.raises(Unavailable):
                await body(tier, context(number, room=number))
        assert tier.statistics().devices_out == 1
        assert tier.statistics().io_errors == 3
        for number in on_b:
            assert context(number).address not in tier, "a miss at once, also before it is swept"
            assert tier.resident(context(number).address) is None
            with pytest.raises(Missing):
                await body(tier, context(number, room=number))
        for number in on_a:
            assert await body(tier, context(number, room=number)) == stored[number]
        # Writing goes on, on the other one.
        more = await fill_from(tier, 500, PER_REGION)
        assert {device_of(tier, number) for number in more} == {0}
        assert tier.statistics().io_errors == 3, "it is not asked any more"
        assert tier.statistics().lost == len(on_b)
        check_balance(tier)

        # After a while it gets one chance, and is out again at once.
        clock.advance_s(61)
        assert tier.statistics().devices_out == 0
        await fill_from(tier, 600, 4 * PER_REGION)
        assert tier.statistics().devices_out == 1
        assert tier.statistics().io_errors == 4

        # Mended, it is one of them again.
        disks["b"].clear()
        clock.advance_s(61)
        back = await fill_from(tier, 700, 4 * PER_REGION)
        assert 1 in {device_of(tier, number) for number in back if number_in(tier, number)}
        assert tier.statistics().devices_out == 0
        check_empties(tier)


def number_in(tier: NvmeTier, number: int) -> bool:
    return context(number).address in tier


async def fill_from(tier: NvmeTier, first: int, count: int) -> list[int]:
    """Store what can be stored; the numbers that were."""
    stored = []
    for number in range(first, first + count):
        try:
            await put(tier, context(number, room=number), sequence=number)
        except Unavailable:
            continue
        stored.append(number)
    return [number for number in stored if number_in(tier, number)]


async def test_errors_that_are_not_in_a_row_take_no_device_out(tmp_path: Path) -> None:
    faulty = Faulty()
    async with opened(tmp_path, make=faulty.make_files) as tier:
        data = await put(tier, context(1))
        for _ in range(9):
            faulty.script(Call.READ, Fail(errno.EIO))
            with pytest.raises(Unavailable):
                await body(tier, context(1))
            assert await body(tier, context(1)) == data
        assert tier.statistics().devices_out == 0


async def test_a_folder_that_cannot_be_opened_is_left_out_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "b").write_text("a file, no folder")
    async with opened([tmp_path / "a", tmp_path / "b"], regions=8) as tier:
        assert tier.statistics().devices_out == 1
        data = await put(tier, context(1))
        assert await body(tier, context(1)) == data
    assert "left out" in caplog.text


async def test_without_any_folder_there_is_no_tier(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a file, no folder")
    (tmp_path / "b").write_text("another")
    with pytest.raises(Unavailable):
        async with opened([tmp_path / "a", tmp_path / "b"]):
            pass


async def test_a_folder_in_use_stops_the_start_and_frees_the_others(tmp_path: Path) -> None:
    async with opened(tmp_path / "b"):
        with pytest.raises(Conflict):
            async with opened([tmp_path / "a", tmp_path / "b"]):
                pass
        async with opened(tmp_path / "a"):
            pass


async def test_a_batch_over_two_devices_is_read_from_both(tmp_path: Path) -> None:
    disks = Disks(tmp_path, "a", "b")
    many = [context(number) for number in range(3 * PER_REGION)]
    async with opened(disks.folders, regions=8, make=disks.make_files) as tier:
        bodies = await put_many(tier, many)
        for disk in disks.disks.values():
            disk.calls.clear()
        found, ends, _ = await read_all(tier, many)
        assert found == bodies
        assert set(ends.values()) == {None}
        assert [disk.count(Call.READ) for disk in disks.disks.values()] in ([1, 2], [2, 1])
        check_empties(tier)


# The write budget


async def test_over_the_days_budget_a_write_is_refused_and_reads_go_on(tmp_path: Path) -> None:
    clock = FakeClock()
    # An hour's share is two records.
    limits = NvmeLimits(write_bytes_per_day=24 * 2 * RECORD)
    async with opened(tmp_path, limits=limits, clock=clock) as tier:
        data = await put(tier, context(1))
        await put(tier, context(2))
        with pytest.raises(Overloaded, match="budget") as caught:
            await put(tier, context(3))
        assert caught.value.field == "nvme_write_bytes_per_day"
        statistics = tier.statistics()
        assert (statistics.budget_refusals, statistics.io_errors) == (1, 0)
        assert statistics.used_bytes == 2 * RECORD
        assert await body(tier, context(1)) == data
        check_balance(tier)
        clock.advance_s(3600)
        await put(tier, context(3))
        check_empties(tier)


async def test_no_day_sees_more_than_its_budget_and_the_bucket(tmp_path: Path) -> None:
    clock = FakeClock()
    budget = 24 * 4 * RECORD
    limits = NvmeLimits(write_bytes_per_day=budget)
    async with opened(tmp_path, limits=limits, clock=clock) as tier:
        for number in range(2 * 24 * 6):
            clock.advance_s(600)
            with contextlib.suppress(Overloaded):
                await put(tier, context(number, room=number), sequence=number)
        written = tier.statistics().written_bytes
        # Two days; a record may go out on the last byte of the budget.
        assert written <= 2 * budget + budget / 24 + RECORD
        assert written >= 1.8 * budget
        assert tier.statistics().budget_refusals > 0


async def test_a_clock_that_steps_back_refuses_no_longer_and_fills_nothing(tmp_path: Path) -> None:
    clock = FakeClock(now_ns=10**15)
    limits = NvmeLimits(write_bytes_per_day=24 * 2 * RECORD)
    async with opened(tmp_path, limits=limits, clock=clock) as tier:
        await put_many(tier, [context(1), context(2)])
        clock.now_ns -= 5 * 10**14
        with pytest.raises(Overloaded):
            await put(tier, context(3))
        clock.advance_s(3600)
        await put(tier, context(3))


async def test_without_a_budget_there_is_none(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        for number in range(100):
            await put(tier, context(number, room=number), sequence=number)
        assert tier.statistics().budget_refusals == 0


# The floor


async def test_below_the_floor_nothing_is_written_and_it_comes_back(tmp_path: Path) -> None:
    faulty, clock = Faulty(), FakeClock()
    limits = NvmeLimits(free_floor_bytes=1_000_000)
    async with opened(tmp_path, make=faulty.make_files, limits=limits, clock=clock) as tier:
        data = await put(tier, context(1))
        faulty.free = 999_999
        clock.advance_s(1)
        writes = faulty.count(Call.WRITE)
        for _ in range(3):
            with pytest.raises(Overloaded, match="floor") as caught:
                await put(tier, context(2))
            assert caught.value.field == "nvme_free_floor_bytes"
        assert faulty.count(Call.WRITE) == writes
        assert tier.statistics().floor_refusals == 3
        assert await body(tier, context(1)) == data
        check_balance(tier)
        faulty.free = 1_000_000
        with pytest.raises(Overloaded):
            await put(tier, context(2))  # the file system is asked once a second
        clock.advance_s(1)
        await put(tier, context(2))
        check_empties(tier)


async def test_the_floor_holds_for_each_device(tmp_path: Path) -> None:
    disks, clock = Disks(tmp_path, "a", "b"), FakeClock()
    limits = NvmeLimits(free_floor_bytes=1_000_000)
    async with opened(
        disks.folders, regions=8, make=disks.make_files, limits=limits, clock=clock
    ) as tier:
        stored = await fill(tier, 2)
        device = device_of(tier, 0)
        disks["ab"[device]].free = 0
        clock.advance_s(1)
        more = await fill_from(tier, 10, 2 * PER_REGION)
        assert {device_of(tier, number) for number in more} == {1 - device}
        assert tier.statistics().floor_refusals == 0
        for number, data in stored.items():
            assert await body(tier, context(number, room=number)) == data
        check_empties(tier)
