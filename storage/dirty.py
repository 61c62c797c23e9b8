"""Blocks that are in host memory and not yet on NVMe, oldest first."""

from __future__ import annotations

import asyncio

from storage.block import BlockAddress


class DirtyBlocks:
    """A queue with one consumer. A block is dirty until the consumer says `done`."""

    def __init__(self) -> None:
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
        self._writing = next(iter(self._waiting))
        del self._waiting[self._writing]
        return self._writing

    def done(self, address: BlockAddress) -> None:
        """The consumer has written the block, or has given up on it."""
        if self._writing == address:
            self._writing = None
        if not self._waiting and self._writing is None:
            self._idle.set()

    async def drained(self) -> None:
        """Return when nothing is dirty."""
        await self._idle.wait()

    def close(self) -> None:
        """No more will come: the consumer ends when it is through."""
        self._closed = True
        self._wake.set()
