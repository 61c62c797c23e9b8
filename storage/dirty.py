"""Blocks that are in host memory and on their way to NVMe: what eviction must step over."""

from __future__ import annotations

from collections.abc import Callable

from storage.block import BlockAddress


def _nobody(_: BlockAddress) -> None:
    pass


class DirtyBlocks:
    """How many offloads of each address are open. Of two there, one is an earlier writing's."""

    def __init__(self) -> None:
        self._open: dict[BlockAddress, int] = {}
        self._cleaned: Callable[[BlockAddress], None] = _nobody

    def tell_cleaned(self, cleaned: Callable[[BlockAddress], None]) -> None:
        """`cleaned` hears of each address as its last offload ends."""
        self._cleaned = cleaned

    def __len__(self) -> int:
        return sum(self._open.values())

    def __contains__(self, address: BlockAddress) -> bool:
        return address in self._open

    def add(self, address: BlockAddress) -> None:
        """An offload begins."""
        self._open[address] = self._open.get(address, 0) + 1

    def remove(self, address: BlockAddress) -> None:
        """An offload has ended."""
        left = self._open[address] - 1
        if left:
            self._open[address] = left
        else:
            del self._open[address]
            self._cleaned(address)
