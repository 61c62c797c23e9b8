"""Room for a record among blocks that lie side by side: which of them leave.

A window is a run of blocks and free room, from one block to the right, that is long enough. One
is looked for from each block that would leave next; the one whose most valuable block is worth
least is taken. Rules:
- Only what is in the window leaves: about as many bytes as come in, never a whole tier for the
  sake of one record of another size.
- Each block in it may leave for this writer, in the order and by the shares of
  `storage.eviction`: a parent with its children, nobody's guaranteed bytes, nothing that is held.
- Nothing leaves when no window is found. What is looked at is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from storage.block import BlockAddress
from storage.extents import Extents, rounded
from storage.index import Index
from storage.lifecycle import Place
from storage.shares import Shares
from strongroom.identity import ComponentId

_LOOKS_MAX: Final = 1024
"""Blocks that are looked at from the next victims on, and as many from the room's beginning."""
_CHOICES_MAX: Final = 8
"""Windows of several blocks to choose from."""

_Cost = tuple[tuple[bool, int, bool, int], int]


class Windows:
    """Over the blocks of one index in `room`; `is_stuck` says whose room would not come free."""

    def __init__(
        self,
        room: Extents,
        index: Index,
        shares: Shares,
        is_stuck: Callable[[BlockAddress, Place], bool],
    ) -> None:
        self._room = room
        self._index = index
        self._shares = shares
        self._is_stuck = is_stuck
        self._slots: dict[int, int] = {}
        """Resident blocks: the index's slot, by offset."""

    def add(self, address: BlockAddress, place: Place) -> None:
        """A block became resident."""
        slot = self._index.slot_of(address)
        assert slot is not None
        self._slots[place.offset] = slot

    def remove(self, place: Place) -> None:
        """A block is resident no more, whether its room is free already or not."""
        del self._slots[place.offset]

    def find(self, writer: ComponentId, nbytes: int, keep: BlockAddress) -> Sequence[BlockAddress]:
        """The blocks to evict for `nbytes` of room, children first; none where there is no window.

        `keep` is the parent of what room is made for.
        """
        need, looks, found = rounded(nbytes), 0, 0
        best: tuple[_Cost, list[int]] | None = None
        victims = self._index.victims(writer=writer, keep=keep)
        for address in victims:
            slot = self._index.slot_of(address)
            assert slot is not None
            run, looked, _ = self._run(self._index.place_at(slot).offset, need)
            looks += looked
            if run and (best is None or self._cost(run) < best[0]):
                looks += len(run)
                order = self._order(run, writer, keep)
                if order:
                    best = self._cost(run), order
            found += bool(run)
            if best is not None and (len(run) == 1 or found >= _CHOICES_MAX):
                break
            if looks > _LOOKS_MAX:
                break
        victims.close()
        if best is None and not looks:
            return []  # nothing may leave at all
        chosen = best[1] if best is not None else self._sweep(writer, need, keep)
        return [self._index.address_at(slot) for slot in chosen]

    def _sweep(self, writer: ComponentId, need: int, keep: BlockAddress) -> list[int]:
        """The first window from the left, of those side by side: no early victim need be in it."""
        at, looks = 0, 0
        while at + need <= self._room.capacity and looks < _LOOKS_MAX:
            run, looked, end = self._run(at, need)
            looks += looked + len(run)
            order = self._order(run, writer, keep)
            if order:
                return order
            at = end if run else end + (self._room.taken_at(end) or need)
        return []

    def _run(self, offset: int, need: int) -> tuple[list[int], int, int]:
        """Slots of the blocks from `offset` on whose room is long enough, with what is free there.

        None of them where something in the way does not come free. Also how many steps that took,
        and where it ends, or is blocked.
        """
        room, slots = self._room, []
        have, at, looked = room.free_before(offset), offset, 0
        while have < need:
            looked += 1
            size = room.free_at(at)
            if not size:
                slot = self._slots.get(at)
                if slot is None or self._is_stuck(
                    self._index.address_at(slot), place := self._index.place_at(slot)
                ):
                    return [], looked, at
                size = rounded(place.nbytes)
                slots.append(slot)
            have += size
            at += size
        return slots, looked, at

    def _order(self, run: Sequence[int], writer: ComponentId, keep: BlockAddress) -> list[int]:
        """The run in the order in which it may leave for this writer; empty when it may not."""
        listed = self._index.shortlist(self._shares, writer, keep)
        for slot in run:
            listed.add(slot)
        order = list(listed)
        return order if len(order) == len(run) else []

    def _cost(self, slots: Sequence[int]) -> _Cost:
        dearest = max(self._index.rank_at(slot) for slot in slots)
        return dearest, sum(self._index.place_at(slot).nbytes for slot in slots)
