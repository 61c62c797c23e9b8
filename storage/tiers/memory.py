"""The reference tier: a dictionary of records. Small enough to be right by reading it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import asynccontextmanager

from storage.block import BlockAddress
from storage.header import Header
from storage.index import Footprint, Index
from storage.lifecycle import Admit, Place, Resident
from storage.shares import Shares
from storage.tiers.protocol import TierName, TierStatistics, drop_in_steps
from strongroom.clock import Clock
from strongroom.errors import Missing, Overloaded
from strongroom.identity import ComponentId, NamespaceId


class MemoryTier:
    """Keeps whole records in ordinary memory, up to `capacity_bytes`."""

    name = TierName.MEMORY

    def __init__(self, capacity_bytes: int, clock: Clock, *, pin_ns: int = 30 * 10**9) -> None:
        self._capacity_bytes = capacity_bytes
        self._clock = clock
        self._pin_ns = pin_ns
        self._shares = Shares(capacity_bytes=capacity_bytes)
        self._index = Index(clock, self._shares)
        self._records: dict[BlockAddress, bytes] = {}
        self._used_bytes = 0
        self._stored = 0
        self._evictions = 0

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
        context = header.context
        nbytes = len(record)
        if nbytes > self._capacity_bytes:
            raise Overloaded("larger than the tier", limit=self._capacity_bytes)
        keep = BlockAddress(context.parent, context.rank)
        self._shares.check(context.tenant, nbytes)
        for victim in self._index.victims(writer=context.tenant, keep=keep):
            if self._used_bytes + nbytes <= self._capacity_bytes:
                break
            self.evict(victim)
        if self._used_bytes + nbytes > self._capacity_bytes:
            raise Overloaded("nothing may leave the tier now", limit=self._capacity_bytes)
        copy = bytes(record)
        admit()
        if context.address in self._index:
            self.drop(context.address)
        resident = self._index.insert(
            context.address, context.parent, context.tenant, context.namespace, Place(0, nbytes)
        )
        self._records[context.address] = copy
        self._shares.charge(context.tenant, nbytes)
        self._used_bytes += nbytes
        self._stored += 1
        return resident

    @asynccontextmanager
    async def hold(self, address: BlockAddress) -> AsyncIterator[memoryview]:
        row = self._index.get(address)
        if row is None:
            raise Missing("not resident")
        pin = self._index.pin(row.resident, self._clock() + self._pin_ns)
        try:
            yield memoryview(self._records[address])
        finally:
            if pin is not None:
                self._index.unpin(pin)

    def evict(self, address: BlockAddress) -> int:
        if address not in self._index or self._index.is_pinned(address):
            return 0
        self._evictions += 1
        return self.drop(address)

    def drop(self, address: BlockAddress) -> int:
        if address not in self._index:
            return 0
        row = self._index.remove(address)
        del self._records[address]
        self._shares.credit(row.resident.tenant, row.place.nbytes)
        self._used_bytes -= row.place.nbytes
        return row.place.nbytes

    async def drop_namespaces(self, namespaces: Collection[NamespaceId]) -> tuple[int, int]:
        return await drop_in_steps(self._index, namespaces, self.drop)

    def namespaces(self) -> Mapping[NamespaceId, int]:
        return self._index.namespaces()

    def footprints(self, step: int) -> Iterator[list[Footprint]]:
        return self._index.footprints(step)

    def tenants(self) -> Mapping[NamespaceId, ComponentId]:
        return self._index.tenants()

    def set_quota(self, tenant: ComponentId, nbytes: int) -> None:
        self._shares.set_cap(tenant, nbytes)

    def set_share(self, tenant: ComponentId, guaranteed_bytes: int, weight: float) -> None:
        self._shares.set_share(tenant, guaranteed_bytes, weight)

    def cap(self, tenant: ComponentId) -> int | None:
        return self._shares.cap(tenant)

    def used(self) -> Mapping[ComponentId, int]:
        return self._shares.used()

    def statistics(self) -> TierStatistics:
        return TierStatistics(
            name=self.name,
            blocks=len(self._index),
            used_bytes=self._used_bytes,
            capacity_bytes=self._capacity_bytes,
            pinned=self._index.pinned,
            stored=self._stored,
            evictions=self._evictions,
            quota_refusals=self._shares.refusals,
        )

    async def close(self) -> None:
        self._records.clear()
