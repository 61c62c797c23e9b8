"""Bringing a database to the newest migration, and telling whether it is there.

The migrations lie in the `migrations` package, which is installed with the service, so they
run from a wheel as well as from a checkout, through Alembic's API.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from service.db.session import SQLITE, Database, open_database, parse_url
from strongroom.errors import Unavailable

SCRIPTS: Final = Path(__file__).resolve().parents[2] / "migrations"
CONNECTION: Final = "connection"
"""The key under which `migrations/env.py` finds the connection to run on."""


def configuration(connection: Connection | None = None) -> Config:
    """Alembic's configuration, without a file."""
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS))
    config.set_main_option("path_separator", "os")
    config.attributes[CONNECTION] = connection
    return config


def newest() -> str | None:
    """The revision that this version of the service needs."""
    return ScriptDirectory.from_config(configuration()).get_current_head()


def upgrade(url: str, revision: str = "head") -> None:
    """Run every migration up to `revision`. Not to be called from a running event loop."""
    asyncio.run(_run(url, revision, down=False))


def downgrade(url: str, revision: str = "base") -> None:
    """Take back migrations down to `revision`. Loses what they added."""
    asyncio.run(_run(url, revision, down=True))


async def upgrade_async(url: str, revision: str = "head") -> None:
    """`upgrade`, from a running event loop."""
    await _run(url, revision, down=False)


async def downgrade_async(url: str, revision: str = "base") -> None:
    """`downgrade`, from a running event loop."""
    await _run(url, revision, down=True)


async def check_revision(database: Database, *, running: bool = False) -> None:
    """Raise `Unavailable`, saying what to do, unless the database is at the newest migration.

    A process that is `running`, which began at its own, goes on while a later version has
    migrated: what a migration adds leaves the version before working (docs/operations.md).
    """
    async with database.engine.connect() as connection:
        current = await connection.run_sync(_current)
    wanted = newest()
    if running and current is not None and wanted is not None and current > wanted:
        return
    if current != wanted:
        raise Unavailable(
            f"the database is at migration {current or 'none'} and this version needs {wanted}: "
            "run `strongroom serve`, which migrates, or service.db.migrate.upgrade",
            field="database_url",
            limit=wanted,
        )


async def _run(url: str, revision: str, *, down: bool) -> None:
    parsed = parse_url(url)
    if parsed.get_backend_name() == SQLITE and parsed.database is not None:
        Path(parsed.database).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    database = open_database(url)
    try:
        async with database.engine.begin() as connection:
            await connection.run_sync(_migrate, revision, down)
    finally:
        await database.close()


def _migrate(connection: Connection, revision: str, down: bool) -> None:
    config = configuration(connection)
    if down:
        command.downgrade(config, revision)
    else:
        command.upgrade(config, revision)


def _current(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()
