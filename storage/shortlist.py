"""Of some blocks of one tier, which leave first: for room in one place and not just anywhere.

Blocks are added by their slot and come out in the order of `storage.eviction`, as if each had
left when it came out: a parent whose children have all come out is next in its turn. Nothing
leaves by that, and nothing is touched, so that the caller may find out first whether enough of
them would. Others may run between any two calls: what they drop does not come out.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from storage.eviction import NONE, Eviction
from storage.shares import Shares
from strongroom.identity import ComponentId

_Rank = tuple[bool, int, bool, int]


class Shortlist:
    """`spared(slot)` says what never leaves; `writer` is the tenant that room is made for."""

    def __init__(
        self,
        eviction: Eviction,
        shares: Shares,
        spared: Callable[[int], bool],
        writer: ComponentId,
    ) -> None:
        self._eviction = eviction
        self._shares = shares
        self._spared = spared
        self._writer = writer
        self._leaves: dict[ComponentId, list[tuple[_Rank, int]]] = {}
        """Heaps of what may leave, by tenant: rank and stamp."""
        self._children: dict[int, int] = {}
        """How many of a parent's children have not come out, by the parent's stamp."""

    def add(self, slot: int) -> None:
        """Take in a resident block."""
        children = self._eviction.children(slot)
        if children:
            self._children[self._eviction.stamp(slot)] = children
        else:
            self._line_up(slot)

    def __iter__(self) -> Iterator[int]:
        """Slots in the order in which their blocks would leave."""
        names = list(self._leaves)
        heaps = [self._leaves[name] for name in names]
        turns = self._eviction.by_excess(
            self._shares, names, lambda number: self._first(heaps[number]), self._writer
        )
        for slot in turns:
            heapq.heappop(self._leaves[self._eviction.tenant(slot)])
            parent = self._eviction.parent(slot)
            if parent != NONE:
                self._one_less(parent)
            yield slot

    def _first(self, heap: list[tuple[_Rank, int]]) -> int:
        while heap:
            stamp = heap[0][1]
            slot = self._eviction.slot_of(stamp)
            if self._eviction.is_stamped(slot, stamp) and not self._spared(slot):
                return slot
            heapq.heappop(heap)
        return NONE

    def _one_less(self, parent: int) -> None:
        stamp = self._eviction.stamp(parent)
        left = self._children.get(stamp, 0) - 1
        if left > 0:
            self._children[stamp] = left
        elif self._children.pop(stamp, None) is not None:
            self._line_up(parent)

    def _line_up(self, slot: int) -> None:
        heap = self._leaves.setdefault(self._eviction.tenant(slot), [])
        heapq.heappush(heap, (self._eviction.rank(slot), self._eviction.stamp(slot)))
