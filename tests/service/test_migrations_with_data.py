"""Every migration, one at a time, down and up again, with rows in every table it may touch.

What a migration takes away is listed here with its reason; everything else has to be there after
it, unchanged. The audit's rows, which are a chain, are in `test_migrations`, and what becomes of
conditions and versions of policies is in `test_policy_migration`.
"""

from __future__ import annotations

from typing import Any, Final

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, MetaData

from service.db.metadata import complete_metadata
from service.db.migrate import configuration, downgrade_async, upgrade_async
from service.db.session import Database, open_database
from tests.service.filling import AUDIT, everything, fill, filled

Rows = dict[str, list[dict[str, Any]]]
ROWS: Final = 6
LOST: Final[dict[str, dict[str, str]]] = {
    "0002": {
        "kek_rotations": "a rotation is begun anew by what is due",
        "key_uses": "there was no such log",
        "kek_versions.retired_at": "destroyed_at alone ended a version",
    },
    "0003": {
        "sidecar_former_keys": "keys were never exchanged",
        "sidecars.keys_changed_at": "keys were never exchanged",
    },
    "0004": {},
    "0005": {"restorations": "restored backups left no word"},
    "0006": {
        "policy_versions": "there was the newest version only",
        "policy_cases": "there were no test cases",
        "policy_rules.condition": "there were none, and test_policy_migration has those",
        "policy_rules.added_in": "there was the newest version only",
        "policy_rules.removed_in": "there was the newest version only",
        "policy_roles.added_in": "there was the newest version only",
        "policy_roles.removed_in": "there was the newest version only",
        "document_versions.sensitivity": "none was known: restricted again on the way up",
    },
    "0007": {"scheduled_revocations": "nothing was scheduled: carry it out or cancel it before"},
    "0008": {
        "residency": "sidecars say it again",
        "residency_reports": "sidecars say it again",
    },
}
"""By migration, what its way down loses, and why that may be."""


def revisions() -> list[str]:
    """Every migration but the first, the newest first."""
    scripts = ScriptDirectory.from_config(configuration())
    return [script.revision for script in scripts.walk_revisions()][:-1]


async def stored(url: str) -> Rows:
    """Every row of the tables that are there, as the database itself describes them."""

    def work(connection: Connection) -> Rows:
        metadata = MetaData()
        metadata.reflect(connection)
        tables = [
            table
            for table in metadata.sorted_tables
            if table.name != "alembic_version" and not table.name.startswith(AUDIT)
        ]
        return everything(connection, tables)

    database = open_database(url)
    try:
        async with database.engine.connect() as connection:
            return await connection.run_sync(work)
    finally:
        await database.close()


def without(rows: Rows, lost: dict[str, str]) -> Rows:
    """`rows` but for the tables and columns in `lost`."""
    return {
        table: sorted(
            (
                {name: value for name, value in row.items() if f"{table}.{name}" not in lost}
                for row in found
            ),
            key=repr,
        )
        for table, found in rows.items()
        if table not in lost
    }


async def full(url: str) -> None:
    await upgrade_async(url)
    database: Database = open_database(url)
    async with database.engine.begin() as connection:
        await connection.run_sync(fill, complete_metadata(), ROWS)
    await database.close()


def test_every_migration_says_what_its_way_down_loses() -> None:
    assert set(LOST) == set(revisions())


async def test_every_migration_keeps_its_rows_on_the_way_down_and_up_again(
    empty_database_url: str,
) -> None:
    url = empty_database_url
    await full(url)
    lost: dict[str, str] = {}
    before = await stored(url)
    assert set(before) == {table.name for table in filled(complete_metadata())}
    assert all(before.values())
    for revision in revisions():
        below = f"{int(revision) - 1:04d}"
        await downgrade_async(url, below)
        after = await stored(url)
        assert after == without(before, LOST[revision]), revision
        await upgrade_async(url, revision)
        again = await stored(url)
        assert without(again, LOST[revision]) == after, revision
        await downgrade_async(url, below)
        lost |= LOST[revision]
        before = await stored(url)
    await upgrade_async(url)
    assert without(await stored(url), lost) == before
    assert len(before) > 20


async def test_what_a_database_refuses_it_refuses_after_every_way(empty_database_url: str) -> None:
    """Checks and foreign keys are there after down and up as they were."""
    from sqlalchemy import text
    from sqlalchemy.exc import IntegrityError

    url = empty_database_url
    await full(url)
    await downgrade_async(url, "0001")
    await upgrade_async(url)
    database = open_database(url)
    for wrong in (
        "UPDATE components SET destroyed_at = NULL",
        "UPDATE policy_rules SET effect = 'perhaps'",
        "UPDATE log_counter SET id = 2",
        "UPDATE namespaces SET tenant = 'nobody'",
        "UPDATE sidecar_tenants SET sidecar = 'nobody'",
    ):
        with pytest.raises(IntegrityError):
            async with database.engine.begin() as connection:
                await connection.execute(text(wrong))
    await database.close()
