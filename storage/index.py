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
        self._parent_stamp = array.array("Q")
        self._children = array.array("I")
        self._names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._in_namespace: dict[int, int] = {}
        self._tenant_of: dict[int, int] = {}
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
        self._parent_stamp[slot] = 0 if parent_slot == _NO_PARENT else self._stamp[parent_slot]
        self._children[slot] = 0
        self._next_stamp += 1
        self._slots[packed] = slot
        self._in_namespace[number] = self._in_namespace.get(number, 0) + 1
        self._tenant_of[number] = self._tenant[slot]
        return self._resident(address, slot)

    def get(self, address: BlockAddress) -> Row | None:
        """The row of a resident block; touches nothing."""
        slot = self._slots.get(address.pack())
        if slot is None:
            return None
        return Row(self._resident(address, slot), Place(self._offset[slot], self._nbytes[slot]))

    def namespace_of(self, address: BlockAddress) -> NamespaceId | None:
        """The namespace of a resident block; touches nothing."""
        slot = self._slots.get(address.pack())
        return None if slot is None else NamespaceId(self._names[self._namespace[slot]])

    def relocate(self, address: BlockAddress, old: Place, new: Place) -> bool:
        """Say that a block's bytes have moved; false when it is gone or no longer at `old`."""
        slot = self._slots.get(address.pack())
        if slot is None or self._offset[slot] != old.offset:
            return False
        self._offset[slot] = new.offset
        return True

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
        # The stamp tells whether the parent's slot still holds that parent.
        if parent != _NO_PARENT and self._stamp[parent] == self._parent_stamp[slot]:
            self._children[parent] -= 1
        self._stamp[slot] = 0
        number = self._namespace[slot]
        self._in_namespace[number] -= 1
        if not self._in_namespace[number]:
            del self._in_namespace[number], self._tenant_of[number]
        self._pins.pop(packed, None)
        self._free.append(slot)
        return row

    def victims(
        self, tenant: ComponentId | None = None, *, keep: BlockAddress | None = None
    ) -> Iterator[BlockAddress]:
        """Blocks that may be evicted, least recently used first, leaves only, none pinned.

        `keep` is the parent of what room is made for: a leaf now, and needed in a moment.
        """
        kept = None if keep is None else keep.pack()
        number = None if tenant is None else self._numbers.get(tenant, -1)
        for packed, slot in self._slots.items():
            if number is not None and self._tenant[slot] != number:
                continue
            if not self._children[slot] and packed != kept and not self._pinned(packed):
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

    def tenants(self) -> Mapping[NamespaceId, ComponentId]:
        """The tenant of each namespace that has resident blocks."""
        return {
            NamespaceId(self._names[namespace]): ComponentId(self._names[tenant])
            for namespace, tenant in self._tenant_of.items()
        }

    def of_namespaces(
        self, namespaces: Collection[NamespaceId], step: int
    ) -> Iterator[list[BlockAddress]]:
        """Every resident block of these namespaces, a list for each `step` blocks looked at.

        It walks the whole index, over a snapshot: between two lists the caller may let others
        run, and finds some of what comes later gone.
        """
        numbers = {self._numbers[name] for name in namespaces if name in self._numbers}
        if not any(number in self._in_namespace for number in numbers):
            return
        snapshot = list(self._slots)
        for first in range(0, len(snapshot), step):
            slots = ((packed, self._slots.get(packed)) for packed in snapshot[first : first + step])
            yield [
                BlockAddress.unpack(packed)
                for packed, slot in slots
                if slot is not None and self._namespace[slot] in numbers
            ]

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

    def _grow(self) -> int:
        for column in (self._tenant, self._namespace, self._offset, self._nbytes, self._stamp):
            column.append(0)
        self._parent.append(_NO_PARENT)
        self._parent_stamp.append(0)
        self._children.append(0)
        return len(self._children) - 1

    def _number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = len(self._names)
            self._names.append(name)
            self._numbers[name] = number
        return number
