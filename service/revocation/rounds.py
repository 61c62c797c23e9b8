"""The rounds that carry out what is due, whoever asked for it and whichever process is left.

A round, in each process of an installation:
1. carries out scheduled revocations whose time has come;
2. notes which revocations have come into force that nobody waits for;
3. ends the key-encryption keys of tenants that are gone, so that their erasure is final at once.
Each of these is done once, by whichever process comes first, and whatever a process that died
left is found by the next round of another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Final

from sqlalchemy import select
from sqlalchemy.exc import DBAPIError

from service.db.base import now
from service.keys.models import KekVersion
from service.keys.provider import KeyProvider
from service.keys.rotation import rotate
from service.revocation import schedule
from service.revocation.desk import RevocationDesk
from service.revocation.models import Revocation
from service.tenancy.models import Tenant
from strongroom.errors import StrongroomError

_OPEN_MAX: Final = 1000
_log: Final = logging.getLogger("strongroom.service")


class RevocationRounds:
    """Does what is due, again and again. `run` needs a parent task, and ends after `stop`."""

    def __init__(
        self,
        desk: RevocationDesk,
        provider: KeyProvider,
        *,
        check_s: float,
        clock: Callable[[], datetime] = now,
    ) -> None:
        self.desk = desk
        self._provider = provider
        self._check_s = check_s
        self._clock = clock
        self._asked = asyncio.Event()
        self._stopping = asyncio.Event()
        self._round = asyncio.Lock()

    def ask(self) -> None:
        """There is something new: do not wait for the next round."""
        self._asked.set()

    def stop(self) -> None:
        """End `run` after the step that it is in: what is under way is not torn."""
        self._stopping.set()
        self._asked.set()

    async def run(self) -> None:
        """A round each `check_s` seconds, when something's time comes, or when asked."""
        while not self._stopping.is_set():
            self._asked.clear()
            pause_s = self._check_s
            try:
                await self.round()
                if self._stopping.is_set():
                    return
                pause_s = await self._pause_s()
            except StrongroomError as error:
                # It stays due, and the next round tries again.
                _log.warning("a round of revocations failed: %s", error.code)
            except (DBAPIError, OSError):
                _log.warning("a round of revocations failed: the database does not answer")
            try:
                async with asyncio.timeout(pause_s):
                    await self._asked.wait()
            except TimeoutError:
                continue

    async def round(self) -> Sequence[str]:
        """What is due now; returns the scheduled revocations that this call carried out.

        One that fails holds up no other; the first error is raised when all were tried.
        """
        async with self._round:
            failed: StrongroomError | None = None
            done = []
            async with self.desk.database.readers() as session:
                due = await schedule.due(session, self._clock())
            for scheduled in due:
                if self._stopping.is_set():
                    break
                try:
                    if await self.desk.carry_out_scheduled(scheduled):
                        done.append(scheduled)
                except StrongroomError as error:
                    failed = failed or error
            await self._settle()
            try:
                await self._end_keks()
            except StrongroomError as error:
                failed = failed or error
            if failed is not None:
                raise failed
            return done

    async def _pause_s(self) -> float:
        async with self.desk.database.readers() as session:
            moment = await schedule.next_due(session)
        if moment is None:
            return self._check_s
        return min(self._check_s, max(0.0, (moment - self._clock()).total_seconds()))

    async def _settle(self) -> None:
        async with self.desk.database.readers() as session:
            rows = await session.scalars(
                select(Revocation.id)
                .where(Revocation.effective_at.is_(None))
                .order_by(Revocation.seq)
                .limit(_OPEN_MAX)
            )
            pending = rows.all()
        for revocation in pending:
            if self._stopping.is_set():
                return
            await self.desk.settle(revocation)

    async def _end_keks(self) -> None:
        """A rotation of a KEK under which nothing lives makes no new version: it ends it."""
        async with self.desk.database.readers() as session:
            rows = await session.scalars(
                select(KekVersion.kek)
                .join(Tenant, Tenant.id == KekVersion.kek)
                .where(Tenant.removed_at.is_not(None), KekVersion.destroyed_at.is_(None))
                .distinct()
            )
            keks = rows.all()
        failed: StrongroomError | None = None
        for kek in keks:
            if self._stopping.is_set():
                break
            try:
                await rotate(self.desk.database, self.desk.changes, self._provider, kek)
            except StrongroomError as error:
                failed = failed or error
        if failed is not None:
            raise failed
