"""NVMe tier against fio: the same block size, depth and file system, O_DIRECT on both sides."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import uvloop

from benchmarks import fio
from benchmarks.blocks import KEYS, BlockSet
from benchmarks.rows import Row, ratio
from benchmarks.scale import Scale
from benchmarks.suite import Bench, Suite
from storage.block import BlockContext
from storage.compose import StoreSettings
from storage.envelope import Sealer
from storage.header import Header, record_bytes
from storage.memory import aligned
from storage.tiers.limits import NvmeLimits
from storage.tiers.nvme import NvmeTier
from storage.workers import disk_workers
from strongroom.clock import boot_ns
from strongroom.errors import StrongroomError

LIMITS: Final = NvmeLimits()
"""The production settings: fio gets the same depth and the same length of a transfer."""
BATCH: Final = 16
"""Records that the write-behind hands over at once."""


@asynccontextmanager
async def open_tier(scale: Scale, folder: Path) -> AsyncIterator[NvmeTier]:
    """The tier alone, with as many disk threads as the depth that fio gets."""
    workers = disk_workers(StoreSettings().disk_threads, 1024)
    tier = await NvmeTier.open(
        folder,
        2 * scale.set_bytes + 3 * scale.region_bytes,
        scale.region_bytes,
        workers,
        boot_ns,
        pin_ns=10**11,
        limits=LIMITS,
    )
    try:
        yield tier
    finally:
        await tier.close()
        workers.close()


def measure(bench: Bench) -> list[Row]:
    """Every row of the suite."""
    return uvloop.run(_measure(bench))


async def _measure(bench: Bench) -> list[Row]:
    scale = bench.scale
    bench.say("disk: sealing the set")
    block_set = BlockSet.make(scale)
    records = [_sealed(block_set, number) for number in range(len(block_set.contexts))]
    size = record_bytes(block_set.contexts[0].segment_bytes)
    reads: list[tuple[float, float]] = []
    writes: list[tuple[float, float]] = []
    how = ""
    transfer = min(size, LIMITS.transfer_bytes)
    with (
        bench.folder("disk") as folder,
        fio.laid_out(folder, len(records) * size, transfer) as file,
    ):
        how = file.how
        for number in bench.rounds("NVMe tier and fio"):
            path = folder / f"nvme-{number}"
            async with open_tier(scale, path) as tier:
                written = await _write(tier, records)
            writes.append((written, file.write(LIMITS.queue_depth).gbytes_per_s))
            async with open_tier(scale, path) as tier:
                read = await _read(tier, block_set.contexts, size)
            reads.append((read, file.read(LIMITS.queue_depth).gbytes_per_s))
            for each in path.iterdir():
                each.unlink()
    note = f"{transfer} bytes a transfer, {LIMITS.queue_depth} in flight, against {how}"
    return [
        ratio("nvme_read_vs_fio", "GB/s", reads, note=note),
        ratio("nvme_write_vs_fio", "GB/s", writes, note=note),
    ]


def _sealed(block_set: BlockSet, number: int) -> tuple[Header, memoryview]:
    context = block_set.contexts[number]
    record = aligned(record_bytes(context.segment_bytes))
    sealer = Sealer.begin(context, KEYS.data, number + 1)
    sealer.segments(range(len(context.segment_bytes)), block_set.part(number), record)
    sealer.finish(record)
    return sealer.header, record


async def _write(tier: NvmeTier, records: list[tuple[Header, memoryview]]) -> float:
    started = time.perf_counter()
    for first in range(0, len(records), BATCH):
        batch = [(*sealed, _admit) for sealed in records[first : first + BATCH]]
        for answer in await tier.put_many(batch):
            if isinstance(answer, StrongroomError):
                raise answer
    return _speed(sum(len(record) for _, record in records), started)


async def _read(tier: NvmeTier, contexts: Sequence[BlockContext], size: int) -> float:
    buffers = [aligned(size) for _ in contexts]
    for buffer in buffers:
        buffer[::4096] = bytes(len(buffer[::4096]))  # touched: a first touch is not the disk's
    errors: list[StrongroomError] = []

    def done(_: int, error: StrongroomError | None) -> None:
        if error is not None:
            errors.append(error)

    started = time.perf_counter()
    wanted = [(context.address, into) for context, into in zip(contexts, buffers, strict=True)]
    await tier.read_many(wanted, done)
    if errors:
        raise errors[0]
    return _speed(len(buffers) * size, started)


def _speed(nbytes: int, started: float) -> float:
    return nbytes / (time.perf_counter() - started) / 1e9


def _admit() -> None:
    """Nothing stands against it."""


SUITE = Suite(
    name="disk",
    summary="NVMe tier against fio at the same block size and depth",
    rows=("nvme_read_vs_fio", "nvme_write_vs_fio"),
    measure=measure,
)
