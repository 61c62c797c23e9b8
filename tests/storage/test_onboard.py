"""Onboarding over real tiers: what comes, what fails alone, what is held and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from storage.block import BlockAddress, BlockContext
from storage.compose import MIB, StoreSettings, open_store
from storage.faulty import Call, Fail, Faulty, Flip, Hold
from storage.fence import Fence, Fenced
from storage.header import record_bytes
from storage.onboard import Failed, Onboarding, Ready, Released, Searched, Staged
from storage.store import BlockStore
from storage.tiers.protocol import TierName, TierStatistics
from strongroom.errors import Corrupt, Missing, Overloaded, QuotaExceeded
from tests.storage.support import KEYS, FakeClock, context, namespace, plaintext

CHAIN = [context(number, parent=number - 1 if number > 1 else None) for number in range(1, 7)]
ADDRESSES = [wanted.address for wanted in CHAIN]
RECORD = record_bytes(CHAIN[0].segment_bytes)
PIN_S = 30.0


def settings(folder: Path, **changes: object) -> StoreSettings:
    fields: dict[str, object] = {
        "host_bytes": 4 * MIB,
        "nvme_path": folder,
        "nvme_bytes": 8 * MIB,
        "region_bytes": MIB,
        "crypto_threads": 2,
        "write_behind_s": 0.0,
        "pin_s": PIN_S,
        "lock_memory": False,
        "huge_pages": False,
    }
    return StoreSettings(**(fields | changes))  # type: ignore[arg-type]


async def fill(folder: Path, chain: Sequence[BlockContext] = CHAIN) -> None:
    async with open_store(settings(folder)) as store:
        for wanted in chain:
            await store.save(wanted, KEYS, plaintext(wanted), Fence())
        await store.flush()


@asynccontextmanager
async def stored(
    folder: Path, clock: FakeClock | None = None, faulty: Faulty | None = None, **changes: object
) -> AsyncIterator[BlockStore]:
    """A store that has the chain on NVMe and nothing in host memory."""
    await fill(folder)
    async with open_store(
        settings(folder, **changes),
        clock or FakeClock(),
        make_files=(faulty or Faulty()).make_files,
    ) as store:
        assert all(store.tier_of(address) is TierName.NVME for address in ADDRESSES)
        yield store


def host(store: BlockStore) -> TierStatistics:
    return next(tier for tier in store.statistics().tiers if tier.name is TierName.HOST)


async def spin(until: object) -> None:
    assert callable(until)
    async with asyncio.timeout(10):
        while not until():
            await asyncio.sleep(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "nvme"


async def test_blocks_come_into_host_as_they_are_and_open_there(folder: Path) -> None:
    async with stored(folder) as store:
        async with store.onboard(ADDRESSES, Fence()) as moving:
            for index, address in enumerate(ADDRESSES):
                ready = await moving.ready(index)
                assert (ready.address, ready.tier, ready.nbytes) == (address, TierName.NVME, RECORD)
                assert store.tier_of(address) is TierName.HOST
            assert host(store).pinned == len(ADDRESSES)
            assert store.statistics().onboard.held == len(ADDRESSES)
        assert host(store).pinned == 0
        for wanted in CHAIN:
            staging = memoryview(bytearray(wanted.plaintext_bytes))
            loaded = await store.load(wanted, KEYS, staging, Fence())
            assert loaded.tier is TierName.HOST
            assert staging == plaintext(wanted)
        counts = store.statistics().onboard
        assert (counts.brought, counts.brought_bytes) == (6, 6 * RECORD)
        assert (counts.failed, counts.overdue, counts.held, counts.reading) == (0, 0, 0, 0)


async def test_what_is_in_host_already_is_held_and_not_read(folder: Path) -> None:
    faulty = Faulty()
    async with stored(folder, faulty=faulty) as store:
        async with store.onboard(ADDRESSES, Fence()) as moving:
            await moving.ready(5)
        before = len(faulty.calls)
        async with store.onboard(ADDRESSES, Fence()) as moving:
            ready = [await moving.ready(index) for index in range(6)]
            assert {block.tier for block in ready} == {TierName.HOST}
            assert host(store).pinned == 6
        assert len(faulty.calls) == before


async def test_reading_ahead_is_bounded_in_blocks(folder: Path) -> None:
    async with (
        stored(folder, ahead_blocks=2) as store,
        store.onboard(ADDRESSES, Fence()) as moving,
    ):
        await moving.ready(0)
        await spin(lambda: isinstance(moving.states[1], Ready))
        assert all(isinstance(state, Searched) for state in moving.states[2:])
        await moving.ready(2)
        await spin(lambda: isinstance(moving.states[3], Ready))
        assert all(isinstance(state, Searched) for state in moving.states[4:])


async def test_reading_ahead_is_bounded_in_bytes_and_one_block_always_goes(folder: Path) -> None:
    async with (
        stored(folder, ahead_bytes=RECORD // 2) as store,
        store.onboard(ADDRESSES, Fence()) as moving,
    ):
        for index in range(6):
            await moving.ready(index)
            assert all(isinstance(state, Searched) for state in moving.states[index + 1 :])


@pytest.mark.parametrize("bad", range(6))
async def test_a_failing_block_fails_alone_and_what_follows_is_given_up(
    folder: Path, bad: int
) -> None:
    async with stored(folder, ahead_blocks=1) as store:
        store._nvme.drop(ADDRESSES[bad])  # type: ignore[union-attr]
        async with store.onboard(ADDRESSES, Fence()) as moving:
            for index in range(bad):
                await moving.ready(index)
            for index in range(bad, 6):
                with pytest.raises(Missing):
                    await moving.ready(index)
        on = [store.tier_of(address) for address in ADDRESSES]
        assert on[:bad] == [TierName.HOST] * bad
        assert on[bad] is None
        assert on[bad + 1 :] == [TierName.NVME] * (5 - bad), "given up, not dropped"
        assert store.statistics().onboard.failed == 1
        assert host(store).used_bytes == bad * RECORD


async def test_a_record_that_is_damaged_in_its_header_is_quarantined_and_never_published(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = Faulty()
    async with stored(folder, faulty=faulty, ahead_blocks=1) as store:
        faulty.script(Call.READ, Flip(100), times=1)
        with caplog.at_level(logging.WARNING):
            async with store.onboard(ADDRESSES, Fence()) as moving:
                with pytest.raises(Corrupt):
                    await moving.ready(0)
        assert store.tier_of(ADDRESSES[0]) is None
        assert host(store).used_bytes == 0
        assert store.statistics().quarantined == 1


async def test_a_failing_device_is_a_miss_and_gives_the_room_back(folder: Path) -> None:
    faulty = Faulty()
    async with stored(folder, faulty=faulty) as store:
        faulty.script(Call.READ, Fail(errno.EIO), times=None)
        async with store.onboard(ADDRESSES, Fence()) as moving:
            with pytest.raises(Missing):
                await moving.ready(0)
        assert host(store).used_bytes == 0


@pytest.mark.parametrize("how", ["fence", "retire"])
async def test_an_invalidation_while_blocks_are_read_publishes_none_of_them(
    folder: Path, how: str
) -> None:
    faulty, hold, fence = Faulty(), Hold(), Fence()
    async with stored(folder, faulty=faulty) as store:
        faulty.script(Call.READ, hold)
        async with store.onboard(ADDRESSES, fence) as moving:
            await spin(hold.entered.is_set)
            assert isinstance(moving.states[0], Staged)
            if how == "fence":
                fence.cut()
            else:
                store.retire([namespace(1)])
            hold.let_go.set()
            with pytest.raises(Fenced):
                await moving.ready(0)
        assert not any(isinstance(state, Ready | Released) for state in moving.states)
        assert host(store).used_bytes == 0


async def test_leaving_waits_for_the_threads_and_gives_every_room_back(folder: Path) -> None:
    faulty, hold = Faulty(), Hold()
    left = asyncio.Event()
    async with stored(folder, faulty=faulty) as store:
        faulty.script(Call.READ, hold)

        async def go() -> None:
            try:
                async with store.onboard(ADDRESSES, Fence()) as moving:
                    await moving.ready(0)
            finally:
                left.set()

        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(go())
            await spin(hold.entered.is_set)
            for _ in range(3):
                task.cancel()
                await asyncio.sleep(0)
            assert not left.is_set(), "a thread still writes into host room"
            assert host(store).used_bytes > 0
            hold.let_go.set()
        assert task.cancelled()
        assert (host(store).used_bytes, host(store).pinned) == (0, 0)
        assert store.statistics().onboard.held == 0
        async with store.onboard(ADDRESSES, Fence()) as moving:
            await moving.ready(5)


async def test_the_watchdog_releases_what_is_held_beyond_its_deadline(folder: Path) -> None:
    clock = FakeClock()
    async with stored(folder, clock) as store:
        async with store.onboard(ADDRESSES, Fence()) as moving:
            await moving.ready(5)
            clock.advance_s(PIN_S - 1)
            store._onboard.watch()
            assert store.statistics().onboard.held == 6
            assert store.statistics().onboard.overdue == 0
            clock.advance_s(2)
            store._onboard.watch()
            assert store.statistics().onboard.held == 0
            assert store.statistics().onboard.overdue == 6
            assert host(store).pinned == 0
            assert all(isinstance(state, Released) for state in moving.states)
            # Who still asks learns that it had come; whether it is there, the load finds out.
            assert (await moving.ready(0)).address == ADDRESSES[0]
        assert store.statistics().onboard.overdue == 6, "released once"


async def test_a_read_that_ends_after_its_deadline_is_dropped(folder: Path) -> None:
    clock, faulty, hold = FakeClock(), Faulty(), Hold()
    async with stored(folder, clock, faulty) as store:
        faulty.script(Call.READ, hold)
        async with store.onboard(ADDRESSES, Fence()) as moving:
            await spin(hold.entered.is_set)
            clock.advance_s(PIN_S)
            hold.let_go.set()
            with pytest.raises(Overloaded):
                await moving.ready(0)
        assert host(store).used_bytes == 0
        assert store.tier_of(ADDRESSES[0]) is TierName.NVME


async def test_without_host_room_a_load_reads_past_the_host_tier_with_few_buffers(
    folder: Path,
) -> None:
    async with (
        stored(folder, host_quota_bytes=RECORD - 4096) as store,
        store.onboard(ADDRESSES, Fence()) as moving,
    ):
        with pytest.raises(QuotaExceeded):
            await moving.ready(0)
    async with stored(folder, host_bytes=MIB) as store:
        staging = [memoryview(bytearray(wanted.plaintext_bytes)) for wanted in CHAIN]
        reserved = store._host.reserve(
            BlockAddress(CHAIN[0].block, 9), CHAIN[0].parent, CHAIN[0].tenant, namespace(9),
            store._host._arena.size - 4096,
        )  # fmt: skip
        await asyncio.gather(
            *(
                store.load(wanted, KEYS, into, Fence())
                for wanted, into in zip(CHAIN, staging, strict=True)
            )
        )
        assert [bytes(into) for into in staging] == [bytes(plaintext(wanted)) for wanted in CHAIN]
        assert len(store._opening._buffers._free) <= 4
        store._host.abandon(reserved)


async def test_a_prompt_longer_than_the_host_tier_comes_from_nvme_whole(folder: Path) -> None:
    wide = [
        context(number, parent=number - 1 if number > 1 else None, segments=(60_000, 60_000))
        for number in range(1, 17)
    ]
    room = record_bytes(wide[0].segment_bytes)
    addresses = [wanted.address for wanted in wide]
    await fill(folder, wide)
    # With and without a bystander that holds on to half of the host tier.
    for pinned in (0, 4):
        async with open_store(settings(folder, host_bytes=8 * room, ahead_blocks=4)) as store:
            others = [context(100 + number, segments=(60_000, 60_000)) for number in range(pinned)]
            for other in others:
                await store.save(other, KEYS, plaintext(other), Fence())
            async with contextlib.AsyncExitStack() as held:
                for other in others:
                    await held.enter_async_context(store._host.hold(other.address))
                async with store.onboard(addresses, Fence()) as moving:
                    for index, wanted in enumerate(wide):
                        with contextlib.suppress(Overloaded):
                            await moving.ready(index)
                        into = memoryview(bytearray(wanted.plaintext_bytes))
                        await store.load(wanted, KEYS, into, Fence())
                        assert into == plaintext(wanted)
                        moving.release(index)
            assert host(store).pinned == 0


async def test_what_there_is_no_room_for_does_not_end_the_chain(folder: Path) -> None:
    async with stored(folder, host_bytes=MIB) as store:
        arena = store._host._arena.size
        block = BlockAddress(CHAIN[0].block, 9)
        reserved = store._host.reserve(
            block, CHAIN[0].parent, CHAIN[0].tenant, namespace(9), arena - 4096
        )
        async with store.onboard(ADDRESSES, Fence()) as moving:
            for index in range(3):
                with pytest.raises(Overloaded):
                    await moving.ready(index)
            store._host.abandon(reserved)
            for index in range(3, 6):
                assert (await moving.ready(index)).tier is TierName.NVME


async def test_two_onboardings_of_one_chain_are_harmless(folder: Path) -> None:
    async with stored(folder) as store:

        async def go() -> list[Ready]:
            moving: Onboarding
            async with store.onboard(ADDRESSES, Fence()) as moving:
                return [await moving.ready(index) for index in range(6)]

        first, second = await asyncio.gather(go(), go())
        assert [block.address for block in first] == [block.address for block in second]
        assert host(store).used_bytes == 6 * RECORD
        assert not any(isinstance(state, Failed) for state in first)


async def test_an_onboarding_that_is_left_at_once_gives_its_room_back(folder: Path) -> None:
    """Its reading task is cancelled before its first step."""
    async with stored(folder) as store:
        async with store.onboard(ADDRESSES, Fence()) as moving:
            assert any(isinstance(state, Staged) for state in moving.states)
        assert not any(isinstance(state, Staged) for state in moving.states)
        assert not store._host.used()
        assert host(store).used_bytes == 0


async def test_one_left_while_another_block_is_being_asked_for_gives_its_room_back(
    folder: Path,
) -> None:
    async with stored(folder, ahead_blocks=1) as store:
        async with store.onboard(ADDRESSES, Fence()) as moving:
            await moving.ready(0)
            moving.release(0)
            asking = asyncio.get_running_loop().create_task(moving.ready(3))
            await asyncio.sleep(0)  # it has made the reading task, which has not begun
            assert isinstance(moving.states[3], Staged)
            asking.cancel()
        assert not any(isinstance(state, Staged) for state in moving.states)
        assert host(store).used_bytes == host(store).blocks * RECORD
