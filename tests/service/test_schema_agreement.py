"""Models and migrations make the same database, down to defaults and checks, on both databases."""

from __future__ import annotations

import re
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, inspect, text

from service.db.metadata import complete_metadata, is_modelled
from service.db.session import Database, open_database

_SPACES = re.compile(r"[\s()\"]+|::(?:text|character varying)(?:\[\])?")


def _same(sql: str | None) -> str:
    """The text of an expression without what each way of asking writes differently."""
    return "" if sql is None else _SPACES.sub("", sql).lower()


def described(connection: Connection) -> dict[str, Any]:
    """Everything that can be asked of a database's tables, in one form."""
    asked = inspect(connection)
    found: dict[str, Any] = {}
    for table in asked.get_table_names():
        if table == "alembic_version" or not is_modelled(table, "table", {}):
            continue
        primary = asked.get_pk_constraint(table)
        found[table] = {
            "columns": {
                column["name"]: (
                    str(column["type"]),
                    column["nullable"],
                    _same(column.get("default")),
                )
                for column in asked.get_columns(table)
            },
            "primary": (primary["name"], primary["constrained_columns"]),
            "foreign": sorted(
                (
                    str(key["name"]),
                    key["constrained_columns"],
                    key["referred_table"],
                    key["referred_columns"],
                    sorted(key.get("options", {}).items()),
                )
                for key in asked.get_foreign_keys(table)
            ),
            "unique": sorted(
                (str(key["name"]), key["column_names"])
                for key in asked.get_unique_constraints(table)
            ),
            "indices": sorted(
                (
                    str(index["name"]),
                    index["column_names"],
                    bool(index["unique"]),
                    sorted(
                        _same(str(where))
                        for name, where in index.get("dialect_options", {}).items()
                        if name.endswith("_where")
                    ),
                )
                for index in asked.get_indexes(table)
            ),
            "checks": sorted(
                (str(check["name"]), _same(check["sqltext"]))
                for check in asked.get_check_constraints(table)
            ),
        }
    return found


async def _described(database: Database) -> dict[str, Any]:
    async with database.engine.connect() as connection:
        return await connection.run_sync(described)


async def _made_by_models(url: str) -> Database:
    database = open_database(url)
    async with database.engine.begin() as connection:
        await connection.run_sync(complete_metadata().create_all)
    return database


async def test_models_and_migrations_make_the_same_tables(
    database: Database, empty_database_url: str
) -> None:
    other = await _made_by_models(empty_database_url)
    try:
        migrated, modelled = await _described(database), await _described(other)
    finally:
        await other.close()
    assert set(migrated) == set(modelled)
    for table, found in migrated.items():
        for what, value in found.items():
            assert value == modelled[table][what], (table, what)
    assert sum(len(found["checks"]) for found in migrated.values()) > 10


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE tenants ADD COLUMN forgotten INTEGER",
        "DROP INDEX ix_residency_namespace",
        "CREATE INDEX ix_forgotten ON documents (created_at)",
    ],
)
async def test_a_difference_is_found(
    database: Database, empty_database_url: str, change: str
) -> None:
    async with database.engine.begin() as connection:
        await connection.execute(text(change))
    other = await _made_by_models(empty_database_url)
    try:
        assert await _described(database) != await _described(other)
    finally:
        await other.close()


async def test_alembic_finds_nothing_to_do_not_even_a_type_or_a_default(
    database: Database,
) -> None:
    def compare(connection: Connection) -> list[Any]:
        options = {
            "compare_type": True,
            "compare_server_default": True,
            "include_name": is_modelled,
        }
        context = MigrationContext.configure(connection, opts=options)
        return list(compare_metadata(context, complete_metadata()))

    async with database.engine.connect() as connection:
        assert await connection.run_sync(compare) == []
