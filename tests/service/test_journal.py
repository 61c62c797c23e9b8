"""The journal, and what start-up does when it and the database differ."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy import delete, select

from policy.rules import parse_rule
from policy.signing import Verifier
from service.audit.models import AuditRow
from service.auth.actor import SYSTEM
from service.db.base import now
from service.db.session import Database, open_database
from service.journal.file import Journal
from service.journal.reconcile import Outcome, reconcile
from service.keys import components
from service.keys.provider import session_info
from service.keys.ring import LocalFileRing
from service.log import chain
from service.log import store as log_store
from service.log.models import LogRow
from service.rules import store as rules
from service.rules.models import Origin, RuleRow
from service.settings import ServiceSettings
from service.sidecars.models import Sidecar
from service.tenancy import changes as tenancy_changes
from service.tenancy import store as tenancy
from strongroom.errors import Conflict, Corrupt, Misuse, Unavailable
from strongroom.identity import ComponentId, ComponentKind, new_component_id
from strongroom.log import InvalidationKind
from tests.service.conftest import Copy
from tests.service.evidence import Evidence, new_signer, start
from tests.service.house import running as running_service


async def retire(evidence: Evidence, *ids: ComponentId) -> None:
    async with evidence.changes.begin(SYSTEM) as change:
        await components.destroy(change.session, ids)
        await change.invalidate(
            kind=InvalidationKind.COMPONENTS, components=ids or [new_component_id()]
        )


@asynccontextmanager
async def running(url: str, ring: LocalFileRing, journal: Path) -> AsyncIterator[Evidence]:
    """A started service's evidence; afterwards nothing of it is open."""
    database = open_database(url, session_info(ring))
    try:
        evidence = await start(database, journal)
        try:
            yield evidence
        finally:
            await evidence.journal.close()
    finally:
        await database.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal" / "log.jws"


async def outcome_of(
    database: Database, journal: Path, verifier: Verifier, *, accept_lost_journal: bool = False
) -> Outcome:
    from service.changes import Changes
    from service.log.kick import Kick

    opened = Journal(journal)
    await opened.open()
    try:
        changes = Changes(database, new_signer(), opened, Kick())
        return await reconcile(
            database, opened, changes, verifier, accept_lost_journal=accept_lost_journal
        )
    finally:
        await opened.close()


async def test_a_torn_last_line_is_cut_off_and_whole_ones_stay(path: Path) -> None:
    journal = Journal(path)
    await journal.open()
    await journal.append(["one", "two"])
    await journal.close()
    with path.open("ab") as file:
        file.write(b"thr")
    again = Journal(path)
    await again.open()
    await again.append(["three"])
    assert await again.lines() == ["one", "two", "three"]
    await again.close()


