"""The host tier: ciphertext in one memfd arena, sealed in place and read in place.

A block's record is encrypted straight into its extent and decrypted straight out of it; there
is no other copy. Room comes from `Extents`, so that what is charged is what is taken; when none
fits, blocks leave in the order of `storage.eviction`: the tenant furthest above its share pays
first. Where one block's room is not enough, `Window` finds blocks that lie side by side, the
least valuable ones, and only these leave. A block that waits to be written behind is not
evicted. Where no such blocks are found, nobody's leaves and the answer is `Overloaded`.

A tenant at its cap makes room among its own blocks that another tier holds too, since nothing is
lost by that; where there are none it is refused, never anybody's block dropped. Above a cap that
was lowered it gives up at most twice what comes in, so that it comes down step by step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import AbstractContextManager, asynccontextmanager
from types import TracebackType
from typing import Final

from storage.block import BlockAddress
from storage.eviction import EvictionSettings
from storage.extents import Extents, rounded
from storage.header import HEADER_BYTES, Header
from storage.index import Footprint, Index
from storage.lifecycle import (
    Admit,
    Pin,
    Place,
    Reserved,
    Resident,
    Sealed,
    WeakReference,
    seal,
)
from storage.memfd import MemoryFile, MemoryOptions
from storage.memory import wipe
from storage.retention import Retention
from storage.shares import Share, Shares
from storage.tiers.protocol import TierName, TierStatistics, drop_in_steps
from storage.windows import Windows
from strongroom.blocks import BlockId
from strongroom.clock import Clock
from strongroom.errors import Missing, Overloaded
from strongroom.identity import ComponentId, NamespaceId

_log = logging.getLogger(__name__)
_EVICTION: Final = EvictionSettings()
_AS_USUAL: Final = Retention()
_LOOKS_MAX: Final = 512
"""Blocks of a tenant at its cap that are looked at for one that another tier holds too."""


def _never(_: BlockAddress) -> bool:
    return False


class HostTier:
    """An arena of `capacity_bytes`.

    `is_dirty` says which blocks wait to be written behind, `is_backed` which ones another tier
    holds too.
    """

    name = TierName.HOST

    def __init__(
        self,
        capacity_bytes: int,
        clock: Clock,
        *,
        pin_ns: int,
        quota_bytes: int | None = None,
        shares: Mapping[ComponentId, Share] | None = None,
        eviction: EvictionSettings = _EVICTION,
        is_dirty: Callable[[BlockAddress], bool] = _never,
        is_backed: Callable[[BlockAddress], bool] = _never,
        lock_memory: bool = True,
        memory: MemoryOptions | None = None,
    ) -> None:
        self._arena = MemoryFile(
            "strongroom-arena", rounded(capacity_bytes), memory or MemoryOptions(lock=lock_memory)
        )
        if self._arena.small_pages:
            # Once a start, for the largest file; staging meets the same in every connection.
            _log.warning(
                "host memory has no huge pages, which costs speed alone: none in the pool, and %s",
                self._arena.small_pages,
            )
        self._room = Extents(self._arena.size)
        self._clock = clock
        self._pin_ns = pin_ns
        self._shares = Shares(quota_bytes, capacity_bytes=self._arena.size, shares=shares)
        self._index = Index(clock, self._shares, eviction)
        self._is_dirty = is_dirty
        self._is_backed = is_backed
        self._index.park_while(is_dirty)
        self._readers: dict[int, int] = {}
        self._windows = Windows(self._room, self._index, self._shares, self._is_stuck)
        self._leaving: dict[int, tuple[ComponentId, Place]] = {}
        self._stored = 0
        self._evictions = 0
        self._overloads = 0

    def settle(self, stop: threading.Event) -> None:
        """Lock the arena, or else touch its pages, on the caller's thread, until `stop`."""
        self._arena.settle(stop)

    def __contains__(self, address: BlockAddress) -> bool:
        return address in self._index

    def resident(self, address: BlockAddress) -> Resident | None:
        row = self._index.get(address)
        return None if row is None else row.resident

    def reference(self, address: BlockAddress) -> WeakReference | None:
        """The writing that is resident now."""
        return self._index.reference(address)

    def namespace_of(self, address: BlockAddress) -> NamespaceId | None:
        return self._index.namespace_of(address)

    def namespace_at(self, packed: bytes) -> NamespaceId | None:
        """`namespace_of` for an address that is packed already."""
        return self._index.namespace_at(packed)

    def namespaces_of_all(self, packed: Iterable[bytes]) -> set[NamespaceId] | None:
        """The namespaces of many such addresses; None unless all of them are resident."""
        return self._index.namespaces_of_all(packed)

    def touch(self, address: BlockAddress) -> None:
        self._index.touch(address)

    def retention_of(self, address: BlockAddress) -> Retention:
        """How a resident block is kept; the default when it is not here."""
        return self._index.retention_of(address)

    # The states of a block that is written in place

    def reserve(
        self,
        address: BlockAddress,
        parent: BlockId,
        tenant: ComponentId,
        namespace: NamespaceId,
        nbytes: int,
    ) -> Reserved:
        """Room for a record, charged at once. Raises `QuotaExceeded` or `Overloaded`."""
        keep = BlockAddress(parent, address.rank)
        self._make_room_in_quota(tenant, nbytes, keep)
        offset = self._make_room(tenant, nbytes, keep)
        if offset is None:
            self._overloads += 1
            raise Overloaded("no room in the host tier now", limit=self._arena.size)
        self._shares.charge(tenant, nbytes)
        return Reserved(address, tenant, namespace, Place(offset, nbytes))

    def buffer(self, reserved: Reserved) -> memoryview:
        """The bytes of a reserved or sealed block."""
        return self._bytes(reserved.place)

    def seal(self, reserved: Reserved, header: Header) -> Sealed:
        """The record is complete in its buffer."""
        return seal(reserved, header)

    def publish(self, sealed: Sealed, admit: Admit, retention: Retention = _AS_USUAL) -> Resident:
        """Make it visible, if `admit` does not raise; otherwise its room is given back."""
        reserved = sealed.reserved
        try:
            admit()
        except BaseException:
            self.abandon(reserved)
            raise
        if reserved.address in self._index:
            self.drop(reserved.address)
        self._stored += 1
        resident = self._index.insert(
            reserved.address,
            sealed.header.context.parent,
            reserved.tenant,
            reserved.namespace,
            reserved.place,
            retention,
        )
        self._windows.add(reserved.address, reserved.place)
        return resident

    def cleaned(self, address: BlockAddress) -> None:
        """The block that may be here does not wait to be written behind any more."""
        self._index.unpark(address)

    def leave_guarantees(self, stuck: Mapping[ComponentId, int]) -> bool:
        """Whether every guarantee could still be kept if these bytes stayed for long."""
        return self._shares.leave_guarantees(stuck)

    def abandon(self, block: Reserved | Sealed) -> None:
        """Give the room of an unpublished block back, its bytes overwritten."""
        reserved = block.reserved if isinstance(block, Sealed) else block
        self._give_back(reserved.tenant, reserved.place)

    # The tier protocol

    async def put(self, header: Header, record: memoryview, admit: Admit) -> Resident:
        context = header.context
        reserved = self.reserve(
            context.address, context.parent, context.tenant, context.namespace, len(record)
        )
        self._bytes(reserved.place)[:] = record
        return self.publish(self.seal(reserved, header), admit)

    @asynccontextmanager
    async def hold(self, address: BlockAddress) -> AsyncIterator[memoryview]:
        reference = self.reference(address)
        if reference is None:
            raise Missing("not resident")
        with self.upgrade(reference) as view:
            yield view

    def upgrade(self, reference: WeakReference) -> AbstractContextManager[memoryview]:
        """From a weak reference to a pin: the record's bytes while the context lasts.

        A transfer's commit point; nothing is awaited. Entering raises `Missing` when that writing
        is gone.
        """
        return _Grip(self, reference)

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
        self._windows.remove(row.place)
        if row.place.offset in self._readers:
            # A reader still decrypts from these bytes: the room follows when it lets go.
            self._leaving[row.place.offset] = (row.resident.tenant, row.place)
        else:
            self._give_back(row.resident.tenant, row.place)
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

    def weight(self, tenant: ComponentId) -> float:
        """A tenant's weight against the others'; 1.0 by default."""
        return self._shares.weight(tenant)

    def cap(self, tenant: ComponentId) -> int | None:
        return self._shares.cap(tenant)

    def used(self) -> Mapping[ComponentId, int]:
        return self._shares.used()

    def refused(self) -> Mapping[ComponentId, int]:
        return self._shares.refused()

    def statistics(self) -> TierStatistics:
        return TierStatistics(
            name=self.name,
            blocks=len(self._index),
            used_bytes=self._room.used_bytes,
            capacity_bytes=self._arena.size,
            pinned=self._index.pinned,
            pinned_bytes=self._index.pinned_bytes,
            stored=self._stored,
            evictions=self._evictions,
            quota_refusals=self._shares.refusals,
            overloads=self._overloads,
        )

    async def close(self) -> None:
        self._arena.close()

    def _make_room_in_quota(self, tenant: ComponentId, nbytes: int, keep: BlockAddress) -> None:
        cap = self._shares.cap(tenant)
        before = self._shares.used_by(tenant)
        if cap is not None and nbytes <= cap < before + nbytes:
            floor = max(cap - nbytes, before - 2 * nbytes)
            looked = 0

            def may_leave(found: BlockAddress) -> bool:
                nonlocal looked
                looked += 1
                return looked > _LOOKS_MAX or self._is_backed(found)

            for address in self._index.victims(tenant, keep=keep, may_leave=may_leave):
                if looked > _LOOKS_MAX:
                    break
                # A block in a reader's hands keeps its room, and so the quota stays charged.
                self.evict(address)
                if self._shares.used_by(tenant) <= floor:
                    break
        self._shares.check(tenant, nbytes, given_up=before - self._shares.used_by(tenant))

    def _make_room(self, tenant: ComponentId, nbytes: int, keep: BlockAddress) -> int | None:
        if nbytes > self._arena.size:
            return None
        offset = self._room.take(nbytes)
        if offset is not None:
            return offset
        window = self._windows.find(tenant, nbytes, keep)
        for address in window:
            self.evict(address)
        return self._room.take(nbytes) if window else None

    def _is_stuck(self, address: BlockAddress, place: Place) -> bool:
        """Whether its room would not come free by eviction now."""
        return place.offset in self._readers or self._is_dirty(address)

    def _bytes(self, place: Place) -> memoryview:
        return self._arena.view[place.offset : place.offset + place.nbytes]

    def _take(self, reference: WeakReference) -> tuple[Pin, Place, memoryview]:
        pin = self._index.pin(reference, self._clock() + self._pin_ns)
        if pin is None:
            raise Missing("that writing is gone")
        place = self._index.place_of(pin)
        self._readers[place.offset] = self._readers.get(place.offset, 0) + 1
        return pin, place, self._bytes(place)

    def _release(self, pin: Pin, place: Place) -> None:
        self._index.unpin(pin)
        self._let_go(place)

    def _let_go(self, place: Place) -> None:
        self._readers[place.offset] -= 1
        if self._readers[place.offset]:
            return
        del self._readers[place.offset]
        leaving = self._leaving.pop(place.offset, None)
        if leaving is not None:
            self._give_back(*leaving)

    def _give_back(self, tenant: ComponentId, place: Place) -> None:
        # The header goes, so that a later occupant's half-written room never reads as a record.
        wipe(self._arena.view[place.offset : place.offset + HEADER_BYTES])
        self._room.give_back(place.offset, place.nbytes)
        self._shares.credit(tenant, place.nbytes)


class _Grip(AbstractContextManager[memoryview]):
    """A record in a reader's hands. A class, and not a generator: every restore enters one."""

    __slots__ = ("_pin", "_place", "_reference", "_tier", "_view")

    def __init__(self, tier: HostTier, reference: WeakReference) -> None:
        self._tier = tier
        self._reference = reference

    def __enter__(self) -> memoryview:
        self._pin, self._place, self._view = self._tier._take(self._reference)
        return self._view

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._view.release()
        self._tier._release(self._pin, self._place)
