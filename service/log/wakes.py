"""Waking the other replicas: PostgreSQL's NOTIFY, heard on a connection of its own.

Rules:
- A notice is a wake and never news: whoever is woken reads the tables. One that is lost costs time
  (a heartbeat, a poll), nothing else.
- That an entry was appended is notified in its own transaction, so that no process dies between the
  two. Acknowledgements are notified after their commit, many at once.
- The connection also says that this process is here: it holds a shared advisory lock that is named
  after the process's journal. Replicas of one database keep one journal between them; a process
  that keeps another is refused at its start, since what it does not journal could be lost.
- Starts are settled one after another, under an exclusive advisory lock.
- On SQLite there is one process, and nothing to do.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, cast

import asyncpg
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.session import POSTGRESQL, Database
from service.log.kick import Kick
from strongroom.errors import Conflict, Unavailable

LOG: Final = "log"
ACKS: Final = "acks"
_CHANNEL: Final = "strongroom"
_JOURNALS: Final = 0x5354524F
"""First half of the advisory locks' names: which journal is kept."""
_STARTS: Final = 0x53545253
_RETRY_S: Final = 1.0
_LOOK_S: Final = 5.0
_log = logging.getLogger("strongroom.service")


async def notify(session: AsyncSession, what: str) -> None:
    """Wake every replica once this session's transaction is committed."""
    if session.get_bind().dialect.name == POSTGRESQL:
        await session.execute(
            text("SELECT pg_notify(:channel, :what)"), {"channel": _CHANNEL, "what": what}
        )


class Wakes:
    """One process's ear. `log` and `acks` ring when any replica has something."""

    def __init__(self, database: Database, log: Kick, acks: Kick) -> None:
        self._database = database
        self._bells = {LOG: log, ACKS: acks}
        self._acked = asyncio.Event()
        self._connection: asyncpg.Connection[Any] | None = None
        self._journal = ""

    @asynccontextmanager
    async def starting(self, journal: str) -> AsyncIterator[None]:
        """Alone among the starts of this database's replicas, which all keep `journal`.

        Raises `Conflict` while one is running that keeps another.
        """
        if self._database.dialect != POSTGRESQL:
            yield
            return
        self._journal = journal
        connection = await self._connect()
        await connection.execute("SELECT pg_advisory_lock($1, 0)", _STARTS)
        try:
            await self._claim(connection)
            yield
        finally:
            if not connection.is_closed():
                await connection.execute("SELECT pg_advisory_unlock($1, 0)", _STARTS)

    async def run(self) -> None:
        """Listen, and tell of acknowledgements, until cancelled."""
        if self._database.dialect != POSTGRESQL:
            return
        while True:
            try:
                connection = await self._connect()
                await connection.add_listener(_CHANNEL, self._heard)
                # What was said while nobody listened.
                for bell in self._bells.values():
                    bell.ring()
                await self._tell(connection)
            except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, Unavailable):
                _log.warning("the database's notices are not heard: news is polled for")
            await self.close()
            await asyncio.sleep(_RETRY_S)

    def acknowledged(self) -> None:
        """Acknowledgements were committed here: wake whoever waits for them, anywhere."""
        self._bells[ACKS].ring()
        self._acked.set()

    async def close(self) -> None:
        """Close the connection; the journal's lock goes with it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
                await connection.close(timeout=1)

    async def _tell(self, connection: asyncpg.Connection[Any]) -> None:
        while True:
            try:
                async with asyncio.timeout(_LOOK_S):
                    await self._acked.wait()
            except TimeoutError:
                await connection.execute("SELECT 1")
                continue
            self._acked.clear()
            await connection.execute("SELECT pg_notify($1, $2)", _CHANNEL, ACKS)

    def _heard(self, _connection: object, _pid: int, _channel: str, what: object) -> None:
        bell = self._bells.get(str(what))
        if bell is not None:
            bell.ring()

    async def _connect(self) -> asyncpg.Connection[Any]:
        if self._connection is None or self._connection.is_closed():
            try:
                # Of the engine's own making, so that it goes where the pool's connections go.
                raw = await self._database.engine.raw_connection()
                self._connection = cast("asyncpg.Connection[Any]", raw.driver_connection)
                raw.detach()
            except OSError as error:
                raise Unavailable("the database does not answer", field="database_url") from error
            if self._journal:
                await self._hold(self._connection)
        return self._connection

    async def _claim(self, connection: asyncpg.Connection[Any]) -> None:
        others = await connection.fetchval(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid = $1 "
            "AND objid <> $2 AND objsubid = 2 AND database = "
            "(SELECT oid FROM pg_database WHERE datname = current_database())",
            _JOURNALS,
            _name(self._journal) % 2**32,
        )
        if others:
            raise Conflict(
                "another replica of this database keeps another journal: give all of them one "
                "journal_directory",
                field="journal_directory",
            )

    async def _hold(self, connection: asyncpg.Connection[Any]) -> None:
        await connection.execute(
            "SELECT pg_advisory_lock_shared($1, $2)", _JOURNALS, _name(self._journal)
        )


def _name(journal: str) -> int:
    """The second half of a lock's name, a signed 32-bit number."""
    return int.from_bytes(hashlib.sha256(journal.encode()).digest()[:4], "big", signed=True)
