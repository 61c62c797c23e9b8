"""Buffers for records that are read past the host tier: few, aligned, and used again.

What they hold is ciphertext. A buffer's pages stay mapped between uses, so that a read pays for
no page fault. Who finds all of them in use waits, fairly by tenant: a load past the host tier
stands behind no other tenant's many.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from storage.fair import Fair, Weight, equal_weights
from storage.memory import aligned
from strongroom.identity import ComponentId

_WAITING_MAX: Final = 1024
"""Beyond it the tenant with most waiting for its weight is `Overloaded`."""


class ReadBuffers:
    """At most `count` buffers, each as large as the largest record that it was used for."""

    def __init__(self, count: int = 4, weight: Weight = equal_weights) -> None:
        self._turns = Fair("read-buffers", count, waiting_max=_WAITING_MAX, weight=weight)
        self._free: list[memoryview] = []

    @asynccontextmanager
    async def borrow(self, tenant: ComponentId, nbytes: int) -> AsyncIterator[memoryview]:
        """`nbytes` of page-aligned memory while the context lasts. Raises `Overloaded`."""
        async with self._turns.turn(tenant, nbytes):
            buffer = self._free.pop() if self._free else aligned(0)
            if len(buffer) < nbytes:
                buffer = aligned(nbytes)
            try:
                with buffer[:nbytes] as view:
                    yield view
            finally:
                self._free.append(buffer)
