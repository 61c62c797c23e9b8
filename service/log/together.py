"""One read for all who want it now.

Whoever asks gets what a read brought that began after it asked: a hundred streams that one entry
wakes cost one read of it, and none of them is told anything older than its wake.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Together(Generic[Value]):
    """Used from the event loop only. What `read` raises, the one that asked for it gets; the next
    that waits reads for itself.
    """

    def __init__(self, read: Callable[[], Awaitable[Value]]) -> None:
        self._read = read
        self._reading = asyncio.Lock()
        self._begun = 0
        self._brought: tuple[int, Value] | None = None
        """The number of a read that was completed, and what it brought."""

    async def get(self) -> Value:
        """What a read brings that begins from now on."""
        asked = self._begun
        async with self._reading:
            if self._brought is not None and self._brought[0] > asked:
                return self._brought[1]
            self._begun += 1
            number = self._begun
            value = await self._read()
            self._brought = (number, value)
            return value