async def test_a_journal_that_others_may_read_is_refused(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("")
    path.chmod(0o644)
    journal = Journal(path)
    with pytest.raises(Misuse, match="permissions"):
        await journal.open()
    path.chmod(0o600)
    await journal.open()
    await journal.close()


async def test_a_second_process_does_not_get_the_journal(path: Path) -> None:
    first, second = Journal(path), Journal(path)
    await first.open()
    with pytest.raises(Conflict):
        await second.open()
    await first.close()
    await second.open()
    await second.close()


async def test_a_failed_append_leaves_no_half_line(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(path)
    await journal.open()
    await journal.append(["one"])
    write = os.write

    def half(descriptor: int, data: memoryview) -> int:
        if len(data) > 2:
            return write(descriptor, data[:2])
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(Unavailable):
        await journal.append(["two"])
    monkeypatch.undo()
    assert path.read_bytes() == b"one\n"
    await journal.append(["two"])
    assert await journal.lines() == ["one", "two"]
    await journal.close()


async def test_a_journal_that_cannot_be_cut_back_takes_nothing_until_it_is_opened_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(path)
    await journal.open()
    await journal.append(["one"])
    write = os.write

    def half(descriptor: int, data: memoryview) -> int:
        if len(data) > 2:
            return write(descriptor, data[:2])
        raise OSError(28, "no space left on device")

    def stuck(descriptor: int, size: int) -> None:
        raise OSError(5, "input/output error")

    monkeypatch.setattr(os, "write", half)
    monkeypatch.setattr(os, "ftruncate", stuck)
    with pytest.raises(Unavailable):
        await journal.append(["two"])
    monkeypatch.undo()
    with pytest.raises(Unavailable, match="opened again"):
        await journal.append(["two"])
    assert path.read_bytes() == b"one\ntw"
    await journal.close()
    again = Journal(path)
    await again.open()
    await again.append(["two"])
    assert await again.lines() == ["one", "two"]
    await again.close()


async def test_a_second_start_finds_both_alike(database: Database, path: Path) -> None:
    evidence = await start(database, path)
    await retire(evidence)
    await evidence.journal.close()
    before = path.read_bytes()
    assert await outcome_of(database, path, evidence.verifier) is Outcome.AGREED
    assert path.read_bytes() == before


@pytest.mark.parametrize("lost_lines", [1, 2])
async def test_a_journal_that_is_behind_is_completed(
    database: Database, path: Path, lost_lines: int
) -> None:
    evidence = await start(database, path)
    await retire(evidence)
    await retire(evidence)
    await evidence.journal.close()
    whole = path.read_bytes()
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:-lost_lines]))
    outcome = await outcome_of(database, path, evidence.verifier)
    assert outcome is Outcome.JOURNAL_COMPLETED
    assert path.read_bytes() == whole


async def test_a_log_that_had_just_begun_completes_an_empty_journal(
    database: Database, path: Path
) -> None:
    evidence = await start(database, path)
    await evidence.journal.close()
    whole = path.read_bytes()
    path.write_bytes(b"")
    outcome = await outcome_of(database, path, evidence.verifier)
    assert outcome is Outcome.JOURNAL_COMPLETED
    assert path.read_bytes() == whole


@pytest.mark.parametrize("gone", [True, False])
async def test_a_lost_journal_stops_the_start_until_it_is_accepted(
    database: Database, path: Path, gone: bool
) -> None:
    evidence = await start(database, path)
    await retire(evidence)
    await evidence.journal.close()
    whole = path.read_bytes()
    if gone:
        path.unlink()
    else:
        path.write_bytes(b"")
    for _ in range(2):
        with pytest.raises(Corrupt, match="setting accept_lost_journal") as refusal:
            await outcome_of(database, path, evidence.verifier)
        assert refusal.value.field == "accept_lost_journal"
        assert path.read_bytes() == b""
    outcome = await outcome_of(database, path, evidence.verifier, accept_lost_journal=True)
    assert outcome is Outcome.JOURNAL_LOST
    assert path.read_bytes() == whole
    async with database.readers() as session:
        rows = await session.scalars(select(AuditRow).where(AuditRow.kind == "log.journal_lost"))
        [alarm] = rows.all()
    assert (alarm.outcome, json.loads(alarm.details)) == ("alarm", {"entries": 2})
    # The setting left on, nothing is said again, and nothing else is accepted by it.
    outcome = await outcome_of(database, path, evidence.verifier, accept_lost_journal=True)
    assert outcome is Outcome.AGREED
    path.write_bytes(whole + whole)
    with pytest.raises(Corrupt):
        await outcome_of(database, path, evidence.verifier, accept_lost_journal=True)


async def test_the_service_takes_the_setting_of_a_lost_journal(settings: ServiceSettings) -> None:
    async with running_service(settings) as service:
        tenant = await service.tenant()
        asked = {"axis": "tenant", "target": tenant, "reason": "asked for", "wait": False}
        await service.operator.post("/v1/revocations", asked)
    (settings.journal / "log.jws").unlink()
    with pytest.raises(Corrupt, match="accept_lost_journal"):
        async with running_service(settings):
            pass  # pragma: no cover - it does not start
    accepting = settings.model_copy(update={"accept_lost_journal": True})
    async with running_service(accepting):
        assert (settings.journal / "log.jws").stat().st_size > 0


