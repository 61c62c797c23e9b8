"""One tenant's flood on its way to NVMe leaves the others theirs; the disk stands still."""

from __future__ import annotations

import asyncio
from pathlib import Path

from storage.compose import StoreSettings, open_store
from storage.faulty import Call, Faulty, Hold
from storage.fence import Fence
from storage.store import BlockStore
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
