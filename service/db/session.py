"""One engine, three kinds of sessions, on SQLite and PostgreSQL.

- `readers`: a read transaction. On SQLite it is a snapshot from its first statement.
- `snapshots`: every statement sees one state of the database (REPEATABLE READ, read only).
- `writers`: on SQLite the write lock is taken at the start (BEGIN IMMEDIATE), so that a
  transaction never fails half way because it began as a reader; on PostgreSQL row locks rule.

On SQLite every connection sets: foreign keys on; `secure_delete`, which overwrites what is
deleted; a write-ahead log with full synchronisation, since a revocation must survive a power
cut; and a bounded wait for the lock. `truncate_wal` empties the log once secrets are gone.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import URL, Connection, event, make_url, text
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.pool import ConnectionPoolEntry

from strongroom.errors import Misuse, Unavailable

SQLITE: Final = "sqlite"
POSTGRESQL: Final = "postgresql"
_DRIVERS: Final = {SQLITE: "sqlite+aiosqlite", POSTGRESQL: "postgresql+asyncpg"}
_WRITER: Final = "strongroom_writer"
_PRAGMAS: Final = (
    "PRAGMA busy_timeout = 10000",
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    "PRAGMA foreign_keys = ON",
    "PRAGMA secure_delete = ON",
    "PRAGMA trusted_schema = OFF",
    "PRAGMA temp_store = MEMORY",
)

Sessions = async_sessionmaker[AsyncSession]


@dataclass(frozen=True, slots=True)
class Database:
    """An open database. `close` gives its connections back."""

    engine: AsyncEngine
    readers: Sessions
    snapshots: Sessions
    writers: Sessions

    @property
    def dialect(self) -> str:
        """`sqlite` or `postgresql`."""
        return self.engine.dialect.name

    async def ping(self) -> None:
        """Raise `Unavailable` unless the database answers."""
        try:
            async with self.engine.connect() as connection:
                await connection.execute(text("SELECT 1"))
        except (DBAPIError, OSError) as error:
            raise Unavailable("the database does not answer", field="database_url") from error

    async def truncate_wal(self) -> bool:
        """Move SQLite's write-ahead log into the database and cut it to nothing.

        Until then the log may hold pages with secrets that have been destroyed since. False
        if a reader or an error kept it from completing: call again. PostgreSQL has no such file
        here.
        """
        if self.dialect != SQLITE:
            return True
        try:
            async with self.engine.connect() as connection:
                raw = (await connection.get_raw_connection()).driver_connection
                if raw is None:  # pragma: no cover - a checked-out connection has its driver
                    return False
                cursor = await raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                row = await cursor.fetchone()
                await cursor.close()
        except (sqlite3.Error, DBAPIError, PoolTimeout, OSError):
            return False
        return row is not None and int(row[0]) == 0

    async def close(self) -> None:
        """Close every connection."""
        await self.engine.dispose()


def parse_url(text_url: str) -> URL:
    """The URL of a supported database, with its asynchronous driver."""
    try:
        url = make_url(text_url)
    except ArgumentError as error:
        raise Misuse("the database URL cannot be read", field="database_url") from error
    driver = _DRIVERS.get(url.get_backend_name())
    if driver is None:
        raise Misuse(
            "the database must be SQLite or PostgreSQL",
            field="database_url",
            limit="sqlite+aiosqlite:///PATH or postgresql+asyncpg://...",
        )
    if url.get_backend_name() == SQLITE and url.database in (None, "", ":memory:"):
        raise Misuse("SQLite needs the path of a file", field="database_url")
    return url.set(drivername=driver)


def open_database(text_url: str, info: dict[str, Any] | None = None) -> Database:
    """Open the database at `text_url`. `info` is put into every session's `info`."""
    url = parse_url(text_url)
    sqlite = url.get_backend_name() == SQLITE
    # What the planner thinks dear it would compile first, for longer than the query then takes.
    plain = {"server_settings": {"jit": "off"}}
    options: dict[str, Any] = {} if sqlite else {"pool_pre_ping": True, "connect_args": plain}
    engine = create_async_engine(url, hide_parameters=True, pool_size=8, **options)
    if sqlite:
        event.listen(engine.sync_engine, "connect", _prepare_sqlite)
        event.listen(engine.sync_engine, "begin", _begin_sqlite)
        snapshot_engine = engine
    else:
        snapshot_engine = engine.execution_options(
            isolation_level="REPEATABLE READ", postgresql_readonly=True
        )
    writer_engine = engine.execution_options(**{_WRITER: True})
    return Database(
        engine=engine,
        readers=_sessions(engine, info),
        snapshots=_sessions(snapshot_engine, info),
        writers=_sessions(writer_engine, info),
    )


def _sessions(engine: AsyncEngine, info: dict[str, Any] | None) -> Sessions:
    return async_sessionmaker(engine, expire_on_commit=False, info=info or {})


def _prepare_sqlite(connection: DBAPIConnection, entry: ConnectionPoolEntry) -> None:
    del entry
    # The driver's own BEGIN is late and never IMMEDIATE; `_begin_sqlite` issues ours instead.
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in _PRAGMAS:
        cursor.execute(pragma)
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    writer = connection.get_execution_options().get(_WRITER, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writer else "BEGIN")
