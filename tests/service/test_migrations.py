"""Migrations: they make what the models say, go up and down, and a stale database is refused."""

from __future__ import annotations

from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, inspect, select, text

from policy.signing import Verifier
from service.app import create_app
from service.audit import merkle
from service.audit.events import AuditEvent, Draft
from service.audit.models import AuditReference, AuditTile
from service.audit.verify import Intact, verify_chain
from service.db.metadata import complete_metadata, is_modelled
from service.db.migrate import check_revision, downgrade_async, newest, upgrade, upgrade_async
from service.db.session import Database, open_database
from service.settings import ServiceSettings
from strongroom.errors import Misuse, Unavailable
from tests.service.house import Service


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


BEFORE_AUDIT = "0003"
OLD_EVENTS = 600


async def _old_audit(database: Database) -> str:
    """A log as the version before kept it; returns its root."""
    peaks: list[bytes] = []
    last = ""
    async with database.engine.begin() as connection:
        for seq in range(OLD_EVENTS):
            draft = Draft(
                kind="access.load",
                actor_kind="sidecar",
                actor="s",
                outcome="hit" if seq % 2 else "miss",
                reason="" if seq % 2 else "permission",
                references=("0" * 64,),
            )
            at = f"2026-{1 + seq // 100:02d}-01T00:00:00.{seq:06d}Z"
            event = AuditEvent(seq, last, at, draft)
            values = {"seq": seq, "at": at, "prev": last, "hash": event.hash()}
            values |= {"outcome": draft.outcome, "reason": draft.reason}
            await connection.execute(
                text(
                    "INSERT INTO audit_events (seq, at, occurred_at, kind, actor_kind, actor, "
                    "subject, target, outcome, reason, details, prev, hash) VALUES (:seq, :at, "
                    ":at, 'access.load', 'sidecar', 's', '', '', :outcome, :reason, '{}', "
                    ":prev, :hash)"
                ),
                values,
            )
            await connection.execute(
                text("INSERT INTO audit_references (seq, reference) VALUES (:seq, :reference)"),
                {"seq": seq, "reference": "0" * 64},
            )
            last = event.hash()
            peaks = merkle.extend(seq, peaks, [bytes.fromhex(last)])
        await connection.execute(
            text("INSERT INTO audit_counter (id, size, hash, peaks) VALUES (1, :n, :last, :peaks)"),
            {"n": OLD_EVENTS, "last": last, "peaks": b"".join(peaks).hex()},
        )
    return merkle.fold(peaks).hex()


async def test_the_audit_is_whole_after_going_up_and_down_and_up_with_data(
    empty_database_url: str,
) -> None:
    await upgrade_async(empty_database_url, BEFORE_AUDIT)
    database = open_database(empty_database_url)
    root = await _old_audit(database)
    for _ in range(2):
        await upgrade_async(empty_database_url)
        async with database.snapshots() as session:
            found = await verify_chain(session, Verifier({}))
            assert found == Intact(OLD_EVENTS, root, 0, 0)
            tiles = await session.scalars(select(AuditTile.index).order_by(AuditTile.index))
            assert list(tiles) == [0, 1]
            alien = await session.scalars(
                select(AuditReference.category).where(AuditReference.alien)
            )
            assert set(alien.all()) == {"served"}
        await downgrade_async(empty_database_url, BEFORE_AUDIT)
        async with database.engine.connect() as connection:
            nodes = await connection.scalar(text("SELECT count(*) FROM audit_nodes"))
            assert nodes == sum(OLD_EVENTS >> level for level in range(1, 10))
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


async def test_who_runs_goes_on_when_a_later_version_has_migrated_and_nobody_begins_so(
    service: Service,
) -> None:
    database = service.runtime.database
    async with database.writers.begin() as session:
        await session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    assert (await service.nobody.ask("GET", "/readyz")).status_code == 200
    with pytest.raises(Unavailable, match="at migration 9999"):
        await check_revision(database)
    async with database.writers.begin() as session:
        await session.execute(text("UPDATE alembic_version SET version_num = '0000'"))
    assert (await service.nobody.ask("GET", "/readyz")).status_code == 503


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
