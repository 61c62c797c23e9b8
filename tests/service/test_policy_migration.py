"""The migration of policies with data in it, up and down, on both databases."""

from __future__ import annotations

import secrets
from typing import Any

from sqlalchemy import text

from service.db.migrate import downgrade_async, upgrade_async
from service.db.session import Database, open_database

TENANT = "a" * 32
BEFORE = "0005"


async def run(database: Database, statement: str, **values: Any) -> list[Any]:
    async with database.engine.begin() as connection:
        result = await connection.execute(text(statement), values)
        return list(result.all()) if result.returns_rows else []


async def rules_of(database: Database, columns: str) -> list[Any]:
    return await run(database, f"SELECT {columns} FROM policy_rules ORDER BY subject, effect")


async def test_rules_become_a_first_version_and_what_was_conditional_does_not_widen_on_the_way_down(
    empty_database_url: str,
) -> None:
    url = empty_database_url
    await upgrade_async(url)
    await downgrade_async(url, BEFORE)
    database = open_database(url)
    async with database.engine.begin() as connection:
        await _insert_tenant(connection)
        for subject, effect in (("user:a", "allow"), ("user:b", "deny")):
            await connection.execute(
                text(
                    "INSERT INTO policy_rules (id, tenant, subject, action, resource, effect,"
                    " created_at) VALUES (:id, :tenant, :subject, 'group:read', 'group:*',"
                    " :effect, CURRENT_TIMESTAMP)"
                ),
                {
                    "id": secrets.token_hex(16),
                    "tenant": TENANT,
                    "subject": subject,
                    "effect": effect,
                },
            )
    await database.close()
    await upgrade_async(url)
    database = open_database(url)
    columns = "subject, effect, condition, added_in, removed_in"
    assert await rules_of(database, columns) == [
        ("user:a", "allow", "", 1, None),
        ("user:b", "deny", "", 1, None),
    ]
    versions = await run(database, "SELECT number, origin, added, revision FROM policy_versions")
    assert versions == [(1, "migrated", 2, 7)]
    for subject, effect, condition, removed in (
        ("user:c", "allow", '{"purposes":["x"]}', None),
        ("user:d", "deny", '{"purposes":["x"]}', None),
        ("user:d", "deny", '{"purposes":["y"]}', None),
        ("user:b", "deny", '{"purposes":["x"]}', None),
        ("user:e", "allow", "", 2),
    ):
        await run(
            database,
            "INSERT INTO policy_rules (id, tenant, subject, action, resource, effect, condition,"
            " added_in, removed_in, created_at) VALUES (:id, :tenant, :subject, 'group:read',"
            " 'group:*', :effect, :condition, 1, :removed, CURRENT_TIMESTAMP)",
            id=secrets.token_hex(16),
            tenant=TENANT,
            subject=subject,
            effect=effect,
            condition=condition,
            removed=removed,
        )
    await database.close()
    await downgrade_async(url, BEFORE)
    database = open_database(url)
    assert await rules_of(database, "subject, effect") == [
        ("user:a", "allow"),
        ("user:b", "deny"),
        ("user:d", "deny"),
    ]
    await database.close()
    await upgrade_async(url)


async def _insert_tenant(connection: Any) -> None:
    await connection.execute(
        text(
            "INSERT INTO components (id, kind, tenant, kek, kek_version, created_at, destroyed_at)"
            " VALUES (:id, 'tenant', :id, 'k', 1, CURRENT_TIMESTAMP, CURRENT_TIMESTAMP)"
        ),
        {"id": TENANT},
    )
    await connection.execute(
        text(
            "INSERT INTO tenants (id, name, revision, review_required, review_epoch,"
            " review_reason, created_at) VALUES (:id, 'acme', 7, false, '', '',"
            " CURRENT_TIMESTAMP)"
        ),
        {"id": TENANT},
    )
