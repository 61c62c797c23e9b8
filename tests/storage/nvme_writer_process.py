"""A process that writes to an NVMe tier for ever and says what it has stored; tests kill it.

It prints `stored <number>` once a block is in the tier, and drops some of them again.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from storage.lifecycle import Resident
from storage.retention import Retention
from storage.tiers.limits import NvmeLimits
from storage.tiers.nvme import NvmeTier
from storage.workers import disk_workers
from strongroom.clock import boot_ns
from tests.storage.nvme_support import batch_of
from tests.storage.support import context

REGION_BYTES = 64 * 1024
REGIONS = 8
BATCH = 4


async def run(folder: Path, first: int) -> None:
    workers = disk_workers(4, 64)
    tier = await NvmeTier.open(
        folder,
        REGIONS * REGION_BYTES,
        REGION_BYTES,
        workers,
        boot_ns,
        pin_ns=10**9,
        limits=NvmeLimits(queue_depth=2, transfer_bytes=16 * 1024),
    )
    print("open", flush=True)  # noqa: T201 - its parent reads it
    number = first
    while True:
        numbers = range(number, number + BATCH)
        batch, _ = batch_of([context(n, room=n) for n in numbers], tier.last_sequence + number)
        answers = await tier.put_many(batch, [Retention(90 if n % 7 == 0 else 35) for n in numbers])
        for one, answer in zip(numbers, answers, strict=True):
            if isinstance(answer, Resident):
                print("stored", one, flush=True)  # noqa: T201
        tier.drop(context(number).address)
        if number % 5 == 0:
            await tier.bury_dead()
        number += BATCH


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), int(sys.argv[2])))
