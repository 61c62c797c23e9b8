"""What the audit needs from time to time: partitions made ahead, heads kept elsewhere, purges.

Rules:
- A head is kept elsewhere only after the last one kept there was held against the tree of today. If
  that does not continue it, the log was cut, changed or forked: an alarm is put on record, nothing
  more is kept there, and the process says so at every round until a person has looked.
- A tree that has not grown is not signed again.
- A purge happens only where a retention is set.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy.exc import SQLAlchemyError

from policy.audit_heads import AuditHeadClaims, verify_head
from policy.signing import Signer, Verifier
from service.audit import partitions, retention, store
from service.audit.keeping import HeadKeeper
from service.audit.retention import Purged
from service.auth.actor import SYSTEM
from service.changes import Changes
from service.db.base import now as wall_clock
from service.db.session import POSTGRESQL, Database
from strongroom.errors import Corrupt, Refused, StrongroomError

_log: Final = logging.getLogger("strongroom.service")


@dataclass(frozen=True, slots=True)
class Kept:
    """A head was kept at every keeper."""

    size: int


@dataclass(frozen=True, slots=True)
class Unchanged:
    """The tree has not grown since the last head that is kept."""


@dataclass(frozen=True, slots=True)
class Forked:
    """The tree does not continue a head that was kept."""

    size: int


class Upkeep:
    """Does what is due. One a process; several processes do no harm to one another."""

    def __init__(
        self,
        database: Database,
        changes: Changes,
        signer: Signer,
        verifier: Verifier,
        keepers: Sequence[HeadKeeper],
        retention_days: int | None,
    ) -> None:
        self._database = database
        self._changes = changes
        self._signer = signer
        self._verifier = verifier
        self._keepers = keepers
        self._retention_days = retention_days
        self._told: set[int] = set()
        """Sizes of heads of which a fork is on record."""

    async def start(self) -> None:
        """Before anything is served: partitions, and a look at the heads that are kept, so that a
        log that was cut or changed meanwhile is on record from the start.
        """
        await self.make_partitions(wall_clock())
        try:
            await self.look()
        except StrongroomError as error:
            _log.warning("the kept audit heads could not be looked at: %s", error.message)

    async def keep_heads(self, every_s: float) -> None:
        """Keep a head every so often, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.keep_head()
            except StrongroomError as error:
                # The next round tries again; what is kept stays as it is.
                _log.warning("an audit head could not be kept: %s", error.message)

    async def keep_up(self, every_s: float) -> None:
        """Make partitions and purge every so often, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.make_partitions(wall_clock())
                await self.purge(wall_clock())
            except (StrongroomError, SQLAlchemyError) as error:
                _log.warning("the audit's upkeep failed: %s", type(error).__name__)

    async def make_partitions(self, now: datetime) -> None:
        """Make the next months' partitions."""
        if self._database.dialect != POSTGRESQL:
            return
        async with self._database.writers() as session, session.begin():
            made = await partitions.make_ahead(session, now)
        if made:
            _log.info("audit partitions made: %s", ", ".join(month.begin for month in made))

    async def purge(self, now: datetime) -> Purged | None:
        """Purge what is past its retention."""
        if self._retention_days is None:
            return None
        async with self._changes.begin(SYSTEM) as change:
            return await retention.purge(change, now - timedelta(days=self._retention_days))

    async def keep_head(self) -> Kept | Unchanged | Forked:
        """Keep the tree's head elsewhere, if it continues what is kept there."""
        behind = await self.look()
        if not isinstance(behind, list):
            return behind
        if not behind:
            return Unchanged()
        async with self._changes.begin(SYSTEM) as change:
            head = await store.sign_head(change.session, self._signer, change.at)
        for keeper in behind:
            await keeper.put(head.size, head.jws)
        return Kept(head.size)

    async def look(self) -> list[HeadKeeper] | Forked:
        """The keepers whose latest head is of a smaller tree; or the log has forked."""
        async with self._database.readers() as session:
            size, _, _ = await store.counter(session)
        behind: list[HeadKeeper] = []
        for keeper in self._keepers:
            jws = await keeper.latest()
            kept = None if jws is None else self._read(jws)
            if kept is not None and not await self._continues(kept):
                return await self._fork(kept.size)
            if size > (0 if kept is None else kept.size):
                behind.append(keeper)
        return behind

    def _read(self, jws: str) -> AuditHeadClaims:
        try:
            return verify_head(jws, self._verifier)
        except Refused as error:
            raise Corrupt("a kept audit head was not signed by this service") from error

    async def _continues(self, kept: AuditHeadClaims) -> bool:
        """Whether the tree of today, cut to the kept head's size, has its root."""
        if kept.size == 0:
            return True
        async with self._database.readers() as session:
            size, _, _ = await store.counter(session)
            if size < kept.size:
                return False
            try:
                root = await store.root_at(session, kept.size)
            except Corrupt:
                return False
        return hmac.compare_digest(root.hex(), kept.root)

    async def _fork(self, size: int) -> Forked:
        _log.error("the audit log does not continue the head of %d events that was kept", size)
        if size not in self._told:
            async with self._changes.begin(SYSTEM) as change:
                await change.audit(
                    "alarm.audit_forked",
                    outcome="alarm",
                    reason="does not continue a kept head",
                    details={"size": size},
                )
            self._told.add(size)
        return Forked(size)
