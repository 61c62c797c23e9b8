"""The log never runs out of room for good: no fault leaves it without a region to write to."""

from __future__ import annotations

import asyncio
import errno
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from storage.faulty import Call, Fail, Faulty, Hold, Made
from storage.tiers.limits import NvmeLimits
from storage.tiers.nvme import NvmeTier
from storage.tiers.regions import RegionFiles
from strongroom.errors import StrongroomError, Unavailable
from tests.storage.nvme_support import check_balance, check_empties, entered, touching
from tests.storage.support import FakeClock, context
from tests.storage.test_recovery import FIRST, RECORD, REGION, body, opened, put

PER_REGION = (REGION - 4096) // RECORD
ONE_BY_ONE = NvmeLimits(transfer_bytes=RECORD, queue_depth=1)
"""So that a move is broken off between two of its records."""


async def refused(tier: NvmeTier, numbers: Iterable[int]) -> list[str]:
    """Store these blocks; what was said to those that were refused."""
    answers = []
    for number in numbers:
        try:
            await put(tier, context(number, room=number), sequence=number + 1)
        except StrongroomError as error:
            answers.append(error.message)
    return answers


async def full(tier: NvmeTier, kept_in: tuple[int, ...]) -> dict[int, bytes]:
    """One full region for each of `kept_in`, and of each so many blocks live."""
    kept = {}
    for region, count in enumerate(kept_in):
        for number in range(region * PER_REGION, (region + 1) * PER_REGION):
            data = await put(tier, context(number, room=number), sequence=number + 1)
            if number % PER_REGION < count:
                kept[number] = data
            else:
                tier.drop(context(number).address)
    await tier.bury_dead()
    return kept


async def check_kept(tier: NvmeTier, kept: dict[int, bytes]) -> None:
    for number, data in kept.items():
        assert await body(tier, context(number)) == data


def is_record(made: Made) -> bool:
    return made.offset > 0


def many(times: int) -> range:
    """Enough blocks to go through the whole tier so many times."""
    return range(1000, 1000 + times * 3 * PER_REGION)


async def test_a_tier_that_is_smaller_after_a_restart_takes_writes(tmp_path: Path) -> None:
    """Its surplus files are gone, and what is left of it is full."""
    async with opened(tmp_path, regions=8) as tier:
        assert not await refused(tier, range(7 * PER_REGION))
    async with opened(tmp_path, regions=4) as tier:
        before = tier.statistics().blocks
        assert before == 4 * PER_REGION
        assert not await refused(tier, [1000])
        assert tier.statistics().blocks > before - 2 * PER_REGION, "no more than it needs left"
        assert not await refused(tier, many(2))
        check_empties(tier)


async def test_a_move_that_one_error_broke_off_goes_on(tmp_path: Path) -> None:
    faulty = Faulty()
    async with opened(tmp_path, make=faulty.make_files, limits=ONE_BY_ONE) as tier:
        kept = await full(tier, (3, 3, 3))
        faulty.script(Call.WRITE, Fail(errno.EIO), skip=1, where=is_record)
        assert len(await refused(tier, [500])) == 1
        assert not await refused(tier, range(501, 505))
        await check_kept(tier, kept)
        assert tier.statistics().evictions == 0, "there was room for all"
        assert not await refused(tier, many(3))
        check_empties(tier)


async def test_a_move_that_was_cancelled_goes_on(tmp_path: Path) -> None:
    faulty = Faulty()
    async with opened(tmp_path, make=faulty.make_files, limits=ONE_BY_ONE) as tier:
        kept = await full(tier, (3, 3, 3))
        slow = Hold()
        faulty.script(Call.WRITE, slow, skip=1, where=is_record)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(refused(tier, [500]))
            await entered(slow)
            task.cancel()
            slow.let_go.set()
        assert task.cancelled()
        assert not await refused(tier, [501])
        await check_kept(tier, kept)
        assert tier.statistics().evictions == 0
        assert not await refused(tier, many(3))
        check_empties(tier)


async def test_a_move_that_a_kill_broke_off_does_not_stop_the_next_life(tmp_path: Path) -> None:
    faulty = Faulty()
    folder, copy = tmp_path / "killed", tmp_path / "next"
    async with opened(folder, make=faulty.make_files, limits=ONE_BY_ONE) as tier:
        await full(tier, (3, 3, 3))
        slow = Hold()
        faulty.script(Call.WRITE, slow, skip=1, where=is_record)
        async with asyncio.TaskGroup() as group:
            group.create_task(refused(tier, [500]))
            await entered(slow)
            shutil.copytree(folder, copy)  # what a kill at this point leaves
            slow.let_go.set()
    async with opened(copy) as tier:
        assert tier.statistics().blocks == 9
        assert not await refused(tier, many(3))
        check_empties(tier)


