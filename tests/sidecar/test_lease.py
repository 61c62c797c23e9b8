"""Until when a verdict counts: what schedulers are told of the serving lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from sidecar.clocks import Clocks
from strongroom.errors import Unavailable
from strongroom.log import InvalidationKind
from strongroom.wire.frames import Fenced, Lease, Ping, Pong, SidecarFrame, Verdict
from tests.sidecar.conftest import Stored
from tests.sidecar.control_plane import FakeControlPlane
from tests.sidecar.harness import ManualClock, Wire, World, harness

LEASE_S = 3600


async def received(wire: Wire) -> list[SidecarFrame]:
    """Every frame that was sent before now, in order."""
    wire.unread.clear()
    wire.send(Ping(1))
    await wire.expect(Pong)
    return [frame for frame in wire.unread if isinstance(frame, Lease | Fenced | Verdict)]


async def leases(wire: Wire) -> list[int]:
    return [frame.deadline_ns for frame in await received(wire) if isinstance(frame, Lease)]


@pytest.fixture
def boot() -> ManualClock:
    return ManualClock()


@pytest.fixture
def control() -> FakeControlPlane:
    """Leases so long that none is renewed but by the test."""
    return FakeControlPlane(lease_ms=LEASE_S * 1000)


@pytest.fixture
async def world(
    tmp_path: Path, boot: ManualClock, control: FakeControlPlane
) -> AsyncIterator[World]:
    async with harness(tmp_path, control, clocks=Clocks(boot)) as world:
        yield world


async def test_a_scheduler_is_told_the_lease_after_welcome_and_at_every_renewal(
    world: World, boot: ManualClock
) -> None:
    gate = world.sidecar.gate
    scheduler, worker = await world.connect("scheduler"), await world.connect("worker")
    async with asyncio.timeout(20):
        # The very next frame after the welcome.
        assert await scheduler.receive() == Lease(gate.require())
    told = [gate.require()]
    for _ in range(3):
        boot.advance(1)
        await world.sidecar.serving.renew()
        assert await received(scheduler) == [Lease(gate.require())]
        told.append(gate.require())
    assert told == sorted(set(told))
    assert await received(worker) == []
    for wire in (scheduler, worker):
        await wire.close()


async def test_every_engines_scheduler_is_told(world: World) -> None:
    (world.token_path.parent / "other.token").touch(mode=0o600)
    (world.token_path.parent / "other.token").write_text("other")
    wires = [
        await world.connect("scheduler"),
        await world.connect("scheduler", engine="other", token="other"),
    ]
    for wire in wires:
        await received(wire)
    await world.sidecar.serving.renew()
    for wire in wires:
        assert await leases(wire) == [world.sidecar.gate.require()]
        await wire.close()


async def test_what_the_renewals_log_fenced_is_told_before_the_renewal(stored: Stored) -> None:
    world, wire = stored.world, stored.engine.scheduler
    world.control.stream_held = True
    for round_ in range(3):
        granted = stored.grant(revision=world.control.head.seq + 1)
        assert (await stored.engine.open(f"r{round_}", granted)).allowed
        await received(wire)
        world.control.append(
            InvalidationKind.TENANT_REVISION,
            tenant=world.tenant.id,
            min_revision=world.control.head.seq + 2,
        )
        await world.sidecar.serving.renew()
        assert [type(frame) for frame in await received(wire)] == [Fenced, Lease]


async def test_no_lease_is_told_while_there_is_none(world: World, boot: ManualClock) -> None:
    early = await world.connect("scheduler")
    assert len(await leases(early)) == 1
    world.control.away = True
    boot.advance(LEASE_S + 1)
    with pytest.raises(Unavailable):
        await world.sidecar.serving.renew()
    assert await leases(early) == []
    late = await world.connect("scheduler")
    assert await leases(late) == []
    world.control.away = False
    await world.sidecar.serving.renew()
    assert await leases(late) == [world.sidecar.gate.require()]
    for wire in (early, late):
        await wire.close()


async def test_a_retired_sidecar_tells_no_lease_though_its_questions_are_answered(
    stored: Stored,
) -> None:
    world, wire = stored.world, stored.engine.scheduler
    mine = world.sidecar.enrolled.sidecar
    entry = world.control.append(InvalidationKind.SIDECAR, sidecar=mine)
    assert await world.sidecar.log.reach(world.control.epoch, entry.seq, 20)
    await received(wire)
    await world.sidecar.serving.renew()
    assert await leases(wire) == []


async def test_an_answer_that_is_older_than_another_takes_no_time_away(
    world: World, boot: ManualClock
) -> None:
    """Two questions under way; the one that was asked first is answered last."""
    hold, waiting = asyncio.Event(), asyncio.Event()
    plane = world.control
    original = plane.handle_async_request

    async def held(request: httpx.Request) -> httpx.Response:
        answer = await original(request)
        if not waiting.is_set():
            waiting.set()
            await hold.wait()
        return answer

    wire = await world.connect("scheduler")
    await received(wire)
    plane.handle_async_request = held  # type: ignore[method-assign]
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(world.sidecar.serving.renew())
        await waiting.wait()
        boot.advance(1)
        await world.sidecar.serving.renew()
        hold.set()
    assert await leases(wire) == [world.sidecar.gate.require()] * 2
    await wire.close()


async def test_namespaces_of_which_nothing_is_stored_are_forgotten_in_time(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, keys = stored.world, stored.world.sidecar.keys
    kept = keys.known()
    assert kept <= world.sidecar.store.namespaces()
    monkeypatch.setattr("sidecar.control.leases.TRIMMED_FROM", 0)

    async def lease_another(name: str) -> None:
        tenant = world.control.tenant()
        granted = world.control.grant(tenant, stored.prompt)
        assert (await stored.engine.open(name, granted)).allowed

    await lease_another("one")
    known = keys.known()
    assert known > kept
    keys._trim_at = 0
    await lease_another("two")
    assert keys.known() > known, "leased a moment ago: a save may still store it"
    monkeypatch.setattr("sidecar.control.leases._KEPT_NS", -(10**18))
    keys._trim_at = 0
    await lease_another("three")
    assert len(keys.known() - kept) == 3, "their keys are held"
    world.sidecar.ring.drop_all()
    keys._trim_at = 0
    await lease_another("four")
    assert len(keys.known() - kept) == 1
    assert keys.known() > kept
    # What is stored is still found by the components that it depends on.
    assert keys.depending([world.tenant.everyone]) == kept
