"""Costs of this machine: restores through the real block store, fitted by least squares.

    seconds = fixed + bytes / bandwidth

for blocks of several sizes, from host memory and, in a store that was opened anew, from NVMe.
What NVMe takes beyond host memory is the disk.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.simulation.machine import Machine
from storage.block import BlockContext
from storage.compose import MIB, StoreSettings, open_store
from storage.fence import Fence
from storage.store import BlockStore
from strongroom.blocks import BlockId
from strongroom.derivation import NamespaceKeys, namespace_keys
from strongroom.identity import ComponentId, NamespaceId

SEGMENTS: Final = 8
SIZES_MIB: Final = (1, 4, 16)
ROUNDS: Final = 6


@dataclass(frozen=True, slots=True)
class Line:
    """`seconds = fixed_s + nbytes / bytes_s`; `noise` is the sigma of the log of what is left."""

    fixed_s: float
    bytes_s: float
    noise: float


@dataclass(frozen=True, slots=True)
class Fit:
    """What was measured."""

    host: Line
    nvme: Line
    write_bytes_s: float
    measured: bool

    def machine(self, name: str, prefill_tokens_s: float) -> Machine:
        """A machine with these costs; NVMe reads pass the link as well."""
        disk_s = max(1 / self.nvme.bytes_s - 1 / self.host.bytes_s, 0.02 / self.host.bytes_s)
        return Machine(
            name=name,
            link_bytes_s=self.host.bytes_s,
            link_fixed_s=self.host.fixed_s,
            disk_bytes_s=1 / disk_s,
            disk_fixed_s=max(self.nvme.fixed_s - self.host.fixed_s, 0.0),
            write_bytes_s=self.write_bytes_s,
            prefill_tokens_s=prefill_tokens_s,
            noise=min(max(self.host.noise, self.nvme.noise, 0.05), 0.3),
        )


RECORDED: Final = Fit(
    host=Line(0.0003, 8.0e9, 0.12),
    nvme=Line(0.0008, 1.3e9, 0.15),
    write_bytes_s=1.0e9,
    measured=False,
)
"""Measured once where this was written (two cores, virtual disk); for runs that must repeat."""


def measure(folder: Path) -> Fit:
    """Measure below `folder`, which is on the disk that is meant; seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="strongroom-fit-", dir=folder))
    try:
        return asyncio.run(_measure(scratch))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


async def _measure(scratch: Path) -> Fit:
    contexts = [
        _context(number + 1, size * MIB)
        for number, size in enumerate(size for size in SIZES_MIB for _ in range(ROUNDS))
    ]
    total = sum(context.plaintext_bytes for context in contexts)
    settings = StoreSettings(
        host_bytes=2 * total,
        nvme_path=scratch / "nvme",
        nvme_bytes=8 * total,
        region_bytes=64 * MIB,
    )
    keys = namespace_keys(secrets.token_bytes(32), bytes(32))
    plain = memoryview(bytearray(secrets.token_bytes(max(SIZES_MIB) * MIB)))
    async with open_store(settings) as store:
        for context in contexts:
            await store.save(context, keys, plain[: context.plaintext_bytes], Fence())
        began = time.perf_counter()
        await store.flush()
        written_s = time.perf_counter() - began
        host = await _times(store, contexts, keys, plain)
    async with open_store(settings) as store:
        nvme = await _times(store, contexts, keys, plain)
    return Fit(_line(host), _line(nvme), total / max(written_s, 1e-3), measured=True)


async def _times(
    store: BlockStore, contexts: Sequence[BlockContext], keys: NamespaceKeys, plain: memoryview
) -> list[tuple[int, float]]:
    times = []
    for context in contexts:
        began = time.perf_counter()
        await store.load(context, keys, plain[: context.plaintext_bytes], Fence())
        times.append((context.plaintext_bytes, time.perf_counter() - began))
    return times


def _line(times: Sequence[tuple[int, float]]) -> Line:
    """Through the medians of each size, so that one stall does not tilt it."""
    sizes = sorted({nbytes for nbytes, _ in times})
    medians = [statistics.median(s for nbytes, s in times if nbytes == size) for size in sizes]
    slope, fixed = statistics.linear_regression(sizes, medians)
    slope = max(slope, 1e-12)
    fixed = max(fixed, 0.0)
    left = [math.log(seconds / (fixed + slope * nbytes)) for nbytes, seconds in times]
    return Line(fixed, 1 / slope, statistics.pstdev(left))


def _context(number: int, nbytes: int) -> BlockContext:
    return BlockContext(
        tenant=ComponentId("1" * 32),
        namespace=NamespaceId("2" * 64),
        block=BlockId(number.to_bytes(32, "big")),
        parent=BlockId((number - 1).to_bytes(32, "big")),
        position=(number - 1) * 256,
        tokens=256,
        format_digest=bytes(32),
        layout_digest=bytes(32),
        rank=0,
        segment_bytes=(nbytes // SEGMENTS,) * SEGMENTS,
    )
