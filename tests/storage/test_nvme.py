"""The NVMe tier under pressure: full regions, a full disk, a failing device, cancelled writes."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from storage.faulty import Call, Fail, Faulty, Hold, Made, Torn
from storage.tiers.operations import Posix
from storage.tiers.regions import REGION_HEADER_BYTES
from strongroom.errors import Corrupt, Overloaded, Unavailable
from tests.storage.support import context
from tests.storage.test_recovery import RECORD, REGION, body, dead, forget_dead, opened, put


def is_record(made: Made) -> bool:
    """Not a region's header."""
    return made.offset > 0


async def test_regions_are_reused_by_copying_what_lives_in_the_emptiest(tmp_path: Path) -> None:
    """Every third block is kept; the log runs through its regions many times."""
    kept = {}
    async with opened(tmp_path) as tier:
        for number in range(60):
            data = await put(tier, context(number), sequence=number)
            if number % 12 == 0:
                kept[number] = data
            else:
                tier.drop(context(number).address)
        assert tier.statistics().evictions == 0
        for number, data in kept.items():
            assert await body(tier, context(number)) == data
        used = tier.statistics().used_bytes
    async with opened(tmp_path) as tier:
        for number, data in kept.items():
            assert await body(tier, context(number)) == data, "moved records are found again"
        assert tier.statistics().used_bytes == used
        assert tier.statistics().foreign == 0


async def test_records_that_nearly_fill_a_region_still_find_room(tmp_path: Path) -> None:
    large = REGION - REGION_HEADER_BYTES - 2 * 4096
    async with opened(tmp_path) as tier:
        for number in range(12):
            wanted = context(number, segments=(large,) if number % 2 else (5000, 3000))
            data = await put(tier, wanted, sequence=number)
            assert await body(tier, wanted) == data


async def test_a_reader_of_a_record_that_is_moved_meanwhile_gets_its_bytes(tmp_path: Path) -> None:
    faulty = Faulty()
    slow = Hold()
    async with opened(tmp_path, make=faulty.make_files) as tier:
        data = await put(tier, context(0))
        faulty.script(Call.READ, slow)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(body(tier, context(0)))
            async with asyncio.timeout(10):
                while not slow.entered.is_set():
                    await asyncio.sleep(0)
            for number in range(1, 20):
                await put(tier, context(number), sequence=number)
            slow.let_go.set()
        assert task.result() == data


async def test_a_region_is_not_renewed_under_a_reader_of_its_last_record(tmp_path: Path) -> None:
    faulty = Faulty()
    slow = Hold()
    large = context(0, segments=(REGION - REGION_HEADER_BYTES - 2 * 4096,))
    async with opened(tmp_path, make=faulty.make_files) as tier:
        data = await put(tier, large)
        faulty.script(Call.READ, slow)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(body(tier, large))
            async with asyncio.timeout(10):
                while not slow.entered.is_set():
                    await asyncio.sleep(0)
            tier.drop(large.address)
            await tier.bury_dead()
            for number in range(1, 30):
                await put(tier, context(number), sequence=number)
            slow.let_go.set()
        assert task.result() == data
        await tier.bury_dead()
        assert dead(tier) == 0


