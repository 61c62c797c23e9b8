"""What lives in the NVMe tier and what it is charged to: index, shares and regions in step.

Every change of a block is one call here, without an `await`, so that the sum of the regions'
live bytes, the bytes in use and the bytes charged are equal at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from storage.block import BlockAddress
from storage.eviction import EvictionSettings
from storage.index import Index, Row
from storage.lifecycle import Place, Resident
from storage.retention import Retention
from storage.shares import Share, Shares
from storage.tiers.devices import Devices
from storage.tiers.flow import Pace
from storage.tiers.regions import Region
from strongroom.blocks import BlockId
from strongroom.clock import Clock
from strongroom.identity import ComponentId, NamespaceId


class Catalogue:
    """The blocks of all devices. `place` and `where` convert between regions and places."""

    def __init__(
        self,
        devices: Devices,
        clock: Clock,
        quota_bytes: int | None,
        shares: Mapping[ComponentId, Share] | None,
        eviction: EvictionSettings,
    ) -> None:
        self._devices = devices
        payloads = [devices.payload_bytes(region) for region in devices.regions]
        # One region is the blank that others are moved into.
        self.capacity_bytes = sum(payloads) - max(payloads)
        self.shares = Shares(quota_bytes, capacity_bytes=self.capacity_bytes, shares=shares)
        self.index = Index(clock, self.shares, eviction)
        self.used_bytes = 0
        self.evictions = 0
        self.told: Callable[[BlockAddress], None] = lambda _: None
        """Hears of every block that is evicted."""
        self.lost = 0
        """Blocks that went with a device, or with a header that could not be read any more."""

    def __contains__(self, address: BlockAddress) -> bool:
        if self._devices.all_well:
            return address in self.index
        return self.row(address) is not None

    def namespace_at(self, packed: bytes) -> NamespaceId | None:
        """The namespace of a block that can be read, by its packed address."""
        if self._devices.all_well:
            return self.index.namespace_at(packed)
        row = self.row(BlockAddress.unpack(packed))
        return None if row is None else row.resident.namespace

    def row(self, address: BlockAddress) -> Row | None:
        """A block that can be read: resident, on a device in service."""
        row = self.index.get(address)
        if row is None or not self._devices.in_service(self.where(row.place)[0]):
            return None
        return row

    def is_at(self, address: BlockAddress, place: Place) -> bool:
        """Whether a block is resident, and there."""
        row = self.index.get(address)
        return row is not None and row.place == place

    def add(
        self,
        address: BlockAddress,
        parent: BlockId,
        tenant: ComponentId,
        namespace: NamespaceId,
        region: Region,
        offset: int,
        nbytes: int,
        retention: Retention,
    ) -> Resident:
        """Make a record visible that is charged already; an earlier writing of it goes."""
        self.drop(address)
        region.live += 1
        region.live_bytes += nbytes
        self.used_bytes += nbytes
        place = self.place(region, offset, nbytes)
        return self.index.insert(address, parent, tenant, namespace, place, retention)

    def drop(self, address: BlockAddress) -> int:
        """Make a block gone; bytes freed. Its header is still to be overwritten."""
        if address not in self.index:
            return 0
        row = self.index.remove(address)
        region, offset = self.where(row.place)
        nbytes = row.place.nbytes
        self._leave(region, offset, nbytes)
        self.used_bytes -= nbytes
        self.shares.credit(row.resident.tenant, nbytes)
        return nbytes

    def evict(self, address: BlockAddress) -> int:
        """Drop it unless somebody holds it; bytes freed."""
        if self.index.is_pinned(address):
            return 0
        freed = self.drop(address)
        if freed:
            self.evictions += 1
            self.told(address)
        return freed

    def move(self, address: BlockAddress, old: Place, region: Region, offset: int) -> bool:
        """Say that a block's bytes are in `region` now; false when it is gone meanwhile.

        The copy that counts no more, the old one or the new one, is dead: a restart must not
        find it.
        """
        if not self.index.relocate(address, old, self.place(region, offset, old.nbytes)):
            region.dead.add(offset, old.nbytes)
            return False
        self._leave(*self.where(old), old.nbytes)
        region.live += 1
        region.live_bytes += old.nbytes
        return True

    async def forget_lost(self) -> None:
        """Drop the blocks of devices that went out of service, in steps."""
        left = self._devices.take_left()
        if left:
            await self._sweep(lambda row: self.where(row.place)[0].device in left)
            for region in self._devices.regions:
                if region.device in left:
                    region.dead.clear()  # nothing can be written there to bury them

    async def forget_region(self, region: Region, told: Collection[BlockAddress]) -> None:
        """Drop what the index has in a region and the region's file does not tell any more."""
        await self._sweep(lambda row: self.where(row.place)[0] is region, keep=told)

    def place(self, region: Region, offset: int, nbytes: int) -> Place:
        return Place(region.slot * self._devices.region_bytes + offset, nbytes)

    def where(self, place: Place) -> tuple[Region, int]:
        slot, offset = divmod(place.offset, self._devices.region_bytes)
        return self._devices.regions[slot], offset

    def _leave(self, region: Region, offset: int, nbytes: int) -> None:
        region.live -= 1
        region.live_bytes -= nbytes
        region.dead.add(offset, nbytes)

    async def _sweep(
        self, goes: Callable[[Row], bool], keep: Collection[BlockAddress] = ()
    ) -> None:
        pace = Pace()
        for row in self.index.rows():
            if goes(row) and row.resident.address not in keep:
                self.lost += 1
                self.drop(row.resident.address)
            await pace.keep()
