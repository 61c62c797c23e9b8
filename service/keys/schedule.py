"""The rounds that keep erasures final in time, and the key-use log within its bound.

A KEK version is due at half of what is promised, so that a round that fails leaves time for
others. What is past its deadline all the same is an error in the log and in the status. One round
at a time; a rotation that was asked for wakes it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

from sqlalchemy.exc import DBAPIError

from service.changes import Changes
from service.db.base import now
from service.db.session import Database
from service.keys import uses
from service.keys.finality import due
from service.keys.provider import KeyProvider
from service.keys.rotation import rotate_due
from strongroom.errors import StrongroomError

_log = logging.getLogger("strongroom.service")


class KeySchedule:
    """Rotates what is due, again and again. `run` needs a parent task."""

    def __init__(
        self,
        database: Database,
        changes: Changes,
        provider: KeyProvider,
        *,
        erasure_final_s: float,
        check_s: float,
        uses_kept_s: float,
        clock: Callable[[], datetime] = now,
    ) -> None:
        self._database = database
        self._changes = changes
        self._provider = provider
        self._promised = timedelta(seconds=erasure_final_s)
        self._check_s = check_s
        self._uses_kept = timedelta(seconds=uses_kept_s)
        self._clock = clock
        self._asked = asyncio.Event()
        self._round = asyncio.Lock()

    def ask(self) -> None:
        """A rotation was begun: do not wait for the next round."""
        self._asked.set()

    async def run(self) -> None:
        """A round each `check_s` seconds, or when asked, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._check_s):
                    await self._asked.wait()
            except TimeoutError:
                pass
            self._asked.clear()
            try:
                await self.round()
            except StrongroomError as error:
                # It stays due, and the next round tries again.
                _log.warning("rotation failed: %s", error.code)
            except (DBAPIError, OSError):
                _log.warning("rotation failed: the database does not answer")

    async def round(self) -> Sequence[str]:
        """What is due now; returns the KEKs that were rotated.

        A write-ahead log that could not be cut when a secret was destroyed is cut here.
        """
        async with self._round:
            await self._changes.cut_wal()
            try:
                return await rotate_due(
                    self._database,
                    self._changes,
                    self._provider,
                    self._promised / 2,
                    clock=self._clock,
                )
            finally:
                await self._say_overdue()
                await self._purge_uses()

    async def overdue(self) -> Sequence[str]:
        """KEKs that should have been rotated by now: erasures under them are late."""
        async with self._database.readers() as session:
            return await due(session, self._clock() - self._promised, begun=False)

    async def _say_overdue(self) -> None:
        for kek in await self.overdue():
            _log.error("erasures under key-encryption key %s are not final in time", kek)

    async def _purge_uses(self) -> None:
        before = self._clock() - self._uses_kept
        while True:
            async with self._database.writers.begin() as session:
                if not await uses.purge(session, before):
                    return
