"""NVMe tier against fio: the same block size, depth and file system, O_DIRECT on both sides."""

from __future__ import annotations

import asyncio
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
from storage.envelope import Sealer
from storage.header import Header, record_bytes
from storage.memory import aligned
from storage.tiers.nvme import NvmeTier
from storage.workers import disk_workers
from strongroom.clock import boot_ns

DEPTH: Final = 4


@asynccontextmanager
async def open_tier(scale: Scale, folder: Path) -> AsyncIterator[NvmeTier]:
    """The tier alone, with as many disk threads as the depth that fio gets."""
    workers = disk_workers(DEPTH, 1024)
    tier = await NvmeTier.open(
        folder,
        2 * scale.set_bytes + 3 * scale.region_bytes,
        scale.region_bytes,
        workers,
        boot_ns,
        pin_ns=10**11,
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
    with bench.folder("disk") as folder, fio.laid_out(folder, len(records) * size, size) as file:
        how = file.how
        for number in bench.rounds("NVMe tier and fio"):
            path = folder / f"nvme-{number}"
            async with open_tier(scale, path) as tier:
                written = await _write(tier, records)
            writes.append((written, file.write(DEPTH).gbytes_per_s))
            async with open_tier(scale, path) as tier:
                read = await _read(tier, block_set.contexts, size)
            reads.append((read, file.read(DEPTH).gbytes_per_s))
            for each in path.iterdir():
                each.unlink()
    note = f"{size} bytes a block, {DEPTH} in flight, against {how}"
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
    for header, record in records:
        await tier.put(header, record, _admit)
    return _speed(sum(len(record) for _, record in records), started)


async def _read(tier: NvmeTier, contexts: Sequence[BlockContext], size: int) -> float:
    buffers = [aligned(size) for _ in contexts]
    for buffer in buffers:
        buffer[::4096] = bytes(len(buffer[::4096]))  # touched: a first touch is not the disk's
    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for context, buffer in zip(contexts, buffers, strict=True):
            tasks.create_task(tier.read_into(context.address, buffer))
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
