"""The migration of scheduled revocations with rows in it, up and down, on both databases."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from sqlalchemy import inspect, text

from service.db.migrate import downgrade_async, upgrade_async
from service.db.session import open_database
from service.revocation.models import Axis, ScheduledRevocation, ScheduleState

AT = datetime(2026, 1, 31, 12, tzinfo=UTC)
REVOCATION = (
    "INSERT INTO revocations (id, axis, target, reason, asked_by, request, committed_at, epoch, "
    "seq, components) VALUES (:id, 'document', '{}', 'r', 'operator:root', 'x', 't', 'e', 1, '')"
)


async def test_what_was_revoked_stays_and_what_was_to_come_goes_down_with_the_table(
    empty_database_url: str,
) -> None:
    await upgrade_async(empty_database_url, "0006")
    database = open_database(empty_database_url)
    async with database.writers.begin() as session:
        await session.execute(text(REVOCATION), {"id": "a" * 32})
    await upgrade_async(empty_database_url)
    async with database.writers.begin() as session:
        session.add(
            ScheduledRevocation(
                id="b" * 32, axis=Axis.GROUP, target="g", reason="r", actor_kind="operator",
                actor="root", asked_by="operator:root", request="x", created_at=AT,
                due_at=AT + timedelta(days=1), state=ScheduleState.SCHEDULED, failure="",
            )
        )  # fmt: skip
    await downgrade_async(empty_database_url, "0006")
    async with database.engine.connect() as connection:
        tables = await connection.run_sync(lambda sync: inspect(sync).get_table_names())
        kept = (await connection.execute(text("SELECT id FROM revocations"))).scalars().all()
    assert "scheduled_revocations" not in tables
    assert kept == ["a" * 32]
    await upgrade_async(empty_database_url)
    async with database.readers() as session:
        assert await session.get(ScheduledRevocation, "b" * 32) is None
    await database.close()
