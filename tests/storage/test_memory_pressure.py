"""Host memory that the system refuses, and an arena full of what may not leave."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from storage.compose import StoreSettings, open_store
from storage.faulty import Call, Faulty, Hold
from storage.fence import Fence
from storage.memfd import MemoryFile
from storage.tiers.protocol import TierName
from strongroom.errors import Overloaded, Unavailable
from tests.storage.support import KEYS, context, plaintext

MIB = 1024 * 1024
TOO_MUCH = 1 << 60


def test_memory_that_the_system_refuses_is_a_typed_error_that_says_how_much() -> None:
    with pytest.raises(Unavailable, match=f"{TOO_MUCH} bytes for arena cannot be had"):
        MemoryFile("arena", TOO_MUCH)


async def test_a_store_whose_arena_cannot_be_had_does_not_start_and_says_why() -> None:
    with pytest.raises(Unavailable, match="cannot be had"):
        async with open_store(StoreSettings(host_bytes=TOO_MUCH, lock_memory=False)):
            pass


async def test_an_arena_of_pinned_and_dirty_blocks_refuses_saves_and_loads_go_on(
    tmp_path: Path,
) -> None:
    faulty = Faulty()
    settings = StoreSettings(
        host_bytes=MIB, nvme_path=tmp_path, nvme_bytes=16 * MIB, region_bytes=4 * MIB,
        crypto_threads=1, lock_memory=False, huge_pages=False,
    )  # fmt: skip
    segments = (48 * 1024,) * 2
    blocks = [context(number, segments=segments) for number in range(20)]
    async with open_store(settings, make_files=faulty.make_files) as store:
        stuck = Hold()
        faulty.script(Call.WRITE, stuck, times=None, where=lambda made: made.offset > 0)
        stored = []
        async with AsyncExitStack() as pins:
            try:
                for block in blocks:
                    try:
                        await store.save(block, KEYS, plaintext(block), Fence())
                    except Overloaded:
                        break
                    stored.append(block)
                    await pins.enter_async_context(store._host.hold(block.address))
                assert len(stored) < len(blocks), "what does not fit is refused"
                assert stored
                for block in stored:
                    staging = memoryview(bytearray(block.plaintext_bytes))
                    loaded = await store.load(block, KEYS, staging, Fence())
                    assert (loaded.tier, staging) == (TierName.HOST, plaintext(block))
            finally:
                stuck.let_go.set()
        async with asyncio.timeout(20):
            await store.flush()
        late = blocks[len(stored)]
        assert (await store.save(late, KEYS, plaintext(late), Fence())).stored