async def test_what_is_remembered_of_dropped_records_ends_with_their_region(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as tier:
        room = len(tier._devices.regions) * REGION // RECORD
        for number in range(12 * room):
            await put(tier, context(number), sequence=number)
            assert dead(tier) <= room
        assert tier.statistics().evictions > 10 * room
        await tier.bury_dead()
        assert dead(tier) == 0
        kept = [number for number in range(12 * room) if context(number).address in tier]
    async with opened(tmp_path) as tier:
        found = [number for number in range(12 * room) if context(number).address in tier]
        assert found == kept, "what was dropped does not come back"


async def test_others_have_their_turn_while_the_dead_are_gone_through(tmp_path: Path) -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with opened(tmp_path) as tier:
        for number in range(6):
            await put(tier, context(number), sequence=number)
        for number in range(6):
            tier.drop(context(number).address)
        for region in tier._devices.regions:
            region.busy += 1  # as if each were being read: nothing can be buried
        waiting = dead(tier)
        assert waiting == 6
        task = asyncio.ensure_future(others())  # noqa: TID251 - ended below
        assert await tier.bury_dead() == 0
        assert turns >= sum(1 for region in tier._devices.regions if len(region.dead))
        task.cancel()
        for region in tier._devices.regions:
            region.busy -= 1
        assert await tier.bury_dead() == waiting


@pytest.mark.parametrize(("code", "error"), [(errno.ENOSPC, Overloaded), (errno.EIO, Unavailable)])
async def test_a_failed_write_is_typed_counted_and_poisons_nothing(
    tmp_path: Path, code: int, error: type[Exception]
) -> None:
    faulty = Faulty()
    async with opened(tmp_path, make=faulty.make_files) as tier:
        before = await put(tier, context(1), sequence=1)
        faulty.script(Call.WRITE, Torn(4096) if code == errno.EIO else Fail(code), where=is_record)
        with pytest.raises(error):
            await put(tier, context(2), sequence=2)
        assert context(2).address not in tier
        assert tier.statistics().io_errors == 1
        assert tier.statistics().used_bytes == RECORD
        again = await put(tier, context(2), sequence=3)
        assert await body(tier, context(1)) == before
        assert await body(tier, context(2)) == again
    async with opened(tmp_path) as tier:
        assert await body(tier, context(2)) == again
        assert tier.statistics().torn == 0, "the half-written record was overwritten as gone"


async def test_a_write_error_at_a_killed_process_leaves_a_torn_record(tmp_path: Path) -> None:
    faulty = Faulty()
    async with opened(tmp_path, make=faulty.make_files) as tier:
        faulty.script(Call.WRITE, Torn(4096), where=is_record)
        with pytest.raises(Unavailable):
            await put(tier, context(1), sequence=1)
        forget_dead(tier)
        data = await put(tier, context(2), sequence=2)
    async with opened(tmp_path) as tier:
        assert tier.statistics().torn == 1
        assert await body(tier, context(2)) == data


async def test_a_failed_read_is_typed_and_counted(tmp_path: Path) -> None:
    faulty = Faulty()
    async with opened(tmp_path, make=faulty.make_files) as tier:
        await put(tier, context(1))
        faulty.script(Call.READ, Fail(errno.EIO))
        with pytest.raises(Unavailable):
            await body(tier, context(1))
        assert tier.statistics().io_errors == 1


async def test_a_file_that_is_cut_under_a_running_store_is_corrupt(tmp_path: Path) -> None:
    async with opened(tmp_path) as tier:
        await put(tier, context(1))
        os.truncate(tmp_path / "000000", REGION_HEADER_BYTES + 4096)
        with pytest.raises(Corrupt):
            await body(tier, context(1))


async def test_a_disk_without_room_for_two_regions_is_refused_with_what_to_do(
    tmp_path: Path,
) -> None:
    faulty = Faulty()
    faulty.script(Call.ALLOCATE, Fail(errno.ENOSPC), times=None)
    with pytest.raises(Unavailable, match="free disk space or lower"):
        async with opened(tmp_path, make=faulty.make_files):
            pass
    assert not (tmp_path / "000000").exists()


async def test_a_disk_with_room_for_some_regions_is_used_as_far_as_it_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = Faulty()
    faulty.script(Call.ALLOCATE, Fail(errno.ENOSPC), skip=3, times=None)
    with caplog.at_level(logging.WARNING):
        async with opened(tmp_path, regions=8, make=faulty.make_files) as tier:
            assert tier.statistics().capacity_bytes == 2 * (REGION - REGION_HEADER_BYTES)
            faulty.clear()
            await put(tier, context(1))
    assert "smaller than set" in caplog.text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
async def test_the_kernels_own_full_device_is_overloaded(tmp_path: Path) -> None:
    class DevFull(Posix):
        full = False

        def pwritev(self, fd: int, parts: Sequence[memoryview], offset: int, /) -> int:
            if not self.full:
                return super().pwritev(fd, parts, offset)
            full = os.open("/dev/full", os.O_WRONLY)
            try:
                return os.pwritev(full, parts, 0)
            finally:
                os.close(full)

    device = DevFull()
    async with opened(tmp_path, make=Faulty(device).make_files) as tier:
        await put(tier, context(1))
        device.full = True
        with pytest.raises(Overloaded):
            await put(tier, context(2))
        device.full = False
        await put(tier, context(2))


async def test_a_cancelled_write_ends_before_its_room_is_used_again(tmp_path: Path) -> None:
    faulty = Faulty()
    slow = Hold()
    faulty.script(Call.WRITE, slow, where=is_record)
    async with opened(tmp_path, make=faulty.make_files) as tier:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(put(tier, context(1)))
            async with asyncio.timeout(10):
                while not slow.entered.is_set():
                    await asyncio.sleep(0)
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.sleep(0)
            assert not task.done(), "the thread still reads the caller's buffer"
            slow.let_go.set()
        assert task.cancelled()
        assert context(1).address not in tier
        assert tier.used() == {}
        data = await put(tier, context(2), sequence=2)
        assert await body(tier, context(2)) == data


async def test_without_direct_io_the_tier_works_through_the_page_cache_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.tiers.regions._direct_works", lambda folder: False)
    with caplog.at_level(logging.WARNING):
        async with opened(tmp_path) as tier:
            data = await put(tier, context(1))
            assert await body(tier, context(1)) == data
    assert "no O_DIRECT" in caplog.text
