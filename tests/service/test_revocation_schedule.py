"""Scheduled revocations: at their time and not before, once, and not at all once cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import func, select

from service.auth.tokens import Role
from service.db.base import now
from service.revocation.models import Revocation, ScheduledRevocation
from service.revocation.rounds import RevocationRounds
from service.settings import ServiceSettings
from strongroom.errors import Unavailable
from tests.service.house import Service, running
from tests.service.test_revocation import alive, body
from tests.service.test_sidecars import World

PATH = "/v1/scheduled-revocations"
LATER = timedelta(hours=1)


def rounds_of(service: Service, moment: datetime) -> RevocationRounds:
    """The rounds of a process whose clock says `moment`."""
    runtime = service.runtime
    return RevocationRounds(
        runtime.revocations.desk, runtime.key_provider, check_s=3600, clock=lambda: moment
    )


async def scheduled(
    service: Service, asked: dict[str, Any], due_at: datetime, **headers: str
) -> dict[str, Any]:
    answer: dict[str, Any] = await service.operator.post(
        PATH, asked | {"at": due_at.isoformat()}, **headers
    )
    assert answer["state"] == "scheduled"
    return answer


async def test_it_is_carried_out_at_its_time_and_not_before(service: Service) -> None:
    world = await World(service).build()
    due_at = now() + LATER
    later = await scheduled(service, body("document_version", world.document), due_at)
    assert later["revocation"] is None
    assert await rounds_of(service, due_at - timedelta(microseconds=1)).round() == []
    assert await alive(service, world.document)
    assert await rounds_of(service, due_at).round() == [later["id"]]
    assert not await alive(service, world.document)
    done = await service.operator.get(f"{PATH}/{later['id']}")
    assert done["state"] == "carried_out"
    revocation = await service.operator.get(done["revocation"])
    assert (revocation["id"], revocation["state"]) == (later["id"], "in_force")
    assert revocation["components"] == [world.document]
    certificate = await service.operator.ask("GET", revocation["certificate"])
    assert certificate.status_code == 200


async def test_the_service_carries_it_out_by_itself(service: Service) -> None:
    world = await World(service).build()
    later = await scheduled(
        service, body("document_version", world.document), now() + timedelta(seconds=2)
    )
    async with asyncio.timeout(20):
        while True:
            news = service.runtime.kick.listen()
            state = (await service.operator.get(f"{PATH}/{later['id']}"))["state"]
            if state != "scheduled":
                break
            await news.wait()
    assert state == "carried_out"
    assert not await alive(service, world.document)


async def test_a_time_is_told_with_its_zone(service: Service) -> None:
    world = await World(service).build()
    asked = body("document_version", world.document)
    moment = (now() + LATER).astimezone(UTC).replace(microsecond=0)
    abroad = moment.astimezone(tz=datetime.strptime("+0530", "%z").tzinfo)
    answer = await service.operator.post(PATH, asked | {"at": abroad.isoformat()})
    assert datetime.fromisoformat(answer["due_at"]) == moment
    for wrong in (
        moment.replace(tzinfo=None).isoformat(),
        (now() - timedelta(seconds=1)).isoformat(),
        (now() + timedelta(days=4000)).isoformat(),
        "tomorrow",
    ):
        refused = await service.operator.ask("POST", PATH, asked | {"at": wrong})
        assert refused.status_code == 422, wrong


async def test_what_is_cancelled_is_never_carried_out(service: Service) -> None:
    world = await World(service).build()
    due_at = now() + LATER
    later = await scheduled(service, body("document_version", world.document), due_at)
    kept = await scheduled(service, body("group", world.group), due_at)
    cancelled = await service.operator.delete(f"{PATH}/{later['id']}")
    assert cancelled["state"] == "cancelled"
    assert await rounds_of(service, due_at).round() == [kept["id"]]
    assert await alive(service, world.document)
    assert not await alive(service, world.group)
    for over in (later, kept):
        again = await service.operator.ask("DELETE", f"{PATH}/{over['id']}")
        assert again.status_code == 409


@pytest.fixture
async def replicas(settings: ServiceSettings) -> AsyncIterator[list[Service]]:
    """Several processes' worth of services on one database, key directory and journal."""
    quiet = settings.model_copy(update={"revocation_check_s": 3600.0})
    async with AsyncExitStack() as stack:
        started = [await stack.enter_async_context(running(quiet)) for _ in range(3)]
        yield started


@pytest.mark.parametrize("dialect", ["postgresql"], indirect=True)
async def test_of_several_replicas_one_carries_it_out(replicas: list[Service]) -> None:
    first = replicas[0]
    world = await World(first).build()
    documents = [await first.document(world.tenant, f"d{n}", world.group) for n in range(6)]
    due_at = now() + LATER
    ids = [
        (await scheduled(first, body("document_version", document), due_at))["id"]
        for document in documents
    ]
    everybody = [rounds_of(service, due_at) for service in replicas]
    done = await asyncio.gather(*(each.round() for each in everybody))
    carried = [each for part in done for each in part]
    assert sorted(carried) == sorted(ids)
    async with first.runtime.sessions() as session:
        count = await session.scalar(select(func.count()).select_from(Revocation))
    assert count == len(ids)
    # Who came second has not taken them for gone.
    listed = (await first.operator.get(PATH))["items"]
    assert {each["state"] for each in listed} == {"carried_out"}
    entries = await first.operator.get("/v1/log", limit=100)
    assert len(entries["entries"]) == entries["head_seq"]


