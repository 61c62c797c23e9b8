"""A host tier, an NVMe tier and the pipeline between them, with a disk and a policy that obey.

async with rig(folder) as it:
    it.disk.hold()
    offload = await it.offer(context(1))
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from storage.block import BlockAddress, BlockContext
from storage.dirty import DirtyBlocks
from storage.lifecycle import Resident
from storage.offload import OffloadPipeline
from storage.offloads import OffloadSettings
from storage.residency import Residency
from storage.retention import Retention
from storage.stages import Candidate, Offload, Unwanted, Wanted
from storage.tiers.host import HostTier
from storage.tiers.nvme import NvmeTier
from storage.tiers.regions import Region, RegionFiles
from storage.workers import Workers
from tests.storage.support import FakeClock, sealed

MIB = 1024 * 1024


class Disk:
    """Writes of records: they fail as told, and wait while held."""

    def __init__(self) -> None:
        self.errors: deque[int | None] = deque()
        """What the next writes end with; None is well."""
        self.writes = 0
        self.arrived = threading.Event()
        self._open = threading.Event()
        self._open.set()

    def hold(self) -> None:
        self._open.clear()
        self.arrived.clear()

    def let_go(self) -> None:
        self._open.set()

    async def held_write(self) -> None:
        """Return once a write waits."""
        async with asyncio.timeout(10):
            while not self.arrived.is_set():
                await asyncio.sleep(0)

    def files(self, *arguments: Any) -> RegionFiles:
        return _Files(self, *arguments)

    def before_write(self) -> None:
        self.arrived.set()
        assert self._open.wait(20)
        self.writes += 1
        code = self.errors.popleft() if self.errors else None
        if code is not None:
            raise OSError(code, os.strerror(code))


class _Files(RegionFiles):
    def __init__(self, disk: Disk, *arguments: Any) -> None:
        self._disk = disk
        super().__init__(*arguments)

    def write(self, region: Region, offset: int, data: Sequence[memoryview]) -> None:
        if len(data) > 1:
            self._disk.before_write()
        super().write(region, offset, data)


class Judge:
    """A policy that answers as told, when it is let."""

    def __init__(self) -> None:
        self.answer: Wanted | Unwanted = Wanted()
        self.error: Exception | None = None
        self.asked: list[Candidate] = []
        self.told: list[BlockAddress] = []
        self._open = asyncio.Event()
        self._open.set()

    def hold(self) -> None:
        self._open.clear()

    def let_go(self) -> None:
        self._open.set()

    async def judge(self, candidate: Candidate, /) -> Wanted | Unwanted:
        self.asked.append(candidate)
        await self._open.wait()
        if self.error is not None:
            raise self.error
        return self.answer

    def written(self, address: BlockAddress, nbytes: int, /) -> None:
        assert nbytes
        self.told.append(address)


@dataclass
class Rig:
    host: HostTier
    nvme: NvmeTier
    residency: Residency
    pipeline: OffloadPipeline
    dirty: DirtyBlocks
    disk: Disk
    judge: Judge
    clock: FakeClock
    handles: list[Offload] = field(default_factory=list)

    async def put(self, wanted: BlockContext) -> Resident:
        header, record = sealed(wanted)
        return await self.host.put(header, record, lambda: None)

    async def offer(self, wanted: BlockContext, priority: int = 35) -> Offload:
        offload = self.pipeline.offer(await self.put(wanted), Retention(priority))
        self.handles.append(offload)
        return offload

    async def turns(self, count: int = 20) -> None:
        """Let whatever is ready run."""
        for _ in range(count):
            await asyncio.sleep(0)

    def verify(self) -> None:
        """Nothing is left behind, and bytes charged are bytes resident or being written."""
        self.pipeline.verify()
        at_rest = not self.pipeline.statistics().committed
        for tier in (self.host, self.nvme) if at_rest else (self.host,):
            resident = sum(row.place.nbytes for row in tier._index.rows())
            leaving = sum(place.nbytes for _, place in self.host._leaving.values())
            charged = sum(tier.used().values())
            assert charged == resident + (leaving if tier is self.host else 0), tier.name

    async def verify_at_rest(self) -> None:
        """When all has ended: no handle open, no pin, nothing dirty."""
        async with asyncio.timeout(20):
            await self.pipeline.drained()
        self.verify()
        assert all(offload.outcome is not None for offload in self.handles)
        assert len(self.pipeline) == len(self.dirty) == 0
        assert self.host.statistics().pinned == self.nvme.statistics().pinned == 0
        assert not self.host._readers


@asynccontextmanager
async def rig(folder: Path, *, host_bytes: int = 4 * MIB, **changes: Any) -> AsyncIterator[Rig]:
    """`changes` are of `OffloadSettings`; batches do not come of age unless told."""
    disk, judge, clock, dirty = Disk(), Judge(), FakeClock(), DirtyBlocks()
    values: dict[str, Any] = {"batch_age_s": 3600.0, "policy_timeout_s": 20.0} | changes
    async with AsyncExitStack() as stack:
        workers = Workers("test-disk", 2, queue_max=256)
        stack.callback(workers.close)
        nvme = await NvmeTier.open(
            folder, 8 * MIB, MIB, workers, clock, pin_ns=30 * 10**9, make_files=disk.files
        )
        stack.push_async_callback(nvme.close)
        host = HostTier(
            host_bytes, clock, pin_ns=30 * 10**9, is_dirty=dirty.__contains__,
            is_backed=nvme.__contains__, lock_memory=False,
        )  # fmt: skip
        dirty.tell_cleaned(host.cleaned)
        stack.push_async_callback(host.close)
        residency = Residency(host, nvme)
        settings = OffloadSettings(**values)
        pipeline = OffloadPipeline(residency, nvme, dirty, judge, clock, settings)
        made = Rig(host, nvme, residency, pipeline, dirty, disk, judge, clock)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pipeline.run())
            try:
                yield made
            finally:
                disk.let_go()
                judge.let_go()
                pipeline.close()
        made.verify()


EIO, ENOSPC = errno.EIO, errno.ENOSPC
