"""Records that did not open: on record and counted, whoever came across them.

A load, a prefetch or a move may be the first to read a damaged record; reading ahead finds most of
them. The block is quarantined by then. Rules:
- What counts for the breaker counts in the step in which the damage is found.
- The record is written by a task of its own, since whoever found it cannot wait. What it writes
  gives nothing to anybody: beyond so many that wait to be written, they are counted alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from sidecar.record.audit import Audit
from sidecar.record.reasons import Reason
from storage.lifecycle import Resident

_WAITING_MAX: Final = 1024


class Damage:
    """One a sidecar. `found` is called on the event loop, `run` is a task beside it.

    `tell` hears at once whose it was, and how many bytes.
    """

    def __init__(self, audit: Audit, tell: Callable[[str, int], None]) -> None:
        self._audit = audit
        self._tell = tell
        self._waiting: asyncio.Queue[Resident] = asyncio.Queue(_WAITING_MAX)
        self.unrecorded = 0

    def found(self, block: Resident) -> None:
        """`block` is what its index row says, and its record is not."""
        self._tell(block.tenant, block.nbytes)
        try:
            self._waiting.put_nowait(block)
        except asyncio.QueueFull:
            self.unrecorded += 1

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            block = await self._waiting.get()
            await self._audit.note(
                "corrupt",
                "failed",
                Reason.INTEGRITY,
                engine="",
                request="",
                grant=None,
                tenant=block.tenant,
                namespaces=[block.namespace],
                nbytes=block.nbytes,
            )