@pytest.mark.parametrize("dialect", ["postgresql"], indirect=True)
async def test_cancelling_and_carrying_out_at_once_has_one_winner(
    replicas: list[Service],
) -> None:
    first, second, _ = replicas
    world = await World(first).build()
    outcomes = set()
    for number in range(8):
        document = await first.document(world.tenant, f"d{number}", world.group)
        due_at = now() + LATER
        later = await scheduled(first, body("document_version", document), due_at)
        cancelling = first.operator.ask("DELETE", f"{PATH}/{later['id']}")
        carrying = rounds_of(second, due_at).round()
        if number % 2:
            done, cancelled = await asyncio.gather(carrying, cancelling)
        else:
            cancelled, done = await asyncio.gather(cancelling, carrying)
        state = (await first.operator.get(f"{PATH}/{later['id']}"))["state"]
        won = cancelled.status_code == 200
        assert (state, done) == (("cancelled", []) if won else ("carried_out", [later["id"]]))
        assert await alive(first, document) == won
        outcomes.add(state)
    assert outcomes


async def test_it_survives_the_process_that_took_it(settings: ServiceSettings) -> None:
    quiet = settings.model_copy(update={"revocation_check_s": 3600.0})
    async with running(quiet) as service:
        world = await World(service).build()
        due_at = now() + LATER
        later = await scheduled(service, body("document_version", world.document), due_at)
    async with running(quiet) as service:
        assert await alive(service, world.document)
        assert await rounds_of(service, due_at).round() == [later["id"]]
        assert not await alive(service, world.document)
        assert await rounds_of(service, due_at).round() == []


async def test_a_process_that_dies_before_the_commit_has_done_nothing(
    settings: ServiceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = settings.model_copy(update={"revocation_check_s": 3600.0})
    async with running(quiet) as service:
        world = await World(service).build()
        due_at = now() + LATER
        later = await scheduled(service, body("document_version", world.document), due_at)

        async def away(*_: object) -> None:
            raise Unavailable("the process is gone")

        with monkeypatch.context() as broken:
            broken.setattr("service.revocation.force.set_deadlines", away)
            with pytest.raises(Unavailable):
                await rounds_of(service, due_at).round()
        assert await alive(service, world.document)
    async with running(quiet) as service:
        assert await rounds_of(service, due_at).round() == [later["id"]]
        assert not await alive(service, world.document)


async def test_what_is_gone_at_its_time_fails_and_holds_up_nothing(service: Service) -> None:
    world = await World(service).build()
    other = await service.document(world.tenant, "other", world.group)
    due_at = now() + LATER
    gone = await scheduled(service, body("document_version", world.document), due_at)
    kept = await scheduled(service, body("document_version", other), due_at)
    await service.operator.post("/v1/revocations", body("document_version", world.document))
    assert await rounds_of(service, due_at).round() == [kept["id"]]
    failed = await service.operator.get(f"{PATH}/{gone['id']}")
    assert (failed["state"], failed["failure"]) == ("failed", "missing")
    assert failed["revocation"] is None
    assert await rounds_of(service, due_at).round() == []


async def test_the_same_key_schedules_once_and_another_request_under_it_is_a_conflict(
    service: Service,
) -> None:
    world = await World(service).build()
    due_at = now() + LATER
    asked = body("document_version", world.document) | {"at": due_at.isoformat()}
    key = {"Idempotency-Key": "k1"}
    first = await service.operator.ask("POST", PATH, asked, headers=key)
    again = await service.operator.ask("POST", PATH, asked, headers=key)
    assert first.json() == again.json()
    other = asked | {"at": (due_at + LATER).isoformat()}
    assert (await service.operator.ask("POST", PATH, other, headers=key)).status_code == 409
    async with service.runtime.sessions() as session:
        assert await session.scalar(select(func.count()).select_from(ScheduledRevocation)) == 1


async def test_unknown_and_not_yours_look_the_same_and_yours_is_scheduled(
    service: Service,
) -> None:
    mine, theirs = await World(service).build(), await World(service).build("globex")
    admin = service.party("boss", mine.tenant, Role.TENANT_ADMIN)
    stranger = service.party("boss", theirs.tenant, Role.TENANT_ADMIN)
    due_at = now() + LATER
    at = {"at": due_at.isoformat()}
    refused = [
        await admin.ask("POST", PATH, asked | at)
        for asked in (
            body("document_version", theirs.document),
            body("document_version", "0" * 32),
            body("tenant", mine.tenant),
        )
    ]
    assert {response.status_code for response in refused} == {404}
    assert len({response.text for response in refused}) == 1
    later = (await admin.post(PATH, body("document_version", mine.document) | at))["id"]
    for method in ("GET", "DELETE"):
        assert (await stranger.ask(method, f"{PATH}/{later}")).status_code == 404
    assert (await stranger.get(PATH))["items"] == []
    [seen] = (await admin.get(PATH, state="scheduled"))["items"]
    assert seen["id"] == later
    assert await rounds_of(service, due_at).round() == [later]
    revocation = await admin.get(f"/v1/revocations/{later}")
    assert revocation["components"] == [mine.document]
    assert (await stranger.ask("GET", f"/v1/revocations/{later}")).status_code == 404
    [committed] = (await service.operator.get("/v1/audit/events", kind="revocation.committed"))[
        "items"
    ]
    assert (committed["actor"], committed["target"]) == ("boss", later)
