"""Blocks that are in host memory and not yet on NVMe, oldest first."""

from __future__ import annotations

import asyncio
import contextlib

from storage.block import BlockAddress


class DirtyBlocks:
    """A queue with one consumer. A block is dirty until the consumer says `done`.

    The consumer is let go `delay_s` after the queue stopped being empty, so that blocks which
    are gone by then cost no write; at once when somebody waits for it, or at the end.
    """

    def __init__(self, delay_s: float = 0.0) -> None:
        self._delay_s = delay_s
        self._hurry = asyncio.Event()
        self._waiting: dict[BlockAddress, None] = {}
        self._writing: BlockAddress | None = None
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting) + (self._writing is not None)

    def __contains__(self, address: BlockAddress) -> bool:
        return address in self._waiting or address == self._writing

    def add(self, address: BlockAddress) -> None:
        """A block to be written."""
        self._waiting[address] = None
        self._idle.clear()
        self._wake.set()

    async def next(self) -> BlockAddress | None:
        """The oldest dirty block; None once closed and everything is written."""
        while not self._waiting:
            if self._closed:
                return None
            self._wake.clear()
            await self._wake.wait()
            if self._delay_s and self._waiting:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._delay_s):
                        await self._hurry.wait()
        self._writing = next(iter(self._waiting))
        del self._waiting[self._writing]
        return self._writing

    def done(self, address: BlockAddress) -> None:
        """The consumer has written the block, or has given up on it."""
        if self._writing == address:
            self._writing = None
        if not self._waiting and self._writing is None:
            self._idle.set()
            if not self._closed:
                self._hurry.clear()

    async def drained(self) -> None:
        """Return when nothing is dirty; the consumer does not dawdle meanwhile."""
        if not self._idle.is_set():
            self._hurry.set()
        await self._idle.wait()

    def close(self) -> None:
        """No more will come: the consumer ends when it is through."""
        self._closed = True
        self._hurry.set()
        self._wake.set()
