"""Room in a fixed span of bytes, handed out in 4 KiB extents.

Best fit among the free extents, the lowest among equals, neighbours merged on release: records
of one model come in few sizes, so holes fit again. A call costs O(log n): free extents are found
by either end, and by length through a heap a length and one sorted list of the lengths there are.
Extents of k different lengths need k * k / 2 pages of room, so that list stays short.
"""

from __future__ import annotations

import bisect
import heapq
from dataclasses import dataclass, field
from typing import Final

GRAIN: Final = 4096
_STALE_MAX: Final = 16


@dataclass(slots=True)
class _Starts:
    """Free extents of one length: a heap that may hold stale entries, and the true number."""

    heap: list[int] = field(default_factory=list)
    count: int = 0


class Extents:
    """Allocator of `[offset, offset + length)` inside `capacity` bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity - capacity % GRAIN
        self.used_bytes = 0
        self._length_of: dict[int, int] = {}
        """Free extents: length by start."""
        self._start_of: dict[int, int] = {}
        """Free extents: start by end."""
        self._lengths: list[int] = []
        self._starts: dict[int, _Starts] = {}
        self._out: dict[int, int] = {}
        if self.capacity:
            self._add(0, self.capacity)

    def take(self, length: int) -> int | None:
        """An offset for `length` bytes (rounded up to 4 KiB), or None when nothing fits."""
        need = rounded(length)
        at = bisect.bisect_left(self._lengths, need)
        if at == len(self._lengths):
            return None
        size = self._lengths[at]
        start = self._lowest(size)
        self._remove(start, size)
        if size > need:
            self._add(start + need, size - need)
        self._out[start] = need
        self.used_bytes += need
        return start

    def give_back(self, offset: int, length: int) -> None:
        """Return an extent; the caller gives back exactly what it took."""
        size = rounded(length)
        if self._out.get(offset) != size:
            raise ValueError("this extent is free already")
        del self._out[offset]
        self.used_bytes -= size
        before = self._start_of.get(offset)
        if before is not None:
            self._remove(before, offset - before)
            size += offset - before
            offset = before
        after = self._length_of.get(offset + size)
        if after is not None:
            self._remove(offset + size, after)
            size += after
        self._add(offset, size)

    def free_before(self, offset: int) -> int:
        """How many bytes are free right before an offset."""
        return offset - self._start_of.get(offset, offset)

    def free_at(self, offset: int) -> int:
        """How many bytes are free from an offset on, where a free extent begins there."""
        return self._length_of.get(offset, 0)

    def taken_at(self, offset: int) -> int:
        """The length of what was taken at an offset; 0 where nothing was."""
        return self._out.get(offset, 0)

    def _add(self, start: int, size: int) -> None:
        self._length_of[start] = size
        self._start_of[start + size] = start
        starts = self._starts.get(size)
        if starts is None:
            starts = self._starts[size] = _Starts()
            bisect.insort(self._lengths, size)
        heapq.heappush(starts.heap, start)
        starts.count += 1
        if len(starts.heap) > 2 * starts.count + _STALE_MAX:
            starts.heap = sorted(s for s in set(starts.heap) if self._length_of.get(s) == size)

    def _remove(self, start: int, size: int) -> None:
        """Its entry in the heap goes stale, and is skipped when it comes up."""
        del self._length_of[start]
        del self._start_of[start + size]
        starts = self._starts[size]
        starts.count -= 1
        if not starts.count:
            del self._starts[size]
            del self._lengths[bisect.bisect_left(self._lengths, size)]

    def _lowest(self, size: int) -> int:
        heap = self._starts[size].heap
        while self._length_of.get(heap[0]) != size:
            heapq.heappop(heap)
        return heap[0]


def rounded(length: int) -> int:
    """`length` rounded up to the grain."""
    return -(-length // GRAIN) * GRAIN
