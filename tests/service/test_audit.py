"""The chain shows every edit, and the questions are answered, each tenant for itself."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from policy.audit_heads import verify_head
from policy.transparency import verify_consistency, verify_inclusion
from service.audit import store
from service.audit.models import AuditCounter, AuditHead, AuditReference, AuditRow, AuditTile
from service.audit.verify import Broken, Intact, verify_chain
from service.auth.actor import SYSTEM
from service.auth.tokens import Role
from service.db.base import now
from service.db.session import Database
from strongroom.control import SpoolEvent
from strongroom.errors import Refused
from strongroom.identity import new_component_id
from strongroom.spool import event_hash, genesis
from tests.service.evidence import Evidence, start
from tests.service.house import Service
from tests.service.sidecar_party import SidecarParty, enrolled
from tests.service.test_sidecars import World

Attack = Callable[[AsyncSession], Awaitable[object]]
COMPONENT = new_component_id()


@pytest.fixture
async def evidence(database: Database, tmp_path: Path) -> AsyncIterator[Evidence]:
    started = await start(database, tmp_path / "journal" / "log.jws")
    for number in range(7):
        async with started.changes.begin(SYSTEM) as change:
            await change.audit(
                "test.event",
                subject=f"subject-{number}",
                details={"number": number},
                references=[COMPONENT],
            )
    yield started
    await started.journal.close()


async def verdict(evidence: Evidence, *kept: str) -> Intact | Broken:
    heads = [verify_head(each, evidence.verifier) for each in kept]
    async with evidence.database.readers() as session:
        return await verify_chain(session, evidence.verifier, heads)


async def signed(evidence: Evidence) -> str:
    async with evidence.changes.begin(SYSTEM) as change:
        return (await store.sign_head(change.session, evidence.signer, change.at)).jws


async def attack(evidence: Evidence, what: Attack) -> None:
    async with evidence.database.writers() as session, session.begin():
        await what(session)


async def test_an_untouched_chain_is_intact(evidence: Evidence) -> None:
    await signed(evidence)
    found = await verdict(evidence)
    assert isinstance(found, Intact)
    assert found.events == 8
    async with evidence.database.readers() as session:
        assert (await store.counter(session))[2].hex() == found.root
        assert (await store.root_at(session, 8)).hex() == found.root


def _edit(**values: Any) -> Attack:
    return lambda session: session.execute(
        update(AuditRow).where(AuditRow.seq == 3).values(**values)
    )


async def _delete(session: AsyncSession) -> None:
    await session.execute(delete(AuditReference).where(AuditReference.seq == 3))
    await session.execute(delete(AuditRow).where(AuditRow.seq == 3))


async def _swap(session: AsyncSession) -> None:
    """The contents of two events change places, hashes and all."""
    columns = [c.key for c in AuditRow.__table__.columns if c.key != "seq"]
    rows = {}
    for seq in (3, 4):
        row = await session.scalar(select(AuditRow).where(AuditRow.seq == seq))
        assert row is not None
        rows[seq] = {name: getattr(row, name) for name in columns}
    await session.execute(update(AuditRow).where(AuditRow.seq == 3).values(**rows[4]))
    await session.execute(update(AuditRow).where(AuditRow.seq == 4).values(**rows[3]))


async def _cut(session: AsyncSession) -> None:
    await session.execute(delete(AuditReference).where(AuditReference.seq >= 5))
    await session.execute(delete(AuditRow).where(AuditRow.seq >= 5))


async def _cut_with_counter(session: AsyncSession) -> None:
    """As `_cut`, and counter and nodes are made to fit what is left."""
    from service.audit import merkle

    await _cut(session)
    rows = (await session.scalars(select(AuditRow).order_by(AuditRow.seq))).all()
    peaks: list[bytes] = []
    for row in rows:
        peaks = merkle.extend(row.seq, peaks, [bytes.fromhex(row.hash)])
    await session.execute(delete(AuditTile))
    await session.execute(
        update(AuditCounter).values(size=5, hash=rows[-1].hash, peaks=b"".join(peaks).hex())
    )


async def _rewrite(session: AsyncSession) -> None:
    """An event is changed and every hash after it made anew: the chain alone cannot tell."""
    from service.audit import merkle

    rows = (await session.scalars(select(AuditRow).order_by(AuditRow.seq))).all()
    references = await store.references_of(session, [row.seq for row in rows])
    prev, peaks = "", list[bytes]()
    for row in rows:
        if row.seq == 3:
            row.subject = "somebody else"
        row.prev = prev
        row.hash = prev = store.event_of(row, references[row.seq]).hash()
        peaks = merkle.extend(row.seq, peaks, [bytes.fromhex(prev)])
    await session.execute(update(AuditCounter).values(hash=prev, peaks=b"".join(peaks).hex()))


@pytest.mark.parametrize(
    ("what", "seq", "reason"),
    [
        (_edit(subject="somebody else"), 3, "content"),
        (_edit(outcome="miss"), 3, "content"),
        (_edit(at="2020-01-01T00:00:00.000000Z"), 3, "content"),
        (_edit(occurred_at="2020-01-01T00:00:00.000000Z"), 3, "content"),
        (_edit(tenant=COMPONENT), 3, "content"),
        (_edit(details='{"number":4}'), 3, "content"),
        (_edit(details="not json"), 3, "content"),
        (_edit(category="served"), 3, "category"),
        (_edit(hash="0" * 64), 3, "content"),
        (
            lambda session: session.execute(delete(AuditReference).where(AuditReference.seq == 3)),
            3,
            "content",
        ),
        (_delete, 3, "missing"),
        (_swap, 3, "follow"),
        (_cut, 5, "cut off"),
    ],
    ids=[
        "subject edited",
        "outcome edited",
        "time edited",
        "time of the event edited",
        "tenant edited",
        "details edited",
        "details damaged",
        "category edited",
        "hash edited",
        "reference taken away",
        "event deleted",
        "events swapped",
        "tail cut",
    ],
)
async def test_every_attack_on_the_rows_is_seen(
    evidence: Evidence, what: Attack, seq: int, reason: str
) -> None:
    assert isinstance(await verdict(evidence), Intact)
    await attack(evidence, what)
    found = await verdict(evidence)
    assert isinstance(found, Broken)
    assert found.seq == seq
    assert reason in found.reason


@pytest.mark.parametrize("what", [_rewrite, _cut_with_counter], ids=["rewritten", "cut to fit"])
async def test_a_chain_made_anew_is_seen_by_a_signed_head(evidence: Evidence, what: Attack) -> None:
    head = await signed(evidence)
    await attack(evidence, what)
    assert isinstance(await verdict(evidence), Broken)
    # Whoever can rewrite the chain can also take the stored heads away; not the one kept elsewhere.
    await attack(evidence, lambda session: session.execute(delete(AuditHead)))
    assert isinstance(await verdict(evidence), Intact)
    assert isinstance(await verdict(evidence, head), Broken)


async def test_a_head_that_this_service_did_not_sign_is_seen(evidence: Evidence) -> None:
    from tests.service.evidence import new_signer

    await signed(evidence)
    async with evidence.database.writers() as session, session.begin():
        row = await session.scalar(select(AuditHead))
        assert row is not None
        forged = new_signer("thief").sign("strongroom-audit-head+jws", b"{}")
        row.jws = forged
    assert isinstance(await verdict(evidence), Broken)
    with pytest.raises(Refused):
        verify_head(forged, evidence.verifier)


async def test_events_of_concurrent_changes_have_places_without_gaps(evidence: Evidence) -> None:
    import asyncio

    async def one(number: int) -> None:
        async with evidence.changes.begin(SYSTEM) as change:
            await change.audit("test.event", details={"number": number})

    await asyncio.gather(*(one(number) for number in range(10)))
    found = await verdict(evidence)
    assert isinstance(found, Intact)
    assert found.events == 18


async def test_proofs_over_http_verify_against_signed_heads(service: Service) -> None:
    operator = service.operator
    first = await operator.post("/v1/audit/heads", None)
    await service.tenant()
    second = await operator.post("/v1/audit/heads", None)
    old, new = (verify_head(head["jws"], service.runtime.verifier) for head in (first, second))
    assert old.size < new.size
    proof = await operator.get("/v1/audit/proofs/consistency", old_size=old.size, size=new.size)
    verify_consistency(
        old.size,
        bytes.fromhex(old.root),
        new.size,
        bytes.fromhex(new.root),
        [bytes.fromhex(step) for step in proof["path"]],
    )
    inclusion = await operator.get("/v1/audit/proofs/inclusion", seq=1, size=new.size)
    verify_inclusion(
        bytes.fromhex(inclusion["leaf"]),
        1,
        new.size,
        [bytes.fromhex(step) for step in inclusion["path"]],
        bytes.fromhex(new.root),
    )
    checked = await operator.post("/v1/audit/verify", {"head": first["jws"]})
    assert checked["intact"]
    assert (await operator.get("/v1/audit/heads/latest"))["size"] == new.size


def spooled(spool: str, *events: dict[str, Any], first: int = 1) -> list[SpoolEvent]:
    """Events in one spool's chain."""
    prev, made = genesis(spool), []
    for count, fields in enumerate(events, start=first):
        at = fields.pop("at", now().isoformat())
        made.append(SpoolEvent(count=count, prev=prev, at=at, **fields))
        prev = event_hash(made[-1])
    return made


