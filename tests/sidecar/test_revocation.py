"""Revocation while things are under way: at the key lease, the load, the save and the verdict."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import httpx
import pytest

from sidecar.control.client import ControlClient
from storage.block import BlockContext
from storage.fence import Fence
from storage.opening import Loaded
from storage.reclaim import Reclaimed
from storage.retention import Retention
from storage.saving import Aside, InTurn, Saved
from storage.store import BlockStore
from strongroom.derivation import NamespaceKeys
from strongroom.log import InvalidationKind
from strongroom.wire.frames import (
    Cancel,
    Copied,
    Failure,
    Fenced,
    Filled,
    Finish,
    Load,
    LoadDone,
    LoadFailed,
    Part,
    Save,
    SaveDone,
    Slots,
    Verdict,
)
from tests.sidecar.conftest import PROMPT, Stored
from tests.sidecar.harness import World, block_content, harness

KIND = InvalidationKind
Revoke = Callable[[World], Awaitable[None]]


class Barrier:
    """Holds whoever arrives until it is lifted."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self.lifted = asyncio.Event()

    async def __call__(self) -> None:
        self.arrived.set()
        await self.lifted.wait()


class Gated:
    """The real store with a barrier after its own work on a load or a save."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self.after_load: Barrier | None = None
        self.before_save: Barrier | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    async def load(
        self, context: BlockContext, keys: NamespaceKeys, staging: memoryview, fence: Fence
    ) -> Loaded:
        loaded = await self._store.load(context, keys, staging, fence)
        if self.after_load is not None:
            await self.after_load()
        return loaded

    async def save(
        self,
        context: BlockContext,
        keys: NamespaceKeys,
        staging: memoryview,
        fence: Fence,
        retention: Retention,
        in_turn: InTurn,
        aside: Aside,
    ) -> Saved:
        if self.before_save is not None:
            await self.before_save()
        return await self._store.save(context, keys, staging, fence, retention, in_turn, aside)


@pytest.fixture
async def gated(stored: Stored) -> AsyncIterator[Gated]:
    depot = stored.world.sidecar.sessions._bench.depot
    gate = Gated(depot.store)
    object.__setattr__(depot, "store", gate)
    yield gate
    for barrier in (gate.after_load, gate.before_save):
        if barrier is not None:
            barrier.lifted.set()


def by_component(world: World) -> int:
    return world.control.revoke(world.tenant.everyone).seq


def by_subject(world: World) -> int:
    return world.control.append(KIND.SUBJECT, tenant=world.tenant.id, subject="alice").seq


def by_revision(world: World) -> int:
    return world.control.append(KIND.TENANT_REVISION, tenant=world.tenant.id, min_revision=2).seq


def of_somebody_else(world: World) -> int:
    other = world.control.tenant()
    return world.control.append(
        KIND.SUBJECT, tenant=other.id, subject="alice", components=(other.everyone,)
    ).seq


async def clean(world: World) -> None:
    """What earlier transfers left in staging is wiped: what is found there now is of this one."""
    for joined in world.sidecar.sessions:
        for worker in joined.workers.values():
            await worker.slots.wiped()


async def applied(world: World, seq: int) -> None:
    assert await world.sidecar.log.reach(world.control.epoch, seq, 20)


REVOCATIONS = [by_component, by_subject, by_revision]


@pytest.mark.parametrize("revoke", REVOCATIONS)
async def test_a_revoked_request_can_no_longer_load_and_is_told(
    stored: Stored, revoke: Callable[[World], int]
) -> None:
    world, engine = stored.world, stored.engine
    await stored.hits("r", stored.grant())
    assert (await engine.load("r", 0, 288)).ok
    await applied(world, of_somebody_else(world))
    assert (await engine.load("r", 0, 288)).ok
    old = stored.grant()
    await applied(world, revoke(world))
    assert not (await engine.load("r", 0, 288)).ok
    assert (await engine.scheduler.expect(Fenced)).request == "r"
    assert await stored.hits("again", old) == -1


@pytest.mark.parametrize("revoke", [*REVOCATIONS, of_somebody_else])
async def test_a_block_opened_before_a_revocation_is_not_released_after_it(
    stored: Stored, gated: Gated, revoke: Callable[[World], int]
) -> None:
    world, wire = stored.world, stored.engine.workers[0]
    await stored.hits("r", stored.grant())
    await clean(world)
    barrier = gated.after_load = Barrier()
    wire.send(Load("r", 1, 0, 64))
    await barrier.arrived.wait()
    content = block_content(PROMPT, 0, 64)
    assert wire.staging is not None
    assert content in wire.staging[:]
    seq = revoke(world)
    await applied(world, seq)
    if revoke is of_somebody_else:
        barrier.lifted.set()
        wire.send(Copied(1, (await wire.expect(Part)).offset))
        await wire.expect(LoadDone)
        return
    assert content not in wire.staging[:]  # zeroed at once, while the load still hangs
    for _ in range(200):  # ample time for an acknowledgement that does not wait for the load
        await asyncio.sleep(0)
    assert not any(ack.seq >= seq for ack in world.control.acks)
    barrier.lifted.set()
    failed = await wire.expect(LoadFailed)
    assert failed.start == 0
    assert not any(isinstance(frame, Part) for frame in wire.unread)
    ack = await world.control.until_acked("fenced", seq)
    assert ack.loads_fenced == 1


async def test_parts_not_copied_yet_are_zeroed_and_the_load_fails_from_its_start(
    stored: Stored,
) -> None:
    world, wire = stored.world, stored.engine.workers[0]
    await stored.hits("r", stored.grant())
    await clean(world)
    wire.send(Load("r", 1, 0, 128))
    first, second = await wire.expect(Part), await wire.expect(Part)
    assert wire.staging is not None
    assert block_content(PROMPT, 64, 128) in wire.staging[:]
    wire.send(Copied(1, first.offset))
    seq = by_component(world)
    failed = await wire.expect(LoadFailed)
    assert failed.start == 0
    assert block_content(PROMPT, 64, 128) not in wire.staging[:]
    await world.control.until_acked("fenced", seq)
    assert not any(wire.staging[:])
    # The slot is not handed out again before the engine has answered for it.
    assert world.sidecar.statistics().staging_used_bytes > 0
    wire.send(Copied(1, second.offset))
    assert (await stored.engine.load("r", 0, 64)).ok is False
    assert world.sidecar.statistics().staging_used_bytes == 0


async def test_a_released_part_is_zeroed_at_once_also_while_the_next_is_being_opened(
    stored: Stored, gated: Gated
) -> None:
    world, wire = stored.world, stored.engine.workers[0]
    await stored.hits("r", stored.grant())
    await clean(world)
    wire.send(Load("r", 1, 0, 128))
    await wire.expect(Part)
    await wire.expect(Part)
    barrier = gated.after_load = Barrier()
    wire.send(Load("r", 2, 128, 192))
    await barrier.arrived.wait()
    assert wire.staging is not None
    assert block_content(PROMPT, 0, 64) in wire.staging[:]
    await applied(world, by_subject(world))
    assert not any(wire.staging[:])
    barrier.lifted.set()
    await wire.expect(LoadFailed)
    await wire.expect(LoadFailed)


async def test_what_ended_transfers_left_in_staging_is_wiped_before_a_fence_is_acknowledged(
    tmp_path: Path,
) -> None:
    prompt = list(range(288))
    async with harness(tmp_path, staging_wipe_s=3600.0) as world:
        engine = await world.engine()
        await engine.compute_and_save("w", world.control.grant(world.tenant, prompt))
        await engine.open("r", world.control.grant(world.tenant, prompt))
        assert (await engine.load("r", 0, 288)).ok
        staging = engine.workers[0].staging
        assert staging is not None
        (joined,) = world.sidecar.sessions
        # The copies are answered for: the slots are given back, and nobody uses them.
        while joined.workers[0].transfers:
            await asyncio.sleep(0)
        assert world.sidecar.statistics().staging_used_bytes == 0
        assert block_content(prompt, 256, 288) in staging[:]
        go_on = threading.Event()
        async with asyncio.TaskGroup() as tasks:
            wiping = joined.workers[0].slots._workers
            tasks.create_task(wiping.run(partial(held, go_on)))
            seq = by_component(world)
            await applied(world, seq)
            for _ in range(200):  # ample time for an acknowledgement that does not wait
                await asyncio.sleep(0)
            assert not any(ack.seq >= seq for ack in world.control.acks if ack.state == "fenced")
            go_on.set()
        await world.control.until_acked("fenced", seq)
        assert not any(staging[:])


def held(go_on: threading.Event) -> None:
    """A thread that is busy until it is told to go on."""
    assert go_on.wait(20)


async def test_keys_of_a_retired_component_are_dropped_and_others_kept(stored: Stored) -> None:
    world = stored.world
    await stored.hits("r", stored.grant())
    (namespace,) = world.sidecar.ring.namespaces()
    await applied(world, of_somebody_else(world))
    assert world.sidecar.ring.namespaces() == {namespace}
    await applied(world, by_subject(world))
    assert world.sidecar.ring.namespaces() == {namespace}  # another subject may hold them
    await applied(world, by_component(world))
    assert world.sidecar.ring.namespaces() == frozenset()


@pytest.mark.parametrize("revoke", [*REVOCATIONS, of_somebody_else])
async def test_a_save_under_way_is_never_published_after_a_revocation(
    stored: Stored, gated: Gated, revoke: Callable[[World], int]
) -> None:
    world, wire = stored.world, stored.engine.workers[0]
    prompt = list(range(7000, 7064))
    await stored.engine.open("w", world.control.grant(world.tenant, prompt))
    barrier = gated.before_save = Barrier()
    wire.send(Save("w", 1, 64))
    (slot,) = (await wire.expect(Slots)).slots
    stored.engine.fill(wire, slot, prompt)
    wire.send(Filled(1, slot.offset, True))
    await barrier.arrived.wait()
    seq = revoke(world)
    await applied(world, seq)
    barrier.lifted.set()
    expected = 1 if revoke is of_somebody_else else 0
    assert (await wire.expect(SaveDone)).stored == expected
    if not expected:
        assert (await world.control.until_acked("fenced", seq)).saves_fenced == 1
    await stored.engine.scheduler.writer.drain()
    fresh = world.control.grant(world.tenant, prompt, revision=2)
    verdict = await stored.engine.open("r", fresh)
    assert verdict.tokens == (64 if expected else 0)


async def test_slots_handed_out_before_a_revocation_store_nothing(stored: Stored) -> None:
    world, wire = stored.world, stored.engine.workers[0]
    prompt = list(range(7000, 7064))
    await stored.engine.open("w", world.control.grant(world.tenant, prompt))
    wire.send(Save("w", 1, 64))
    (slot,) = (await wire.expect(Slots)).slots
    await clean(world)
    stored.engine.fill(wire, slot, prompt)
    by_subject(world)
    assert (await wire.expect(SaveDone)).stored == 0
    assert wire.staging is not None
    assert not any(wire.staging[:])
    stored.engine.fill(wire, slot, prompt)  # the engine had not heard yet
    wire.send(Filled(1, slot.offset, True))
    verdict = await stored.engine.open("r", world.control.grant(world.tenant, prompt))
    assert (verdict.allowed, verdict.tokens) == (True, 0)
    async with asyncio.timeout(20):
        while any(wire.staging[:]):
            await asyncio.sleep(0)


async def test_a_key_lease_that_arrives_after_an_invalidation_is_dropped(world: World) -> None:
    engine = await world.engine()
    plane = world.control
    hold = plane.before_key_lease = asyncio.Event()
    good = plane.grant(world.tenant, PROMPT)
    opening = asyncio.ensure_future(engine.open("r", good))  # noqa: TID251 - awaited below
    await plane.key_lease_waiting.wait()
    await applied(world, plane.revoke(world.tenant.everyone).seq)
    hold.set()
    assert not (await opening).allowed
    assert world.sidecar.ring.namespaces() == frozenset()
    assert world.sidecar.keys.counts.dropped == 1


async def test_a_key_lease_survives_an_invalidation_of_something_else(world: World) -> None:
    engine = await world.engine()
    plane = world.control
    hold = plane.before_key_lease = asyncio.Event()
    opening = asyncio.ensure_future(engine.open("r", plane.grant(world.tenant, PROMPT)))  # noqa: TID251
    await plane.key_lease_waiting.wait()
    await applied(world, plane.revoke(plane.component()).seq)
    hold.set()
    assert (await opening).allowed
    assert len(world.sidecar.ring.namespaces()) == 1


async def test_two_requests_of_one_grant_share_one_key_lease(world: World) -> None:
    engine = await world.engine()
    plane = world.control
    granted = plane.grant(world.tenant, PROMPT)
    hold = plane.before_key_lease = asyncio.Event()
    first = asyncio.ensure_future(engine.open("a", granted))  # noqa: TID251
    await plane.key_lease_waiting.wait()
    from strongroom.blocks import pack_tokens
    from strongroom.wire.frames import Open

    engine.scheduler.send(Open("b", granted.token, granted.salt, pack_tokens(PROMPT), "none"))
    hold.set()
    assert (await first).allowed
    assert (await engine.scheduler.expect(Verdict)).allowed
    assert sum(path.endswith("/key-lease") for path in plane.calls) == 1


async def test_revocation_reclaims_bytes_in_the_background_and_acknowledges(
    stored: Stored,
) -> None:
    world = stored.world
    assert world.sidecar.store.namespaces()
    seq = by_component(world)
    await world.control.until_acked("fenced", seq)
    ack = await world.control.until_acked("reclaimed", seq)
    assert ack.bytes_reclaimed > 0
    assert not world.sidecar.store.namespaces()


async def test_namespaces_retired_while_the_sidecar_was_down_are_reclaimed_at_start(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as world:
        engine = await world.engine()
        tenant, control = world.tenant, world.control
        kept = control.component()
        await engine.compute_and_save("a", control.grant(tenant, PROMPT))
        await engine.compute_and_save("b", control.grant(tenant, PROMPT, [(300, (), (kept,))]))
        assert len(world.sidecar.store.namespaces()) == 2
    control.revoke(tenant.everyone)
    async with harness(tmp_path, control) as world:
        await control.until_acked("reclaimed", control.head.seq)
        assert len(world.sidecar.store.namespaces()) == 1
        engine = await world.engine()
        good = await engine.open("b", control.grant(tenant, PROMPT, [(300, (), (kept,))]))
        assert good.tokens == 288


async def test_cancel_stops_a_load_and_frees_its_staging(stored: Stored, gated: Gated) -> None:
    wire = stored.engine.workers[0]
    await stored.hits("r", stored.grant())
    barrier = gated.after_load = Barrier()
    wire.send(Load("r", 1, 0, 288))
    await barrier.arrived.wait()
    stored.engine.scheduler.send(Cancel("r"))
    while not stored.world.sidecar.sessions._sets["engine-a"].requests.get("r").fence.is_cut:  # type: ignore[union-attr]
        await asyncio.sleep(0)
    barrier.lifted.set()
    assert (await wire.expect(LoadFailed)).start == 0
    gated.after_load = None
    await stored.hits("next", stored.grant())
    assert (await stored.engine.load("next", 0, 288)).ok
    assert stored.world.sidecar.statistics().staging_used_bytes == 0


async def test_saves_go_on_after_finish_and_loads_do_not(stored: Stored) -> None:
    prompt = list(range(7000, 7128))
    engine = stored.engine
    await engine.open("w", stored.world.control.grant(stored.world.tenant, prompt))
    assert await engine.save("w", prompt, 64) == 1
    await engine.open("r", stored.world.control.grant(stored.world.tenant, prompt))
    assert (await engine.load("r", 0, 64)).ok
    for name in ("w", "r"):
        engine.scheduler.send(Finish(name))
    await engine.open("after", stored.world.control.grant(stored.world.tenant, prompt))
    assert await engine.save("w", prompt, 128) == 1
    assert not (await engine.load("r", 0, 64)).ok


async def test_two_saves_of_one_block_ask_for_it_once(stored: Stored) -> None:
    world, wire = stored.world, stored.engine.workers[0]
    prompt = list(range(7000, 7064))
    for name in ("a", "b"):
        await stored.engine.open(name, world.control.grant(world.tenant, prompt))
    wire.send(Save("a", 1, 64))
    (slot,) = (await wire.expect(Slots)).slots
    wire.send(Save("b", 2, 64))
    assert (await wire.expect(Slots)).slots == ()
    assert (await wire.expect(SaveDone)).stored == 0
    stored.engine.fill(wire, slot, prompt)
    wire.send(Filled(1, slot.offset, True))
    assert (await wire.expect(SaveDone)).stored == 1
    assert len(world.sidecar.in_flight) == 0


async def test_a_slot_given_back_unused_stores_nothing(stored: Stored) -> None:
    world, wire = stored.world, stored.engine.workers[0]
    prompt = list(range(7000, 7064))
    await stored.engine.open("a", world.control.grant(world.tenant, prompt))
    wire.send(Save("a", 1, 64))
    (slot,) = (await wire.expect(Slots)).slots
    wire.send(Filled(1, slot.offset, False))
    assert (await wire.expect(SaveDone)).stored == 0
    assert await stored.engine.save("a", prompt, 64) == 1


async def test_a_load_larger_than_staging_goes_through_it_piece_by_piece(tmp_path: Path) -> None:
    async with harness(tmp_path, staging_bytes=16 * 1024) as world:
        engine = await world.engine()
        granted = world.control.grant(world.tenant, PROMPT)
        await engine.open("w", granted)
        stored = 0
        for _ in range(5):
            stored += await engine.save("w", PROMPT, 288)
        assert stored == 5
        assert (await engine.open("r", granted)).tokens == 288
        restored = await engine.load("r", 0, 288)
        assert restored.ok
        assert len(restored.blocks) == 5


async def test_a_load_that_starts_inside_a_block_brings_that_block(stored: Stored) -> None:
    await stored.hits("r", stored.grant())
    restored = await stored.engine.load("r", 96, 160)
    assert restored.ok
    assert sorted(restored.blocks) == [64, 128]


async def test_an_engine_that_does_not_copy_in_time_fails_its_load(tmp_path: Path) -> None:
    from tests.sidecar.control_plane import FakeControlPlane

    control = FakeControlPlane(lease_ms=300)
    async with harness(tmp_path, control, staging_grace_s=0.01) as world:
        engine = await world.engine()
        granted = world.control.grant(world.tenant, PROMPT)
        await engine.compute_and_save("w", granted)
        await engine.open("r", granted)
        await clean(world)
        wire = engine.workers[0]
        wire.send(Load("r", 1, 0, 64))
        await wire.expect(Part)
        assert (await wire.expect(LoadFailed)).start == 0
        assert wire.staging is not None
        assert not any(wire.staging[:])


async def test_an_engine_that_never_fills_its_slots_loses_its_connection(tmp_path: Path) -> None:
    async with harness(tmp_path, fill_deadline_s=0.05) as world:
        engine = await world.engine()
        await engine.open("w", world.control.grant(world.tenant, PROMPT))
        wire = engine.workers[0]
        wire.send(Save("w", 1, 64))
        assert (await wire.expect(Slots)).slots
        assert (await wire.expect(SaveDone)).stored == 0
        assert len(world.sidecar.in_flight) == 0
        assert (await wire.expect(Failure)).code == "overloaded"
        with pytest.raises(asyncio.IncompleteReadError):
            await wire.receive()


async def test_a_corrupt_block_fails_its_load_and_is_a_miss_afterwards(stored: Stored) -> None:
    world = stored.world
    assert await stored.hits("good", stored.grant()) == 288
    arena = world.sidecar.store._host._arena.view
    content = bytes(arena[:])
    arena[:] = bytes(byte ^ 0xFF for byte in content)
    restored = await stored.engine.load("good", 0, 288)
    assert not restored.ok
    assert restored.blocks == {}
    assert await stored.hits("after", stored.grant()) == 0
    counts = world.sidecar.audit.counts
    assert counts["load", "failed", "integrity"] == 1
    # Two blocks are opened at a time, and each record that does not open is on record.
    found = world.sidecar.store.statistics().quarantined
    assert found in {1, 2}
    async with asyncio.timeout(20):
        while counts["corrupt", "failed", "integrity"] != found:
            await asyncio.sleep(0)


async def test_a_tenant_over_its_quota_is_refused_and_counted(tmp_path: Path) -> None:
    async with harness(tmp_path, tenant_host_bytes=20 * 1024, nvme_path=None) as world:
        engine = await world.engine()
        granted = world.control.grant(world.tenant, PROMPT)
        await engine.open("w", granted)
        first = await engine.save("w", PROMPT, 64)
        rest = await engine.save("w", PROMPT, 288)
        assert first + rest < 5
        assert world.sidecar.audit.counts["quota", "failed", "quota"] >= 1


@pytest.mark.parametrize("held_up", ["reclaim", "liveness", "its acknowledgement"])
async def test_fenced_is_acknowledged_while_an_earlier_reclaim_is_under_way(
    stored: Stored, held_up: str
) -> None:
    world = stored.world
    plane, invalidation = world.control, world.sidecar.follower.invalidation
    hold = Barrier()
    reclaim, liveness, answer = (
        invalidation.reclaim, invalidation.ask_liveness, plane.handle_async_request,
    )  # fmt: skip

    async def held_reclaim() -> Reclaimed:
        await hold()
        return await reclaim()

    async def held_liveness(client: ControlClient, *, unknown_only: bool) -> int:
        await hold()
        return await liveness(client, unknown_only=unknown_only)

    async def held_answer(request: httpx.Request) -> httpx.Response:
        if b'"reclaimed"' in await request.aread():
            await hold()
        return await answer(request)

    match held_up:
        case "reclaim":
            invalidation.reclaim = held_reclaim  # type: ignore[method-assign]
        case "liveness":
            invalidation.ask_liveness = held_liveness  # type: ignore[method-assign]
        case _:
            plane.handle_async_request = held_answer  # type: ignore[method-assign]
    async with asyncio.timeout(20):
        first = plane.revoke(plane.component()).seq
        await hold.arrived.wait()
        await plane.until_acked("fenced", first)
        second = by_component(world)
        await plane.until_acked("fenced", second)
        assert not any(ack.state == "reclaimed" and ack.seq >= first for ack in plane.acks)
        hold.lifted.set()
        assert (await plane.until_acked("reclaimed", second)).seq == second
    assert not world.sidecar.store.namespaces()


@pytest.mark.parametrize("gone", ["its name is used again", "its scheduler is gone"])
async def test_fenced_waits_for_the_transfers_of_requests_that_are_gone(
    stored: Stored, gated: Gated, gone: str
) -> None:
    world, engine = stored.world, stored.engine
    wire = engine.workers[0]
    await stored.hits("r", stored.grant())
    barrier = gated.after_load = Barrier()
    wire.send(Load("r", 1, 0, 64))
    await barrier.arrived.wait()
    if gone == "its name is used again":
        await stored.hits("r", stored.grant())
    else:
        await engine.scheduler.close()
        while world.sidecar.sessions._sets["engine-a"].scheduler is not None:
            await asyncio.sleep(0)
    seq = by_component(world)
    await applied(world, seq)
    for _ in range(200):
        await asyncio.sleep(0)
    assert not any(ack.seq >= seq for ack in world.control.acks)
    barrier.lifted.set()
    async with asyncio.timeout(20):
        ack = await world.control.until_acked("fenced", seq)
    assert ack.loads_fenced == 1


async def test_an_engine_is_known_until_the_last_of_its_transfers_has_ended(
    stored: Stored, gated: Gated
) -> None:
    (joined,) = stored.world.sidecar.sessions
    await stored.hits("r", stored.grant())
    barrier = gated.after_load = Barrier()
    stored.engine.workers[0].send(Load("r", 1, 0, 64))
    await barrier.arrived.wait()
    await stored.engine.scheduler.close()
    while joined.scheduler is not None:
        await asyncio.sleep(0)
    # As if another worker connection had taken over and gone while the first still ends.
    stored.world.sidecar.sessions.join(joined.greeting)
    worker = joined.workers.pop(0)
    assert not joined.empty
    stored.world.sidecar.sessions.leave(joined)
    assert list(stored.world.sidecar.sessions) == [joined]
    joined.workers[0] = worker
    barrier.lifted.set()
    await stored.engine.workers[0].close()
    async with asyncio.timeout(20):
        while list(stored.world.sidecar.sessions):
            await asyncio.sleep(0)
