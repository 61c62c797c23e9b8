"""The NVMe tier under pressure: full regions, a full disk, a failing device, cancelled writes."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from collections import deque
from pathlib import Path
from typing import ClassVar, Never

import pytest

from storage.tiers.regions import REGION_HEADER_BYTES, Region, RegionFiles
from strongroom.errors import Corrupt, Overloaded, Unavailable
from tests.storage.support import context
from tests.storage.test_recovery import RECORD, REGION, body, dead, forget_dead, opened, put


class Faulty(RegionFiles):
    """Real files with an error put in their way, one for each entry, first in first out."""

    write_errors: ClassVar[deque[int]] = deque()
    read_errors: ClassVar[deque[int]] = deque()

    def write(self, region: Region, offset: int, data: list[memoryview]) -> None:
        if self.write_errors and offset:
            # As a device does: part of it is out already.
            super().write(region, offset, [data[0]])
            code = self.write_errors.popleft()
            raise OSError(code, os.strerror(code))
        super().write(region, offset, data)

    def read(self, region: Region, offset: int, into: memoryview) -> int:
        if self.read_errors and len(into) > 4096:
            code = self.read_errors.popleft()
            raise OSError(code, os.strerror(code))
        return super().read(region, offset, into)


@pytest.fixture(autouse=True)
def healthy() -> None:
    Faulty.write_errors = deque()
    Faulty.read_errors = deque()


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
    reading = threading.Event()
    go_on = threading.Event()

    class Slow(RegionFiles):
        def read(self, region: Region, offset: int, into: memoryview) -> int:
            if armed:
                armed.clear()
                reading.set()
                go_on.wait(10)
            return super().read(region, offset, into)

    armed: list[bool] = []
    async with opened(tmp_path, make=Slow) as tier:
        data = await put(tier, context(0))
        armed.append(True)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(body(tier, context(0)))
            async with asyncio.timeout(10):
                while not reading.is_set():
                    await asyncio.sleep(0)
            for number in range(1, 20):
                await put(tier, context(number), sequence=number)
            go_on.set()
        assert task.result() == data


async def test_a_region_is_not_renewed_under_a_reader_of_its_last_record(tmp_path: Path) -> None:
    reading = threading.Event()
    go_on = threading.Event()
    armed: list[bool] = []

    class Slow(RegionFiles):
        def read(self, region: Region, offset: int, into: memoryview) -> int:
            if armed:
                armed.clear()
                reading.set()
                go_on.wait(10)
            return super().read(region, offset, into)

    large = context(0, segments=(REGION - REGION_HEADER_BYTES - 2 * 4096,))
    async with opened(tmp_path, make=Slow) as tier:
        data = await put(tier, large)
        armed.append(True)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(body(tier, large))
            async with asyncio.timeout(10):
                while not reading.is_set():
                    await asyncio.sleep(0)
            tier.drop(large.address)
            await tier.bury_dead()
            for number in range(1, 30):
                await put(tier, context(number), sequence=number)
            go_on.set()
        assert task.result() == data
        await tier.bury_dead()
        assert dead(tier) == 0


async def test_what_is_remembered_of_dropped_records_ends_with_their_region(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as tier:
        room = len(tier._files.regions) * REGION // RECORD
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
        for region in tier._files.regions:
            region.busy += 1  # as if each were being read: nothing can be buried
        waiting = dead(tier)
        assert waiting == 6
        task = asyncio.ensure_future(others())  # noqa: TID251 - ended below
        assert await tier.bury_dead() == 0
        assert turns >= waiting
        task.cancel()
        for region in tier._files.regions:
            region.busy -= 1
        assert await tier.bury_dead() == waiting


@pytest.mark.parametrize(("code", "error"), [(errno.ENOSPC, Overloaded), (errno.EIO, Unavailable)])
async def test_a_failed_write_is_typed_counted_and_poisons_nothing(
    tmp_path: Path, code: int, error: type[Exception]
) -> None:
    async with opened(tmp_path, make=Faulty) as tier:
        before = await put(tier, context(1), sequence=1)
        Faulty.write_errors.append(code)
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
    async with opened(tmp_path, make=Faulty) as tier:
        Faulty.write_errors.append(errno.EIO)
        with pytest.raises(Unavailable):
            await put(tier, context(1), sequence=1)
        forget_dead(tier)
        data = await put(tier, context(2), sequence=2)
    async with opened(tmp_path) as tier:
        assert tier.statistics().torn == 1
        assert await body(tier, context(2)) == data


async def test_a_failed_read_is_typed_and_counted(tmp_path: Path) -> None:
    async with opened(tmp_path, make=Faulty) as tier:
        await put(tier, context(1))
        Faulty.read_errors.append(errno.EIO)
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
    class Full(RegionFiles):
        def _allocate(self, fd: int) -> Never:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(Unavailable, match="free disk space or lower"):
        async with opened(tmp_path, make=Full):
            pass
    assert not (tmp_path / "000000").exists()


async def test_a_disk_with_room_for_some_regions_is_used_as_far_as_it_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Small(RegionFiles):
        room = 3

        def _allocate(self, fd: int) -> None:
            if not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.room -= 1
            super()._allocate(fd)

    with caplog.at_level(logging.WARNING):
        async with opened(tmp_path, regions=8, make=Small) as tier:
            assert tier.statistics().capacity_bytes == 2 * (REGION - REGION_HEADER_BYTES)
            assert isinstance(tier._files, Small)
            tier._files.room = 9
            await put(tier, context(1))
    assert "smaller than set" in caplog.text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
async def test_the_kernels_own_full_device_is_overloaded(tmp_path: Path) -> None:
    class DevFull(RegionFiles):
        full = False

        def write(self, region: Region, offset: int, data: list[memoryview]) -> None:
            if not self.full:
                super().write(region, offset, data)
                return
            fd = os.open("/dev/full", os.O_WRONLY)
            try:
                os.pwritev(fd, data, 0)
            finally:
                os.close(fd)

    async with opened(tmp_path, make=DevFull) as tier:
        await put(tier, context(1))
        assert isinstance(tier._files, DevFull)
        tier._files.full = True
        with pytest.raises(Overloaded):
            await put(tier, context(2))
        tier._files.full = False
        await put(tier, context(2))


async def test_a_cancelled_write_ends_before_its_room_is_used_again(tmp_path: Path) -> None:
    writing = threading.Event()
    go_on = threading.Event()

    class Slow(RegionFiles):
        def write(self, region: Region, offset: int, data: list[memoryview]) -> None:
            if offset and not go_on.is_set():
                writing.set()
                go_on.wait(10)
            super().write(region, offset, data)

    async with opened(tmp_path, make=Slow) as tier:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(put(tier, context(1)))
            async with asyncio.timeout(10):
                while not writing.is_set():
                    await asyncio.sleep(0)
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.sleep(0)
            assert not task.done(), "the thread still reads the caller's buffer"
            go_on.set()
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
