"""The NVMe tier: a log of self-describing records in region files.

- One writer appends; a full region is left and the next free one taken. When none is free, the
  region that was filled longest ago is emptied and reused whole (first in, first out).
- The index is memory only. At start every region is scanned by its record headers; what is
  torn, foreign, stale or damaged is dropped and counted, and nothing is trusted: GCM decides
  what is true when a block is opened.
- A dropped block's header is overwritten, so that a restart does not bring it back. If that
  write fails the block may come back as a candidate, which its erased key keeps unreadable.
- No fsync: it is a cache.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from pathlib import Path

from storage.block import BlockAddress
from storage.envelope import (
    HEADER_BYTES,
    RECORD_ALIGN,
    DeadRecord,
    ForeignRecord,
    Header,
    dead_header,
    decode_header,
    stamp,
)
from storage.index import Index
from storage.lifecycle import Admit, Place, Resident
from storage.quota import Quota
from storage.tiers.protocol import TierName, TierStatistics
from storage.tiers.regions import REGION_HEADER_BYTES, AlignedBuffer, Region, RegionFiles
from strongroom.clock import Clock
from strongroom.errors import Corrupt, Missing, Overloaded, Unavailable
from strongroom.identity import ComponentId, NamespaceId

_log = logging.getLogger(__name__)


class NvmeTier:
    """Opened with `NvmeTier.open`, which scans; closed with `close`."""

    name = TierName.NVME

    def __init__(
        self,
        files: RegionFiles,
        executor: Executor,
        clock: Clock,
        *,
        pin_ns: int,
        quota_bytes: int | None = None,
    ) -> None:
        self._files = files
        self._executor = executor
        self._clock = clock
        self._pin_ns = pin_ns
        self._index = Index(clock)
        capacity = len(files.regions) * (files.region_bytes - REGION_HEADER_BYTES)
        self._capacity_bytes = capacity
        self._quota = Quota(quota_bytes)
        self._writing = asyncio.Lock()  # guards the tail and the order of regions
        self._filled: list[Region] = []
        self._free: list[Region] = []
        self._open_region: Region | None = None
        self._dead: list[tuple[Region, int, int]] = []
        self._sequence = 0
        self._used_bytes = 0
        self._count: dict[str, int] = dict.fromkeys(
            (
                "stored",
                "evictions",
                "overloads",
                "io_errors",
                "recovered",
                "torn",
                "foreign",
                "stale",
                "corrupt",
            ),
            0,
        )

    @classmethod
    async def open(
        cls,
        folder: Path,
        capacity_bytes: int,
        region_bytes: int,
        executor: Executor,
        clock: Clock,
        *,
        pin_ns: int,
        quota_bytes: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> NvmeTier:
        """Open or create the region files and rebuild the index from the record headers.

        `progress(done, all)` is called after each region. Raises `Unavailable` when the files
        cannot be prepared.
        """
        loop = asyncio.get_running_loop()
        count = max(2, capacity_bytes // region_bytes)
        files = await loop.run_in_executor(executor, RegionFiles, folder, region_bytes, count)
        tier = cls(files, executor, clock, pin_ns=pin_ns, quota_bytes=quota_bytes)
        for done, region in enumerate(files.regions, 1):
            found = await loop.run_in_executor(executor, tier._scan, region)
            for place, header in found:
                tier._recover(region, place, header)
            if progress is not None:
                progress(done, count)
        tier._sort_regions()
        return tier

    def __contains__(self, address: BlockAddress) -> bool:
        return address in self._index

    def resident(self, address: BlockAddress) -> Resident | None:
        row = self._index.get(address)
        return None if row is None else row.resident

    def touch(self, address: BlockAddress) -> None:
        self._index.touch(address)

    async def put(self, header: Header, record: memoryview, admit: Admit) -> Resident:
        """Append the record. `record` is 4 KiB aligned memory; its region stamp is rewritten."""
        context = header.context
        nbytes = len(record)
        self._quota.check(context.tenant, nbytes)
        if nbytes > self._files.region_bytes - REGION_HEADER_BYTES:
            self._count["overloads"] += 1
            raise Overloaded("larger than a region", limit=self._files.region_bytes)
        self._quota.charge(context.tenant, nbytes)
        try:
            async with self._writing:
                region = await self._region_for(nbytes)
                offset = region.tail
                region.tail += nbytes
                region.busy += 1
                self._sequence += 1
                stamp(record, region.generation, self._sequence)
                try:
                    await self._run(self._files.write, region, offset, record)
                except BaseException:
                    region.tail = offset if region.tail == offset + nbytes else region.tail
                    raise
                finally:
                    region.busy -= 1
            try:
                admit()
            except BaseException:
                self._bury(region, offset, nbytes)
                raise
        except BaseException:
            self._quota.credit(context.tenant, nbytes)
            raise
        if context.address in self._index:
            self.drop(context.address)
        region.live += 1
        self._used_bytes += nbytes
        self._count["stored"] += 1
        return self._index.insert(
            context.address,
            context.parent,
            context.tenant,
            context.namespace,
            Place(region.number * self._files.region_bytes + offset, nbytes),
        )

    @asynccontextmanager
    async def hold(self, address: BlockAddress) -> AsyncIterator[memoryview]:
        resident = self.resident(address)
        if resident is None:
            raise Missing("not resident")
        buffer = AlignedBuffer(resident.nbytes)
        try:
            await self.read_into(address, buffer.view)
            yield buffer.view
        finally:
            buffer.close()

    async def read_into(self, address: BlockAddress, into: memoryview) -> None:
        """Read the record into aligned memory of its exact size."""
        row = self._index.get(address)
        if row is None:
            raise Missing("not resident")
        pin = self._index.pin(row.resident, self._clock() + self._pin_ns)
        region, offset = self._where(row.place)
        region.busy += 1
        try:
            await self._run(self._files.read, region, offset, into)
        finally:
            region.busy -= 1
            if pin is not None:
                self._index.unpin(pin)

    def evict(self, address: BlockAddress) -> int:
        if self._index.is_pinned(address):
            return 0
        freed = self.drop(address)
        self._count["evictions"] += 1 if freed else 0
        return freed

    def drop(self, address: BlockAddress) -> int:
        if address not in self._index:
            return 0
        row = self._index.remove(address)
        region, offset = self._where(row.place)
        region.live -= 1
        self._used_bytes -= row.place.nbytes
        self._quota.credit(row.resident.tenant, row.place.nbytes)
        self._bury(region, offset, row.place.nbytes)
        return row.place.nbytes

    def drop_namespaces(self, namespaces: Collection[NamespaceId]) -> tuple[int, int]:
        freed = [self.drop(address) for address in list(self._index.of_namespaces(namespaces))]
        return len(freed), sum(freed)

    def namespaces(self) -> Mapping[NamespaceId, int]:
        return self._index.namespaces()

    def tenants(self) -> Mapping[NamespaceId, ComponentId]:
        """The tenant of each namespace that has blocks here, as their headers say."""
        return {row.resident.namespace: row.resident.tenant for row in self._index.rows()}

    def set_quota(self, tenant: ComponentId, nbytes: int) -> None:
        self._quota.set_cap(tenant, nbytes)

    def used(self) -> Mapping[ComponentId, int]:
        return self._quota.used()

    async def bury_dead(self) -> int:
        """Overwrite the headers of dropped records; returns how many."""
        done = 0
        while self._dead:
            region, offset, nbytes = self._dead.pop()
            page = AlignedBuffer(HEADER_BYTES)
            try:
                page.view[:] = dead_header(nbytes, region.generation)
                await self._run(self._files.write, region, offset, page.view)
                done += 1
            except Unavailable:
                _log.warning("a dropped record's header could not be overwritten")
            finally:
                page.close()
        return done

    def statistics(self) -> TierStatistics:
        return TierStatistics(
            name=self.name,
            blocks=len(self._index),
            used_bytes=self._used_bytes,
            capacity_bytes=self._capacity_bytes,
            pinned=self._index.pinned,
            quota_refusals=self._quota.refusals,
            **self._count,
        )

    async def close(self) -> None:
        await self.bury_dead()
        self._files.close()

    async def _run(
        self,
        call: Callable[[Region, int, memoryview], None],
        region: Region,
        offset: int,
        data: memoryview,
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._executor, call, region, offset, data)
        except OSError as error:
            self._count["io_errors"] += 1
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise Overloaded("the NVMe device is full", field="nvme") from error
            raise Unavailable(
                f"the NVMe device failed: {errno.errorcode.get(error.errno or 0, 'error')}"
            ) from error

    async def _region_for(self, nbytes: int) -> Region:
        region = self._open_region
        if region is not None and region.tail + nbytes <= self._files.region_bytes:
            return region
        if region is not None:
            self._filled.append(region)
            self._open_region = None
        if not self._free:
            self._empty_oldest()
        region = self._free.pop(0)
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._executor, self._files.renew, region)
        except OSError as error:
            self._count["io_errors"] += 1
            self._free.append(region)
            raise Unavailable("the NVMe device failed while a region was renewed") from error
        self._open_region = region
        return region

    def _empty_oldest(self) -> None:
        for region in self._filled:
            if region.busy:
                continue
            first = region.number * self._files.region_bytes
            last = first + self._files.region_bytes
            for row in list(self._index.rows()):
                if first <= row.place.offset < last:
                    self.drop(row.resident.address)
                    self._count["evictions"] += 1
            self._dead = [dead for dead in self._dead if dead[0] is not region]
            self._filled.remove(region)
            self._free.append(region)
            return
        self._count["overloads"] += 1
        raise Overloaded("every region is being read", field="nvme")

    def _where(self, place: Place) -> tuple[Region, int]:
        number, offset = divmod(place.offset, self._files.region_bytes)
        return self._files.regions[number], offset

    def _bury(self, region: Region, offset: int, nbytes: int) -> None:
        self._dead.append((region, offset, nbytes))

    # Recovery

    def _scan(self, region: Region) -> list[tuple[int, Header]]:
        """The records of one region, in order: offset and header. Runs on the executor."""
        found: list[tuple[int, Header]] = []
        page = AlignedBuffer(HEADER_BYTES)
        offset = REGION_HEADER_BYTES
        try:
            while offset + HEADER_BYTES <= self._files.region_bytes:
                self._files.read(region, offset, page.view)
                step = self._judge(region, offset, page.view, found)
                if step == 0:
                    break
                offset += step
        except (OSError, Corrupt):
            self._count["torn"] += 1
        finally:
            page.close()
        region.tail = offset
        return found

    def _judge(
        self, region: Region, offset: int, page: memoryview, found: list[tuple[int, Header]]
    ) -> int:
        """How far to go on, 0 at the end of what this generation wrote."""
        if not any(page[:16]):
            return 0
        try:
            header = decode_header(page)
        except ForeignRecord:
            self._count["foreign"] += 1
            return self._resume(region, offset)
        except Corrupt:
            self._count["corrupt"] += 1
            return self._resume(region, offset)
        if header.generation != region.generation:
            self._count["stale"] += 1
            return 0
        length = header.length if isinstance(header, DeadRecord) else header.record_bytes
        if length <= 0 or length % RECORD_ALIGN or offset + length > self._files.region_bytes:
            self._count["torn"] += 1
            return 0
        if isinstance(header, Header):
            found.append((offset, header))
        return length

    def _resume(self, region: Region, offset: int) -> int:
        """After a damaged header: the distance to the next one of this generation, or 0."""
        page = AlignedBuffer(HEADER_BYTES)
        at = offset + RECORD_ALIGN
        try:
            while at + HEADER_BYTES <= self._files.region_bytes:
                self._files.read(region, at, page.view)
                try:
                    header = decode_header(page.view)
                except Corrupt:
                    at += RECORD_ALIGN
                    continue
                return at - offset if header.generation == region.generation else 0
        finally:
            page.close()
        return 0

    def _recover(self, region: Region, offset: int, header: Header) -> None:
        context = header.context
        nbytes = header.record_bytes
        self._sequence = max(self._sequence, header.sequence)
        if context.address in self._index:
            # Regions are scanned by number, not by age; both copies open, and one is enough.
            self._count["stale"] += 1
            return
        self._index.insert(
            context.address,
            context.parent,
            context.tenant,
            context.namespace,
            Place(region.number * self._files.region_bytes + offset, nbytes),
        )
        region.live += 1
        region.newest = max(region.newest, header.sequence)
        self._used_bytes += nbytes
        self._quota.charge(context.tenant, nbytes)
        self._count["recovered"] += 1

    def _sort_regions(self) -> None:
        """After a scan: empty regions are free, the rest filled; writing starts in a new one."""
        used = [region for region in self._files.regions if region.live]
        self._free = [region for region in self._files.regions if not region.live]
        self._filled = sorted(used, key=lambda region: region.newest)
