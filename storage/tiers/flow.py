"""Doing many small things: a bounded number of them at once, or one by one with pauses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

_T = TypeVar("_T")
_STEP_S = 0.0005
_PAUSE_S = 0.001
"""In which others get many turns."""


class Pace:
    """Keeps long work from holding the loop: half a millisecond of it, then a pause."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    async def keep(self) -> None:
        """Called between small steps."""
        if time.perf_counter() - self._since > _STEP_S:
            await asyncio.sleep(_PAUSE_S)
            self._since = time.perf_counter()


async def in_flight_at_most(
    depth: int, items: Iterable[_T], one: Callable[[_T], Awaitable[None]]
) -> None:
    """Await `one(item)` for every item, in order of their beginning, `depth` of them at once.

    Returns when all have ended. When cancelled, what has begun is waited for and nothing else
    begins.
    """
    waiting = list(items)
    if len(waiting) == 1 or depth == 1:
        for item in waiting:
            await one(item)
        return
    queue = iter(waiting)

    async def work() -> None:
        for item in queue:
            await one(item)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(depth, len(waiting))):
            group.create_task(work())
