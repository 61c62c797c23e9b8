"""Component secrets: their life, and that destroyed ones are really gone."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
from sqlalchemy import select, text

from service.db.session import Database
from service.keys import components
from service.keys.models import Component
from strongroom.errors import Missing
from strongroom.identity import ComponentKind
from tests.service.evidence import noted


async def test_a_registered_component_gives_its_secret_back(database: Database) -> None:
    async with database.writers.begin() as session:
        tenant = await components.register(session, ComponentKind.TENANT, None)
        group = await components.register(session, ComponentKind.GROUP, tenant)
        model = await components.register(session, ComponentKind.MODEL, None)
    async with database.readers() as session:
        first = await components.secrets(session, [tenant, group, model], noted())
        again = await components.secrets(session, [model, tenant], noted())
    assert len({bytes(secret) for secret in first}) == 3
    assert [len(secret) for secret in first] == [32, 32, 32]
    assert again == [first[2], first[0]]


async def test_a_destroyed_component_has_no_secret_and_leaves_a_tombstone(
    database: Database,
) -> None:
    async with database.writers.begin() as session:
        model = await components.register(session, ComponentKind.MODEL, None)
        other = await components.register(session, ComponentKind.MODEL, None)
    async with database.writers.begin() as session:
        assert await components.destroy(session, [model]) == [model]
        assert await components.destroy(session, [model]) == []
    async with database.readers() as session:
        assert not await components.alive(session, [model, other])
        assert await components.alive(session, [other])
        with pytest.raises(Missing):
            await components.secrets(session, [other, model], noted())
        tombstone = await session.get_one(Component, model)
        assert tombstone.wrapped is None
        assert tombstone.destroyed_at is not None


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
async def test_a_destroyed_secret_is_in_no_file_of_sqlite(
    database: Database, tmp_path: Path
) -> None:
    def on_disk(needle: bytes) -> bool:
        return any(needle in path.read_bytes() for path in tmp_path.glob("strongroom.db*"))

    async with database.writers.begin() as session:
        ids = [await components.register(session, ComponentKind.MODEL, None) for _ in range(400)]
    async with database.readers() as session:
        rows = await session.execute(select(Component.id, Component.wrapped))
        blobs = {row.id: row.wrapped for row in rows}
    assert await database.truncate_wal()
    assert all(on_disk(blob) for blob in blobs.values())

    doomed = [component for component in ids if secrets.randbelow(3)]
    for start in range(0, len(doomed), 7):
        async with database.writers.begin() as session:
            await components.destroy(session, doomed[start : start + 7])
            await components.register(session, ComponentKind.MODEL, None)
    assert await database.truncate_wal()
    assert not [component for component in doomed if on_disk(blobs[component])]
    spared = set(ids) - set(doomed)
    assert all(on_disk(blobs[component]) for component in spared)


async def test_a_foreign_owner_cannot_take_a_wrapped_secret(database: Database) -> None:
    async with database.writers.begin() as session:
        one = await components.register(session, ComponentKind.MODEL, None)
        two = await components.register(session, ComponentKind.MODEL, None)
    async with database.writers.begin() as session:
        await session.execute(
            text(
                "UPDATE components SET wrapped = "
                "(SELECT wrapped FROM components WHERE id = :two) WHERE id = :one"
            ),
            {"one": one, "two": two},
        )
    async with database.readers() as session:
        assert await components.secrets(session, [two], noted())
        with pytest.raises(Exception, match="does not open"):
            await components.secrets(session, [one], noted())
