"""What is resident in one tier, in columns: arrays and one map from address to slot.

A Python object a block would cost hundreds of bytes and garbage-collector pauses, so a row is
a slot number in parallel arrays, and the map holds bytes and numbers only, which the collector
does not visit one by one. Row objects exist only while someone looks at one.

Who leaves first is `storage.eviction`'s to say, which also numbers the slots. A chain's parent
outlives its children: a child without its parent can never match, so victims are leaves.
"""

from __future__ import annotations

import array
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, cast

from storage.block import BlockAddress
from storage.eviction import NONE, Eviction, EvictionSettings
from storage.lifecycle import Pin, Place, Resident, WeakReference
from storage.retention import Retention
from storage.shares import Shares
from storage.shortlist import Shortlist
from strongroom.blocks import BlockId
from strongroom.clock import Clock
from strongroom.errors import Missing
from strongroom.identity import ComponentId, NamespaceId

_PACKED_BYTES: Final = 36
_AS_USUAL: Final = Retention()
_DEFAULTS: Final = EvictionSettings()


@dataclass(frozen=True, slots=True)
class Row:
    """One resident block as its tier keeps it."""

    resident: Resident
    place: Place


@dataclass(frozen=True, slots=True)
class Footprint:
    """How much of one namespace is resident in one tier."""

    namespace: NamespaceId
    blocks: int
    nbytes: int


