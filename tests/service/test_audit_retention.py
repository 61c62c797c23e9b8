"""What is past its retention goes, what is held stays, and the log can be verified all the same."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import delete, func, select, text

from policy.transparency import verify_inclusion
from service.audit import holds, partitions, retention, store
from service.audit.events import Draft
from service.audit.models import AuditReference, AuditRow
from service.audit.retention import Purged
from service.audit.verify import Broken, Intact, verify_chain
from service.auth.actor import SYSTEM
from service.auth.tokens import Role
from service.db.base import now
from strongroom.identity import ComponentId, new_component_id
from tests.service.evidence import Evidence
from tests.service.house import Service
from tests.service.test_sidecars import World

OLD = datetime(2020, 3, 15, tzinfo=UTC)
NEXT = datetime(2020, 4, 2, tzinfo=UTC)
CUTOFF = datetime(2020, 4, 20, tzinfo=UTC)
HELD, OTHER = new_component_id(), new_component_id()


def drafts(tenant: ComponentId, count: int, kind: str = "access.load") -> list[Draft]:
    return [
        Draft(
            kind=kind,
            actor_kind="sidecar",
            actor="s",
            tenant=tenant,
            outcome="miss",
            references=(tenant,),
        )
        for _ in range(count)
    ]


@pytest.fixture
async def evidence(service: Service) -> Evidence:
    """The parts of a running service."""
    runtime = service.runtime
    return Evidence(
        runtime.database,
        runtime.signer,
        runtime.verifier,
        runtime.journal,
        runtime.kick,
        runtime.changes,
    )


async def fill(evidence: Evidence) -> int:
    """Five hundred events of two tenants in March, as many in April, and today's."""
    async with evidence.database.writers() as session, session.begin():
        await partitions.make_ahead(session, OLD)
    # The service began its log today; the old events follow, as if its clock had been behind.
    for moment in (OLD, NEXT):
        async with evidence.database.writers() as session, session.begin():
            await store.append(session, [*drafts(HELD, 200), *drafts(OTHER, 300)], moment)
            await store.append(session, drafts(OTHER, 1, "revocation.committed"), moment)
    async with evidence.database.writers() as session, session.begin():
        await store.append(session, drafts(OTHER, 300), now())
    async with evidence.changes.begin(SYSTEM) as change:
        await store.sign_head(change.session, evidence.signer, change.at)
    return (await verdict(evidence)).events  # type: ignore[union-attr]


async def verdict(evidence: Evidence) -> Intact | Broken:
    async with evidence.database.snapshots() as session:
        return await verify_chain(session, evidence.verifier)


async def purge(evidence: Evidence, cutoff: datetime = CUTOFF) -> Purged | None:
    async with evidence.changes.begin(SYSTEM) as change:
        return await retention.purge(change, cutoff)


async def left(evidence: Evidence, tenant: ComponentId) -> int:
    async with evidence.database.readers() as session:
        count = (
            select(func.count())
            .select_from(AuditRow)
            .where(AuditRow.tenant == tenant, AuditRow.kind == "access.load")
        )
        return await session.scalar(count) or 0


async def test_what_is_purged_leaves_every_proof(evidence: Evidence, dialect: str) -> None:
    size = await fill(evidence)
    async with evidence.database.readers() as session:
        first = await session.scalar(select(func.min(AuditRow.seq)).where(AuditRow.tenant == HELD))
        assert first is not None
        leaf = bytes.fromhex((await store.event(session, first)).hash())
        root = await store.root_at(session, size)
    done = await purge(evidence)
    assert done is not None
    # PostgreSQL drops whole months: April is not over at the cutoff.
    assert done.events == (500 if dialect == "postgresql" else 1000)
    found = await verdict(evidence)
    assert isinstance(found, Intact)
    assert found.purged == done.events
    async with evidence.database.readers() as session:
        assert await store.root_at(session, size) == root
        assert await store.leaf(session, first) == leaf
        path = await store.inclusion_proof(session, first, size)
        verify_inclusion(leaf, first, size, path, root)
        kinds = (await session.scalars(select(AuditRow.kind))).all()
        assert kinds.count("revocation.committed") == 2
        assert "audit.purged" in kinds
        orphans = select(AuditReference.seq).where(AuditReference.seq.not_in(select(AuditRow.seq)))
        assert (await session.scalars(orphans)).all() == []
    again = await purge(evidence)
    assert again is None