@pytest.mark.parametrize("times", [1, None], ids=["once", "for good"])
@pytest.mark.parametrize("at", [0, FIRST, FIRST + RECORD - 4096], ids=["region", "header", "tail"])
async def test_a_bad_page_costs_one_record_of_a_region_that_is_emptied(
    tmp_path: Path, at: int, times: int | None
) -> None:
    faulty = Faulty()
    clock = FakeClock()
    async with opened(tmp_path, make=faulty.make_files, clock=clock) as tier:
        kept = await full(tier, (2, 3, 3))
        fd = tier._devices.regions[0].fd
        faulty.script(Call.READ, Fail(errno.EIO), times=times, where=touching(at, fd))
        assert not await refused(tier, range(500, 501))
        lost = at > 0 and times is None
        assert (context(0).address not in tier) == lost
        assert tier.statistics().lost == lost
        kept = {number: data for number, data in kept.items() if number or not lost}
        await check_kept(tier, kept)
        clock.advance_s(1)
        assert not await refused(tier, many(3))
        assert tier.statistics().devices_out == 0
        check_empties(tier)


async def test_a_region_of_which_nothing_can_be_read_is_given_up(tmp_path: Path) -> None:
    faulty = Faulty()
    async with opened(tmp_path, make=faulty.make_files) as tier:
        kept = await full(tier, (2, 3, 3))
        bad = tier._devices.regions[0].fd
        faulty.script(Call.READ, Fail(errno.EIO), times=None, where=lambda made: made.fd == bad)
        assert not await refused(tier, [500])
        assert tier.statistics().lost == 2
        await check_kept(tier, {number: data for number, data in kept.items() if number > 1})
        check_balance(tier)
        faulty.clear()
        assert not await refused(tier, many(3))
        check_empties(tier)


async def test_a_blank_region_that_cannot_be_renewed_is_done_without(tmp_path: Path) -> None:
    faulty = Faulty()
    async with opened(tmp_path, make=faulty.make_files, clock=FakeClock()) as tier:
        await full(tier, (3, 3, 3))
        blank = next(region for region in tier._devices.regions if not region.live)
        faulty.script(Call.WRITE, Fail(errno.EIO), times=None, where=touching(0, blank.fd))
        answers: list[str] = []
        for number in many(3):
            answers += await refused(tier, [number])
            newest = context(number).address
            if newest in tier:  # others' calls go well in between
                await body(tier, context(number))
        assert len(answers) <= 2
        assert tier.statistics().devices_out == 0
        check_empties(tier)


async def test_what_lies_below_the_floor_is_not_evicted_for_room_elsewhere(tmp_path: Path) -> None:
    """Room that is won on a device without free space is of no use to the writer."""
    folders = (tmp_path / "low", tmp_path / "well")
    low = Faulty()

    def make(
        folder: Path, store: bytes, region_bytes: int, count: int, floor_bytes: int
    ) -> RegionFiles:
        disk = low if folder.name == "low" else Faulty()
        return disk.make_files(folder, store, region_bytes, count, floor_bytes)

    limits = NvmeLimits(free_floor_bytes=1, free_check_s=0.0)
    clock = FakeClock()
    async with opened(folders, regions=8, make=make, limits=limits, clock=clock) as tier:
        assert not await refused(tier, range(7 * PER_REGION))
        low.free = 0
        clock.advance_s(1)
        there = [region for region in tier._devices.regions if region.device == 0]
        before = sum(region.live for region in there)
        assert before > PER_REGION
        answers = await refused(tier, many(1))
        assert sum(region.live for region in there) == before
        assert not answers
        check_empties(tier)


@pytest.mark.parametrize("at", [0, 2])
async def test_a_region_that_a_full_disk_took_costs_no_other_at_the_next_start(
    tmp_path: Path, at: int
) -> None:
    """Renewing it cut its file to nothing; files behind it are full of records."""
    faulty = Faulty()
    async with opened(tmp_path, regions=8, make=faulty.make_files) as tier:
        assert not await refused(tier, range(6 * PER_REGION))
        for number in range(at * PER_REGION, (at + 1) * PER_REGION):
            tier.drop(context(number).address)
        faulty.script(Call.ALLOCATE, Fail(errno.ENOSPC), times=None)
        await tier.bury_dead()
    assert (tmp_path / f"{at:06d}").stat().st_size == 0
    async with opened(tmp_path, regions=8, make=faulty.make_files) as tier:
        assert tier.statistics().recovered == 5 * PER_REGION
        faulty.clear()
        assert not await refused(tier, many(2))
        check_empties(tier)
    async with opened(tmp_path, regions=8) as tier:
        assert len(tier._devices.regions) == 8, "it is back where there is room again"


