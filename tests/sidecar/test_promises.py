"""What is promised of a revocation, with the real service, real sidecars and many who try.

Replicas are two applications over one PostgreSQL, one key directory and one journal.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import pytest

from service.log import store as log_store
from service.policies.enforcers import Enforcers, TenantPolicy
from service.tenancy.models import Tenant
from sidecar.clocks import Clocks
from sidecar.control.logstate import LogState
from tests.service.conftest import PostgresServer
from tests.service.conftest import postgres_server as postgres
from tests.sidecar.attempts import PROMPT, SHARED, WHOLE, Attempts, Served, as_granted, until
from tests.sidecar.harness import ENGINE, Engine, World
from tests.sidecar.proxy import proxied
from tests.sidecar.real_service import (
    RealService,
    real_service,
    replica,
    sidecar_fields,
    sidecar_of,
)
from tests.sidecar.sidecar_process import killed, start

postgres_server = postgres
LEASE_S = 2.0
SLACK_S = 3.0
"""Of a busy machine: what a call takes besides waiting."""


@pytest.fixture
async def postgres_url(postgres_server: PostgresServer) -> AsyncIterator[str]:
    name = await postgres_server.new_database(empty=True)
    yield postgres_server.url(name)
    await postgres_server.drop_database(name)


@dataclass
class House:
    """A tenant with a team, whose document's blocks are stored by every engine in `engines`."""

    service: RealService
    tenant: str
    team: str
    document: str

    @property
    def spans(self) -> list[dict[str, Any]]:
        return [{"end": SHARED, "group": "everyone"}, {"end": 300, "document": self.document}]

    async def granted(self, name: str, service: RealService | None = None) -> Any:
        return as_granted(
            await (service or self.service).grant(self.tenant, name, PROMPT, self.spans)
        )

    async def stores(self, engine: Engine, name: str = "alice") -> None:
        """The engine's sidecar has what `name` may read, and serves it."""
        await until_open(self, engine, name)
        grant = await self.granted(name)
        await engine.open("store", grant)
        await engine.save("store", grant.prompt, WHOLE)
        assert (await engine.open("stored", grant)).tokens == WHOLE


async def house(service: RealService, *members: str) -> House:
    acme = await service.tenant("acme")
    team = await service.group(acme, "team")
    for name in ("alice", *members):
        await service.subject(acme, name, team)
    return House(service, acme, team, await service.document(acme, "handbook", team))


async def until_open(house: House, engine: Engine, name: str) -> None:
    """Return once the engine's sidecar serves `name` again."""
    async with asyncio.timeout(20):
        number = 0
        while not (await engine.open(f"try-{number}", await house.granted(name))).allowed:
            number += 1
            await asyncio.sleep(0.05)


def moment_of(at: str) -> float:
    """A wall-clock text on this process's boot clock."""
    return datetime.fromisoformat(at).timestamp() - time.time() + time.monotonic()


def within_a_lease(answer: Any, took_s: float) -> None:
    """The one sidecar's lease ran out, and the call had not to wait for longer than that."""
    assert [each["state"] for each in answer["sidecars"]] == ["lease_expired"]
    assert moment_of(answer["in_force_at"]) - moment_of(answer["committed_at"]) <= LEASE_S + 0.1
    assert took_s <= LEASE_S + SLACK_S