class Index:
    """Resident blocks of one tier. With `shares`, tenants pay for room by their shares."""

    def __init__(
        self,
        clock: Clock,
        shares: Shares | None = None,
        settings: EvictionSettings = _DEFAULTS,
    ) -> None:
        self._clock = clock
        self._eviction = Eviction(clock, shares, settings)
        self._slots: dict[bytes, int] = {}
        self._packed = bytearray()
        """The address of each slot."""
        self._namespace = array.array("I")
        self._offset = array.array("Q")
        self._names: list[NamespaceId] = []
        """By number; a number whose last row has gone is given to the next new name."""
        self._free_numbers: list[int] = []
        self._numbers: dict[NamespaceId, int] = {}
        self._in_namespace: dict[int, int] = {}
        self._bytes_in: dict[int, int] = {}
        self._tenant_of: dict[int, ComponentId] = {}
        self._pins: dict[int, set[Pin]] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, address: BlockAddress) -> bool:
        return address.pack() in self._slots

    def insert(
        self,
        address: BlockAddress,
        parent: BlockId,
        tenant: ComponentId,
        namespace: NamespaceId,
        place: Place,
        retention: Retention = _AS_USUAL,
    ) -> Resident:
        """Make a block visible, as used now; its address must be free."""
        packed = address.pack()
        if packed in self._slots:
            raise ValueError("this address is resident already")
        above = self._slots.get(BlockAddress(parent, address.rank).pack(), NONE)
        slot = self._eviction.add(packed, above, tenant, place.nbytes, retention)
        if slot == len(self._offset):
            self._packed += packed
            self._namespace.append(0)
            self._offset.append(0)
        else:
            self._packed[slot * _PACKED_BYTES : (slot + 1) * _PACKED_BYTES] = packed
        number = self._number(namespace)
        self._namespace[slot] = number
        self._offset[slot] = place.offset
        self._slots[packed] = slot
        self._in_namespace[number] = self._in_namespace.get(number, 0) + 1
        self._bytes_in[number] = self._bytes_in.get(number, 0) + place.nbytes
        self._tenant_of[number] = tenant
        return self._resident(address, slot)

    def get(self, address: BlockAddress) -> Row | None:
        """The row of a resident block; touches nothing."""
        slot = self._slots.get(address.pack())
        return None if slot is None else self._row(address, slot)

    def reference(self, address: BlockAddress) -> WeakReference | None:
        """The writing that is resident now; touches nothing."""
        slot = self._slots.get(address.pack())
        return None if slot is None else WeakReference(address, self._eviction.stamp(slot))

    def namespace_of(self, address: BlockAddress) -> NamespaceId | None:
        """The namespace of a resident block; touches nothing."""
        slot = self._slots.get(address.pack())
        return None if slot is None else self._names[self._namespace[slot]]

    def namespace_at(self, packed: bytes) -> NamespaceId | None:
        """`namespace_of` for an address that is packed already."""
        slot = self._slots.get(packed)
        return None if slot is None else self._names[self._namespace[slot]]

    def namespaces_of_all(self, packed: Iterable[bytes]) -> set[NamespaceId] | None:
        """The namespaces of these blocks; None unless all of them are resident."""
        slots = list(map(self._slots.get, packed))
        if None in slots:
            return None
        numbers = set(map(self._namespace.__getitem__, cast("list[int]", slots)))
        return {self._names[number] for number in numbers}

    def retention_of(self, address: BlockAddress) -> Retention:
        """How a copy of a resident block in another tier is kept; the default for an absent one."""
        slot = self._slots.get(address.pack())
        return _AS_USUAL if slot is None else self._eviction.retention(slot)

    def relocate(self, address: BlockAddress, old: Place, new: Place) -> bool:
        """Say that a block's bytes have moved; false when it is gone or no longer at `old`."""
        slot = self._slots.get(address.pack())
        if slot is None or self._offset[slot] != old.offset:
            return False
        self._offset[slot] = new.offset
        return True

    def touch(self, address: BlockAddress) -> None:
        """Count a use of a block, if it is here."""
        packed = address.pack()
        slot = self._slots.get(packed)
        if slot is not None:
            self._eviction.touch(slot)

    def remove(self, address: BlockAddress) -> Row:
        """Make a block invisible; its place is the caller's to give back."""
        packed = address.pack()
        slot = self._slots.pop(packed, None)
        if slot is None:
            raise Missing("not resident")
        row = self._row(address, slot)
        number = self._namespace[slot]
        self._in_namespace[number] -= 1
        self._bytes_in[number] -= row.place.nbytes
        if not self._in_namespace[number]:
            del self._in_namespace[number], self._bytes_in[number], self._tenant_of[number]
            del self._numbers[row.resident.namespace]
            self._free_numbers.append(number)
        self._pins.pop(slot, None)
        self._eviction.remove(slot, packed)
        return row

    def victims(
        self,
        tenant: ComponentId | None = None,
        *,
        writer: ComponentId | None = None,
        keep: BlockAddress | None = None,
        may_leave: Callable[[BlockAddress], bool] | None = None,
    ) -> Generator[BlockAddress, None, None]:
        """Blocks that may be evicted, in the order of `storage.eviction`, leaves only, none pinned.

        `writer` is the tenant for whom room is made. `keep` is the parent of what room is made
        for: a leaf now, and needed in a moment. `may_leave` is the caller's own word. One
        iteration serves for any number of victims; what it gave counts as given up in it, also
        where the caller removes it later, and is not given again.
        """
        kept = NONE if keep is None else self._slots.get(keep.pack(), NONE)

        def spared(slot: int) -> bool:
            if slot == kept or self._is_held(slot):
                return True
            return may_leave is not None and not may_leave(self._address(slot))

        for slot in self._eviction.victims(spared, tenant, writer):
            yield self._address(slot)

    def shortlist(self, shares: Shares, writer: ComponentId, keep: BlockAddress) -> Shortlist:
        """An empty list of blocks of which some may leave for a writer; as with `victims`."""
        kept = self._slots.get(keep.pack(), NONE)
        return Shortlist(
            self._eviction, shares, lambda slot: slot == kept or self._is_held(slot), writer
        )

    def slot_of(self, address: BlockAddress) -> int | None:
        """The number that a resident block has in a `Shortlist`, while it is resident."""
        return self._slots.get(address.pack())

    def address_at(self, slot: int) -> BlockAddress:
        """The address of the block in this slot."""
        return self._address(slot)

    def place_at(self, slot: int) -> Place:
        """Where the block in this slot is."""
        return Place(self._offset[slot], self._eviction.nbytes(slot))

    def rank_at(self, slot: int) -> tuple[bool, int, bool, int]:
        """Where it stands in the order of leaving; the least leaves first."""
        return self._eviction.rank(slot)

    def park_while(self, is_parked: Callable[[BlockAddress], bool]) -> None:
        """A block for which this is true is no victim; once it is not, `unpark` must be called."""
        self._eviction.park_while(lambda slot: is_parked(self._address(slot)))

    def unpark(self, address: BlockAddress) -> None:
        """What parked this address is over, whichever block is there now, if any."""
        slot = self._slots.get(address.pack())
        if slot is not None:
            self._eviction.unpark(slot)

    def pin(self, resident: WeakReference | Resident, deadline_ns: int) -> Pin | None:
        """Upgrade to a strong reference; None when that writing is gone."""
        slot = self._slots.get(resident.address.pack())
        if slot is None or self._eviction.stamp(slot) != resident.stamp:
            return None
        pin = Pin(resident.address, resident.stamp, deadline_ns)
        held = self._pins.get(slot)
        if held is None:
            self._pins[slot] = {pin}
        else:
            held.add(pin)
        return pin

    def place_of(self, pin: Pin) -> Place:
        """Where a block that is pinned is."""
        return self.place_at(self._eviction.slot_of(pin.stamp))

    def unpin(self, pin: Pin) -> None:
        """Release a strong reference; nothing happens when the block is gone or it ran out."""
        slot = self._eviction.slot_of(pin.stamp)
        held = self._pins.get(slot)
        if held is None:
            return
        held.discard(pin)
        if not held:
            del self._pins[slot]

    def is_pinned(self, address: BlockAddress) -> bool:
        """Whether somebody holds a pin on it that has not run out."""
        slot = self._slots.get(address.pack())
        return slot is not None and self._is_held(slot)

    @property
    def pinned(self) -> int:
        """How many blocks hold a pin that has not run out; costs their number, not all blocks'."""
        return sum(1 for slot in list(self._pins) if self._is_held(slot))

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the blocks that hold a pin that has not run out."""
        held = [slot for slot in list(self._pins) if self._is_held(slot)]
        return sum(self._eviction.nbytes(slot) for slot in held)

    def namespaces(self) -> Mapping[NamespaceId, int]:
        """Namespaces with resident blocks, and how many."""
        return {self._names[number]: count for number, count in self._in_namespace.items()}

    def footprints(self, step: int) -> Iterator[list[Footprint]]:
        """What each namespace has here now, a list for at most `step` of them.

        Between two lists the caller may let others run; a namespace that comes or goes meanwhile
        may be left out.
        """
        numbers = list(self._in_namespace)
        for first in range(0, len(numbers), step):
            yield [
                Footprint(self._names[number], blocks, self._bytes_in[number])
                for number in numbers[first : first + step]
                if (blocks := self._in_namespace.get(number, 0))
            ]

    def tenants(self) -> Mapping[NamespaceId, ComponentId]:
        """The tenant of each namespace that has resident blocks."""
        return {self._names[number]: tenant for number, tenant in self._tenant_of.items()}

    def of_namespaces(
        self, namespaces: Collection[NamespaceId], step: int
    ) -> Iterator[list[BlockAddress]]:
        """Every resident block of these namespaces, a list for each `step` slots looked at.

        It walks the whole index by slot number and copies nothing. Between two lists the caller
        may let others run; it finds what was here from the beginning and is still here then.
        What it costs follows the rows, not how many namespaces there ever were.
        """
        wanted = tuple(namespaces)
        here: set[NamespaceId] = set()
        for first in range(0, len(wanted), step):
            here.update(name for name in wanted[first : first + step] if name in self._numbers)
            if first + step < len(wanted):
                yield []
        left = list(here)
        first = 0
        while first < len(self._namespace):
            while left and left[-1] not in self._numbers:
                left.pop()
            if not left:
                return
            last = min(first + step, len(self._namespace))
            rows = self._namespace[first:last]
            # By name: a number may have been given to another namespace meanwhile.
            numbers = {number for number in set(rows) if self._names[number] in here}
            yield [
                self._address(slot)
                for slot, number in enumerate(rows, first)
                if number in numbers and self._eviction.is_here(slot)
            ]
            first = last

    def rows(self) -> Iterator[Row]:
        """Every row, by slot number; what comes or goes meanwhile may be left out."""
        for slot in range(len(self._namespace)):
            if self._eviction.is_here(slot):
                yield self._row(self._address(slot), slot)

    def _row(self, address: BlockAddress, slot: int) -> Row:
        return Row(
            self._resident(address, slot), Place(self._offset[slot], self._eviction.nbytes(slot))
        )

    def _resident(self, address: BlockAddress, slot: int) -> Resident:
        return Resident(
            address,
            self._eviction.tenant(slot),
            self._names[self._namespace[slot]],
            self._eviction.nbytes(slot),
            self._eviction.stamp(slot),
        )

    def _address(self, slot: int) -> BlockAddress:
        first = slot * _PACKED_BYTES
        return BlockAddress.unpack(bytes(self._packed[first : first + _PACKED_BYTES]))

    def _is_held(self, slot: int) -> bool:
        held = self._pins.get(slot)
        if not held:
            return False
        now = self._clock()
        held -= {pin for pin in held if pin.deadline_ns <= now}
        if not held:
            del self._pins[slot]
        return bool(held)

    def _number(self, name: NamespaceId) -> int:
        number = self._numbers.get(name)
        if number is None:
            if not self._free_numbers:
                self._free_numbers.append(len(self._names))
                self._names.append(name)
            number = self._numbers[name] = self._free_numbers.pop()
            self._names[number] = name
        return number
