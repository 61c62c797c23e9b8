"""The store as prefetching sees it: where blocks are, and how they come into host room."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from sidecar.prefetch import Onboarding
from storage.block import BlockAddress
from storage.fence import Fence
from storage.header import clear_placement, read_header
from storage.lifecycle import Resident
from storage.store import BlockStore
from storage.tiers.protocol import TierName
from strongroom.errors import Missing


class StoreShelf:
    """A thin view of a `BlockStore`."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._residency = store._residency

    def tier_of(self, address: BlockAddress) -> TierName | None:
        return self._store.tier_of(address)

    def waiting_on_nvme(self, address: BlockAddress) -> Resident | None:
        return self._store.waiting_on_nvme(address)

    @asynccontextmanager
    async def onboard(
        self, addresses: Sequence[BlockAddress], fence: Fence
    ) -> AsyncIterator[Onboarding]:
        yield _OneByOne(self, tuple(addresses), fence)

    async def bring(self, address: BlockAddress, fence: Fence) -> None:
        """Read one record into host room and publish it, ciphertext unchanged."""
        host, nvme = self._residency.host, self._residency.nvme
        if address in host:
            return
        resident = None if nvme is None else nvme.resident(address)
        if nvme is None or resident is None:
            raise Missing("not resident")
        self._residency.check(resident.namespace, fence)
        async with nvme.hold(address) as record:
            header = read_header(record)
            self._residency.check(resident.namespace, fence)
            if address in host:
                return
            context = header.context
            reserved = host.reserve(
                address, context.parent, resident.tenant, resident.namespace, len(record)
            )
            with host.buffer(reserved) as room:
                room[:] = record
                clear_placement(room)
            host.publish(
                host.seal(reserved, header),
                lambda: self._residency.check(resident.namespace, fence),
            )


class _OneByOne:
    def __init__(
        self, shelf: StoreShelf, addresses: tuple[BlockAddress, ...], fence: Fence
    ) -> None:
        self._shelf = shelf
        self._addresses = addresses
        self._fence = fence

    async def ready(self, index: int) -> None:
        await self._shelf.bring(self._addresses[index], self._fence)