async def test_a_hold_keeps_what_it_covers_and_nothing_else(evidence: Evidence) -> None:
    await fill(evidence)
    async with evidence.changes.begin(SYSTEM) as change:
        from service.audit.models import AuditHold

        held = AuditHold(
            id="0" * 32,
            tenant=HELD,
            since=None,
            until=None,
            reason="matter",
            placed_by="root",
            placed_at="2020-01-01T00:00:00.000000Z",
            released_by=None,
            released_at=None,
        )
        change.session.add(held)
    before = await left(evidence, OTHER)
    await purge(evidence, datetime(2020, 5, 1, tzinfo=UTC))
    assert await left(evidence, HELD) == 400
    assert await left(evidence, OTHER) == before - 600
    assert isinstance(await verdict(evidence), Intact)
    async with evidence.changes.begin(SYSTEM) as change:
        await holds.release(change, "0" * 32, None)
    await purge(evidence, datetime(2020, 5, 1, tzinfo=UTC))
    assert await left(evidence, HELD) == 0
    assert isinstance(await verdict(evidence), Intact)


async def test_a_deletion_beside_a_purge_is_no_purge(evidence: Evidence) -> None:
    await fill(evidence)
    await purge(evidence)
    assert isinstance(await verdict(evidence), Intact)
    async with evidence.database.writers() as session, session.begin():
        # A revocation's event, older than the cutoff: a purge would have kept it.
        seq = await session.scalar(
            select(func.min(AuditRow.seq)).where(AuditRow.kind == "revocation.committed")
        )
        await session.execute(delete(AuditReference).where(AuditReference.seq == seq))
        await session.execute(delete(AuditRow).where(AuditRow.seq == seq))
    assert isinstance(await verdict(evidence), Broken)


@pytest.mark.parametrize("dialect", ["postgresql"], indirect=True)
async def test_months_have_partitions_ahead_and_lose_them_by_a_purge(evidence: Evidence) -> None:
    await fill(evidence)
    async with evidence.database.readers() as session:
        made = await partitions.months(session)
    this = partitions.Month.of(now())
    assert {this, this.later(1), this.later(2), partitions.Month(2020, 3)} <= set(made)
    await purge(evidence)
    async with evidence.database.readers() as session:
        gone = set(made) - set(await partitions.months(session))
    assert gone == {partitions.Month(2020, 3)}


@pytest.mark.parametrize("dialect", ["postgresql"], indirect=True)
async def test_events_without_a_partition_are_taken_and_move_when_it_is_made(
    evidence: Evidence,
) -> None:
    far = datetime(2031, 7, 9, tzinfo=UTC)
    async with evidence.database.writers() as session, session.begin():
        await store.append(session, drafts(OTHER, 100), far)
    async with evidence.database.readers() as session:
        assert await session.scalar(text("SELECT count(*) FROM audit_events_default")) == 100
    async with evidence.database.writers() as session, session.begin():
        await partitions.make_ahead(session, far)
    async with evidence.database.readers() as session:
        assert await session.scalar(text("SELECT count(*) FROM audit_events_default")) == 0
        assert await session.scalar(text("SELECT count(*) FROM audit_events_2031_07")) == 100
    assert isinstance(await verdict(evidence), Intact)


async def test_holds_are_placed_listed_and_released_each_tenant_for_itself(
    service: Service,
) -> None:
    tenant, other = await service.tenant(), await service.tenant("globex")
    mine, theirs = (service.party("adm", each, Role.TENANT_ADMIN) for each in (tenant, other))
    placed = await mine.post("/v1/audit/holds", {"reason": "matter 1"})
    assert placed["tenant"] == tenant
    assert [each["id"] for each in (await mine.get("/v1/audit/holds"))["items"]] == [placed["id"]]
    assert (await theirs.get("/v1/audit/holds"))["items"] == []
    path = f"/v1/audit/holds/{placed['id']}"
    assert (await theirs.ask("DELETE", path)).status_code == 404
    foreign = {"reason": "x", "tenant": tenant}
    assert (await theirs.ask("POST", "/v1/audit/holds", foreign)).status_code == 404
    released = await mine.delete(path)
    assert released["released_by"] == "adm"
    assert (await mine.ask("DELETE", path)).status_code == 409
    kinds = [each["kind"] for each in (await mine.get("/v1/audit/events", kind="hold."))["items"]]
    assert kinds == ["hold.placed", "hold.released"]


async def test_a_hold_stops_no_revocation(service: Service) -> None:
    world = await World(service).build()
    await service.operator.post("/v1/audit/holds", {"reason": "everything"})
    body: dict[str, Any] = {"axis": "document_version", "target": world.document, "reason": "x"}
    answer = await service.operator.post("/v1/revocations", body)
    assert answer["in_force_at"]


async def test_a_retention_that_is_not_set_purges_nothing(service: Service) -> None:
    upkeep = service.app.state.upkeep
    assert await upkeep.purge(now() + timedelta(days=10_000)) is None
