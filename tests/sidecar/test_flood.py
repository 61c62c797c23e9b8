"""One tenant floods an engine's connection with loads; another's one load is not behind them.

Counted in turns and not in time: the store opens one block after the other, when it is told to.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from sidecar.engines.holdings import Holdings, PerTenant
from sidecar.transfers.slots import Slots, wiping_workers
from storage.block import BlockContext
from storage.fair import Fair
from storage.staging import Staging
from storage.store import BlockStore
from strongroom.identity import ComponentId
from strongroom.wire.frames import Copied, Load, LoadDone, LoadFailed, Part
from tests.sidecar.harness import World, harness

BLOCKS = 5
FLOOD_LOADS = 30
LOADS_AT_ONCE = 8
"""More than is set, so that a flood stands before the turns and not before its own limit."""
PROMPT = list(range(1000, 1300))
A, B, C = (ComponentId(name * 32) for name in "abc")


class OneAtATime:
    """The real store, whose loads wait until they are told to go on, first come first served."""

    def __init__(self, store: BlockStore) -> None:
        self._load = store.load
        self.waiting: deque[tuple[ComponentId, asyncio.Event]] = deque()
        self.served: list[ComponentId] = []

    async def load(self, context: BlockContext, *rest: Any) -> Any:
        go_on = asyncio.Event()
        self.waiting.append((context.tenant, go_on))
        await go_on.wait()
        return await self._load(context, *rest)

    def serve_one(self) -> None:
        tenant, go_on = self.waiting.popleft()
        self.served.append(tenant)
        go_on.set()


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


async def read(world: World, ended: dict[int, LoadDone | LoadFailed], loads: int) -> None:
    """Answer for every part, until so many loads have ended."""
    wire = world.engines[0].workers[0]
    while len(ended) < loads:
        match await wire.receive():
            case Part(load=number, offset=offset):
                wire.send(Copied(number, offset))
            case (LoadDone() | LoadFailed()) as end:
                ended[end.load] = end
            case _:
                pass


@pytest.mark.parametrize("fair", [True, False], ids=["fair", "one queue for all"])
async def test_a_load_beside_a_flood_waits_for_turns_and_not_for_the_flood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, fair: bool
) -> None:
    monkeypatch.setattr("sidecar.engines.session.LOADS_AT_ONCE", LOADS_AT_ONCE)
    async with harness(tmp_path) as world:
        engine = await world.engine()
        flooder, quiet = world.tenant, world.control.tenant()
        for name, tenant in (("f", flooder), ("q", quiet)):
            granted = world.control.grant(tenant, PROMPT)
            assert await engine.compute_and_save(f"save-{name}", granted) == BLOCKS
            assert (await engine.open(name, world.control.grant(tenant, PROMPT))).tokens == 288
        (joined,) = world.sidecar.sessions
        session = joined.workers[0]
        if not fair:
            enter = Fair.turn
            monkeypatch.setattr(
                Fair, "turn", lambda turns, _, nbytes: enter(turns, ComponentId("0" * 32), nbytes)
            )
        gate = OneAtATime(world.sidecar.store)
        monkeypatch.setattr(world.sidecar.store, "load", gate.load)
        turns, wire = session._turns.host, engine.workers[0]
        at_once = turns.statistics().slots
        for number in range(FLOOD_LOADS):
            wire.send(Load("f", number, 0, 288))
        await until(lambda: turns.waiting == 2 * LOADS_AT_ONCE - at_once)
        wire.send(Load("q", FLOOD_LOADS, 0, 288))
        await until(lambda: turns.waiting == 2 * LOADS_AT_ONCE - at_once + 2)
        ends: dict[int, LoadDone | LoadFailed] = {}
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(read(world, ends, FLOOD_LOADS + 1))
            while FLOOD_LOADS not in ends:
                await until(lambda: FLOOD_LOADS in ends or len(gate.waiting) == at_once)
                if FLOOD_LOADS not in ends:
                    gate.serve_one()
            before = gate.served.count(flooder.id)
            while len(ends) <= FLOOD_LOADS:
                await until(lambda: len(ends) > FLOOD_LOADS or gate.waiting)
                if gate.waiting:
                    gate.serve_one()
        assert all(isinstance(end, LoadDone) for end in ends.values())
        assert gate.served.count(quiet.id) == BLOCKS
        if fair:
            assert before <= at_once + 2 * BLOCKS
        else:
            assert before >= 4 * LOADS_AT_ONCE, "a test that cannot fail without turns"
        assert turns.statistics().in_turn == 0


async def test_transfers_that_one_tenant_holds_leave_the_others_their_part(tmp_path: Path) -> None:
    async with harness(tmp_path, transfers_max=4) as world:
        engine = await world.engine()
        quiet = world.control.tenant()
        for name, tenant in (("f", world.tenant), ("q", quiet)):
            granted = world.control.grant(tenant, PROMPT)
            assert await engine.compute_and_save(f"save-{name}", granted) == BLOCKS
            assert (await engine.open(name, world.control.grant(tenant, PROMPT))).tokens == 288
        gate = OneAtATime(world.sidecar.store)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(world.sidecar.store, "load", gate.load)
            wire = engine.workers[0]
            for number in range(5):
                wire.send(Load("f", number, 0, 288))
            assert (await wire.expect(LoadFailed)).load == 4, "the flood's fifth"
            wire.send(Load("q", 5, 0, 288))
            ends: dict[int, LoadDone | LoadFailed] = {}
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(read(world, ends, 5))
                while len(ends) < 5:
                    await until(lambda: len(ends) == 5 or gate.waiting)
                    if gate.waiting:
                        gate.serve_one()
        assert ends.keys() == {0, 1, 2, 3, 5}
        assert all(isinstance(end, LoadDone) for end in ends.values())


@pytest.mark.parametrize("lends", [True, False], ids=["lent", "held"])
async def test_saves_that_wait_for_a_disk_hold_up_no_other_tenants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, lends: bool
) -> None:
    """The flood's blocks wait for the way to NVMe, more of them than may be sealed at once."""
    if not lends:
        monkeypatch.setattr(Fair, "lent", lambda _: nullcontext())
    async with harness(tmp_path) as world:
        engine = await world.engine()
        quiet = world.control.grant(world.control.tenant(), PROMPT)
        flood = world.control.grant(world.tenant, list(range(5000, 5600)))
        offload = world.sidecar.store._offload
        assert offload is not None
        disk, waiting, admits = asyncio.Event(), 0, offload.admits

        async def patience(ready: Any) -> bool:
            nonlocal waiting
            waiting += 1
            await disk.wait()
            return True

        monkeypatch.setattr(offload, "patience", patience)
        monkeypatch.setattr(
            offload, "admits", lambda one: one.tenant != world.tenant.id and admits(one)
        )
        token = world.token_path.with_name("engine-b.token")
        token.touch(mode=0o600)
        token.write_text("token-b")
        second = await world.engine(engine="engine-b", token="token-b")
        seals = world.sidecar.in_flight.seals
        at_once = seals.statistics().slots
        async with asyncio.TaskGroup() as tasks:
            saving = tasks.create_task(engine.compute_and_save("f", flood))
            await until(lambda: waiting >= (at_once + 2 if lends else at_once))
            other = tasks.create_task(second.compute_and_save("q", quiet))
            if lends:
                async with asyncio.timeout(20):
                    assert await other == BLOCKS
                assert not saving.done()
            else:
                await until(lambda: seals.waiting > at_once)
                assert not other.done(), "a test that cannot fail without it"
            disk.set()
        assert seals.statistics().in_turn == 0
        assert saving.result() > at_once


