"""Saves: sealed side by side and published in order, stopped at any point, never left behind."""

from __future__ import annotations

import asyncio
import itertools
import json
import random  # noqa: TID251 - a seeded generator, so that a failure repeats
import signal
import sys
from pathlib import Path

import msgspec
import pytest

from sidecar.record.reasons import Reason
from sidecar.record.spool import SpoolSync
from storage.block import BlockContext
from storage.fence import Fence
from storage.retention import BlockKind, Retention
from storage.saving import Aside, InTurn, Saved
from storage.store import BlockStore
from storage.tiers.protocol import TierName
from strongroom.derivation import NamespaceKeys
from strongroom.wire.frames import Cancel, Filled, Finish, Save, SaveDone, Slot, Slots
from tests.sidecar.harness import Engine, World, harness
from tests.steps import Steps

ROOT = Path(__file__).resolve().parents[2]
PROMPT = list(range(4000, 4256))
BLOCKS = 4
MIB = 1024 * 1024


class Watched:
    """The real store: it keeps a save at its door while told to, and notes who comes and goes."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self.inside = 0
        self.most = 0
        self.contexts: list[BlockContext] = []
        self.retentions: list[Retention] = []
        self._gates: dict[int, asyncio.Event] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def hold(self, position: int) -> asyncio.Event:
        """Blocks at this token position wait until the event is set."""
        return self._gates.setdefault(position, asyncio.Event())

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
        self.contexts.append(context)
        self.retentions.append(retention)
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            gate = self._gates.get(context.position)
            if gate is not None:
                await gate.wait()
            return await self._store.save(context, keys, staging, fence, retention, in_turn, aside)
        finally:
            self.inside -= 1


def watch(world: World) -> Watched:
    depot = world.sidecar.sessions._bench.depot
    watched = Watched(depot.store)
    object.__setattr__(depot, "store", watched)
    return watched


async def begun(
    world: World, engine: Engine, name: str, prompt: list[int]
) -> tuple[int, tuple[Slot, ...]]:
    """A request with a save: its number, and the slots that were handed out."""
    await engine.open(name, world.control.grant(world.tenant, prompt))
    number, wire = engine.next_number(), engine.workers[0]
    wire.send(Save(name, number, len(prompt)))
    return number, (await wire.expect(Slots)).slots


async def at_rest(world: World) -> None:
    """Nothing of any save is left: no claim, no slot, no plaintext, no pin, nothing dirty."""
    async with asyncio.timeout(20):
        while world.sidecar.statistics().staging_used_bytes or len(world.sidecar.in_flight):
            await asyncio.sleep(0)
        await world.sidecar.store.flush()
    store = world.sidecar.store
    assert store._offload is not None
    store._offload.verify()
    statistics = store.statistics()
    assert statistics.write_behind_pending == 0
    for tier in statistics.tiers:
        assert tier.pinned == 0
        resident = [t for t in (store._host, store._nvme) if t is not None and t.name == tier.name]
        assert sum(resident[0].used().values()) == tier.used_bytes


# Side by side, in order


async def test_blocks_are_sealed_side_by_side_and_bounded(tmp_path: Path) -> None:
    async with harness(tmp_path) as world:
        engine, watched = await world.engine(), watch(world)
        gate = watched.hold(0)
        prompt = list(range(64 * 8))
        number, slots = await begun(world, engine, "r", prompt)
        wire = engine.workers[0]
        for slot in slots:
            engine.fill(wire, slot, prompt)
            wire.send(Filled(number, slot.offset, True))
        bound = world.sidecar.settings.crypto_threads + 2
        async with asyncio.timeout(20):
            while watched.inside < bound:
                await asyncio.sleep(0)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(watched.contexts) == bound == watched.most > 1
        assert not world.sidecar.store.namespaces(), "none is published before its parent"
        gate.set()
        assert (await wire.expect(SaveDone)).stored == 8
        await at_rest(world)


async def test_what_the_engine_fills_out_of_order_is_sealed_in_order(tmp_path: Path) -> None:
    async with harness(tmp_path) as world:
        engine, watched = await world.engine(), watch(world)
        number, slots = await begun(world, engine, "r", PROMPT)
        wire = engine.workers[0]
        for slot in reversed(slots):
            engine.fill(wire, slot, PROMPT)
            wire.send(Filled(number, slot.offset, True))
        assert (await wire.expect(SaveDone)).stored == BLOCKS
        assert [context.position for context in watched.contexts] == [0, 64, 128, 192]


@pytest.mark.parametrize("lost", [0, 1, 3])
async def test_what_comes_after_a_block_that_failed_is_not_saved(tmp_path: Path, lost: int) -> None:
    async with harness(tmp_path) as world:
        engine = await world.engine()
        number, slots = await begun(world, engine, "r", PROMPT)
        wire = engine.workers[0]
        for index, slot in enumerate(slots):
            engine.fill(wire, slot, PROMPT)
            wire.send(Filled(number, slot.offset, index != lost))
        assert (await wire.expect(SaveDone)).stored == lost
        await at_rest(world)
        statistics = world.sidecar.statistics().saves
        after = BLOCKS - lost - 1
        assert statistics.stored == lost
        assert statistics.dropped[Reason.CANCELLED] == 1
        assert statistics.dropped.get(Reason.PARENT, 0) == after
        verdict = await engine.open("again", world.control.grant(world.tenant, PROMPT))
        assert verdict.tokens == 64 * lost
        assert await engine.save("again", PROMPT, len(PROMPT)) == BLOCKS - lost


async def test_children_sealed_already_are_not_published_when_their_parent_is_refused(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path, nvme_path=None) as world:
        engine, watched = await world.engine(), watch(world)
        gate = watched.hold(0)
        number, slots = await begun(world, engine, "r", PROMPT)
        wire = engine.workers[0]
        for slot in slots:
            engine.fill(wire, slot, PROMPT)
            wire.send(Filled(number, slot.offset, True))
        async with asyncio.timeout(20):
            while watched.inside < 3:
                await asyncio.sleep(0)
        (context,) = [context for context in watched.contexts if context.position == 0]
        world.sidecar.store.set_quota(context.tenant, TierName.HOST, 1)
        gate.set()
        assert (await wire.expect(SaveDone)).stored == 0
        assert not world.sidecar.store.namespaces()
        assert world.sidecar.store._host.statistics().used_bytes == 0
        dropped = world.sidecar.statistics().saves.dropped
        assert dropped[Reason.QUOTA] >= 1
        assert world.sidecar.audit.counts["quota", "failed", "quota"] == 1


async def test_a_save_of_thousands_of_blocks_is_given_up_as_one_of_a_few(tmp_path: Path) -> None:
    """Each later block is visited once, and no call goes deeper for each: a cancelled request, and
    a revocation, must not stop in the middle of a save because it is long.
    """
    blocks = sys.getrecursionlimit() * 2
    async with harness(tmp_path, staging_bytes=64 * MIB) as world:
        engine = await world.engine()
        prompt = list(range(64 * blocks))
        number, slots = await begun(world, engine, "r", prompt)
        assert len(slots) == blocks
        (other_number, others) = await begun(world, engine, "other", prompt[: 64 * 4])
        assert len(others) == 0, "its blocks are asked for already"
        (joined,) = world.sidecar.sessions
        request = joined.requests.get("r")
        assert request is not None
        request.fence_off()
        wire = engine.workers[0]
        for slot in slots:
            wire.send(Filled(number, slot.offset, True))
        done = [await wire.expect(SaveDone) for _ in range(2)]
        assert {frame.save: frame.stored for frame in done} == {number: 0, other_number: 0}
        dropped = world.sidecar.statistics().saves.dropped
        assert dropped == {Reason.REVOKED: 1, Reason.PARENT: blocks - 1}
        await at_rest(world)


async def test_a_chain_that_is_sealed_all_at_once_is_given_up_block_by_block(
    tmp_path: Path,
) -> None:
    """Blocks that are being sealed have not ended yet: each is given up once, and not once for
    every way that leads to it from the first.
    """
    blocks = 64
    async with harness(tmp_path, crypto_threads=64) as world:
        engine, watched = await world.engine(), watch(world)
        gates = [watched.hold(64 * position) for position in range(blocks)]
        prompt = list(range(64 * blocks))
        number, slots = await begun(world, engine, "r", prompt)
        wire = engine.workers[0]
        for slot in slots:
            engine.fill(wire, slot, prompt)
            wire.send(Filled(number, slot.offset, True))
        async with asyncio.timeout(20):
            while watched.inside < blocks:
                await asyncio.sleep(0)
        engine.scheduler.send(Cancel("r"))
        (joined,) = world.sidecar.sessions
        async with asyncio.timeout(20):
            while not world.sidecar.statistics().requests or joined.opens:
                await asyncio.sleep(0)
        for gate in gates:
            gate.set()
        assert (await wire.expect(SaveDone)).stored == 0
        await at_rest(world)


async def test_a_block_is_kept_by_what_its_span_probably_is(tmp_path: Path) -> None:
    async with harness(tmp_path) as world:
        engine, watched, plane = await world.engine(), watch(world), world.control
        document, private = plane.component(), plane.component()
        spans = [
            (64, (), (world.tenant.everyone,)),
            (128, (document,), (world.tenant.everyone,)),
            (192, (), (world.tenant.everyone,)),
            (256, (), (private,)),
        ]
        await engine.open("r", plane.grant(world.tenant, PROMPT, spans))
        assert await engine.save("r", PROMPT, 256) == BLOCKS
        kinds = [BlockKind.SYSTEM, BlockKind.DOCUMENT, BlockKind.HISTORY, BlockKind.HISTORY]
        assert watched.retentions == [Retention.of(kind) for kind in kinds]
        plain = list(range(9000, 9064))
        await engine.open("p", plane.grant(world.tenant, plain))
        await engine.save("p", plain, 64)
        assert watched.retentions[-1] == Retention.of(BlockKind.HISTORY)


# Stopped, revoked, killed


async def test_a_connection_that_goes_ends_its_saves_with_their_cause(tmp_path: Path) -> None:
    async with harness(tmp_path) as world:
        engine, watched = await world.engine(), watch(world)
        watched.hold(64)
        number, slots = await begun(world, engine, "r", PROMPT)
        wire = engine.workers[0]
        for slot in slots[:2]:
            engine.fill(wire, slot, PROMPT)
            wire.send(Filled(number, slot.offset, True))
        async with asyncio.timeout(20):
            while not (watched.inside == 1 and world.sidecar.store.namespaces()):
                await asyncio.sleep(0)
        await wire.close()
        await at_rest(world)
        async with asyncio.timeout(20):
            while not world.sidecar.audit.counts["save", "failed", "cancelled"]:
                await asyncio.sleep(0)
        assert world.sidecar.audit.counts["save", "stored", ""] == 1
        statistics = world.sidecar.statistics().saves
        assert (statistics.stored, statistics.claimed, statistics.sealing) == (1, 0, 0)
        assert sum(statistics.dropped.values()) == BLOCKS - 1


async def test_five_hundred_saves_cancelled_leave_nothing_behind(tmp_path: Path) -> None:
    """A cancellation storm: before, amid and after the filling, in a seeded order."""
    order = random.Random(7)
    prompts = {f"r{n}": list(range(n * 100, n * 100 + 128)) for n in range(500)}
    async with harness(tmp_path, transfers_max=2000, staging_bytes=16 * MIB, opens_max=64) as world:
        engine = await world.engine()
        wire = engine.workers[0]
        by_number: dict[int, str] = {}
        for name, prompt in prompts.items():
            await engine.open(name, world.control.grant(world.tenant, prompt))
            number = engine.next_number()
            by_number[number] = name
            wire.send(Save(name, number, 128))
        handed = [await wire.expect(Slots) for _ in prompts]
        assert sum(len(frame.slots) for frame in handed) == 1000
        steps = [("fill", frame.save, slot) for frame in handed for slot in frame.slots]
        cancels = [("cancel", frame.save, None) for frame in handed]
        events = steps + cancels
        order.shuffle(events)
        for _, number, slot in events:
            if slot is None:
                engine.scheduler.send(Cancel(by_number[number]))
            else:
                engine.fill(wire, slot, prompts[by_number[number]])
                wire.send(Filled(number, slot.offset, order.random() < 0.8))
            if order.random() < 0.02:
                await asyncio.sleep(0)
        done = [await wire.expect(SaveDone) for _ in prompts]
        assert sorted(frame.save for frame in done) == sorted(by_number)
        await at_rest(world)
        statistics = world.sidecar.statistics().saves
        assert statistics.stored == sum(frame.stored for frame in done)
        ended = statistics.stored + statistics.present + sum(statistics.dropped.values())
        assert ended == 1000
        assert statistics.dropped[Reason.CANCELLED] > 100
        assert wire.staging is not None
        await _zeroed(world, engine)
        fresh = list(range(900_000, 900_128))
        await engine.open("after", world.control.grant(world.tenant, fresh))
        assert await engine.save("after", fresh, 128) == 2


async def _zeroed(world: World, engine: Engine) -> None:
    """Nothing that was given back still holds plaintext once it has been wiped."""
    (joined,) = world.sidecar.sessions
    await joined.workers[0].slots.wiped()
    staging = engine.workers[0].staging
    assert staging is not None
    assert not any(staging[:])


async def test_a_save_revoked_at_any_await_is_never_visible_afterwards(tmp_path: Path) -> None:
    """The fence falls at every point at which the save or one of its seals gives way."""
    # Synced before serving, a save gives way at every record that it writes, too.
    synced = SpoolSync.BEFORE_SERVING
    async with harness(tmp_path, nvme_path=None, spool_sync=synced) as world:
        engine, host = await world.engine(), world.sidecar.store._host
        reached = 0
        for at in itertools.count():
            name, prompt = f"w{at}", list(range(at * 1000, at * 1000 + 128))
            if not await _revoked_at(world, engine, name, prompt, at):
                break
            reached += 1
        assert reached > 4, "a save of two blocks gives way more often than this"
        await at_rest_without_nvme(world)
        assert host.statistics().pinned == 0


async def at_rest_without_nvme(world: World) -> None:
    async with asyncio.timeout(20):
        while world.sidecar.statistics().staging_used_bytes or len(world.sidecar.in_flight):
            await asyncio.sleep(0)


async def _revoked_at(world: World, engine: Engine, name: str, prompt: list[int], at: int) -> bool:
    host, wire = world.sidecar.store._host, engine.workers[0]
    visible: list[int] = []

    def act() -> None:
        (joined,) = world.sidecar.sessions
        request = joined.requests.get(name)
        assert request is not None
        visible.append(host.statistics().blocks)
        request.fence_off()

    def watching() -> None:
        assert host.statistics().blocks == visible[0], "published after the fence was cut"

    before = host.statistics().blocks
    await engine.open(name, world.control.grant(world.tenant, prompt))
    steps = Steps(("WorkerSession._save", "SaveTransfer._seal"), at, act, watching)
    number = engine.next_number()
    with steps.installed():
        steps.arm()
        wire.send(Save(name, number, 128))
        slots = await wire.expect(Slots)
        for slot in slots.slots:
            engine.fill(wire, slot, prompt)
            wire.send(Filled(number, slot.offset, True))
        done = await wire.expect(SaveDone)
        await at_rest_without_nvme(world)
    assert host.statistics().blocks == before + done.stored
    if steps.acted:
        assert host.statistics().blocks == visible[0]
    else:
        assert done.stored == 2
    await _zeroed(world, engine)
    engine.scheduler.send(Finish(name))
    return steps.acted


@pytest.mark.parametrize("sealing", [False, True])
async def test_an_engine_killed_while_it_holds_staging_leaves_nothing_and_others_save_on(
    tmp_path: Path, sealing: bool
) -> None:
    async with harness(tmp_path) as world:
        watched = watch(world)
        gate = watched.hold(64)
        granted = world.control.grant(world.tenant, PROMPT)
        orders = {
            "socket": str(world.socket_path),
            "scheduler": msgspec.to_builtins(world.hello("scheduler")),
            "worker": msgspec.to_builtins(world.hello("worker")),
            "grant": granted.token,
            "salt": granted.salt,
            "prompt": PROMPT,
            "fill": 3 if sealing else 0,
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.sidecar.engine_child",
            cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(orders).encode() + b"\n")
        async with asyncio.timeout(60):
            assert await process.stdout.readline() == f"holding {BLOCKS}\n".encode()
            while sealing and not (watched.inside and world.sidecar.store.namespaces()):
                await asyncio.sleep(0)
            assert len(world.sidecar.in_flight) == BLOCKS - sealing
            process.send_signal(signal.SIGKILL)
            assert await process.wait() == -signal.SIGKILL
            while world.sidecar.statistics().engines:
                await asyncio.sleep(0)
        await at_rest(world)
        assert world.sidecar.audit.counts["save", "failed", "cancelled"] == 1
        statistics = world.sidecar.statistics().saves
        assert statistics.stored == sealing, "what was published before is whole"
        assert sum(statistics.dropped.values()) == BLOCKS - sealing
        gate.set()
        engine = await world.engine()
        await engine.open("r", world.control.grant(world.tenant, PROMPT))
        assert await engine.save("r", PROMPT, len(PROMPT)) == BLOCKS - sealing
        await engine.open("l", world.control.grant(world.tenant, PROMPT))
        assert (await engine.load("l", 0, len(PROMPT))).ok
