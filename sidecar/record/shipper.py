"""Brings the spool to the service: in order, resumed by count, segments removed once taken."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from sidecar.control.client import ControlClient
from sidecar.record.spool import Spool
from strongroom.control import IntakeRequest
from strongroom.errors import StrongroomError

_log = logging.getLogger(__name__)

_EVENTS_MAX: Final = 500
_RETRY_LAST_S: Final = 30.0


class Shipper:
    """`run` until cancelled. The service says what it has: counts it knows are not sent again."""

    def __init__(self, spool: Spool, client: ControlClient, interval_s: float) -> None:
        self._spool = spool
        self._client = client
        self._interval_s = interval_s
        self.shipped = 0
        self.failures = 0

    async def run(self) -> None:
        pause_s = self._interval_s
        while True:
            await self._spool.news.wait()
            self._spool.news.clear()
            try:
                while await self.ship():
                    pause_s = self._interval_s
            except (StrongroomError, OSError) as error:
                self.failures += 1
                self._spool.news.set()
                # Without the text of an `OSError`: it may name files.
                reason = error.message if isinstance(error, StrongroomError) else error.strerror
                _log.warning("audit events wait on this node: %s", reason)
                pause_s = min(2 * pause_s, _RETRY_LAST_S)
            await asyncio.sleep(pause_s)

    async def ship(self) -> int:
        """Send one run; returns how many events were taken, 0 when there is nothing to send."""
        start = max(self._spool.taken, self._spool.first_count)
        events = await self._spool.read(start, _EVENTS_MAX)
        if not events:
            return 0
        request = IntakeRequest(spool=self._spool.spool, events=events)
        next_count = await self._client.intake(request)
        await self._spool.release(next_count)
        taken = max(0, self._spool.taken - start)
        self.shipped += taken
        return taken
