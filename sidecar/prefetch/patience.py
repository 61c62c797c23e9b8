"""How long a load waits for a prefetch of its blocks that is under way.

A load never waits for what is only planned: it would read that as fast itself. Waiting changes
nothing of what is checked afterwards, and ends at once when the load is stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from sidecar.clocks import NS
from sidecar.prefetch.ledger import Ledger
from storage.block import BlockAddress
from strongroom.clock import Clock

Wait = Callable[[asyncio.Event, int], Awaitable[None]]
"""Returns when the event is set, or at a time of the boot clock, whichever comes first."""


class PrefetchPolicy(StrEnum):
    """What a load does about a prefetch of its blocks that is under way."""

    BEST_EFFORT = "best_effort"
    """It ends the prefetch, waits for nothing and reads for itself."""
    WAIT_COMPLETE = "wait_complete"
    """It waits for each block up to the load's own deadline."""
    TIMEOUT = "timeout"
    """It waits a base and a time for each thousand tokens in all; then it reads for itself."""


@dataclass(frozen=True, slots=True)
class PatienceSettings:
    """The two times count with `TIMEOUT` alone."""

    policy: PrefetchPolicy = PrefetchPolicy.BEST_EFFORT
    base_ns: int = 50_000_000
    per_1k_tokens_ns: int = 20_000_000

    def until_ns(self, now_ns: int, tokens: int, deadline_ns: int) -> int | None:
        """Until when a load of `tokens` waits; None is not at all."""
        match self.policy:
            case PrefetchPolicy.BEST_EFFORT:
                return None
            case PrefetchPolicy.WAIT_COMPLETE:
                return deadline_ns
            case PrefetchPolicy.TIMEOUT:
                patience_ns = self.base_ns + self.per_1k_tokens_ns * tokens // 1000
                return min(deadline_ns, now_ns + patience_ns)


class Patience:
    """One load's. Used on the event loop's thread."""

    def __init__(self, ledger: Ledger, wait: Wait, until_ns: int | None) -> None:
        self._ledger = ledger
        self._wait = wait
        self._until_ns = until_ns
        self._waiting: asyncio.Event | None = None

    async def until_here(self, address: BlockAddress) -> None:
        """Return when the block has landed, will not come, or the patience is over."""
        block = self._ledger.wanted(address)
        if block is None or self._until_ns is None:
            return
        self._waiting = block.watch()
        try:
            await self._wait(self._waiting, self._until_ns)
        finally:
            self._waiting = None

    def give_up(self) -> None:
        """The load is stopped: wait for nothing any more."""
        self._until_ns = None
        if self._waiting is not None:
            self._waiting.set()


async def wait_until(clock: Clock, event: asyncio.Event, until_ns: int) -> None:
    """`Wait` on the real clock."""
    while not event.is_set():
        left_ns = until_ns - clock()
        if left_ns <= 0:
            return
        try:
            async with asyncio.timeout(left_ns / NS + 0.001):
                await event.wait()
        except TimeoutError:
            continue