async def alarms(service: Service) -> list[str]:
    answer = await service.operator.get("/v1/audit/events", outcome="alarm")
    return [event["kind"] for event in answer["items"]]


def lookup(**fields: Any) -> dict[str, Any]:
    return {"kind": "lookup", "outcome": "hit", **fields}


async def test_a_spool_is_taken_in_order_and_each_event_once(service: Service) -> None:
    tenant = await service.tenant()
    party = await enrolled(service, tenant)
    events = spooled("spool-000001", *(lookup(tenant=tenant, subject="alice") for _ in range(3)))
    for part, after in ((events[:2], 3), (events[:2], 3), (events, 4)):
        response = await party.ship("spool-000001", part)
        assert response.json() == {"next_count": after}
    found = await service.operator.get("/v1/audit/events", kind="access.lookup")
    assert [event["details"]["count"] for event in found["items"]] == [1, 2, 3]
    assert await alarms(service) == []


@pytest.mark.parametrize(
    ("what", "alarm"),
    [
        ("gap", "alarm.spool_gap"),
        ("fork", "alarm.spool_fork"),
        ("new", "alarm.spool_new"),
        ("foreign", "alarm.foreign_tenant"),
    ],
)
async def test_what_does_not_fit_is_taken_and_raises_an_alarm(
    service: Service, what: str, alarm: str
) -> None:
    tenant, other = await service.tenant(), await service.tenant("globex")
    party = await enrolled(service, tenant)
    spool = "spool-000001"
    good = spooled(spool, *(lookup(tenant=tenant) for _ in range(4)))
    await party.ship(spool, good[:2])
    assert await alarms(service) == []
    match what:
        case "gap":
            await party.ship(spool, good[3:])
        case "fork":
            [forked] = spooled(spool, lookup(tenant=tenant, subject="x"), first=3)
            await party.ship(spool, [forked])
        case "new":
            await party.ship("spool-000002", spooled("spool-000002", lookup(tenant=tenant)))
        case _:
            last = SpoolEvent(
                count=3, prev=event_hash(good[1]), at="", kind="load", outcome="hit", tenant=other
            )
            await party.ship(spool, [last])
    assert await alarms(service) == [alarm]
    taken = await service.operator.get("/v1/audit/events", kind="access.")
    assert len(taken["items"]) == 3


