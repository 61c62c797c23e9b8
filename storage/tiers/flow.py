"""Doing many small things at once, a bounded number of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

_T = TypeVar("_T")


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