async def revoke_under_attempts(directory: Path, url: str, total: int) -> Attempts:
    """Bob loses his team while he tries everywhere; returns what succeeded after that returned."""
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(real_service(directory, database_url=url))
        two = await stack.enter_async_context(replica(one.settings, one.artefacts))
        home = await house(one, "bob")
        engines = []
        for number, service in enumerate((one, two, two)):
            place = directory / f"node-{number}"
            place.mkdir()
            world = await stack.enter_async_context(sidecar_of(service, place))
            engines.append(await world.engine())
            await home.stores(engines[-1])
        old = [await one.grant(home.tenant, "bob", PROMPT, home.spans) for _ in range(3)]
        attempts, returned, enough = Attempts(), 0.0, total
        halfway = total // 2

        def more() -> bool:
            return not returned or attempts.tried < enough

        async with asyncio.TaskGroup() as tasks:
            for number, engine in enumerate(engines):
                tasks.create_task(attempts.present(engine, old, more, f"node-{number}"))
            for service in (one, two):
                who = (home.tenant, "bob")
                tasks.create_task(attempts.ask(service, who, home.spans, more, service.url))
            # Before, everything he tries succeeds: the attempts are able to.
            able = {
                *(f"hit at node-{number}" for number in range(3)),
                *(f"grant of {service.url}" for service in (one, two)),
            }
            await until(
                lambda: (
                    attempts.tried >= halfway and able <= {each.what for each in attempts.served}
                ),
                60,
            )
            await one.revoke("membership", "bob", tenant=home.tenant, group=home.team)
            returned = time.monotonic()
            enough = max(total, attempts.tried + total // 4)
        for service in (one, two):
            for number, engine in enumerate(engines):
                name = f"last-{number}-{service.url}"
                fresh = await home.granted("bob", service)
                if (await engine.open(f"bob-{name}", fresh)).tokens > SHARED:
                    attempts.served.append(Served(time.monotonic(), time.monotonic(), name))
                alice = await home.granted("alice", service)
                assert (await engine.open(f"alice-{name}", alice)).tokens == WHOLE
        attempts.served = attempts.asked_after(returned)
        return attempts


async def test_after_a_revocation_has_returned_nothing_is_allowed_and_nothing_hits_anywhere(
    tmp_path: Path, postgres_url: str
) -> None:
    attempts = await revoke_under_attempts(tmp_path, postgres_url, 10_000)
    assert attempts.tried >= 10_000
    assert attempts.served == []


@pytest.mark.parametrize("switched_off", ["the sidecar's look at the log", "the policy's revision"])
async def test_the_test_before_fails_with_a_revision_check_switched_off(
    switched_off: str, tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if switched_off == "the sidecar's look at the log":
        monkeypatch.setattr(LogState, "dead", lambda self, grant: None)
    else:
        at = Enforcers.at

        async def any_revision(self: Enforcers, session: Any, tenant: Tenant) -> TenantPolicy:
            known = self._newest.get(tenant.id)
            return known or await at(self, session, tenant)

        monkeypatch.setattr(Enforcers, "at", any_revision)
    attempts = await revoke_under_attempts(tmp_path, postgres_url, 600)
    assert attempts.served


@pytest.mark.parametrize("clock", ["the wall clock as it is", "the wall clock set back an hour"])
async def test_a_sidecar_that_is_cut_off_serves_nothing_a_lease_after_the_commit(
    clock: str, tmp_path: Path
) -> None:
    """Its connections stay up; what the service sends is held back, and then comes all at once."""
    ahead_s = 0.0
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(real_service(tmp_path, serving_lease_s=LEASE_S))
        home = await house(service, "bob")
        proxy = await stack.enter_async_context(proxied(service.url))
        clocks = Clocks(wall_s=lambda: time.time() + ahead_s)
        world = await stack.enter_async_context(
            sidecar_of(service, tmp_path, clocks=clocks, service_url=proxy.url)
        )
        engine = await world.engine()
        await home.stores(engine)
        old = [await service.grant(home.tenant, "bob", PROMPT, home.spans)]
        assert (await engine.open("held", as_granted(old[0]))).tokens == WHOLE
        attempts, trying = Attempts(), True
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(attempts.present(engine, old, lambda: trying, "node"))
            await until(lambda: bool(attempts.served))
            proxy.hold()
            if "back" in clock:
                ahead_s = -3600.0
            asked = time.monotonic()
            answer = await service.revoke("membership", "bob", tenant=home.tenant, group=home.team)
            took_s = time.monotonic() - asked
            ended = moment_of(answer["committed_at"]) + LEASE_S
            await until(lambda: time.monotonic() > ended + 0.5)
            assert proxy.held_bytes > 0
            proxy.release()
            tried = attempts.tried
            await until(lambda: attempts.tried > tried + 200)
            trying = False
        within_a_lease(answer, took_s)
        # It did serve while its lease ran, or the cut had come too late to mean anything.
        assert attempts.asked_after(asked)
        assert attempts.asked_after(ended) == []
        assert attempts.answered_after(ended + 0.25) == []
        assert not (await engine.load("held", 0, WHOLE)).ok
        ahead_s = 0.0
        await until_open(home, engine, "alice")
        assert (await engine.open("alice", await home.granted("alice"))).tokens == WHOLE


async def connected(world: World) -> Engine:
    """An engine of a sidecar in another process, once that listens."""
    async with asyncio.timeout(30):
        while True:
            try:
                return await world.engine()
            except (OSError, asyncio.IncompleteReadError):
                await asyncio.sleep(0.05)


async def test_a_sidecar_that_was_stopped_and_continued_serves_nothing_of_what_was_revoked(
    tmp_path: Path,
) -> None:
    async with real_service(tmp_path, serving_lease_s=LEASE_S) as service:
        home = await house(service, "bob")
        fields = await sidecar_fields(service, tmp_path)
        process = start(fields)
        world = World(
            cast("Any", None), cast("Any", None), cast("Any", None), tmp_path,
            fields["socket_path"], fields["engine_tokens"] / f"{ENGINE}.token", "engine-token",
        )  # fmt: skip
        try:
            engine = await connected(world)
            await home.stores(engine)
            old = await service.grant(home.tenant, "bob", PROMPT, home.spans)
            assert (await engine.open("before", as_granted(old))).tokens == WHOLE
            assert process.pid is not None
            os.kill(process.pid, signal.SIGSTOP)
            asked = time.monotonic()
            attempts, turns = Attempts(), iter([True, False])
            async with asyncio.TaskGroup() as tasks:
                # Asked while it is stopped, and answered when it goes on.
                trying = tasks.create_task(
                    attempts.present(engine, [old], lambda: next(turns), "stopped")
                )
                answer = await service.revoke(
                    "membership", "bob", tenant=home.tenant, group=home.team
                )
                took_s = time.monotonic() - asked
                assert not trying.done()
                os.kill(process.pid, signal.SIGCONT)
            within_a_lease(answer, took_s)
            assert (attempts.tried, attempts.served) == (25, [])
            await until_open(home, engine, "alice")
            assert (await engine.open("alice", await home.granted("alice"))).tokens == WHOLE
            assert not (await engine.open("bob", as_granted(old))).allowed
            await engine.close()
        finally:
            os.kill(cast("int", process.pid), signal.SIGCONT)
            killed(process)


@pytest.mark.parametrize("restarted", ["nothing", "the sidecar", "the service", "both"])
async def test_a_grant_from_before_a_change_never_serves_after_it(
    restarted: str, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(started(tmp_path))
        service = first.service
        home = await house(service, "by-group", "by-standing")
        for name in ("by-rule", "by-role"):
            await service.subject(home.tenant, name)
        where = f"/v1/tenants/{home.tenant}"
        may = {"action": "group:read", "resource": f"group:{home.team}", "effect": "allow"}
        rule = await service.ask("POST", f"{where}/rules", may | {"subject": "user:by-rule"})
        await service.ask("POST", f"{where}/rules", may | {"subject": "role:reader"})
        role = await service.ask(
            "POST", f"{where}/roles", {"subject": "user:by-role", "role": "role:reader"}
        )
        proxy = await stack.enter_async_context(proxied(service.url))
        lives = await stack.enter_async_context(AsyncExitStack())
        world = await lives.enter_async_context(
            sidecar_of(service, tmp_path, service_url=proxy.url)
        )
        engine = await world.engine()
        await home.stores(engine)
        names = ("by-rule", "by-role", "by-group", "by-standing")
        before = {name: await home.granted(name) for name in names}
        for name in names:
            assert (await engine.open(f"may-{name}", before[name])).tokens == WHOLE, name
        for path in (
            f"rules/{rule['id']}",
            f"roles/{role['id']}",
            f"memberships/{home.team}/by-group",
            "principals/by-standing",
        ):
            await service.ask("DELETE", f"{where}/{path}")
        async with service.runtime.sessions() as session:
            head = await log_store.head(session)
        if restarted in ("the service", "both"):
            await first.stop()
            second = await stack.enter_async_context(started(tmp_path, service.artefacts))
            proxy.point_at(second.service.url)
            home.service = second.service
        if restarted in ("the sidecar", "both"):
            await lives.aclose()
            world = await stack.enter_async_context(
                sidecar_of(home.service, tmp_path, service_url=proxy.url)
            )
            engine = await world.engine()
        log = world.sidecar.log
        await until(lambda: log.head is not None and log.head.seq >= head.seq)
        await until_open(home, engine, "alice")
        for name in names:
            assert not (await engine.open(f"old-{name}", before[name])).allowed, name
            assert not (await engine.load(f"may-{name}", 0, WHOLE)).ok
        assert (await engine.open("alice", await home.granted("alice"))).tokens == WHOLE
        for name in names[:3]:
            after = await home.granted(name)
            assert after.granted_tokens == SHARED, name
            assert (await engine.open(f"new-{name}", after)).tokens <= SHARED, name


class Started:
    """A service that can be stopped before its test ends."""

    def __init__(self, service: RealService, stop: Callable[[], Any]) -> None:
        self.service = service
        self.stop = stop


@asynccontextmanager
async def started(
    directory: Path, artefacts: dict[str, str] | None = None
) -> AsyncIterator[Started]:
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(real_service(directory, artefacts=artefacts))
        yield Started(service, stack.aclose)


async def test_a_document_uploaded_again_after_its_erasure_hits_nothing_old(
    tmp_path: Path,
) -> None:
    async with real_service(tmp_path) as service:
        home = await house(service)
        async with sidecar_of(service, tmp_path) as world:
            engine = await world.engine()
            await home.stores(engine)
            old = await home.granted("alice")
            await service.revoke("document_version", home.document, tenant=home.tenant)
            documents = f"/v1/tenants/{home.tenant}/documents"
            [known] = [
                each["id"]
                for each in (await service.ask("GET", documents))["items"]
                if each["name"] == "handbook"
            ]
            body = {
                "content_digest": hashlib.sha256(b"handbook").hexdigest(),
                "group": home.team,
            }
            again = await service.ask("POST", f"{documents}/{known}/versions", body)
            assert again["id"] != home.document
            home.document = again["id"]
            fresh = await home.granted("alice")
            assert fresh.granted_tokens == 300
            # The same text, the same tokens, the same reader: only the shared part is there.
            assert (await engine.open("again", fresh)).tokens <= SHARED
            assert not (await engine.open("old", old)).allowed
            # And it is a cache still: what is saved now is found.
            await engine.save("again", fresh.prompt, WHOLE)
            assert (await engine.open("stored-again", fresh)).tokens == WHOLE