def test_who_comes_last_finds_a_part_and_who_is_alone_has_all() -> None:
    held = Holdings(8, lambda tenant: 3.0 if tenant == C else 1.0)
    assert all(held.take(A) for _ in range(8))
    assert not held.take(A)
    assert [held.take(B) for _ in range(5)] == [True] * 4 + [False]
    assert sum(held.take(C) for _ in range(8)) == 4, "twice the limit, and no more in all"
    assert held.total == 16
    for _ in range(8):
        held.give_back(A)
    assert held.held_by(A) == 0
    assert held.take(C), "three parts of four are its own"
    assert not held.take(B)


async def test_a_tenants_jobs_wait_for_its_own_alone() -> None:
    limit, order, go_on = PerTenant(2), list[str](), asyncio.Event()

    async def job(name: str, tenant: ComponentId) -> None:
        async with limit.one(tenant):
            order.append(name)
            await go_on.wait()

    async with asyncio.TaskGroup() as tasks:
        for number in range(5):
            tasks.create_task(job(f"a{number}", A))
        await asyncio.sleep(0)
        tasks.create_task(job("b", B))
        await asyncio.sleep(0)
        assert order == ["a0", "a1", "b"]
        go_on.set()
    assert sorted(order) == ["a0", "a1", "a2", "a3", "a4", "b"]
    assert not limit._limits


async def test_slots_to_fill_leave_room_for_loads_and_for_other_tenants() -> None:
    workers = wiping_workers()
    slots = Slots(Staging(16 * 4096), workers)
    try:
        mine = [slots.take_to_fill(A, 4096) for _ in range(12)]
        assert sum(slot is not None for slot in mine) == 6, "half of three quarters"
        assert slots.take_to_fill(B, 4096) is not None
        for slot in filter(None, mine):
            slots.give_back(slot)
        await slots.wiped()
        # There is zeroed room, and a load that waits for more of it: the load comes first.
        loads = [slots.take(4096) for _ in range(12)]
        assert slots.take_to_fill(A, 4096) is not None
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(slots.wait_take(4 * 4096))
            await asyncio.sleep(0)
            assert slots.take_to_fill(A, 4096) is None
            for slot in filter(None, loads):
                slots.give_back(slot)
        assert waiting.result().nbytes == 4 * 4096
        assert slots.take_to_fill(A, 4096) is not None
    finally:
        await slots.close()
        workers.close()
