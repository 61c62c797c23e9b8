"""Several processes of the service over one PostgreSQL, one key directory and one journal."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy import delete, select, update

from service.auth.actor import SYSTEM
from service.auth.tokens import Role
from service.db.session import Database
from service.journal.file import Journal
from service.log import chain
from service.log import store as log_store
from service.log.models import LogComponent, LogCounter, LogRow
from service.log.stream import stream
from service.log.together import Together
from service.settings import ServiceSettings
from service.sidecars.roster import Roster
from strongroom.errors import Conflict, Corrupt, Unavailable
from strongroom.identity import new_component_id
from strongroom.log import InvalidationKind
from tests.service.house import Service, running
from tests.service.sidecar_party import SidecarParty, enrolled
from tests.service.test_sidecars import World


@pytest.fixture
def dialect() -> str:
    return "postgresql"


@asynccontextmanager
async def replicas(settings: ServiceSettings) -> AsyncIterator[tuple[Service, Service]]:
    async with running(settings) as one, running(settings) as two:
        yield one, two


@pytest.fixture
async def both(settings: ServiceSettings) -> AsyncIterator[tuple[Service, Service]]:
    slow = settings.model_copy(update={"stream_heartbeat_s": 60.0})
    async with replicas(slow) as started:
        yield started


def at(service: Service, party: SidecarParty) -> SidecarParty:
    """The same sidecar, speaking to another replica."""
    there = SidecarParty(service.http, party.name)
    there.signer, there.hpke = party.signer, party.hpke
    there.id, there.epoch, there.verifier = party.id, party.epoch, party.verifier
    return there


async def retire(service: Service) -> int:
    async with service.runtime.changes.begin(SYSTEM) as change:
        entry = await change.invalidate(
            kind=InvalidationKind.COMPONENTS, components=[new_component_id()]
        )
    return entry.seq


async def test_replicas_that_write_at_once_leave_one_log_and_one_journal_of_it(
    both: tuple[Service, Service],
) -> None:
    one, two = both
    seqs = await asyncio.gather(*(retire(both[number % 2]) for number in range(40)))
    assert sorted(seqs) == list(range(2, 42))
    async with one.runtime.sessions() as session:
        stored = await log_store.all_after(session, 0, 100)
    links = chain.Chain()
    for each in stored:
        links.follow(chain.read(each.jws, one.runtime.verifier))
    lines = await one.runtime.journal.lines()
    # What each replica was told is there, in the log's order; the other's last one may be too.
    assert lines == [each.jws for each in stored]
    assert lines == await two.runtime.journal.lines()


async def test_an_entry_committed_by_one_replica_wakes_the_streams_of_the_other(
    both: tuple[Service, Service],
) -> None:
    one, two = both

    async def yes() -> bool:
        return True

    async with one.runtime.sessions() as session:
        head = await log_store.head(session)
    follower = stream(two.runtime.tail, head.epoch, head.seq, 60.0, yes, 100)
    async with aclosing(follower) as events:
        await anext(events)
        coming = asyncio.ensure_future(anext(events))  # noqa: TID251 - awaited below
        await asyncio.sleep(0)
        seq = await retire(one)
        event = (await asyncio.wait_for(coming, 5)).decode()
    assert event.startswith(f"id: {head.epoch}:{seq}\n")


async def test_an_acknowledgement_at_one_replica_rings_at_the_one_that_waits(
    both: tuple[Service, Service],
) -> None:
    one, two = both
    party = await enrolled(one)
    seq = await retire(one)
    rung = one.runtime.desk.acks.listen()
    assert (await at(two, party).ack(seq)).status_code == 204
    await asyncio.wait_for(rung.wait(), 5)


async def test_a_revocation_at_one_replica_is_in_force_once_acknowledged_at_the_other(
    both: tuple[Service, Service],
) -> None:
    one, two = both
    world = await World(one).build()
    party = await enrolled(one, world.tenant)
    await at(two, party).serving_lease()
    body = {"axis": "document_version", "target": world.document, "reason": "x"}
    before = (await party.log()).head_seq
    async with asyncio.TaskGroup() as tasks:
        revoking = tasks.create_task(one.operator.post("/v1/revocations", body))
        while (head := (await party.log()).head_seq) == before:
            await asyncio.sleep(0)
        assert (await at(two, party).ack(head)).status_code == 204
        answer = await asyncio.wait_for(revoking, 3)
    assert [each["state"] for each in answer["sidecars"]] == ["fenced"]


async def test_no_replica_keeps_a_secret_or_a_decision_past_an_invalidation(
    both: tuple[Service, Service],
) -> None:
    one, two = both
    world = await World(one).build()
    artefacts = await one.artefacts()
    there = World(two)
    there.tenant, there.group, there.document = world.tenant, world.group, world.document
    there.alice = two.party("alice", world.tenant, Role.SUBJECT)
    party = at(two, await enrolled(one, world.tenant))
    before = await there.grant(artefacts)
    assert (await party.key_lease(before["grant"])).status_code == 200
    where = f"/v1/tenants/{world.tenant}"
    rule = await one.operator.post(
        f"{where}/rules",
        {
            "subject": "user:alice",
            "action": "group:read",
            "resource": f"group:{world.group}",
            "effect": "deny",
        },
    )
    assert (await there.grant(artefacts))["granted_tokens"] < before["granted_tokens"]
    assert (await party.key_lease(before["grant"])).status_code == 403
    await one.operator.delete(f"{where}/rules/{rule['id']}")
    again = await there.grant(artefacts)
    assert again["granted_tokens"] == before["granted_tokens"]
    assert (await party.key_lease(again["grant"])).status_code == 200
    body = {"axis": "document_version", "target": world.document, "reason": "x", "wait": False}
    await one.operator.ask("POST", "/v1/revocations", body)
    assert (await there.grant(artefacts))["granted_tokens"] < before["granted_tokens"]
    assert (await party.key_lease(again["grant"])).status_code == 403


async def test_a_replica_that_keeps_another_journal_does_not_start(
    settings: ServiceSettings, tmp_path: Path
) -> None:
    async with running(settings):
        elsewhere = settings.model_copy(update={"journal_directory": tmp_path / "elsewhere"})
        with pytest.raises(Conflict, match="another journal"):
            async with running(elsewhere):
                pass
        async with running(settings):
            pass


async def put_back(database: Database, entries: int) -> None:
    """The database forgets the last entries of its log, as one does that failed over too early."""
    async with database.writers() as session, session.begin():
        counter = await session.scalar(select(LogCounter))
        assert counter is not None
        kept = counter.position - entries
        last = await session.scalar(select(LogRow).where(LogRow.position == kept))
        assert last is not None
        await session.execute(delete(LogComponent).where(LogComponent.position > kept))
        await session.execute(delete(LogRow).where(LogRow.position > kept))
        await session.execute(
            update(LogCounter).values(position=kept, seq=last.seq, hash=last.hash)
        )


async def test_a_database_put_back_under_running_replicas_is_not_served_until_a_start_settles_it(
    settings: ServiceSettings,
) -> None:
    async with replicas(settings) as (one, two):
        party = await enrolled(one)
        await retire(one)
        await retire(two)
        claims = await at(two, party).serving_lease()
        await put_back(two.runtime.database, 1)
        with pytest.raises(Unavailable, match="put back"):
            await retire(two)
        refused = await at(two, party).send(
            "POST", "/serving-lease", {"nonce": secrets.token_hex(16), "epoch": "", "seq": 0}
        )
        assert refused.status_code == 503
        # The other replica has not journalled that far itself: the journal tells it, before it
        # commits an entry that the journal could never take.
        with pytest.raises(Unavailable, match="put back"):
            await retire(one)
        async with one.runtime.sessions() as session:
            assert (await log_store.head(session)).seq == claims.seq - 1


async def test_a_start_after_a_database_was_put_back_reaches_the_journals_head_in_a_new_epoch(
    settings: ServiceSettings,
) -> None:
    async with replicas(settings) as (one, two):
        world = await World(one).build()
        body = {"axis": "document_version", "target": world.document, "reason": "x", "wait": False}
        await two.operator.ask("POST", "/v1/revocations", body)
        async with two.runtime.sessions() as session:
            before = await log_store.head(session)
        await put_back(two.runtime.database, 1)
    async with replicas(settings) as (one, two):
        async with one.runtime.sessions() as session:
            after = await log_store.head(session)
            assert await log_store.at(session, before.epoch, before.seq) is not None
        assert after.epoch != before.epoch
        async with two.runtime.sessions() as session:
            assert await log_store.head(session) == after


async def test_a_shared_journal_takes_a_line_once_and_nothing_else_in_its_place(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal" / "log.jws"
    one, two = Journal(path, shared=True), Journal(path, shared=True)
    await one.open()
    await two.open()
    try:
        assert await one.identity() == await two.identity()
        assert await one.append(["a", "b"], after=0) == 2
        assert await two.append(["a", "b", "c"], after=0) == 3
        assert await one.append(["c", "d"], after=2) == 4
        # Said again by the one that wrote it: it may have been cancelled before it knew.
        assert await one.append(["c", "d", "e"], after=2) == 5
        with pytest.raises(Corrupt, match="other entries"):
            await two.append(["x"], after=4)
        with pytest.raises(Corrupt, match="lost"):
            await two.append(["g"], after=6)
        assert await two.lines() == ["a", "b", "c", "d", "e"]
        with pytest.raises(Conflict):
            await Journal(path).open()
    finally:
        await one.close()
        await two.close()


async def test_what_a_dead_replica_left_torn_in_a_shared_journal_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "journal" / "log.jws"
    journal = Journal(path, shared=True)
    await journal.open()
    try:
        await journal.append(["a"], after=0)
        with path.open("ab") as file:
            file.write(b"half")
        assert await journal.append(["b"], after=1) == 2
        assert await journal.lines() == ["a", "b"]
    finally:
        await journal.close()


async def test_a_read_that_had_begun_is_not_given_to_who_asks_later() -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    begun: list[int] = []

    async def read() -> int:
        number = len(begun)
        begun.append(number)
        await gates[number].wait()
        return number

    together = Together(read)
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(together.get())
        await asyncio.sleep(0)
        assert begun == [0]
        later = [tasks.create_task(together.get()) for _ in range(5)]
        await asyncio.sleep(0)
        gates[0].set()
        assert await first == 0
        gates[1].set()
    assert {each.result() for each in later} == {1}
    assert begun == [0, 1]


async def test_who_waited_for_a_read_that_failed_reads_again() -> None:
    outcomes = iter([Unavailable("no"), None, None])

    async def read() -> str:
        await asyncio.sleep(0)
        failure = next(outcomes)
        if failure is not None:
            raise failure
        return "read"

    together = Together(read)
    results = await asyncio.gather(together.get(), together.get(), return_exceptions=True)
    assert [type(each) for each in results] == [Unavailable, str]


async def test_the_roster_finds_each_sidecar_that_is_live_with_its_tenants(
    both: tuple[Service, Service],
) -> None:
    one, two = both
    tenant = await one.tenant()
    scoped, free = await enrolled(one, tenant), await enrolled(one, name="node-2")
    roster = Roster(two.runtime.sessions)
    found = await asyncio.gather(*(roster.find(each) for each in (scoped.id, free.id, "0" * 32)))
    assert [None if each is None else each.tenants for each in found] == [
        frozenset({tenant}),
        None,
        None,
    ]
    assert found[0] is not None
    assert await roster.is_current(found[0])
    body = {"axis": "sidecar", "target": scoped.id, "reason": "x", "wait": False}
    await one.operator.ask("POST", "/v1/revocations", body)
    assert not await roster.is_current(found[0])
    assert await roster.find(scoped.id) is None


async def test_acknowledgements_at_once_are_judged_each_for_itself(
    both: tuple[Service, Service],
) -> None:
    one, _ = both
    parties = [await enrolled(one, name=f"node-{number}") for number in range(4)]
    seq = await retire(one)
    body = {"axis": "sidecar", "target": parties[3].id, "reason": "x", "wait": False}
    ahead = seq + 100
    answers = await asyncio.gather(
        parties[0].ack(seq),
        parties[1].ack(ahead),
        parties[2].ack(seq, state="nonsense"),
        parties[3].ack(seq),
    )
    assert [each.status_code for each in answers] == [204, 409, 422, 204]
    await one.operator.ask("POST", "/v1/revocations", body)
    assert (await parties[0].ack(seq + 1)).status_code == 204
    gone = await parties[3].send("POST", "/acks", {"epoch": "", "seq": seq, "state": "fenced"})
    assert gone.status_code == 401
