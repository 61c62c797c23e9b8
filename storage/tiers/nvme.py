"""The NVMe tier: a log of self-describing records in region files, on one device or several.

- `storage.tiers.writer` appends to the open region, `reclaim` empties regions so that there is
  one to open, `reader` reads, `recovery` rebuilds the index at start, `catalogue` keeps index,
  quota and regions in step, `devices` knows which device is well. Here they are put together.
- Records that are written or read together go in one system call where they are neighbours.
- A dropped record's header is overwritten, so that a restart does not bring it back. If that
  write fails it may come back as a candidate, which its erased key keeps unreadable.
- A tenant at its cap gives up its own blocks for new ones, in the order in which they would leave;
  what can't be made room for that way is refused as `QuotaExceeded`, counted.
- Over the day's write budget, below the free-space floor and with no region to be had, a write
  is refused as `Overloaded`, each counted for itself; what is there stays readable.
- No fsync on the way: it is a cache. An orderly stop syncs once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Self

from storage.block import BlockAddress
from storage.eviction import EvictionSettings
from storage.fair import FairStatistics
from storage.header import HEADER_BYTES, Fault, Header, gone_block
from storage.index import Footprint
from storage.lifecycle import Admit, Resident
from storage.memory import aligned
from storage.retention import PRIORITY_DEFAULT, Retention
from storage.shares import Share
from storage.tiers.budget import WriteBudget
from storage.tiers.catalogue import Catalogue
from storage.tiers.devices import Devices, MakeFiles
from storage.tiers.limits import NvmeLimits
from storage.tiers.protocol import TierName, TierStatistics, drop_in_steps
from storage.tiers.reader import Done, Reader
from storage.tiers.reclaim import Reclaimer
from storage.tiers.recovery import Progress, Recovered, recover
from storage.tiers.regions import Region, RegionFiles
from storage.tiers.writer import LogWriter, Spot
from storage.workers import Workers
from strongroom.clock import Clock
from strongroom.errors import Missing, Overloaded, StrongroomError, Unavailable
from strongroom.identity import ComponentId, NamespaceId

__all__ = ["MakeFiles", "NvmeTier"]

_log = logging.getLogger(__name__)
_EVICTION: Final = EvictionSettings()
_BURY_STEP = 32
"""Headers that are overwritten before a writer has its turn."""

Sealed = tuple[Header, memoryview, Admit]
"""A record to be stored: it lies in page-aligned memory and is not changed."""


@dataclass(slots=True)
class _Pending:
    """One record of a batch that has its room."""

    number: int
    header: Header
    record: memoryview
    admit: Admit
    retention: Retention
    spot: Spot


class NvmeTier:
    """Opened with `NvmeTier.open`, which recovers; closed with `close`."""

    name = TierName.NVME

    def __init__(
        self,
        devices: Devices,
        clock: Clock,
        limits: NvmeLimits,
        *,
        pin_ns: int,
        quota_bytes: int | None = None,
        shares: Mapping[ComponentId, Share] | None = None,
        eviction: EvictionSettings = _EVICTION,
    ) -> None:
        self._devices = devices
        self._catalogue = Catalogue(devices, clock, quota_bytes, shares, eviction)
        self._index = self._catalogue.index
        self._shares = self._catalogue.shares
        self._budget = WriteBudget(clock, limits.write_bytes_per_day, self._shares.weight)
        self._writer = LogWriter(devices, self._budget, limits)
        self._reclaimer = Reclaimer(self._catalogue, devices, self._writer, limits)
        self._reader = Reader(self._catalogue, devices, clock, limits, pin_ns=pin_ns)
        self._payload_bytes = min(devices.payload_bytes(region) for region in devices.regions)
        self._writing = asyncio.Lock()
        """Guards which region is open, tails and generations: held while room is taken, while
        a region is emptied and for a burial. Index, quota and regions' live bytes change on
        the event loop, between awaits."""
        self._recovered = Recovered.nothing()
        self._stored = 0
        self._overloads = 0

    @classmethod
    async def open(
        cls,
        folder: Path | Sequence[Path],
        capacity_bytes: int,
        region_bytes: int,
        workers: Workers,
        clock: Clock,
        *,
        pin_ns: int,
        quota_bytes: int | None = None,
        shares: Mapping[ComponentId, Share] | None = None,
        eviction: EvictionSettings = _EVICTION,
        limits: NvmeLimits | None = None,
        progress: Progress | None = None,
        make_files: MakeFiles = RegionFiles,
    ) -> Self:
        """Open or make the region files and rebuild the index.

        `folder` may be several, each on a device of its own; the capacity is theirs together.
        Raises `Unavailable` when no folder can be prepared, `Conflict` when another process has
        one.
        """
        limits = limits or NvmeLimits()
        folders = (folder,) if isinstance(folder, Path) else tuple(folder)
        devices = await Devices.open(
            folders, capacity_bytes, region_bytes, workers, clock, limits, make_files
        )
        try:
            tier = cls(
                devices,
                clock,
                limits,
                pin_ns=pin_ns,
                quota_bytes=quota_bytes,
                shares=shares,
                eviction=eviction,
            )
            await tier._recover(limits.queue_depth, progress)
        except BaseException:
            devices.close()
            raise
        return tier

    @property
    def turns(self) -> FairStatistics:
        """Who waits for a turn to read."""
        return self._reader.turns

    @property
    def last_sequence(self) -> int:
        """The highest sealing number found at start."""
        return self._recovered.last_sequence

    def __contains__(self, address: BlockAddress) -> bool:
        return address in self._catalogue

    def resident(self, address: BlockAddress) -> Resident | None:
        row = self._catalogue.row(address)
        return None if row is None else row.resident

    def retention_of(self, address: BlockAddress) -> Retention:
        """How a copy of the block in another tier is kept."""
        return self._index.retention_of(address)

    def namespace_of(self, address: BlockAddress) -> NamespaceId | None:
        return self._index.namespace_of(address) if address in self._catalogue else None

    def namespace_at(self, packed: bytes) -> NamespaceId | None:
        """`namespace_of` for an address that is packed already."""
        return self._catalogue.namespace_at(packed)

    def touch(self, address: BlockAddress) -> None:
        self._index.touch(address)

    # Writing

    async def put(
        self,
        header: Header,
        record: memoryview,
        admit: Admit,
        retention: Retention = Retention(),  # noqa: B008 - frozen
    ) -> Resident:
        """Append one record; see `put_many`. Raises what that would answer."""
        (answer,) = await self.put_many([(header, record, admit)], [retention])
        if isinstance(answer, StrongroomError):
            raise answer
        return answer

    async def put_many(
        self, batch: Sequence[Sealed], retentions: Sequence[Retention] = ()
    ) -> list[Resident | StrongroomError]:
        """Append records; neighbours go out in one system call.

        The answer has one entry for each, in order: it is there, or why not (`Overloaded`,
        `QuotaExceeded`, `Unavailable`, or what its `admit` raised); one that is refused holds up
        no other. Without `retentions` the default holds. When cancelled, no thread reads the
        records any more, and what was not admitted has left nothing behind.
        """
        answers: list[Resident | StrongroomError] = [Unavailable("not written")] * len(batch)
        pending: list[_Pending] = []
        await self._devices.look_at_free_space()
        try:
            async with self._writing:
                for number, (header, record, admit) in enumerate(batch):
                    retention = retentions[number] if retentions else Retention()
                    try:
                        self._check(header, len(record))
                        self._make_room_in_quota(header, len(record))
                        if pending and not self._writer.fits(len(record)):
                            # What is emptied next must not be what this batch still fills.
                            await self._finish(pending, answers)
                        spot = await self._take(header, len(record), retention)
                    except StrongroomError as error:
                        self._overloads += type(error) is Overloaded
                        answers[number] = error
                    else:
                        pending.append(_Pending(number, header, record, admit, retention, spot))
            await self._finish(pending, answers)
        finally:
            for left in pending:
                self._abandon(left)
        return answers

    def _check(self, header: Header, nbytes: int) -> None:
        if nbytes > self._payload_bytes:
            raise Overloaded("larger than a region", limit=self._payload_bytes)
        self._devices.check_floor()
        self._budget.check(header.context.tenant)

    def _make_room_in_quota(self, header: Header, nbytes: int) -> None:
        """At its cap a tenant's own blocks make way, the least worth first. Of one that is above
        a cap which was lowered, at most twice the record's size. Raises `QuotaExceeded`.
        """
        tenant = header.context.tenant
        cap, before = self._shares.cap(tenant), self._shares.used_by(tenant)
        if cap is not None and nbytes <= cap < before + nbytes:
            keep = BlockAddress(header.context.parent, header.context.rank)
            floor = max(cap - nbytes, before - 2 * nbytes)
            for address in self._index.victims(tenant, keep=keep):
                self._catalogue.evict(address)
                if self._shares.used_by(tenant) <= floor:
                    break
        self._shares.check(tenant, nbytes, given_up=before - self._shares.used_by(tenant))

    async def _take(self, header: Header, nbytes: int, retention: Retention) -> Spot:
        """Charge the tenant and take room at the log's end, making it first."""
        tenant = header.context.tenant
        self._shares.charge(tenant, nbytes)
        try:
            keep = BlockAddress(header.context.parent, header.context.rank)
            await self._reclaimer.make_room(nbytes, tenant, keep)
        except BaseException:
            self._shares.credit(tenant, nbytes)
            raise
        self._budget.count(tenant, nbytes)
        return self._writer.take(nbytes, _kept_priority(retention))

    async def _finish(
        self, pending: list[_Pending], answers: list[Resident | StrongroomError]
    ) -> None:
        """Write what has room and make it visible, record by record."""
        errors = await self._writer.write([(one.spot, one.record) for one in pending])
        # From here to the end nothing awaits: each is visible at once, or not at all.
        for error in errors:
            one = pending.pop(0)
            refusal = error
            if refusal is None:
                try:
                    one.admit()
                except StrongroomError as refused:
                    refusal = refused
                except BaseException:
                    self._abandon(one)
                    raise
            if refusal is not None:
                self._abandon(one)
                answers[one.number] = refusal
            else:
                answers[one.number] = self._publish(one)

    def _publish(self, one: _Pending) -> Resident:
        context, spot = one.header.context, one.spot
        resident = self._catalogue.add(
            context.address,
            context.parent,
            context.tenant,
            context.namespace,
            spot.region,
            spot.offset,
            spot.nbytes,
            one.retention,
        )
        self._writer.settle(spot, is_live=True)
        self._stored += 1
        return resident

    def _abandon(self, one: _Pending) -> None:
        self._writer.settle(one.spot, is_live=False)
        self._shares.credit(one.header.context.tenant, one.spot.nbytes)

    # Reading

    @contextlib.asynccontextmanager
    async def hold(self, address: BlockAddress) -> AsyncIterator[memoryview]:
        resident = self.resident(address)
        if resident is None:
            raise Missing("not resident")
        buffer = aligned(resident.nbytes)
        await self.read_into(address, buffer)
        yield buffer

    async def read_into(self, address: BlockAddress, into: memoryview) -> None:
        """Read one record; see `read_many`. Raises what that would tell."""
        errors: list[StrongroomError] = []

        def done(_: int, error: StrongroomError | None) -> None:
            if error is not None:
                errors.append(error)

        await self._reader.read_many([(address, into)], done)
        if errors:
            raise errors[0]

    async def read_many(
        self, wanted: Sequence[tuple[BlockAddress, memoryview]], done: Done
    ) -> None:
        """Read records into aligned memory of their exact sizes, the first asked first.

        `done(i, error)` is called on the loop as each is there: None, `Missing`, `Corrupt` when
        the file is cut short, `Unavailable` when the device fails, `Overloaded` when the disk
        queue is full. Returns when all were told. When cancelled, no thread writes into any of
        the buffers any more.
        """
        await self._reader.read_many(wanted, done)

    # Leaving

    def tell_evicted(self, told: Callable[[BlockAddress], None]) -> None:
        """`told` hears of every block that is evicted from now on."""
        self._catalogue.told = told

    def evict(self, address: BlockAddress) -> int:
        return self._catalogue.evict(address)

    def drop(self, address: BlockAddress) -> int:
        return self._catalogue.drop(address)

    async def drop_namespaces(self, namespaces: Collection[NamespaceId]) -> tuple[int, int]:
        return await drop_in_steps(self._index, namespaces, self.drop)

    async def bury_dead(self) -> int:
        """Overwrite the headers of dropped records; returns how many.

        Those of a region without any live record go together, by renewing it. What is dropped
        meanwhile is for the next call.
        """
        await self._catalogue.forget_lost()
        done = 0
        for region in self._devices.regions:
            left = len(region.dead)
            while left > 0 and len(region.dead):
                async with self._writing:
                    done += await self._bury(region)
                left -= _BURY_STEP
                # Where there was nothing to write, others have not had their turn yet.
                await asyncio.sleep(0)
        return done

    async def _bury(self, region: Region) -> int:
        if region.busy or not self._devices.in_service(region):
            return 0  # somebody may still be reading one of these very records
        step: list[tuple[int, int]] = []
        try:
            if region is self._writer.region and len(region.dead) > _BURY_STEP and not region.live:
                self._writer.region = None  # all of it is dead: one renewal instead of many writes
            if not region.live and region is not self._writer.region:
                done = len(region.dead)
                await self._writer.renew(region)
                return done
            step = [region.dead.pop() for _ in range(min(_BURY_STEP, len(region.dead)))]
            files = self._devices.files_of(region)
            await self._devices.run(region, partial(_overwrite, files, region, step), always=True)
        except (Unavailable, Overloaded):
            _log.warning("dropped records' headers are not overwritten yet")
            # For the next call. What comes back if there is none is a candidate, no more.
            for offset, nbytes in step:
                region.dead.add(offset, nbytes)
            return 0
        self._budget.spend(len(step) * HEADER_BYTES)
        return len(step)

    # The rest of the protocol

    def namespaces(self) -> Mapping[NamespaceId, int]:
        return self._index.namespaces()

    def footprints(self, step: int) -> Iterator[list[Footprint]]:
        return self._index.footprints(step)

    def tenants(self) -> Mapping[NamespaceId, ComponentId]:
        return self._index.tenants()

    def set_quota(self, tenant: ComponentId, nbytes: int) -> None:
        self._shares.set_cap(tenant, nbytes)

    def set_share(self, tenant: ComponentId, guaranteed_bytes: int, weight: float) -> None:
        """What a tenant is sure of here, and what its excess counts for."""
        self._shares.set_share(tenant, guaranteed_bytes, weight)

    def weight(self, tenant: ComponentId) -> float:
        """A tenant's weight in this tier."""
        return self._shares.weight(tenant)

    def refused(self) -> Mapping[ComponentId, int]:
        """Writes that were refused over a tenant's cap, by tenant."""
        return self._shares.refused()

    def cap(self, tenant: ComponentId) -> int | None:
        return self._shares.cap(tenant)

    def used(self) -> Mapping[ComponentId, int]:
        return self._shares.used()

    async def sync(self) -> None:
        """Bury what was dropped and bring the regions to the device. Raises `Unavailable`."""
        await self.bury_dead()
        try:
            await self._devices.workers.run(*self._devices.sync(), always=True)
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, "error")
            raise Unavailable(f"the NVMe device failed: {name}") from error

    def statistics(self) -> TierStatistics:
        faults = self._recovered.faults
        return TierStatistics(
            name=self.name,
            blocks=len(self._index),
            used_bytes=self._catalogue.used_bytes,
            capacity_bytes=self._catalogue.capacity_bytes,
            pinned=self._index.pinned,
            pinned_bytes=self._index.pinned_bytes,
            stored=self._stored,
            evictions=self._catalogue.evictions,
            quota_refusals=self._shares.refusals,
            overloads=self._overloads,
            io_errors=self._devices.errors,
            recovered=self._recovered.blocks,
            torn=faults[Fault.TORN],
            foreign=faults[Fault.FOREIGN],
            stale=faults[Fault.STALE],
            corrupt=faults[Fault.CORRUPT],
            future=faults[Fault.FUTURE],
            unburied=sum(len(region.dead) for region in self._devices.regions),
            written_bytes=self._budget.written_bytes,
            moved=self._reclaimer.moved,
            reclaimed_regions=self._reclaimer.reclaimed,
            budget_refusals=self._budget.refusals,
            floor_refusals=self._devices.floor_refusals,
            devices_out=self._devices.out,
            lost=self._catalogue.lost,
        )

    async def close(self) -> None:
        try:
            await self.sync()
        except (Unavailable, Overloaded) as error:
            _log.warning("the NVMe tier is closed without a sync: %s", error.message)
        finally:
            self._devices.close()

    async def _recover(self, depth: int, progress: Progress | None) -> None:
        found = await recover(self._devices, self._catalogue, depth, progress)
        self._recovered = found
        self._writer.order = found.last_order
        if found.last_region is not None and self._devices.writable(found.last_region):
            self._writer.region = found.last_region


def _kept_priority(retention: Retention) -> int | None:
    """What a restart is to know: a priority for a time ends with the process that knew when."""
    if retention.duration_s is not None or retention.priority == PRIORITY_DEFAULT:
        return None
    return retention.priority


def _overwrite(files: RegionFiles, region: Region, step: Sequence[tuple[int, int]]) -> None:
    page = aligned(HEADER_BYTES)
    for offset, nbytes in step:
        page[:] = gone_block(nbytes)
        files.write(region, offset, [page])