async def test_a_restored_database_destroys_again_what_it_had_forgotten(
    database_url: str, ring: LocalFileRing, path: Path, backup: Copy
) -> None:
    async with running(database_url, ring, path) as evidence:
        async with evidence.changes.begin(SYSTEM) as change:
            tenant = await tenancy.create_tenant(change.session, "acme")
            other = await tenancy.create_tenant(change.session, "globex")
            shared = await components.register(change.session, ComponentKind.MODEL, None)
            kept = await components.register(change.session, ComponentKind.MODEL, None)
            owned = await components.register(change.session, ComponentKind.GROUP, other.id)
            alice = await tenancy.create_principal(change.session, tenant.id, "alice")
            clerks = await tenancy.create_group(change.session, tenant.id, "clerks")
            bob = await tenancy.create_principal(change.session, tenant.id, "bob")
            await tenancy_changes.add_membership(change, clerks, bob)
            edition = rules.Edition(change, tenant.id, Origin.EDITED)
            for who in ("alice", "bob"):
                rule = parse_rule(f"user:{who}", "group:read", f"group:{clerks.id}", "allow")
                await edition.add(rule)
            await edition.close(tenant.revision)
            change.session.add(_sidecar("5" * 32))
            ids = (tenant.id, other.id, shared, kept, owned, alice.private_group)
        await retire(evidence)
    restored = await backup(database_url)
    tenant_id, other_id, shared, kept, owned, private = ids
    async with running(database_url, ring, path) as evidence:
        await retire(evidence, shared)
        await retire(evidence, other_id)
        async with evidence.changes.begin(SYSTEM) as change:
            principal = await tenancy.get_principal(change.session, tenant_id, "alice")
            await tenancy_changes.remove_principal(change, principal)
            member = await tenancy.get_principal(change.session, tenant_id, "bob")
            clerks = await tenancy.get_group(change.session, tenant_id, clerks.id)
            await tenancy_changes.remove_membership(change, clerks, member)
            revision = await tenancy.bump_revision(change.session, tenant_id)
            revision = await tenancy.bump_revision(change.session, tenant_id)
            await change.invalidate(
                kind=InvalidationKind.TENANT_REVISION, tenant=tenant_id, min_revision=revision
            )
            await change.invalidate(kind=InvalidationKind.SIDECAR, sidecar="5" * 32)
        async with evidence.database.readers() as session:
            forgotten = await log_store.head(session)

    async with running(restored, ring, path) as evidence:
        async with evidence.database.readers() as session:
            assert not await components.alive(session, [shared])
            assert not await components.alive(session, [other_id])
            assert not await components.alive(session, [owned])
            assert not await components.alive(session, [private])
            assert await components.alive(session, [kept])
            assert await components.alive(session, [tenant_id])
            assert await tenancy.find_principal(session, tenant_id, "alice") is None
            again = await tenancy.get_tenant(session, tenant_id)
            assert again.revision > revision
            assert (again.review_required, again.review_epoch) == (True, forgotten.epoch)
            left = await session.scalars(
                select(RuleRow.subject).where(RuleRow.removed_in.is_(None))
            )
            assert left.all() == ["user:bob"], "a removed subject's rules are removed with it"
            sidecar = await session.get(Sidecar, "5" * 32)
            assert sidecar is not None
            assert sidecar.revoked_at is not None
            head = await log_store.head(session)
            assert head.epoch != forgotten.epoch
            assert head.seq == 1
            alarm = await session.scalar(select(AuditRow).where(AuditRow.kind == "log.replayed"))
            assert alarm is not None
            assert alarm.outcome == "alarm"
            assert json.loads(alarm.details)["tenants_to_review"] == [tenant_id]
            rows = (await session.scalars(select(LogRow).order_by(LogRow.position))).all()
        links = chain.Chain()
        for row in rows:
            links.follow(chain.read(row.jws, evidence.verifier))
        assert [row.jws for row in rows] == await evidence.journal.lines()
        verifier = evidence.verifier
    reopened = open_database(restored, session_info(ring))
    assert await outcome_of(reopened, path, verifier) is Outcome.AGREED
    await reopened.close()


