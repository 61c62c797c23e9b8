"""Slabs: the arena's room, in few sizes, so that a freed record's hole fits the next one.

A record's length is rounded up to a size class, at most an eighth above it, and slots of one
class share slabs. A slab whose slots are all free goes back to the common room, where another
class, or a record larger than half a slab, may take it. Without classes, evicting scattered
short blocks would hardly ever free a run long enough for a full one.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Final

from storage.extents import GRAIN, Extents, rounded

SLAB_BYTES: Final = 16 * 1024 * 1024
_SLABS_MIN: Final = 16


@dataclass(slots=True)
class _Slab:
    slot_bytes: int
    free: list[int] = field(default_factory=list)
    used: int = 0


class Slabs:
    """Allocator of `[offset, offset + length)` inside `capacity` bytes."""

    def __init__(self, capacity: int, slab_bytes: int = SLAB_BYTES) -> None:
        self._runs = Extents(capacity)
        self.capacity = self._runs.capacity
        # A small arena has small slabs, so that several classes have room at once.
        self.slab_bytes = max(GRAIN, min(slab_bytes, capacity // _SLABS_MIN // GRAIN * GRAIN))
        self.used_bytes = 0
        self._slabs: dict[int, _Slab] = {}
        self._open: dict[int, list[int]] = {}
        """Slabs with a free slot, by class: heaps. A slab that is gone or full is skipped."""
        self._home: dict[int, int] = {}

    def take(self, length: int) -> int | None:
        """An offset for `length` bytes, 4 KiB aligned, or None when nothing fits."""
        slot_bytes = size_class(length)
        if slot_bytes > self.slab_bytes // 2:
            offset = self._runs.take(length)
            self.used_bytes += rounded(length) if offset is not None else 0
            return offset
        start = self._open_slab(slot_bytes)
        if start is None:
            return None
        slab = self._slabs[start]
        offset = slab.free.pop()
        slab.used += 1
        self._home[offset] = start
        self.used_bytes += slot_bytes
        return offset

    def give_back(self, offset: int, length: int) -> None:
        """Return what `take(length)` gave; anything else is an error of ours."""
        slot_bytes = size_class(length)
        if slot_bytes > self.slab_bytes // 2:
            self._runs.give_back(offset, length)
            self.used_bytes -= rounded(length)
            return
        start = self._home.pop(offset, None)
        if start is None:
            raise ValueError("this slot is free already")
        slab = self._slabs[start]
        slab.free.append(offset)
        slab.used -= 1
        self.used_bytes -= slot_bytes
        if not slab.used:
            del self._slabs[start]
            self._runs.give_back(start, self.slab_bytes)
        elif len(slab.free) == 1:
            heapq.heappush(self._open[slot_bytes], start)

    def _open_slab(self, slot_bytes: int) -> int | None:
        """The lowest slab of this class with a free slot, so that high slabs run empty."""
        starts = self._open.setdefault(slot_bytes, [])
        while starts:
            slab = self._slabs.get(starts[0])
            if slab is not None and slab.slot_bytes == slot_bytes and slab.free:
                return starts[0]
            heapq.heappop(starts)
        start = self._runs.take(self.slab_bytes)
        if start is None:
            return None
        count = self.slab_bytes // slot_bytes
        slots = [start + number * slot_bytes for number in reversed(range(count))]
        self._slabs[start] = _Slab(slot_bytes, slots)
        heapq.heappush(starts, start)
        return start


def size_class(length: int) -> int:
    """`length` rounded up to an eighth of its power of two, and to 4 KiB."""
    step = max(GRAIN, 1 << max(0, (length - 1).bit_length() - 4))
    return -(-length // step) * step
