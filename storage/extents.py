"""Room in a fixed span of bytes, handed out in 4 KiB extents.

Best fit over a sorted list of free extents, neighbours merged on release: records of one model
come in few sizes, so holes fit again. Nothing is allocated a byte of memory at a time.
"""

from __future__ import annotations

import bisect
from typing import Final

GRAIN: Final = 4096


class Extents:
    """Allocator of `[offset, offset + length)` inside `capacity` bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity - capacity % GRAIN
        self.used_bytes = 0
        self._starts: list[int] = [0]
        self._lengths: dict[int, int] = {0: self.capacity}

    def take(self, length: int) -> int | None:
        """An offset for `length` bytes (rounded up to 4 KiB), or None when nothing fits."""
        need = rounded(length)
        best: int | None = None
        for start in self._starts:
            size = self._lengths[start]
            if size >= need and (best is None or size < self._lengths[best]):
                best = start
                if size == need:
                    break
        if best is None:
            return None
        size = self._lengths.pop(best)
        at = bisect.bisect_left(self._starts, best)
        if size == need:
            del self._starts[at]
        else:
            self._starts[at] = best + need
            self._lengths[best + need] = size - need
        self.used_bytes += need
        return best

    def give_back(self, offset: int, length: int) -> None:
        """Return an extent; the caller gives back exactly what it took."""
        size = rounded(length)
        self.used_bytes -= size
        at = bisect.bisect_left(self._starts, offset)
        if at > 0:
            before = self._starts[at - 1]
            if before + self._lengths[before] > offset:
                raise ValueError("this extent is free already")
            if before + self._lengths[before] == offset:
                size += self._lengths.pop(before)
                offset = before
                at -= 1
                del self._starts[at]
        if at < len(self._starts):
            after = self._starts[at]
            if offset + size > after:
                raise ValueError("this extent is free already")
            if offset + size == after:
                size += self._lengths.pop(after)
                del self._starts[at]
        self._starts.insert(at, offset)
        self._lengths[offset] = size


def rounded(length: int) -> int:
    """`length` rounded up to the grain."""
    return -(-length // GRAIN) * GRAIN
