"""How far a block is opened: from the threads that open it to the event loop, in order.

Rules:
- Threads end segments in any order; what is told is how many of the first ones are good, rising.
- A thread wakes the loop only when that number has risen by `step`, and never while an earlier
  wake-up is still on its way: many segments cost one.
- After `close` nothing is told any more: an opening that failed takes back what it said.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable


class Progress:
    """Made on the event loop's thread; `mark` is called by any thread, `told` on the loop's.

    That all segments are good is not told: the opening returns then.
    """

    __slots__ = ("_closed", "_count", "_done", "_known", "_loop", "_on_its_way", "_step", "_told")

    def __init__(self, count: int, step: int, told: Callable[[int], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._count = count
        self._step = max(step, 1)
        self._told = told
        self._done = bytearray(count)
        self._known = 0
        self._on_its_way = False
        self._closed = False

    def mark(self, index: int) -> None:
        """Segment `index` is good."""
        self._done[index] = 1
        # Looked at after the mark, as `_tell` clears it before it counts: no mark is overlooked.
        if self._on_its_way or self._first_missing() < self._known + self._step:
            return
        self._on_its_way = True
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody listens
            self._loop.call_soon_threadsafe(self._tell)

    def close(self) -> None:
        """Tell nothing from now on."""
        self._closed = True

    def _tell(self) -> None:
        self._on_its_way = False
        good = self._first_missing()
        if not self._closed and self._known < good < self._count:
            self._known = good
            self._told(good)

    def _first_missing(self) -> int:
        at = self._done.find(0, self._known)
        return self._count if at < 0 else at