async def test_files_beyond_a_smaller_tier_are_removed(tmp_path: Path) -> None:
    async with opened(tmp_path, regions=8):
        pass
    async with opened(tmp_path, regions=4):
        assert [path.name for path in sorted(tmp_path.glob("0*"))] == [f"{n:06d}" for n in range(4)]


class Disk(Faulty):
    """A file system of so many bytes."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.left = nbytes

    def allocate(self, fd: int, nbytes: int, /) -> None:
        self.left -= nbytes
        super().allocate(fd, nbytes)

    def free_bytes(self, folder: Path, /) -> int:
        return max(0, self.left)


async def test_what_is_laid_out_leaves_the_floor_and_is_written_to(tmp_path: Path) -> None:
    disk = Disk(6 * REGION)
    limits = NvmeLimits(free_floor_bytes=2 * REGION)
    async with opened(tmp_path, regions=5, make=disk.make_files, limits=limits) as tier:
        assert disk.left == 2 * REGION
        assert len(tier._devices.regions) == 4
        assert not await refused(tier, range(3 * PER_REGION))
        assert tier.statistics().floor_refusals == 0
        check_empties(tier)


async def test_a_disk_without_room_above_the_floor_has_the_smallest_tier_until_there_is(
    tmp_path: Path,
) -> None:
    disk = Disk(6 * REGION)
    clock = FakeClock()
    limits = NvmeLimits(free_floor_bytes=5 * REGION)
    async with opened(
        tmp_path, regions=5, make=disk.make_files, limits=limits, clock=clock
    ) as tier:
        assert len(tier._devices.regions) == 2
        assert len(await refused(tier, [1])) == 1
        disk.left = 5 * REGION
        clock.advance_s(2)
        assert not await refused(tier, [2])


async def test_a_cancelled_start_leaves_no_file_open(tmp_path: Path) -> None:
    faulty = Faulty()
    slow = Hold()
    faulty.script(Call.ALLOCATE, slow)

    async def start() -> None:
        async with opened(tmp_path, make=faulty.make_files):
            pass

    def ours() -> list[str]:
        links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        names = [str(link.readlink()) for link in links]
        return [name for name in names if name.startswith(str(tmp_path))]

    async with asyncio.TaskGroup() as group:
        task = group.create_task(start())
        await entered(slow)
        task.cancel()
        slow.let_go.set()
    assert task.cancelled()
    assert not ours()


async def test_a_device_that_is_in_service_again_keeps_what_it_has(tmp_path: Path) -> None:
    faulty = Faulty()
    clock = FakeClock()
    async with opened(tmp_path, make=faulty.make_files, clock=clock) as tier:
        kept = await full(tier, (3, 3, 3))
        faulty.script(Call.READ, Fail(errno.EIO), times=3)
        for number in (0, 1, 2):
            with pytest.raises(Unavailable):
                await body(tier, context(number))
        assert tier.statistics().devices_out == 1
        assert not any(context(number).address in tier for number in kept)
        clock.advance_s(61)
        await check_kept(tier, kept)
        await tier.bury_dead()
        await check_kept(tier, kept)
        assert tier.statistics().lost == 0


async def test_a_device_that_is_out_of_service_loses_what_it_has(tmp_path: Path) -> None:
    """The other side of the pair."""
    faulty = Faulty()
    clock = FakeClock()
    async with opened(tmp_path, make=faulty.make_files, clock=clock) as tier:
        kept = await full(tier, (3, 3, 3))
        faulty.script(Call.READ, Fail(errno.EIO), times=3)
        for number in (0, 1, 2):
            with pytest.raises(Unavailable):
                await body(tier, context(number))
        await tier.bury_dead()
        assert tier.statistics().lost == len(kept)
        check_balance(tier)


async def test_a_write_that_cannot_be_made_leaves_the_others_their_room(tmp_path: Path) -> None:
    """A device that fails for good empties no region for the writers that it refuses."""
    faulty = Faulty()
    async with opened(tmp_path, make=faulty.make_files, clock=FakeClock()) as tier:
        kept = await full(tier, (3, 3, 3))
        faulty.script(Call.WRITE, Fail(errno.EIO), times=None)
        with pytest.raises(Unavailable):
            await put(tier, context(500), sequence=500)
        faulty.clear()
        await check_kept(tier, kept)
        check_balance(tier)
