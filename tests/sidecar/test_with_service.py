"""The main paths against the real service: no fake stands between the two."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from strongroom.wire.frames import Fenced, Finish
from tests.service.conftest import PostgresServer
from tests.service.conftest import postgres_server as postgres
from tests.sidecar.control_plane import Granted
from tests.sidecar.harness import Engine, block_content
from tests.sidecar.real_service import RealGrant, RealService, real_service, sidecar_of

PROMPT = list(range(4000, 4300))


postgres_server = postgres


@pytest.fixture(params=["sqlite", "postgresql"])
async def database_url(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """Empty: SQLite in the state directory; else a PostgreSQL database without tables."""
    if request.param == "sqlite":
        yield ""
        return
    server: PostgresServer = request.getfixturevalue("postgres_server")
    name = await server.new_database(empty=True)
    yield server.url(name)
    await server.drop_database(name)


def as_granted(grant: RealGrant) -> Granted:
    return cast("Granted", grant)


async def saved(engine: Engine, name: str, grant: RealGrant) -> int:
    verdict = await engine.open(name, as_granted(grant))
    assert verdict.allowed
    assert verdict.save
    stored = await engine.save(name, grant.prompt, 288)
    engine.scheduler.send(Finish(name))
    return stored


async def until_event(service: RealService, **wanted: str) -> dict[str, Any]:
    """The first audit event with these fields; intake is asynchronous."""
    async with asyncio.timeout(20):
        while True:
            events = (await service.ask("GET", "/v1/audit/events?limit=200"))["items"]
            for event in events:
                if all(event.get(name) == value for name, value in wanted.items()):
                    return cast("dict[str, Any]", event)
            await asyncio.sleep(0.05)


async def test_save_hit_restart_deny_revoke_and_audit(tmp_path: Path, database_url: str) -> None:
    async with real_service(tmp_path, database_url=database_url) as service:
        assert service.settings.database.startswith(database_url or "sqlite")
        acme, globex = await service.tenant("acme"), await service.tenant("globex")
        team = await service.group(acme, "team")
        await service.subject(acme, "alice", team)
        await service.subject(acme, "bob")
        await service.subject(globex, "mallory")
        document = await service.document(acme, "handbook", team)
        spans = [{"end": 100, "group": "everyone"}, {"end": 300, "document": document}]

        async def alice() -> RealGrant:
            return await service.grant(acme, "alice", PROMPT, spans)

        async with sidecar_of(service, tmp_path) as world:
            engine = await world.engine()
            grant = await alice()
            assert grant.granted_tokens == 300
            assert await saved(engine, "first", grant) == 5
            hit = await engine.open("second", as_granted(await alice()))
            assert (hit.allowed, hit.tokens) == (True, 288)
            restored = await engine.load("second", 0, 288)
            assert restored.ok
            assert restored.blocks[96] == block_content(PROMPT, 96, 160)
            # Without the group: the shared part alone. Another tenant: nothing.
            bob = await service.grant(acme, "bob", PROMPT, spans)
            assert (await engine.open("bob", as_granted(bob))).tokens == 96
            mallory = await service.grant(
                globex, "mallory", PROMPT, [{"end": 300, "group": "everyone"}]
            )
            assert (await engine.open("mallory", as_granted(mallory))).tokens == 0
            access = await until_event(service, kind="access.load", target="second")
            assert access["subject"] == "alice"

        async with sidecar_of(service, tmp_path) as world:
            engine = await world.engine()
            again = await alice()
            assert (await engine.open("nvme", as_granted(again))).tokens == 288
            assert (await engine.load("nvme", 0, 288)).ok
            before = await alice()
            async with asyncio.timeout(20):
                done = await service.revoke("document_version", document, tenant=acme)
            (standing,) = [
                s for s in done["sidecars"] if s["sidecar"] == world.sidecar.enrolled.sidecar
            ]
            assert standing["state"] == "fenced"
            assert standing["namespaces_dropped"] >= 1
            assert (await engine.scheduler.expect(Fenced)).request == "nvme"
            assert not (await engine.load("nvme", 0, 288)).ok
            assert not (await engine.open("after", as_granted(before))).allowed
            later = await alice()
            assert later.granted_tokens == 100
            assert (await engine.open("later", as_granted(later))).tokens == 96
            denied = await until_event(service, kind="access.denied", target="after")
            assert denied["outcome"] == "refused"


async def test_a_removed_subjects_grants_are_dead_and_others_are_not(tmp_path: Path) -> None:
    async with real_service(tmp_path) as service:
        acme = await service.tenant("acme")
        for name in ("alice", "bob"):
            await service.subject(acme, name)
        spans = [{"end": 300, "group": "everyone"}]
        async with sidecar_of(service, tmp_path) as world:
            engine = await world.engine()
            alice = await service.grant(acme, "alice", PROMPT, spans)
            bob = await service.grant(acme, "bob", PROMPT, spans)
            assert await saved(engine, "w", alice) == 5
            assert (await engine.open("a", as_granted(alice))).tokens == 288
            assert (await engine.open("b", as_granted(bob))).tokens == 288
            await service.ask("DELETE", f"/v1/tenants/{acme}/principals/alice")
            fresh = await service.grant(acme, "bob", PROMPT, spans)
            assert (await engine.open("b2", as_granted(fresh))).tokens == 288
            assert not (await engine.open("a2", as_granted(alice))).allowed
            assert not (await engine.load("a", 0, 288)).ok


async def test_a_sidecar_serves_the_tenants_that_it_is_enrolled_for(tmp_path: Path) -> None:
    async with real_service(tmp_path) as service:
        acme, globex = await service.tenant("acme"), await service.tenant("globex")
        await service.subject(acme, "alice")
        await service.subject(globex, "mallory")
        spans = [{"end": 300, "group": "everyone"}]
        async with sidecar_of(service, tmp_path, tenants=[acme]) as world:
            engine = await world.engine()
            mine = await service.grant(acme, "alice", PROMPT, spans)
            theirs = await service.grant(globex, "mallory", PROMPT, spans)
            assert (await engine.open("mine", as_granted(mine))).allowed
            assert not (await engine.open("theirs", as_granted(theirs))).allowed


async def test_an_upgraded_model_misses_and_its_blocks_are_reclaimed(tmp_path: Path) -> None:
    async with real_service(tmp_path) as service:
        acme = await service.tenant("acme")
        await service.subject(acme, "alice")
        spans = [{"end": 300, "group": "everyone"}]
        async with sidecar_of(service, tmp_path) as world:
            engine = await world.engine()
            old = await service.grant(acme, "alice", PROMPT, spans)
            assert await saved(engine, "w", old) == 5
            model = service.artefacts["model"]
            body = {"revision": "2", "digest": "cd" * 32}
            answer = await service.ask("POST", f"/v1/artefacts/{model}/upgrade", body)
            service.artefacts["model"] = answer["id"]
            new = await service.grant(acme, "alice", PROMPT, spans)
            # This engine still runs the old weights: the new grant is not for it.
            assert not (await engine.open("new", as_granted(new))).allowed
            assert not (await engine.open("old", as_granted(old))).allowed
            async with asyncio.timeout(20):
                while world.sidecar.store.namespaces():
                    await asyncio.sleep(0.02)


async def test_a_revoked_sidecar_gets_no_lease(tmp_path: Path) -> None:
    async with real_service(tmp_path, serving_lease_s=2) as service:
        acme = await service.tenant("acme")
        await service.subject(acme, "alice")
        async with sidecar_of(service, tmp_path) as world:
            engine = await world.engine()
            grant = await service.grant(acme, "alice", PROMPT, [{"end": 300, "group": "everyone"}])
            assert (await engine.open("before", as_granted(grant))).allowed
            await service.revoke("sidecar", world.sidecar.enrolled.sidecar)
            assert not (await engine.open("after", as_granted(grant))).allowed


async def test_a_sidecar_that_is_too_far_behind_starts_afresh_and_serves_again(
    tmp_path: Path,
) -> None:
    async with real_service(tmp_path, log_behind_max=5) as service:
        acme = await service.tenant("acme")
        await service.subject(acme, "alice")
        spans = [{"end": 300, "group": "everyone"}]
        async with sidecar_of(service, tmp_path) as world:
            engine = await world.engine()
            old = await service.grant(acme, "alice", PROMPT, spans)
            assert await saved(engine, "w", old) == 5
        for number in range(8):
            name = f"passing-{number}"
            await service.subject(acme, name)
            await service.ask("DELETE", f"/v1/tenants/{acme}/principals/{name}")
        async with sidecar_of(service, tmp_path) as world:
            assert world.sidecar.follower.counts.afresh == 1
            assert world.sidecar.follower.counts.entries == 0
            engine = await world.engine()
            assert not (await engine.open("old", as_granted(old))).allowed
            fresh = await service.grant(acme, "alice", PROMPT, spans)
            assert (await engine.open("new", as_granted(fresh))).tokens == 288