async def test_another_tenants_name_in_a_spool_does_not_reach_that_tenants_trail(
    service: Service,
) -> None:
    tenant, other = await service.tenant(), await service.tenant("globex")
    party = await enrolled(service, tenant)
    await party.ship("spool-000001", spooled("spool-000001", lookup(tenant=other)))
    auditor = service.party("aud", other, Role.AUDITOR)
    answer = await auditor.get("/v1/audit/events", kind="access.")
    assert answer["items"] == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"count": 0},
        {"kind": "Not A Word"},
        {"outcome": ""},
        {"namespaces": ["x"]},
        {"subject": "s" * 257},
    ],
)
async def test_an_event_that_cannot_be_one_is_refused(
    service: Service, wrong: dict[str, Any]
) -> None:
    party = await enrolled(service)
    fields = {"count": 1, "prev": "", "at": "", "kind": "load", "outcome": "hit"} | wrong
    response = await party.send("POST", "/audit", {"spool": "spool-000001", "events": [fields]})
    assert response.status_code == 422


class Accessed:
    """Two tenants; the first one's document was granted, leased and served."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def build(self) -> Accessed:
        service = self.service
        self.world = await World(service).build()
        self.other = await World(service).build("globex")
        artefacts = await service.artefacts()
        self.party: SidecarParty = await enrolled(service)
        self.spool: list[dict[str, Any]] = []
        self.shipped = 0
        self.names = {}
        for world in (self.world, self.other):
            granted = await world.grant(artefacts)
            claims, _ = self.party.open_lease(await self.party.key_lease(granted["grant"]))
            self.names[world.tenant] = [each.namespace for each in claims.info.namespaces]
            await self.serve(world, self.names[world.tenant])
        return self

    async def serve(self, world: World, namespaces: list[str], **fields: Any) -> None:
        served = {
            "kind": "load",
            "outcome": "hit",
            "tenant": world.tenant,
            "subject": "alice",
            "request": "r1",
            "namespaces": namespaces,
            "tokens": 128,
            "tier": "host",
        }
        self.spool.append(served | fields)
        every = spooled("spool-000001", *(dict(event) for event in self.spool))
        # `at` differs each time the chain is made, so only the new tail is sent, unchained.
        response = await self.party.ship("spool-000001", every[-1:])
        assert response.is_success, response.text


async def test_who_accessed_a_document_names_its_readers_and_nobody_elses(
    service: Service,
) -> None:
    accessed = await Accessed(service).build()
    world, other = accessed.world, accessed.other
    found = await service.operator.get("/v1/audit/accesses", document=world.document)
    kinds = {event["kind"] for event in found["items"]}
    assert kinds == {"grant.issued", "key.leased", "access.load"}
    assert {event["tenant"] for event in found["items"]} == {world.tenant}
    assert {event["subject"] for event in found["items"]} == {"alice"}
    load = next(event for event in found["items"] if event["kind"] == "access.load")
    assert (load["tokens"], load["tier"], load["request"]) == (128, "host", "r1")
    theirs = await service.operator.get("/v1/audit/accesses", document=other.document)
    assert {event["tenant"] for event in theirs["items"]} == {other.tenant}


async def test_an_access_to_other_documents_only_is_not_this_documents(service: Service) -> None:
    accessed = await Accessed(service).build()
    world = accessed.world
    [first, *_] = accessed.names[world.tenant]
    before = await service.operator.get("/v1/audit/accesses", document=world.document)
    await accessed.serve(world, [first])
    after = await service.operator.get("/v1/audit/accesses", document=world.document)
    assert len(after["items"]) == len(before["items"])


async def test_accesses_are_found_between_two_moments(service: Service) -> None:
    accessed = await Accessed(service).build()
    world = accessed.world
    old = "2020-05-05T05:05:05.000000+00:00"
    await accessed.serve(world, accessed.names[world.tenant], at=old, request="old")
    asked = {"tenant": world.tenant, "kind": "load"}
    found = await service.operator.get(
        "/v1/audit/accesses", since="2020-01-01T00:00:00Z", until="2021-01-01T00:00:00Z", **asked
    )
    assert [event["request"] for event in found["items"]] == ["old"]
    recent = (now() - timedelta(hours=1)).isoformat()
    found = await service.operator.get("/v1/audit/accesses", since=recent, **asked)
    assert [event["request"] for event in found["items"]] == ["r1"]


async def test_what_derived_from_a_document_is_listed_and_shown_to_be_gone(
    service: Service,
) -> None:
    accessed = await Accessed(service).build()
    world = accessed.world
    before = await service.operator.get("/v1/audit/derived", document=world.document)
    assert {each["namespace"] for each in before["items"]} == set(accessed.names[world.tenant][1:])
    assert not any(each["retired"] for each in before["items"])
    await service.operator.post(
        "/v1/revocations",
        {"axis": "document_version", "target": world.document, "reason": "x", "wait": False},
    )
    after = await service.operator.get("/v1/audit/derived", document=world.document, limit=1)
    assert after["next_cursor"]
    rest = await service.operator.get(
        "/v1/audit/derived", document=world.document, limit=1, cursor=after["next_cursor"]
    )
    both = [*after["items"], *rest["items"]]
    assert rest["next_cursor"] is None
    assert [each["retired"] for each in both] == [True, True]
    assert all(each["retired_components"] == [world.document] for each in both)


async def test_an_access_after_a_revocation_is_found_and_one_before_is_not(
    service: Service,
) -> None:
    accessed = await Accessed(service).build()
    world = accessed.world
    answer = await service.operator.post(
        "/v1/revocations",
        {"axis": "document_version", "target": world.document, "reason": "x"},
    )
    path = f"/v1/audit/revocations/{answer['id']}/accesses"
    assert (await service.operator.get(path))["items"] == []
    later = (now() + timedelta(seconds=60)).isoformat()
    names = accessed.names[world.tenant]
    await accessed.serve(world, names[:1], at=later)
    await accessed.serve(world, names, at=later, outcome="miss", reason="revoked")
    assert (await service.operator.get(path))["items"] == []
    await accessed.serve(world, names, at=later, request="leak")
    found = await service.operator.get(path)
    assert [event["request"] for event in found["items"]] == ["leak"]


async def test_denials_are_counted_by_reason(service: Service) -> None:
    accessed = await Accessed(service).build()
    world = accessed.world
    for _ in range(2):
        await accessed.serve(world, [], outcome="miss", reason="permission", kind="denied")
    await accessed.serve(world, [], outcome="miss", reason="nvme", kind="lookup")
    found = await service.operator.get("/v1/audit/denials", tenant=world.tenant)
    assert {"kind": "access.denied", "reason": "permission", "count": 2} in found["items"]
    assert all(each["reason"] != "nvme" for each in found["items"])


async def test_a_cross_tenant_hit_is_found_and_there_is_none_otherwise(service: Service) -> None:
    accessed = await Accessed(service).build()
    world, other = accessed.world, accessed.other
    assert (await service.operator.get("/v1/audit/cross-tenant-hits"))["items"] == []
    await accessed.serve(world, accessed.names[other.tenant], request="leak")
    await accessed.serve(world, accessed.names[other.tenant], outcome="miss", request="safe")
    found = await service.operator.get("/v1/audit/cross-tenant-hits")
    assert [event["request"] for event in found["items"]] == ["leak"]


async def test_a_tenants_auditor_sees_that_tenants_events_and_no_others(
    service: Service,
) -> None:
    accessed = await Accessed(service).build()
    world, other = accessed.world, accessed.other
    auditor = service.party("aud", world.tenant, Role.AUDITOR)
    for path in ("/v1/audit/events", "/v1/audit/accesses"):
        found = await auditor.get(path, limit=1000)
        assert {event["tenant"] for event in found["items"]} == {world.tenant}
    exported = (await auditor.ask("GET", "/v1/audit/events.jsonl")).text.splitlines()
    assert {json.loads(line)["tenant"] for line in exported} == {world.tenant}
    for path, params in (
        ("/v1/audit/events", {"tenant": other.tenant}),
        ("/v1/audit/accesses", {"document": other.document}),
        ("/v1/audit/derived", {"document": other.document}),
    ):
        assert (await auditor.ask("GET", path, params=params)).status_code == 404
    for method, path in (("POST", "/v1/audit/heads"), ("GET", "/v1/audit/heads/latest")):
        assert (await auditor.ask(method, path)).status_code == 403
    assert (await auditor.ask("POST", "/v1/audit/verify", {})).status_code == 403
    for party in (world.alice, service.party("gw", "", Role.GATEWAY)):
        assert (await party.ask("GET", "/v1/audit/events")).status_code == 403
    assert (await service.nobody.ask("GET", "/v1/audit/events")).status_code == 401


@pytest.mark.parametrize("order", ["asc", "desc", "chain"])
async def test_pages_hold_every_event_once_in_order(service: Service, order: str) -> None:
    await Accessed(service).build()
    found: list[tuple[str, int]] = []
    cursor: str | None = None
    while True:
        params = {"limit": 4, "order": order} | ({"cursor": cursor} if cursor else {})
        page = await service.operator.get("/v1/audit/events", **params)
        found += [(event["occurred_at"], event["seq"]) for event in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    async with service.runtime.sessions() as session:
        count = await session.scalar(select(func.count()).select_from(AuditRow))
    assert sorted(seq for _, seq in found) == list(range(count or 0))
    by_place = (lambda place: place[1]) if order == "chain" else None
    assert found == sorted(found, key=by_place, reverse=order == "desc")


async def test_a_cursor_of_another_listing_is_refused(service: Service) -> None:
    await Accessed(service).build()
    page = await service.operator.get("/v1/audit/events", limit=1)
    response = await service.operator.ask("GET", "/v1/audit/events", params={"cursor": "AAAA"})
    assert response.status_code == 422
    assert page["next_cursor"]


async def test_an_export_has_every_event_and_is_one_itself(service: Service) -> None:
    await Accessed(service).build()
    response = await service.operator.ask("GET", "/v1/audit/events.jsonl")
    assert response.headers["content-type"].startswith("application/jsonl")
    events = [json.loads(line) for line in response.text.splitlines()]
    assert [event["seq"] for event in events] == list(range(len(events)))
    assert events[-1]["kind"] == "audit.exported"


async def test_the_report_counts_what_has_to_be_nothing_and_what_was_denied(
    service: Service,
) -> None:
    accessed = await Accessed(service).build()
    world, other = accessed.world, accessed.other
    await accessed.serve(world, [], outcome="miss", reason="permission", kind="denied")
    clean = await service.operator.get("/v1/audit/report")
    assert (clean["cross_tenant_hits"], clean["accesses_after_revocation"]) == (0, 0)
    assert {"kind": "access.denied", "reason": "permission", "count": 1} in clean["denials"]
    answer = await service.operator.post(
        "/v1/revocations",
        {"axis": "document_version", "target": world.document, "reason": "x", "wait": False},
    )
    behind = await service.operator.get("/v1/audit/report")
    assert behind["oldest_unacknowledged"]["sidecar"] == accessed.party.id
    later = (now() + timedelta(milliseconds=1)).isoformat()
    await accessed.serve(world, accessed.names[world.tenant], at=later)
    await accessed.serve(other, accessed.names[world.tenant][:1], at=later)
    found = await service.operator.get("/v1/audit/report")
    assert answer["id"]
    assert (found["cross_tenant_hits"], found["accesses_after_revocation"]) == (1, 1)
    assert found["alarms"] >= 1
    mine = service.party("aud", world.tenant, Role.AUDITOR)
    theirs = await mine.get("/v1/audit/report")
    assert (theirs["cross_tenant_hits"], theirs["accesses_after_revocation"]) == (0, 1)
    assert theirs["oldest_unacknowledged"] is None
