"""One change, one transaction: no gap in seq, journalled before it returns, and all or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import select

from service.db.session import Database
from service.keys import components
from service.log import chain
from service.log import store as log_store
from service.log.models import LogRow
from strongroom.errors import Misuse, Unavailable
from strongroom.identity import ComponentKind, new_component_id
from strongroom.log import InvalidationKind
from tests.service.evidence import SYSTEM, Evidence, new_signer, start


@pytest.fixture
async def evidence(database: Database, tmp_path: Path) -> AsyncIterator[Evidence]:
    started = await start(database, tmp_path / "journal" / "log.jws")
    yield started
    await started.journal.close()


async def retire_one(evidence: Evidence) -> int:
    async with evidence.changes.begin(SYSTEM) as change:
        entry = await change.invalidate(
            kind=InvalidationKind.COMPONENTS, components=[new_component_id()]
        )
    return entry.seq


async def test_a_new_log_begins_with_a_signed_entry_of_its_epoch(evidence: Evidence) -> None:
    async with evidence.database.readers() as session:
        head = await log_store.head(session)
        stored = await log_store.at(session, head.epoch, 1)
    assert head.seq == 1
    assert stored is not None
    entry = chain.read(stored.jws, evidence.verifier)
    assert entry.kind is InvalidationKind.EPOCH
    assert entry.hash() == head.hash


async def test_concurrent_writers_leave_no_gap_and_commit_in_the_order_of_seq(
    evidence: Evidence, tmp_path: Path
) -> None:
    # Two Changes on one database stand for two processes: only the database's lock orders them.
    other = await start(evidence.database, tmp_path / "other" / "log.jws")
    try:
        seqs = await asyncio.gather(
            *(retire_one(evidence if number % 2 else other) for number in range(24))
        )
    finally:
        await other.journal.close()
    assert sorted(seqs) == list(range(2, 26))
    async with evidence.database.readers() as session:
        rows = (await session.scalars(select(LogRow).order_by(LogRow.position))).all()
    links = chain.Chain()
    for row in rows:
        links.follow(chain.read(row.jws, evidence.verifier))
    assert [row.position for row in rows] == [row.seq for row in rows]


async def test_a_reader_never_sees_a_seq_before_the_one_below_it(evidence: Evidence) -> None:
    async def read_while_writing() -> None:
        for _ in range(30):
            async with evidence.database.readers() as session:
                seqs = (await session.scalars(select(LogRow.seq).order_by(LogRow.seq))).all()
            assert list(seqs) == list(range(1, len(seqs) + 1))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(read_while_writing())
        for _ in range(10):
            tasks.create_task(retire_one(evidence))


async def test_entries_are_in_the_journal_before_the_call_returns(evidence: Evidence) -> None:
    await retire_one(evidence)
    lines = await evidence.journal.lines()
    async with evidence.database.readers() as session:
        stored = await log_store.all_after(session, 0, 10)
    assert lines == [entry.jws for entry in stored]
    assert len(lines) == 2
    assert evidence.journal.path.stat().st_mode & 0o777 == 0o600


async def test_concurrent_changes_are_journalled_in_the_order_of_the_log(
    evidence: Evidence,
) -> None:
    await asyncio.gather(*(retire_one(evidence) for _ in range(12)))
    async with evidence.database.readers() as session:
        stored = await log_store.all_after(session, 0, 100)
    assert await evidence.journal.lines() == [entry.jws for entry in stored]


async def test_an_error_in_the_block_leaves_nothing_behind(evidence: Evidence) -> None:
    async with evidence.changes.begin(SYSTEM) as change:
        component = await components.register(change.session, ComponentKind.MODEL, None)

    async def fail() -> None:
        async with evidence.changes.begin(SYSTEM) as change:
            await components.destroy(change.session, [component])
            await change.invalidate(kind=InvalidationKind.COMPONENTS, components=[component])
            await change.audit("test.failed", target=component)
            raise Misuse("the change was wrong")

    with pytest.raises(Misuse):
        await fail()
    async with evidence.database.readers() as session:
        assert await components.alive(session, [component])
        assert (await log_store.head(session)).seq == 1
    assert len(await evidence.journal.lines()) == 1


async def test_a_journal_that_cannot_be_written_stops_changes_until_it_can(
    evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = evidence.journal.append

    async def full(lines: object, after: int) -> int:
        raise Unavailable("the journal cannot be written")

    monkeypatch.setattr(evidence.journal, "append", full)
    with pytest.raises(Unavailable):
        await retire_one(evidence)
    with pytest.raises(Unavailable):
        await retire_one(evidence)
    monkeypatch.setattr(evidence.journal, "append", append)
    assert await retire_one(evidence) == 3
    async with evidence.database.readers() as session:
        stored = await log_store.all_after(session, 0, 100)
    assert await evidence.journal.lines() == [entry.jws for entry in stored]


async def test_a_destroyed_secret_is_gone_from_the_sqlite_files(
    evidence: Evidence, dialect: str, tmp_path: Path
) -> None:
    if dialect != "sqlite":
        pytest.skip("about SQLite's files")
    async with evidence.changes.begin(SYSTEM) as change:
        component = await components.register(change.session, ComponentKind.MODEL, None)
    from service.keys.models import Component

    async with evidence.database.readers() as session:
        wrapped = await session.scalar(select(Component.wrapped).where(Component.id == component))
    assert wrapped

    def holders() -> list[str]:
        return [
            path.name for path in tmp_path.glob("strongroom.db*") if wrapped in path.read_bytes()
        ]

    assert holders()
    async with evidence.changes.begin(SYSTEM) as change:
        await components.destroy(change.session, [component])
        await change.invalidate(kind=InvalidationKind.COMPONENTS, components=[component])
    assert holders() == []


async def test_too_many_components_at_once_are_refused(evidence: Evidence) -> None:
    async with evidence.changes.begin(SYSTEM) as change:
        with pytest.raises(Misuse, match="too many"):
            await change.invalidate(
                kind=InvalidationKind.COMPONENTS, components=[new_component_id()] * 8193
            )


def test_the_signer_of_the_tests_is_the_same_each_time() -> None:
    assert new_signer().kid == new_signer().kid
