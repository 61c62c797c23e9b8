"""No engine and no tenant turns caching off for another one: what it does counts for itself."""

from __future__ import annotations

import secrets
from pathlib import Path

from sidecar.degrade.conditions import Condition
from sidecar.degrade.stance import Action
from strongroom.blocks import pack_tokens
from strongroom.wire.frames import (
    PROTOCOL_VERSION,
    EngineFrame,
    Finish,
    Greet,
    Hint,
    Load,
    LoadFailed,
    Open,
    Ping,
    Pong,
    Report,
    Unhint,
    Verdict,
)
from tests.sidecar.conftest import PROMPT
from tests.sidecar.harness import ENGINE, MIB, Wire, World, harness
from tests.sidecar.prefetch_support import until

OTHER = "engine-b"
TOKEN = "b" * 40


def another_engine(world: World) -> None:
    path = world.directory / "tokens" / f"{OTHER}.token"
    path.touch(mode=0o600)
    path.write_text(TOKEN)


async def told(wire: Wire, frame: EngineFrame) -> None:
    """Sent, and known to be read."""
    wire.send(frame)
    wire.send(Ping(7))
    await wire.expect(Pong)


async def test_hints_that_are_taken_back_cost_no_other_tenant_its_cache(tmp_path: Path) -> None:
    async with harness(
        tmp_path,
        watch_interval_s=3600,
        prefetch_bytes=4 * MIB,
        prefetch_tenant_bytes=4 * MIB,
        prefetch_waste_min=40,
    ) as world:
        engine = await world.engine()
        token = world.directory / "tokens" / "gw.gateway"
        token.touch(mode=0o600)
        token.write_text(secrets.token_urlsafe(32))
        victim = world.control.tenant()
        assert await engine.compute_and_save("v", world.control.grant(victim, PROMPT)) == 5
        prompt = list(range(64 * 60))
        wasteful = world.control.grant(world.tenant, prompt)
        assert await engine.compute_and_save("w", wasteful) == 60
        store = world.sidecar.store
        await store.flush()
        host = store._residency.host
        for row in list(host._index.rows()):
            host.evict(row.resident.address)
        hello = Greet(PROTOCOL_VERSION, "gw", token.read_text(), ENGINE)
        gateway = await Wire.connect(world.socket_path, hello)  # type: ignore[arg-type]
        packed = pack_tokens(prompt)
        gateway.send(Hint("h", wasteful.token, wasteful.salt, packed, "none", 1000))
        await until(lambda: world.sidecar.statistics().prefetch.completed >= 50)
        gateway.send(Unhint("h"))
        await until(lambda: world.sidecar.statistics().prefetch.wasted >= 50)
        await gateway.close()
        watch = world.sidecar.watch
        assert len(watch.breakers.tripped_for(Condition.PREFETCH_WASTE)) == 1
        assert (await engine.open("v2", world.control.grant(victim, PROMPT))).tokens == 288
        again = await engine.open("w2", world.control.grant(world.tenant, prompt))
        assert (again.allowed, again.tokens) == (True, 0)


async def test_what_one_engine_reports_leaves_another_its_cache_and_its_prefetches(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path, watch_interval_s=3600) as world:
        engine = await world.engine()
        granted = world.control.grant(world.tenant, PROMPT)
        assert await engine.compute_and_save("saved", granted) == 5
        another_engine(world)
        short = await world.connect("scheduler", engine=OTHER, token=TOKEN)
        watch = world.sidecar.watch
        watch.pressure._ladders = type(watch.pressure._ladders)(
            engine=watch.pressure._ladders.engine.__class__((0.9, 0.94, 0.97, 0.99), 0.04, 0, 0)
        )
        await told(short, Report(100, 8, 1, 0, 0, 0, 0, 0))
        watch.look()
        assert watch.stance(OTHER).action is Action.STOP_PREFETCH
        for number in (0, 10**12):
            await told(short, Report(100, 0, 1, 0, 0, 0, 0, number))
        watch.look()
        assert watch.stance(OTHER).action is Action.ENGINE_ONLY
        assert watch.stance(ENGINE).prefetches
        await world.sidecar.store.flush()
        host = world.sidecar.store._residency.host
        for row in list(host._index.rows()):
            host.evict(row.resident.address)
        before = world.sidecar.statistics().prefetch.issued
        assert (await engine.open("r", world.control.grant(world.tenant, PROMPT))).tokens == 288
        await until(lambda: world.sidecar.statistics().prefetch.issued > before)
        await short.close()


async def test_an_engine_short_of_pages_gets_no_prefetches(tmp_path: Path) -> None:
    async with harness(tmp_path, watch_interval_s=3600) as world:
        engine = await world.engine()
        granted = world.control.grant(world.tenant, PROMPT)
        assert await engine.compute_and_save("saved", granted) == 5
        await world.sidecar.store.flush()
        host = world.sidecar.store._residency.host
        for row in list(host._index.rows()):
            host.evict(row.resident.address)
        watch = world.sidecar.watch
        watch.pressure._ladders = type(watch.pressure._ladders)(
            engine=watch.pressure._ladders.engine.__class__((0.9, 0.94, 0.97, 0.99), 0.04, 0, 0)
        )
        await told(engine.scheduler, Report(100, 8, 1, 0, 0, 0, 0, 0))
        watch.look()
        assert (await engine.open("r", world.control.grant(world.tenant, PROMPT))).tokens == 288
        await told(engine.scheduler, Finish("r"))
        prefetch = world.sidecar.statistics().prefetch
        assert (prefetch.issued, prefetch.pending) == (0, 0)


async def test_an_engine_that_hangs_turns_off_its_own_cache_alone(tmp_path: Path) -> None:
    async with harness(tmp_path, watch_interval_s=3600, staging_grace_s=0.01) as world:
        engine = await world.engine()
        granted = world.control.grant(world.tenant, PROMPT)
        assert await engine.compute_and_save("saved", granted) == 5
        another_engine(world)
        worker = await world.connect("worker", engine=OTHER, token=TOKEN)
        hung = await world.connect("scheduler", engine=OTHER, token=TOKEN)
        g = world.control.grant(world.tenant, PROMPT)
        hung.send(Open("x", g.token, g.salt, pack_tokens(PROMPT), "none"))
        assert (await hung.expect(Verdict)).tokens == 288
        for number in range(1, 21):
            worker.send(Load("x", number, 0, 64))  # its parts are never copied
        for _ in range(20):
            await worker.expect(LoadFailed)
        breakers = world.sidecar.watch.breakers
        assert breakers.tripped_for(Condition.ERROR_STREAK) == (OTHER,)
        assert (await engine.open("r", world.control.grant(world.tenant, PROMPT))).tokens == 288
        await worker.close()
        await hung.close()
