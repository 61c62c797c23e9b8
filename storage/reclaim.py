"""Freeing the bytes of retired namespaces: housekeeping after their keys are gone.

One walk over the tiers at a time, in steps, in the background or on call; what is retired
during a walk starts another one. In the background it begins a moment after the news: whoever
retired has something to tell first, which must not wait behind the walk.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from storage.residency import Residency


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """What a reclaim freed, all tiers together."""

    blocks: int
    bytes: int


class Reclaim:
    """The reclaiming of one store; `run` is its background task."""

    def __init__(self, residency: Residency, delay_s: float = 0.05) -> None:
        self._residency = residency
        self._delay_s = delay_s
        self._ending = asyncio.Event()
        self._news = asyncio.Event()
        self._walking = asyncio.Lock()
        """Held by the one walk over the indexes at a time."""
        self._freed = Reclaimed(0, 0)

    def wake(self) -> None:
        """Something was retired."""
        self._news.set()

    def close(self) -> None:
        """Let `run` end; what is not freed yet is found retired at the next start."""
        self._ending.set()
        self._news.set()

    async def run(self) -> None:
        """Walk after every piece of news, until closed."""
        while True:
            await self._news.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._delay_s):
                    await self._ending.wait()
                    return
            await self._walk()

    async def reclaim(self) -> Reclaimed:
        """Walk now; what was freed since the last answer, here and in the background."""
        await self._walk()
        answer, self._freed = self._freed, Reclaimed(0, 0)
        return answer

    async def _walk(self) -> None:
        residency = self._residency
        async with self._walking:
            self._news.clear()
            nvme = residency.nvme
            for tier in (residency.host, nvme) if nvme is not None else (residency.host,):
                blocks, freed = await tier.drop_namespaces(residency.retired)
                self._freed = Reclaimed(self._freed.blocks + blocks, self._freed.bytes + freed)
            if nvme is not None:
                await nvme.bury_dead()
