"""Faults of what stands around the sidecar: engine, model, control plane, clocks, memory.

Each row of the fault table in docs/operations.md that is not about a disk names a test here or
beside it. Nothing wrong is served in any of them, and service comes back by itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import time
from pathlib import Path

import pytest

from sidecar.clocks import Clocks
from strongroom.grant import EngineDigests
from strongroom.wire.frames import (
    Copied,
    Digests,
    Fenced,
    Load,
    LoadDone,
    LoadFailed,
    Part,
    SidecarFrame,
)
from tests.sidecar.conftest import PROMPT
from tests.sidecar.control_plane import (
    TEMPLATE,
    TOKENIZER,
    FakeControlPlane,
    Granted,
)
from tests.sidecar.harness import (
    Engine,
    ManualClock,
    RefusedHello,
    Wire,
    World,
    block_content,
    harness,
)

TWO_BLOCKS = 8192
"""Staging for two blocks of the prompt's five: a load stands still until one is copied."""
OTHER_MODEL = hashlib.sha256(b"the next model").hexdigest()


async def stored(world: World) -> tuple[Engine, Granted]:
    engine = await world.engine()
    granted = world.control.grant(world.tenant, PROMPT)
    await save_whole(engine, "saved", granted)
    return engine, granted


async def save_whole(engine: Engine, request: str, granted: Granted) -> None:
    """Five blocks, as many at a time as staging has room for."""
    assert (await engine.open(request, granted)).save
    blocks = 0
    while blocks < 5:
        stored = await engine.save(request, PROMPT, 288)
        assert stored
        blocks += stored


async def half_loaded(world: World, engine: Engine, request: str) -> tuple[int, list[Part]]:
    """A load whose first two parts are released and lie in staging, not copied."""
    assert (await engine.open(request, world.control.grant(world.tenant, PROMPT))).tokens == 288
    number = engine.next_number()
    engine.workers[0].send(Load(request, number, 0, 288))
    return number, [await engine.workers[0].expect(Part) for _ in range(2)]


async def until_zero(wire: Wire) -> None:
    """Return once the whole staging that this engine mapped is zeros."""
    assert wire.staging is not None
    async with asyncio.timeout(20):
        while any(wire.staging[:]):
            await asyncio.sleep(0.01)


async def joined(world: World, digests: Digests) -> Engine:
    """The engine with its new model, once its old connections are seen to be dead."""
    async with asyncio.timeout(20):
        while True:
            try:
                return await world.engine(digests=digests)
            except RefusedHello:
                await asyncio.sleep(0.01)


async def until_end(wire: Wire) -> LoadDone | LoadFailed:
    """The load's final frame."""
    while True:
        async with asyncio.timeout(20):
            frame: SidecarFrame = await wire.receive()
        if isinstance(frame, LoadDone | LoadFailed):
            return frame


async def restored_whole(engine: Engine, request: str, granted: Granted) -> bool:
    assert (await engine.open(request, granted)).tokens == 288
    restored = await engine.load(request, 0, 288)
    assert all(
        content == block_content(PROMPT, at, min(at + 64, 288))
        for at, content in restored.blocks.items()
    )
    return restored.ok and len(restored.blocks) == 5


async def test_an_engine_whose_device_is_reset_in_a_load_comes_back_empty_and_restores_all(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path, staging_bytes=TWO_BLOCKS) as world:
        engine, _ = await stored(world)
        _, parts = await half_loaded(world, engine, "r")
        old = engine.workers[0]
        assert old.staging is not None
        assert any(old.staging[parts[0].offset : parts[0].offset + 4096])
        # The process dies with its device context; its mapping is ours to look at.
        old.writer.close()
        engine.scheduler.writer.close()
        again = await world.engine()
        await until_zero(old)
        assert await restored_whole(again, "again", world.control.grant(world.tenant, PROMPT))
        assert world.sidecar.statistics().staging_used_bytes == 0
        await again.close()


async def test_a_model_switch_under_load_ends_what_runs_and_nothing_old_hits_the_new_model(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path, staging_bytes=TWO_BLOCKS) as world:
        engine, old_grant = await stored(world)
        number, _ = await half_loaded(world, engine, "r")
        world.control.revoke(world.tenant.model)
        failed = await until_end(engine.workers[0])
        assert failed == LoadFailed(number, 0)
        await engine.scheduler.expect(Fenced)
        await until_zero(engine.workers[0])

        digests = Digests(OTHER_MODEL, TOKENIZER, TEMPLATE)
        with pytest.raises(RefusedHello, match="conflict"):
            await world.engine(digests=digests)
        await engine.close()
        switched = dataclasses.replace(world.tenant, model=world.control.component())
        measured = EngineDigests(OTHER_MODEL, "none", TOKENIZER, TEMPLATE)

        def grant() -> Granted:
            return world.control.grant(switched, PROMPT, engine=measured)

        new = await joined(world, digests)
        assert not (await new.open("old grant", old_grant)).allowed
        assert (await new.open("first", grant())).tokens == 0
        await save_whole(new, "save", grant())
        assert await restored_whole(new, "second", grant())


