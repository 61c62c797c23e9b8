"""Migrations: they make what the models say, go up and down, and a stale database is refused."""

from __future__ import annotations

from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, inspect, text

from service.app import create_app
from service.db.metadata import complete_metadata, is_modelled
from service.db.migrate import check_revision, downgrade_async, newest, upgrade, upgrade_async
from service.db.session import Database, open_database
from service.settings import ServiceSettings
from strongroom.errors import Misuse, Unavailable


async def _differences(database: Database) -> list[Any]:
    def compare(connection: Connection) -> list[Any]:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "include_name": is_modelled}
        )
        return list(compare_metadata(context, complete_metadata()))

    async with database.engine.connect() as connection:
        return await connection.run_sync(compare)


async def _tables(database: Database) -> set[str]:
    async with database.engine.connect() as connection:
        return await connection.run_sync(lambda sync: set(inspect(sync).get_table_names()))


async def test_the_migrations_make_what_the_models_say(database: Database) -> None:
    assert await _differences(database) == []


async def test_migrations_go_up_and_down_and_up_again(empty_database_url: str) -> None:
    database = open_database(empty_database_url)
    await upgrade_async(empty_database_url)
    await check_revision(database)
    assert set(complete_metadata().tables) < await _tables(database)
    await downgrade_async(empty_database_url)
    assert await _tables(database) == {"alembic_version"}
    await upgrade_async(empty_database_url)
    await upgrade_async(empty_database_url)
    assert await _differences(database) == []
    await database.close()


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
def test_upgrade_makes_the_database_and_its_folder(tmp_path: Any, dialect: str) -> None:
    path = tmp_path / "new" / "strongroom.db"
    upgrade(f"sqlite+aiosqlite:///{path}")
    assert path.exists()


async def test_a_database_without_migrations_stops_the_start(
    empty_database_url: str, settings: ServiceSettings
) -> None:
    app = create_app(settings.model_copy(update={"database_url": empty_database_url}))
    with pytest.raises(Unavailable, match=f"migration none and this version needs {newest()}"):
        async with app.router.lifespan_context(app):
            pass


async def test_a_database_that_is_behind_is_not_ready(
    database: Database, settings: ServiceSettings
) -> None:
    await check_revision(database)
    async with database.writers.begin() as session:
        await session.execute(text("UPDATE alembic_version SET version_num = '0000'"))
    with pytest.raises(Unavailable, match="at migration 0000"):
        await check_revision(database)


async def test_a_database_that_is_away_says_so() -> None:
    database = open_database("postgresql+asyncpg://nobody@/none?host=/nonexistent")
    with pytest.raises(Unavailable, match="does not answer"):
        await database.ping()
    await database.close()


@pytest.mark.parametrize(
    "url", ["", "nonsense", "mysql://host/db", "sqlite://", "sqlite:///:memory:"]
)
def test_another_kind_of_database_is_refused_by_name(url: str) -> None:
    with pytest.raises(Misuse) as refusal:
        open_database(url)
    assert refusal.value.field == "database_url"