async def test_a_lost_database_begins_a_new_epoch_after_the_journal(
    database: Database, path: Path, tmp_path: Path, ring: LocalFileRing, dialect: str
) -> None:
    if dialect != "sqlite":
        pytest.skip("one empty database is like another")
    del ring
    first = await start(database, path)
    await retire(first)
    await first.journal.close()
    async with database.writers() as session, session.begin():
        from service.log.models import LogComponent, LogCounter

        for record in (LogComponent, LogRow, LogCounter):
            await session.execute(delete(record))
    again = await start(database, path)
    async with database.readers() as session:
        head = await log_store.head(session)
        stored = await log_store.all_after(session, 0, 10)
    assert head.seq == 1
    assert [entry.seq for entry in stored] == [1, 2, 1]
    await again.journal.close()


async def test_a_forked_journal_is_refused(
    database_url: str, ring: LocalFileRing, path: Path, backup: Copy
) -> None:
    async with running(database_url, ring, path) as evidence:
        await retire(evidence)
    copy = await backup(database_url)
    kept = path.read_bytes()
    async with running(database_url, ring, path) as evidence:
        await retire(evidence)
    forked = path.read_bytes()
    path.write_bytes(kept)
    async with running(copy, ring, path) as evidence:
        await retire(evidence)
    path.write_bytes(forked)
    with pytest.raises(Corrupt, match="differ"):
        async with running(copy, ring, path):
            pass  # pragma: no cover - it does not start


@pytest.mark.parametrize("damage", ["edited", "foreign", "reordered", "garbage", "gap"])
async def test_a_damaged_journal_is_refused(database: Database, path: Path, damage: str) -> None:
    evidence = await start(database, path)
    await retire(evidence)
    await retire(evidence)
    await evidence.journal.close()
    lines = path.read_text().splitlines()
    head = chain.head_of(chain.parse(lines[-1]))
    extra = chain.next_entry(head, now(), InvalidationKind.COMPONENTS)
    match damage:
        case "edited":
            lines[1] = lines[1][:-3] + "AAA"
        case "foreign":
            lines.append(chain.sign(extra, new_signer("thief")))
        case "reordered":
            lines[1], lines[2] = lines[2], lines[1]
        case "garbage":
            lines.append("not an entry")
        case _:
            skipped = chain.next_entry(chain.head_of(extra), now(), InvalidationKind.COMPONENTS)
            lines.append(chain.sign(skipped, evidence.signer))
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(Corrupt):
        await start(database, path)


async def test_a_database_whose_log_was_edited_is_refused(database: Database, path: Path) -> None:
    evidence = await start(database, path)
    await retire(evidence)
    await retire(evidence)
    await evidence.journal.close()
    async with database.writers() as session, session.begin():
        row = await session.scalar(select(LogRow).where(LogRow.seq == 2))
        assert row is not None
        row.jws = row.jws[:-3] + "AAA"
    with pytest.raises(Corrupt):
        await start(database, path)


def _sidecar(sidecar: str) -> Sidecar:
    return Sidecar(
        id=sidecar,
        name="node",
        signing_key="k",
        hpke_key="k",
        every_tenant=True,
        enrolled_at=now(),
        leases=0,
        epoch="",
        applied_seq=0,
        fenced_seq=0,
        reclaimed_seq=0,
    )
