"""One tenant's flood on its way to NVMe leaves the others theirs; the disk stands still."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from storage.compose import StoreSettings, open_store
from storage.faulty import Call, Faulty, Hold
from storage.fence import Fence
from storage.store import BlockStore
from tests.storage.offload_rig import rig
from tests.storage.support import KEYS, context, plaintext

MIB = 1024 * 1024
QUEUE = 32
FLOOD, QUIET = 1, 2


async def save(store: BlockStore, number: int, tenant: int) -> None:
    block = context(number, room=tenant, tenant=tenant)
    await store.save(block, KEYS, plaintext(block), Fence())


async def test_a_flood_fills_its_own_part_of_the_way_to_nvme_and_nobody_elses(
    tmp_path: Path,
) -> None:
    faulty = Faulty()
    settings = StoreSettings(
        host_bytes=64 * MIB, nvme_path=tmp_path, nvme_bytes=64 * MIB, region_bytes=8 * MIB,
        crypto_threads=1, lock_memory=False, huge_pages=False, offload_queue_max=QUEUE,
    )  # fmt: skip
    async with open_store(settings, make_files=faulty.make_files) as store:
        held = Hold()
        faulty.script(Call.WRITE, held, times=None, where=lambda made: made.offset > 0)
        pipeline = store._offload
        assert pipeline is not None
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(4 * QUEUE):
                    tasks.create_task(save(store, number, FLOOD))
                async with asyncio.timeout(20):
                    while len(pipeline) < QUEUE // 2:
                        await asyncio.sleep(0)
                # Had it to wait for the flood, the pipeline's own patience (1 s) would end first.
                async with asyncio.timeout(20):
                    for number in range(QUEUE // 8):
                        await save(store, 1000 + number, QUIET)
                under_way = {offload.address for offload in pipeline._offloads.open()}
                quiet = [context(1000 + n, room=QUIET, tenant=QUIET) for n in range(QUEUE // 8)]
                assert all(block.address in under_way for block in quiet), (
                    "it has its place on disk"
                )
        finally:
            held.let_go.set()
        async with asyncio.timeout(20):
            await store.flush()
        pipeline.verify()
        assert store._nvme is not None
        assert all(block.address in store._nvme for block in quiet)


async def test_writes_to_the_disk_are_in_turns_by_tenant(tmp_path: Path) -> None:
    async with rig(tmp_path, slots=1, batch_blocks_max=4) as it:
        it.disk.hold()
        await it.offer(context(1, room=FLOOD, tenant=FLOOD))
        it.pipeline.request_ended()
        await it.disk.held_write()
        # One batch is being written, and one more of the flood is closed before the others come.
        for number in range(2, 42):
            await it.offer(context(number, room=FLOOD, tenant=FLOOD))
        await it.turns()
        quiet = [context(100 + number, room=QUIET, tenant=QUIET) for number in range(4)]
        handles = [await it.offer(one) for one in quiet]
        await it.turns()
        it.disk.let_go()
        async with asyncio.timeout(20):
            for handle in handles:
                await handle.wait()
        await it.verify_at_rest()
        order = [it.judge.told.index(one.address) for one in quiet]
        assert order == sorted(order), "in their own order"
        assert max(order) < 1 + 4 + 2 * 4, "half of the next two batches"
        assert len(it.judge.told) == 45


async def test_the_policy_is_asked_in_turns_by_tenant(tmp_path: Path) -> None:
    async with rig(tmp_path, policy_slots=1) as it:
        it.judge.hold()
        for number in range(1, 21):
            await it.offer(context(number, room=FLOOD, tenant=FLOOD))
        await it.turns()
        for number in range(100, 103):
            await it.offer(context(number, room=QUIET, tenant=QUIET))
        it.judge.let_go()
        await it.verify_at_rest()
        asked = [candidate.tenant for candidate in it.judge.asked]
        quiet = context(1, tenant=QUIET).tenant
        assert [number for number, who in enumerate(asked) if who == quiet][-1] <= 7
        assert len(asked) == 23


async def test_a_save_that_waits_for_the_disk_says_so_and_holds_nothing(tmp_path: Path) -> None:
    """What is entered while it waits is left again, whatever becomes of it."""
    faulty = Faulty()
    settings = StoreSettings(
        host_bytes=64 * MIB, nvme_path=tmp_path, nvme_bytes=64 * MIB, region_bytes=8 * MIB,
        crypto_threads=1, lock_memory=False, huge_pages=False, offload_queue_max=1,
    )  # fmt: skip
    aside = Aside()
    async with open_store(settings, make_files=faulty.make_files) as store:
        held = Hold()
        faulty.script(Call.WRITE, held, times=None, where=lambda made: made.offset > 0)
        try:
            await save(store, 1, FLOOD)
            assert aside.entered == 0
            block = context(2, room=FLOOD, tenant=FLOOD)
            async with asyncio.TaskGroup() as tasks:
                waiting = tasks.create_task(
                    store.save(block, KEYS, plaintext(block), Fence(), aside=aside)
                )
                async with asyncio.timeout(20):
                    while not aside.entered:
                        await asyncio.sleep(0)
                assert aside.inside == 1
                assert not waiting.done()
                held.let_go.set()
            assert waiting.result().stored
            assert (aside.entered, aside.inside) == (1, 0)
        finally:
            held.let_go.set()


class Aside:
    """Counts who is in it."""

    def __init__(self) -> None:
        self.entered = 0
        self.inside = 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.entered += 1
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1
