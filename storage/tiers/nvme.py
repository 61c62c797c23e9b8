"""The NVMe tier: a log of self-describing records in region files.

- One writer appends to the open region; when it is full a blank one is opened. One blank region
  is always kept back: when it is all that is left, the region with the fewest live bytes has
  its live records copied into it and is blank again (compaction). Regions are thus reused
  whole, and the least recently used leaves are evicted block by block, children before parents.
- The index is memory only. At start every region is walked by its record headers
  (`storage.tiers.recovery`); of two records of one block the one that was sealed later counts.
  What is found is charged to its tenant before the tier is open: a cold quota table would let a
  tenant take everything, or evict everybody.
- A dropped record's header is overwritten, so that a restart does not bring it back. If that
  write fails it may come back as a candidate, which its erased key keeps unreadable.
- No fsync on the way: it is a cache. An orderly stop syncs once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from functools import partial
from pathlib import Path

from storage.block import BlockAddress
from storage.header import HEADER_BYTES, Fault, Header, Placement, gone_block, write_placement
from storage.index import Index
from storage.lifecycle import Admit, Place, Resident
from storage.memory import aligned
from storage.quota import Quota
from storage.tiers.manifest import open_manifest, prepare_folder
from storage.tiers.protocol import TierName, TierStatistics, drop_in_steps
from storage.tiers.recovery import Found, Survey, survey
from storage.tiers.regions import REGION_HEADER_BYTES, Region, RegionFiles
from storage.workers import Workers
from strongroom.clock import Clock
from strongroom.errors import Corrupt, Missing, Overloaded, Unavailable
from strongroom.identity import ComponentId, NamespaceId

_log = logging.getLogger(__name__)

COMPACT_LIVE_MAX = 0.75
"""A fuller region is not worth copying: leaves are evicted until one is emptier than this."""

MakeFiles = Callable[[Path, bytes, int, int], RegionFiles]


class NvmeTier:
    """Opened with `NvmeTier.open`, which recovers; closed with `close`."""

    name = TierName.NVME

    def __init__(
        self,
        files: RegionFiles,
        workers: Workers,
        clock: Clock,
        *,
        lock: int,
        pin_ns: int,
        quota_bytes: int | None = None,
    ) -> None:
        self._files = files
        self._workers = workers
        self._clock = clock
        self._lock = lock
        self._pin_ns = pin_ns
        self._index = Index(clock)
        self._payload_bytes = files.region_bytes - REGION_HEADER_BYTES
        # One region is the blank that compaction copies into.
        self._capacity_bytes = (len(files.regions) - 1) * self._payload_bytes
        self._quota = Quota(quota_bytes)
        self._writing = asyncio.Lock()
        """Guards tails, generations and which region is open: held for a write, a turnover and
        a burial. Index, quota and members change on the event loop, between awaits."""
        self._open_region: Region | None = None
        self._order = 0
        self._used_bytes = 0
        self.last_sequence = 0
        """The highest sealing number found at start."""
        self._faults: Counter[Fault] = Counter()
        self._stored = 0
        self._recovered = 0
        self._evictions = 0
        self._overloads = 0
        self._io_errors = 0

    @classmethod
    async def open(
        cls,
        folder: Path,
        capacity_bytes: int,
        region_bytes: int,
        workers: Workers,
        clock: Clock,
        *,
        pin_ns: int,
        quota_bytes: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        make_files: MakeFiles = RegionFiles,
    ) -> NvmeTier:
        """Open or create the region files and rebuild the index.

        `progress(done, all)` is called after each region. Raises `Unavailable` when the files
        cannot be prepared, `Conflict` when another process has them.
        """
        region_bytes -= region_bytes % HEADER_BYTES
        async with contextlib.AsyncExitStack() as undo:
            lock = prepare_folder(folder)
            undo.callback(os.close, lock)
            manifest = await open_manifest(folder, region_bytes)
            if manifest.region_bytes != region_bytes:
                _log.warning("%s keeps its region length, %d", folder, manifest.region_bytes)
            made: list[RegionFiles] = []
            count = capacity_bytes // manifest.region_bytes
            await workers.run(
                lambda: made.append(
                    make_files(folder, manifest.store, manifest.region_bytes, count)
                ),
                always=True,
            )
            files = made[0]
            undo.callback(files.close)
            tier = cls(files, workers, clock, lock=lock, pin_ns=pin_ns, quota_bytes=quota_bytes)
            await tier._recover_all(progress)
            undo.pop_all()
        return tier

    def __contains__(self, address: BlockAddress) -> bool:
        return address in self._index

    def resident(self, address: BlockAddress) -> Resident | None:
        row = self._index.get(address)
        return None if row is None else row.resident

    def namespace_of(self, address: BlockAddress) -> NamespaceId | None:
        return self._index.namespace_of(address)

    def touch(self, address: BlockAddress) -> None:
        self._index.touch(address)

    async def put(self, header: Header, record: memoryview, admit: Admit) -> Resident:
        """Append the record, which lies in 4 KiB aligned memory; it is not changed."""
        context = header.context
        nbytes = len(record)
        if nbytes > self._payload_bytes:
            self._overloads += 1
            raise Overloaded("larger than a region", limit=self._payload_bytes)
        self._quota.check(context.tenant, nbytes)
        self._quota.charge(context.tenant, nbytes)
        try:
            async with self._writing:
                region, offset = await self._append(
                    record, BlockAddress(context.parent, context.rank)
                )
            try:
                admit()
            except BaseException:
                region.dead[offset] = nbytes
                raise
        except BaseException:
            self._quota.credit(context.tenant, nbytes)
            raise
        # From here to the end nothing awaits: visible at once, or not at all.
        self.drop(context.address)
        self._admit(region, offset, context.address, nbytes)
        self._stored += 1
        return self._index.insert(
            context.address,
            context.parent,
            context.tenant,
            context.namespace,
            self._place(region, offset, nbytes),
        )

    @contextlib.asynccontextmanager
    async def hold(self, address: BlockAddress) -> AsyncIterator[memoryview]:
        resident = self.resident(address)
        if resident is None:
            raise Missing("not resident")
        buffer = aligned(resident.nbytes)
        await self.read_into(address, buffer)
        yield buffer

    async def read_into(self, address: BlockAddress, into: memoryview) -> None:
        """Read the record into aligned memory of its exact size.

        Raises `Missing`, `Corrupt` when the file is cut short, `Unavailable` when the device
        fails, `Overloaded` when the disk queue is full.
        """
        row = self._index.get(address)
        if row is None:
            raise Missing("not resident")
        pin = self._index.pin(row.resident, self._clock() + self._pin_ns)
        region, offset = self._where(row.place)
        region.busy += 1
        counts: list[int] = []
        try:
            await self._io(
                lambda: counts.append(self._files.read(region, offset, into)), always=False
            )
        finally:
            region.busy -= 1
            if pin is not None:
                self._index.unpin(pin)
        if counts[0] < len(into):
            raise Corrupt("the region file is cut short")

    def evict(self, address: BlockAddress) -> int:
        if self._index.is_pinned(address):
            return 0
        freed = self.drop(address)
        self._evictions += 1 if freed else 0
        return freed

    def drop(self, address: BlockAddress) -> int:
        if address not in self._index:
            return 0
        row = self._index.remove(address)
        region, offset = self._where(row.place)
        nbytes = row.place.nbytes
        del region.members[offset]
        region.live_bytes -= nbytes
        self._used_bytes -= nbytes
        self._quota.credit(row.resident.tenant, nbytes)
        region.dead[offset] = nbytes
        return nbytes

    async def drop_namespaces(self, namespaces: Collection[NamespaceId]) -> tuple[int, int]:
        return await drop_in_steps(self._index, namespaces, self.drop)

    def namespaces(self) -> Mapping[NamespaceId, int]:
        return self._index.namespaces()

    def tenants(self) -> Mapping[NamespaceId, ComponentId]:
        return self._index.tenants()

    def set_quota(self, tenant: ComponentId, nbytes: int) -> None:
        self._quota.set_cap(tenant, nbytes)

    def cap(self, tenant: ComponentId) -> int | None:
        return self._quota.cap(tenant)

    def used(self) -> Mapping[ComponentId, int]:
        return self._quota.used()

    async def bury_dead(self) -> int:
        """Overwrite the headers of dropped records; returns how many.

        Those of a region without any live record go together, by renewing it. What is dropped
        meanwhile is for the next call.
        """
        done = 0
        for region in self._files.regions:
            for offset in tuple(region.dead):
                async with self._writing:
                    done += await self._bury(region, offset)
                # Where there was nothing to write, others have not had their turn yet.
                await asyncio.sleep(0)
        return done

    async def _bury(self, region: Region, offset: int) -> int:
        nbytes = region.dead.get(offset)
        if nbytes is None or region.busy or offset in region.members:
            return 0  # renewed meanwhile, or somebody may still be reading this very record
        try:
            if self._is_idle(region):
                done = len(region.dead)
                await self._renew(region)
                return done
            page = aligned(HEADER_BYTES)
            page[:] = gone_block(nbytes)
            await self._io(partial(self._files.write, region, offset, [page]))
        except (Unavailable, Overloaded):
            _log.warning("a dropped record's header could not be overwritten")
            return 0
        finally:
            # Also after a failure: what comes back after a restart is a candidate, no more.
            region.dead.pop(offset, None)
        return 1

    async def _renew(self, region: Region) -> None:
        await self._io(partial(self._files.renew, region))
        region.dead.clear()

    async def sync(self) -> None:
        """Bury what was dropped and bring the regions to the device. Raises `Unavailable`."""
        await self.bury_dead()
        await self._io(self._files.sync)

    def statistics(self) -> TierStatistics:
        return TierStatistics(
            name=self.name,
            blocks=len(self._index),
            used_bytes=self._used_bytes,
            capacity_bytes=self._capacity_bytes,
            pinned=self._index.pinned,
            pinned_bytes=self._index.pinned_bytes,
            stored=self._stored,
            evictions=self._evictions,
            quota_refusals=self._quota.refusals,
            overloads=self._overloads,
            io_errors=self._io_errors,
            recovered=self._recovered,
            torn=self._faults[Fault.TORN],
            foreign=self._faults[Fault.FOREIGN],
            stale=self._faults[Fault.STALE],
            corrupt=self._faults[Fault.CORRUPT],
            future=self._faults[Fault.FUTURE],
        )

    async def close(self) -> None:
        try:
            await self.sync()
        except (Unavailable, Overloaded) as error:
            _log.warning("the NVMe tier is closed without a sync: %s", error.message)
        finally:
            self._files.close()
            os.close(self._lock)

    # Writing; all of it under `_writing`

    async def _append(self, record: memoryview, keep: BlockAddress) -> tuple[Region, int]:
        nbytes = len(record)
        region = await self._room(nbytes, keep)
        offset = region.tail
        self._order += 1
        head = aligned(HEADER_BYTES)
        head[:] = record[:HEADER_BYTES]
        write_placement(
            head,
            Placement(self._files.store, region.number, region.generation, offset, self._order),
        )
        # Advanced first: a write that fails half way leaves a torn record, never a shared one.
        region.tail += nbytes
        region.busy += 1
        try:
            await self._io(
                partial(self._files.write, region, offset, [head, record[HEADER_BYTES:]])
            )
        except BaseException:
            region.dead[offset] = nbytes
            raise
        finally:
            region.busy -= 1
        return region, offset

    async def _room(self, nbytes: int, keep: BlockAddress) -> Region:
        """A region with room for `nbytes` at its tail. Raises `Overloaded` or `Unavailable`."""
        while not self._fits(self._open_region, nbytes):
            self._open_region = None
            empty = [region for region in self._files.regions if not region.members]
            idle = [region for region in empty if not region.busy]
            idle.sort(key=lambda region: region.failures)
            if len(idle) > 1:
                await self._turn_to(idle[0])
                continue
            victim = self._worth_compacting(nbytes) if idle else None
            if victim is not None:
                await self._turn_to(idle[0])
                await self._move_live_records(victim)
                continue
            leaf = next(self._index.victims(keep=keep), None)
            # An empty region that is still being read will be idle in a moment: with nothing
            # to copy into, evicting more meanwhile would gain nothing.
            soon = bool(empty) and not idle
            if soon or leaf is None or not self.evict(leaf):
                self._overloads += 1
                raise Overloaded("no region of the NVMe tier can be emptied now")
        region = self._open_region
        assert region is not None
        return region

    def _fits(self, region: Region | None, nbytes: int) -> bool:
        return region is not None and region.tail + nbytes <= self._files.region_bytes

    def _is_idle(self, region: Region) -> bool:
        return not region.members and not region.busy and region is not self._open_region

    async def _turn_to(self, region: Region) -> None:
        if not (region.clean and region.tail == REGION_HEADER_BYTES):
            await self._renew(region)
        self._open_region = region

    def _worth_compacting(self, nbytes: int) -> Region | None:
        """The emptiest region, if `nbytes` fit behind its live records once they are moved."""
        limit = min(int(COMPACT_LIVE_MAX * self._payload_bytes), self._payload_bytes - nbytes)
        quiet = [region for region in self._files.regions if region.members and not region.busy]
        victim = min(quiet, key=lambda region: region.live_bytes, default=None)
        return victim if victim is not None and victim.live_bytes <= limit else None

    async def _move_live_records(self, victim: Region) -> None:
        """Copy what lives in `victim` into the open region, in order."""
        for offset, packed in sorted(victim.members.items()):
            address = BlockAddress.unpack(packed)
            row = self._index.get(address)
            if row is None or self._where(row.place) != (victim, offset):
                continue
            nbytes = row.place.nbytes
            buffer = aligned(nbytes)
            await self._io(partial(_read_all, self._files, victim, offset, buffer))
            region, new_offset = await self._append(buffer, address)
            new = self._place(region, new_offset, nbytes)
            if self._index.relocate(address, row.place, new):
                del victim.members[offset]
                victim.live_bytes -= nbytes
                region.members[new_offset] = packed
                region.live_bytes += nbytes
            else:
                region.dead[new_offset] = nbytes

    def _admit(self, region: Region, offset: int, address: BlockAddress, nbytes: int) -> None:
        region.members[offset] = address.pack()
        region.live_bytes += nbytes
        self._used_bytes += nbytes

    def _place(self, region: Region, offset: int, nbytes: int) -> Place:
        return Place(region.number * self._files.region_bytes + offset, nbytes)

    def _where(self, place: Place) -> tuple[Region, int]:
        number, offset = divmod(place.offset, self._files.region_bytes)
        return self._files.regions[number], offset

    async def _io(self, job: Callable[[], None], *, always: bool = True) -> None:
        try:
            await self._workers.run(job, always=always)
        except OSError as error:
            self._io_errors += 1
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise Overloaded("the NVMe device is full", field="nvme") from error
            name = errno.errorcode.get(error.errno or 0, "error")
            raise Unavailable(f"the NVMe device failed: {name}") from error

    # Recovery

    async def _recover_all(self, progress: Callable[[int, int], None] | None) -> None:
        candidates: list[Found] = []
        regions = self._files.regions
        for done, region in enumerate(regions, 1):
            results = [Survey()]
            try:
                await self._io(partial(_survey_into, self._files, region, results))
            except (Unavailable, Overloaded) as error:
                _log.warning("region %d was not read: %s", region.number, error.message)
            result = results[-1]
            candidates += result.found
            region.tail = result.tail
            region.clean = bool(result.found) and not result.faults
            self._faults += result.faults
            if progress is not None:
                progress(done, len(regions))
        # Parents were sealed before their children, so this order links them; it is also the
        # best guess at recency.
        candidates.sort(key=lambda found: (found.header.sequence, found.order))
        for found in candidates:
            self._recover(found)
        self._reopen_last(candidates)

    def _recover(self, found: Found) -> None:
        context = found.header.context
        nbytes = found.header.record_bytes
        if context.address in self._index:
            self._faults[Fault.STALE] += 1
            self.drop(context.address)
            self._recovered -= 1
        self.last_sequence = max(self.last_sequence, found.header.sequence)
        self._order = max(self._order, found.order)
        self._admit(found.region, found.offset, context.address, nbytes)
        self._quota.charge(context.tenant, nbytes)
        self._recovered += 1
        self._index.insert(
            context.address,
            context.parent,
            context.tenant,
            context.namespace,
            self._place(found.region, found.offset, nbytes),
        )

    def _reopen_last(self, candidates: list[Found]) -> None:
        """Go on in the region that was written last, if nothing in it was damaged."""
        if candidates:
            last = max(candidates, key=lambda found: found.order).region
            if last.clean:
                self._open_region = last


def _read_all(files: RegionFiles, region: Region, offset: int, into: memoryview) -> None:
    if files.read(region, offset, into) < len(into):
        raise OSError(errno.EIO, "the region file is cut short")


def _survey_into(files: RegionFiles, region: Region, results: list[Survey]) -> None:
    results.append(survey(files, region))
