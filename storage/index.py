"""What is resident in one tier, in columns: arrays and one id-to-slot map in order of use.

A Python object a block would cost hundreds of bytes and garbage-collector pauses, so a row is
a slot number in parallel arrays. Row objects exist only while someone looks at one.

A chain's parent outlives its children: a child without its parent can never match, so victims
are leaves.
"""

from __future__ import annotations

import array
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from storage.block import BlockAddress
from storage.lifecycle import Pin, Place, Resident, WeakReference
from strongroom.blocks import BlockId
from strongroom.clock import Clock
from strongroom.errors import Missing
from strongroom.identity import ComponentId, NamespaceId

_NO_PARENT = -1


@dataclass(frozen=True, slots=True)
class Row:
    """One resident block as its tier keeps it."""

    resident: Resident
    place: Place


class Index:
    """Resident blocks of one tier, least recently used first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._free: list[int] = []
        self._tenant = array.array("I")
        self._namespace = array.array("I")
        self._offset = array.array("Q")
        self._nbytes = array.array("Q")
        self._stamp = array.array("Q")
        self._parent = array.array("q")
        self._children = array.array("I")
        self._names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._in_namespace: dict[int, int] = {}
        self._pins: dict[bytes, dict[Pin, int]] = {}
        self._next_stamp = 1

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
    ) -> Resident:
        """Make a block visible as the most recently used; its address must be free."""
        packed = address.pack()
        if packed in self._slots:
            raise ValueError("this address is resident already")
        slot = self._free.pop() if self._free else self._grow()
        parent_slot = self._slots.get(BlockAddress(parent, address.rank).pack(), _NO_PARENT)
        if parent_slot != _NO_PARENT:
            self._children[parent_slot] += 1
        number = self._number(namespace)
        self._tenant[slot] = self._number(tenant)
        self._namespace[slot] = number
        self._offset[slot] = place.offset
        self._nbytes[slot] = place.nbytes
        self._stamp[slot] = self._next_stamp
        self._parent[slot] = parent_slot
        self._children[slot] = 0
        self._next_stamp += 1
        self._slots[packed] = slot
        self._in_namespace[number] = self._in_namespace.get(number, 0) + 1
        return self._resident(address, slot)

    def get(self, address: BlockAddress) -> Row | None:
        """The row of a resident block; touches nothing."""
        slot = self._slots.get(address.pack())
        if slot is None:
            return None
        return Row(self._resident(address, slot), Place(self._offset[slot], self._nbytes[slot]))

    def touch(self, address: BlockAddress) -> None:
        """Make a block the most recently used, if it is here."""
        packed = address.pack()
        if packed in self._slots:
            self._slots.move_to_end(packed)

    def remove(self, address: BlockAddress) -> Row:
        """Make a block invisible; its place is the caller's to give back."""
        row = self.get(address)
        if row is None:
            raise Missing("not resident")
        packed = address.pack()
        slot = self._slots.pop(packed)
        parent = self._parent[slot]
        if parent != _NO_PARENT and self._children[parent]:
            self._children[parent] -= 1
        if self._children[slot]:
            self._orphan(slot)
        number = self._namespace[slot]
        self._in_namespace[number] -= 1
        if not self._in_namespace[number]:
            del self._in_namespace[number]
        self._pins.pop(packed, None)
        self._free.append(slot)
        return row

    def victims(self) -> Iterator[BlockAddress]:
        """Blocks that may be evicted, least recently used first, leaves only, none pinned."""
        for packed, slot in self._slots.items():
            if not self._children[slot] and not self._pinned(packed):
                yield BlockAddress.unpack(packed)

    def pin(self, resident: WeakReference | Resident, deadline_ns: int) -> Pin | None:
        """Upgrade to a strong reference; None when that writing is gone."""
        packed = resident.address.pack()
        slot = self._slots.get(packed)
        if slot is None or self._stamp[slot] != resident.stamp:
            return None
        pin = Pin(resident.address, resident.stamp, deadline_ns)
        held = self._pins.setdefault(packed, {})
        held[pin] = held.get(pin, 0) + 1
        return pin

    def unpin(self, pin: Pin) -> None:
        """Release a strong reference; nothing happens when the block is gone or it ran out."""
        packed = pin.address.pack()
        held = self._pins.get(packed)
        if held is None or pin not in held:
            return
        held[pin] -= 1
        if not held[pin]:
            del held[pin]
        if not held:
            del self._pins[packed]

    def is_pinned(self, address: BlockAddress) -> bool:
        """Whether somebody holds a pin on it that has not run out."""
        return self._pinned(address.pack())

    @property
    def pinned(self) -> int:
        """How many blocks hold a pin that has not run out."""
        return sum(1 for packed in list(self._pins) if self._pinned(packed))

    def namespaces(self) -> Mapping[NamespaceId, int]:
        """Namespaces with resident blocks, and how many."""
        return {NamespaceId(self._names[n]): count for n, count in self._in_namespace.items()}

    def of_namespaces(self, namespaces: Collection[NamespaceId]) -> Iterator[BlockAddress]:
        """Every resident block of these namespaces. Walks the whole index."""
        numbers = {self._numbers[name] for name in namespaces if name in self._numbers}
        if numbers:
            for packed, slot in list(self._slots.items()):
                if self._namespace[slot] in numbers:
                    yield BlockAddress.unpack(packed)

    def rows(self) -> Iterator[Row]:
        """Every row, least recently used first."""
        for packed in list(self._slots):
            row = self.get(BlockAddress.unpack(packed))
            if row is not None:
                yield row

    def _resident(self, address: BlockAddress, slot: int) -> Resident:
        return Resident(
            address,
            ComponentId(self._names[self._tenant[slot]]),
            NamespaceId(self._names[self._namespace[slot]]),
            self._nbytes[slot],
            self._stamp[slot],
        )

    def _pinned(self, packed: bytes) -> bool:
        held = self._pins.get(packed)
        if not held:
            return False
        now = self._clock()
        for pin in [pin for pin in held if pin.deadline_ns <= now]:
            del held[pin]
        if not held:
            del self._pins[packed]
        return bool(held)

    def _orphan(self, parent: int) -> None:
        for slot in self._slots.values():
            if self._parent[slot] == parent:
                self._parent[slot] = _NO_PARENT

    def _grow(self) -> int:
        for column in (self._tenant, self._namespace, self._offset, self._nbytes, self._stamp):
            column.append(0)
        self._parent.append(_NO_PARENT)
        self._children.append(0)
        return len(self._children) - 1

    def _number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = len(self._names)
            self._names.append(name)
            self._numbers[name] = number
        return number
