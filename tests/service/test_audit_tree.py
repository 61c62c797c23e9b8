"""The tree in tiles: proofs, and what an attack on rows and tiles of a longer log shows as."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from policy.signing import Verifier
from policy.transparency import verify_consistency, verify_inclusion
from service.audit import merkle, store
from service.audit.events import AuditEvent, Draft, encode_details
from service.audit.models import AuditCounter, AuditReference, AuditRow, AuditTile
from service.audit.verify import Broken, Intact, verify_chain
from service.db.base import now
from service.db.session import Database
from strongroom.canonical import canonical_json
from strongroom.errors import Corrupt
from strongroom.identity import new_component_id

Attack = Callable[[AsyncSession], Awaitable[object]]
SIZE = 700
REFERENCE = new_component_id()
NOBODY = Verifier({})


def draft(number: int, **fields: Any) -> Draft:
    return Draft(
        kind="test.event",
        actor_kind="system",
        actor="system",
        subject=f"subject-{number}",
        references=(REFERENCE,),
        **fields,
    )


async def fill(database: Database, *batches: int) -> list[bytes]:
    """Append batches of so many events; returns every leaf hash."""
    leaves: list[bytes] = []
    for count in batches:
        async with database.writers() as session, session.begin():
            drafts = [draft(len(leaves) + number) for number in range(count)]
            events = await store.append(session, drafts, now())
        leaves += [bytes.fromhex(event.hash()) for event in events]
    return leaves


async def verdict(database: Database) -> Intact | Broken:
    async with database.snapshots() as session:
        return await verify_chain(session, NOBODY)


TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


@given(
    draft=st.builds(
        Draft,
        kind=TEXT,
        actor_kind=TEXT,
        actor=TEXT,
        tenant=st.none() | TEXT,
        subject=TEXT,
        target=TEXT,
        outcome=TEXT,
        reason=TEXT,
        details=st.dictionaries(TEXT, TEXT | st.integers()).map(encode_details),
        references=st.lists(st.text("0123456789abcdef", min_size=1, max_size=64)).map(tuple),
        occurred_at=TEXT,
    ),
    seq=st.integers(0, 2**62),
    prev=TEXT,
)
def test_what_is_hashed_is_canonical_json(draft: Draft, seq: int, prev: str) -> None:
    fields = {name: getattr(draft, name) for name in Draft.__slots__}
    fields |= {"details": json.loads(draft.details), "references": list(draft.references)}
    fields |= {"tenant": draft.tenant or "", "seq": seq, "prev": prev, "at": "x"}
    assert AuditEvent(seq, prev, "x", draft).payload() == canonical_json(fields)


@given(st.lists(st.integers(0, 600), max_size=5))
def test_a_tree_that_grows_in_batches_is_the_one_that_grows_by_single_leaves(
    batches: list[int],
) -> None:
    leaves = [bytes([number & 255, number >> 8]) * 16 for number in range(sum(batches))]
    single: list[bytes] = []
    for size, leaf in enumerate(leaves):
        single = merkle.extend(size, single, [leaf])
    peaks: list[bytes] = []
    at = 0
    for count in batches:
        peaks = merkle.extend(at, peaks, leaves[at : at + count])
        at += count
    assert peaks == single


async def test_proofs_from_tiles_verify_and_others_do_not(database: Database) -> None:
    leaves = await fill(database, 3, 250, 1, 2, 300, 144)
    async with database.readers() as session:
        assert await session.scalar(select(AuditTile.index).order_by(AuditTile.index.desc())) == 1
        for size in (1, 255, 256, 257, 512, SIZE):
            root = await store.root_at(session, size)
            assert root == merkle.fold(merkle.extend(0, [], leaves[:size]))
            for index in {0, size // 2, size - 1, min(size - 1, 255), min(size - 1, 256)}:
                path = await store.inclusion_proof(session, index, size)
                verify_inclusion(leaves[index], index, size, path, root)
                assert await store.leaf(session, index) == leaves[index]
            for old in {1, size // 2, size - 1} - {0}:
                proof = await store.consistency_proof(session, old, size)
                older = await store.root_at(session, old)
                verify_consistency(old, older, size, root, proof)
    found = await verdict(database)
    assert isinstance(found, Intact)
    assert found.events == SIZE


async def test_a_tree_of_three_levels_of_tiles_has_its_proofs(database: Database) -> None:
    """65536 leaves make a tile of tiles: written as the tree alone, without their events."""
    from service.audit import tree

    size = merkle.TILE * merkle.TILE
    leaves = [number.to_bytes(32) for number in range(size)]
    async with database.writers() as session, session.begin():
        for start in range(0, size, 8192):
            await tree.add(session, start, leaves[start : start + 8192])
    root = merkle.fold(merkle.extend(0, [], leaves))
    async with database.readers() as session:
        assert await session.scalar(select(AuditTile.index).where(AuditTile.level == 1)) == 0
        for index in (0, 255, 256, 40_000, size - 1):
            path = await store.inclusion_proof(session, index, size)
            verify_inclusion(leaves[index], index, size, path, root)
        older = await store.root_at(session, 300 * 100)
        proof = await store.consistency_proof(session, 300 * 100, size)
        verify_consistency(300 * 100, older, size, root, proof)


async def _delete(session: AsyncSession) -> None:
    await session.execute(delete(AuditReference).where(AuditReference.seq == 100))
    await session.execute(delete(AuditRow).where(AuditRow.seq == 100))


async def _delete_many(session: AsyncSession) -> None:
    await session.execute(delete(AuditReference).where(AuditReference.seq < 300))
    await session.execute(delete(AuditRow).where(AuditRow.seq < 300))


async def _tile(session: AsyncSession) -> None:
    await session.execute(update(AuditTile).where(AuditTile.index == 1).values(root=bytes(32)))


async def _tile_gone(session: AsyncSession) -> None:
    await session.execute(delete(AuditTile).where(AuditTile.index == 1))


async def _hide(session: AsyncSession) -> None:
    """A reference that says another time is not found between two moments."""
    await session.execute(
        update(AuditReference).where(AuditReference.seq == 100).values(occurred_at="2001")
    )


async def _forge_purge(session: AsyncSession) -> None:
    """Events deleted, and a purge appended that takes them all upon itself but is wrong by one."""
    await _delete(session)
    details = encode_details({"before": 300, "events": 2})
    forged = Draft(kind="audit.purged", actor_kind="system", actor="system", details=details)
    await store.append(session, [forged], now())


@pytest.mark.parametrize(
    ("what", "seq", "reason"),
    [
        (_delete, 100, "missing"),
        (_delete_many, 0, "missing"),
        (_tile, 256, "tile"),
        (_tile_gone, 256, "tile"),
        (_hide, 100, "repeats"),
        (_forge_purge, 100, "missing"),
    ],
)
async def test_an_attack_on_a_log_with_tiles_is_seen(
    database: Database, what: Attack, seq: int, reason: str
) -> None:
    await fill(database, SIZE)
    assert isinstance(await verdict(database), Intact)
    async with database.writers() as session, session.begin():
        await what(session)
    found = await verdict(database)
    assert isinstance(found, Broken)
    assert (found.seq, reason in found.reason) == (seq, True), found


async def test_an_event_that_is_there_twice_is_seen(database: Database) -> None:
    await fill(database, 5)
    async with database.writers() as session, session.begin():
        row = await session.scalar(select(AuditRow).where(AuditRow.seq == 3))
        assert row is not None
        values = {c.key: getattr(row, c.key) for c in AuditRow.__table__.columns}
        session.add(AuditRow(**values | {"at": "2001-01-01T00:00:00.000000Z"}))
    assert isinstance(await verdict(database), Broken)


async def test_a_tree_whose_peaks_were_cut_takes_nothing_more(database: Database) -> None:
    await fill(database, 5)
    async with database.writers() as session, session.begin():
        await session.execute(update(AuditCounter).values(peaks=""))
    with pytest.raises(Corrupt):
        await fill(database, 1)


async def test_progress_goes_up_to_the_end(database: Database) -> None:
    await fill(database, SIZE)
    told: list[tuple[int, int]] = []
    async with database.snapshots() as session:
        await verify_chain(session, NOBODY, (), lambda done, of: told.append((done, of)))
    assert told[-1] == (SIZE, SIZE)