async def test_a_load_goes_on_without_the_control_plane_while_the_lease_runs(
    tmp_path: Path,
) -> None:
    boot = ManualClock()
    async with harness(tmp_path, clocks=Clocks(boot), staging_bytes=TWO_BLOCKS) as world:
        engine, _ = await stored(world)
        number, parts = await half_loaded(world, engine, "r")
        world.control.away = True
        boot.advance(4)
        wire = engine.workers[0]
        for part in parts:
            wire.send(Copied(number, part.offset))
        for _ in range(3):
            part = await wire.expect(Part)
            assert engine.read_part(wire, part)[:4096] == block_content(
                PROMPT, part.start, part.end
            )
            wire.send(Copied(number, part.offset))
        assert isinstance(await until_end(wire), LoadDone)


async def test_a_load_that_outlives_the_lease_of_a_control_plane_that_is_gone_fails(
    tmp_path: Path,
) -> None:
    boot = ManualClock()
    async with harness(tmp_path, clocks=Clocks(boot), staging_bytes=TWO_BLOCKS) as world:
        engine, _ = await stored(world)
        number, parts = await half_loaded(world, engine, "r")
        world.control.away = True
        boot.advance(5.1)
        wire = engine.workers[0]
        assert all(part.deadline_ns <= boot.now_ns for part in parts), "the engine refuses these"
        for part in parts:
            wire.send(Copied(number, part.offset))
        ended = await until_end(wire)
        assert ended == LoadFailed(number, 128), "not one block was released after the lease"
        await until_zero(wire)
        assert not (await engine.open("more", world.control.grant(world.tenant, PROMPT))).allowed
        world.control.away = False
        await world.sidecar.serving.renew()
        assert await restored_whole(engine, "back", world.control.grant(world.tenant, PROMPT))


async def test_a_wall_clock_that_jumps_serves_no_grant_longer_and_comes_back(
    tmp_path: Path,
) -> None:
    boot = ManualClock()
    start = time.time()
    wall = [start]
    async with harness(tmp_path, clocks=Clocks(boot, lambda: wall[0])) as world:

        def grant(life_s: int) -> Granted:
            now = int(start)
            return world.control.grant(world.tenant, PROMPT, iat=now, exp=now + life_s)

        engine = await world.engine()
        assert await engine.compute_and_save("saved", grant(300)) == 5
        wall[0] = start + 7200
        assert not (await engine.open("forward", grant(300))).allowed
        wall[0] = start - 7200
        assert (await engine.open("back", grant(300))).tokens == 288
        assert (await engine.load("back", 0, 288)).ok
        # Set back, it makes no grant live longer than time has passed.
        boot.advance(4)
        assert (await engine.open("within", grant(100))).tokens == 288
        boot.advance(200)
        await world.sidecar.serving.renew()
        assert not (await engine.open("after", grant(100))).allowed
        wall[0] = start + 204
        assert (await engine.open("right again", grant(300))).tokens == 288


async def test_a_boot_clock_that_jumps_forward_ends_the_lease_until_it_is_renewed(
    tmp_path: Path,
) -> None:
    """A machine that slept: its boot clock counted on, and so did the service's revocations."""
    boot = ManualClock()
    control = FakeControlPlane()
    start = time.time()
    async with harness(tmp_path, control, clocks=Clocks(boot, lambda: start)) as world:
        engine, granted = await stored(world)
        other = control.tenant()
        control.stream_held = True
        boot.advance(60)
        assert not (await engine.open("slept", granted)).allowed
        control.revoke(world.tenant.everyone)
        await world.sidecar.serving.renew()
        assert not (await engine.open("revoked", granted)).allowed
        await save_whole(engine, "others", control.grant(other, PROMPT))
        assert (await engine.open("hit", control.grant(other, PROMPT))).tokens == 288


async def test_an_engine_whose_staging_cannot_be_had_is_refused_alone(tmp_path: Path) -> None:
    async with harness(tmp_path) as world:
        engine, granted = await stored(world)
        server = world.sidecar.server
        plenty = server._limits
        server._limits = dataclasses.replace(plenty, staging_bytes=1 << 60)
        with pytest.raises(RefusedHello, match="unavailable"):
            await world.connect("worker")
        assert server.counts.crashed == 0
        assert await restored_whole(engine, "goes on", granted)
        server._limits = plenty
        again = await world.connect("worker")
        assert again.staging is not None
        await again.close()
