"""Buffers for records that are read past the host tier: few, aligned, and used again.

What they hold is ciphertext. A buffer's pages stay mapped between uses, so that a read pays for
no page fault; who finds all of them in use waits its turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from storage.memory import aligned


class ReadBuffers:
    """At most `count` buffers, each as large as the largest record that it was used for."""

    def __init__(self, count: int = 4) -> None:
        self._turns = asyncio.Semaphore(count)
        self._free: list[memoryview] = []

    @asynccontextmanager
    async def borrow(self, nbytes: int) -> AsyncIterator[memoryview]:
        """`nbytes` of page-aligned memory while the context lasts."""
        async with self._turns:
            buffer = self._free.pop() if self._free else aligned(0)
            if len(buffer) < nbytes:
                buffer = aligned(nbytes)
            try:
                with buffer[:nbytes] as view:
                    yield view
            finally:
                self._free.append(buffer)
