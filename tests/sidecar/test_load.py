"""Loads and their room in staging: what is taken comes back, however a load ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sidecar.record.audit import Audit
from storage.block import BlockAddress
from storage.tiers.protocol import TierName
from strongroom.blocks import pack_tokens
from strongroom.wire.frames import (
    Copied,
    Filled,
    Layers,
    LayoutFields,
    Load,
    LoadDone,
    LoadFailed,
    Open,
    Part,
    Save,
    SaveDone,
    Slots,
    Verdict,
)
from tests.sidecar.conftest import PROMPT, Stored
from tests.sidecar.harness import LAYERS, MIB, PAGE, Wire, World, harness
from tests.sidecar.prefetch_support import until
from tests.sidecar.test_hints import BLOCKS, hint, set_apart
from tests.sidecar.test_layers import OneByOne, turns
from tests.sidecar.test_revocation import by_subject

__all__ = ["turns"]
BIG = 4096
"""Pages of so many bytes make blocks that fill their slots, which are used again as they are."""


def forget_block(world: World, request: str, index: int) -> None:
    """The block is evicted between the verdict and the load."""
    (joined,) = world.sidecar.sessions
    judged = joined.requests.get(request).readable()  # type: ignore[union-attr]
    assert judged is not None
    address = BlockAddress(judged.hit.ids[index], 0)
    world.sidecar.store._residency.drop_everywhere(address)


async def until_unused(world: World) -> None:
    await until(lambda: world.sidecar.statistics().staging_used_bytes == 0)


async def test_a_load_whose_second_block_is_gone_gives_all_its_staging_back(
    stored: Stored,
) -> None:
    assert await stored.hits("r", stored.grant()) == 288
    forget_block(stored.world, "r", 1)
    wire = stored.engine.workers[0]
    for number in range(1, 6):
        wire.send(Load("r", number, 0, 288))
        part = await wire.expect(Part)
        wire.send(Copied(number, part.offset))
        assert (await wire.expect(LoadFailed)).start == 64
        await until_unused(stored.world)


class Prompted:
    """One engine of large pages, by hand."""

    def __init__(self, world: World, worker: Wire, scheduler: Wire, tokens: int) -> None:
        self.world = world
        self.worker = worker
        self.scheduler = scheduler
        self.tokens = tokens

    @classmethod
    async def connect(cls, world: World, tokens: int, page_bytes: int = BIG) -> Prompted:
        shape = LayoutFields("cpu:nhd", "test", PAGE, (page_bytes,) * LAYERS, 1, 0, 1, 0)
        worker = await world.connect("worker", layout=shape)
        return cls(world, worker, await world.connect("scheduler", layout=shape), tokens)

    async def open(self, name: str, spans: list[tuple[int, tuple[()], tuple[Any, ...]]]) -> int:
        prompt = list(range(self.tokens))
        granted = self.world.control.grant(self.world.tenant, prompt, spans)
        packed = pack_tokens(prompt)
        self.scheduler.send(Open(name, granted.token, granted.salt, packed, "none"))
        return (await self.scheduler.expect(Verdict)).tokens

    async def save(self, name: str) -> int:
        staging = self.worker.staging
        assert staging is not None
        self.worker.send(Save(name, 1, self.tokens))
        for slot in (await self.worker.expect(Slots)).slots:
            size = (slot.end - slot.start) // PAGE * BIG * LAYERS
            staging[slot.offset : slot.offset + size] = bytes([1 + slot.start // 32]) * size
            self.worker.send(Filled(1, slot.offset, True))
        return (await self.worker.expect(SaveDone)).stored

    async def close(self) -> None:
        await self.worker.close()
        await self.scheduler.close()


async def test_no_plaintext_is_left_once_fenced_is_acknowledged_after_a_load_that_ended_early(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path, staging_wipe_s=3600.0) as world:
        engine = await Prompted.connect(world, 64 * 4 + 32)
        everyone, group = world.tenant.everyone, world.control.component()
        spans: list[tuple[int, tuple[()], tuple[Any, ...]]] = [
            (96, (), (everyone,)),
            (engine.tokens, (), (everyone, group)),
        ]
        await engine.open("saved", spans)
        blocks = await engine.save("saved")
        assert await engine.open("r", spans) == engine.tokens
        wire = engine.worker
        wire.send(Load("r", 2, 0, engine.tokens))  # a good one: its room is used again
        for _ in range(blocks):
            wire.send(Copied(2, (await wire.expect(Part)).offset))
        await wire.expect(LoadDone)
        forget_block(world, "r", 1)
        wire.send(Load("r", 3, 0, engine.tokens))
        wire.send(Copied(3, (await wire.expect(Part)).offset))
        assert (await wire.expect(LoadFailed)).start == 64
        assert wire.staging is not None
        assert any(wire.staging[:]), "nothing has wiped it before the fence"
        entry = world.control.revoke(everyone)
        async with asyncio.timeout(20):
            await world.control.until_acked("fenced", entry.seq)
        left = bytes(wire.staging[:])
        await engine.close()
        assert not any(left)


async def test_copied_for_layers_of_a_block_that_is_being_opened_frees_nothing(
    stored: Stored, turns: OneByOne
) -> None:
    assert await stored.hits("r", stored.grant()) == 288
    wire = stored.engine.workers[0]
    wire.send(Load("r", 1, 0, 64, True))
    turns.let(1)
    early = await wire.expect(Layers)
    wire.send(Copied(1, early.offset))  # threads still write there
    wire.send(Load("r", 2, 64, 128))
    (joined,) = stored.world.sidecar.sessions
    loads = joined.workers[0]._loads
    await until(lambda: (second := loads.get(2)) is not None and bool(second._busy))
    turns.let(3)
    one, two = await wire.expect(Part), await wire.expect(Part)
    assert {one.load, two.load} == {1, 2}
    assert one.offset != two.offset
    for part in (one, two):
        wire.send(Copied(part.load, part.offset))
    for _ in (one, two):
        await wire.expect(LoadDone)
    await until_unused(stored.world)


async def test_an_early_copied_of_a_block_that_fails_gives_its_slot_back(
    stored: Stored, turns: OneByOne
) -> None:
    assert await stored.hits("r", stored.grant()) == 288
    wire = stored.engine.workers[0]
    wire.send(Load("r", 1, 0, 64, True))
    turns.let(1)
    wire.send(Copied(1, (await wire.expect(Layers)).offset))
    # The frames of one connection are handled in turn: the answer is there before the end.
    (joined,) = stored.world.sidecar.sessions
    load = joined.workers[0]._loads[1]
    assert load is not None
    await until(lambda: bool(load._parts._answered))
    stored.world.sidecar.gate.shut("a test")
    turns.let(1)
    await wire.expect(LoadFailed)
    await until_unused(stored.world)


async def test_a_load_that_is_fenced_before_it_waits_for_a_prefetch_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with harness(tmp_path, prefetch_policy="wait_complete") as world:
        engine = await world.engine()
        granted = world.control.grant(world.tenant, PROMPT)
        assert await engine.compute_and_save("saved", granted) == BLOCKS
        async with set_apart(Stored(world, engine, PROMPT)) as apart:
            reading = apart.shelf.at("before 0")
            gateway = await apart.gateway()
            gateway.send(hint(apart.stored.grant(sub="bob")))  # somebody else's, and it goes on
            await reading.arrived.wait()
            assert (await engine.open("r", granted)).tokens == 288
            plain, arrived, lifted = Audit.record, asyncio.Event(), asyncio.Event()

            async def record(audit: Audit, kind: Any, *rest: Any, **named: Any) -> None:
                if kind == "load":
                    arrived.set()
                    await lifted.wait()
                await plain(audit, kind, *rest, **named)

            monkeypatch.setattr(Audit, "record", record)
            engine.workers[0].send(Load("r", 1, 0, 64))
            await arrived.wait()
            seq = by_subject(world)
            await until(lambda: world.sidecar.log.head.seq >= seq)  # type: ignore[union-attr]
            lifted.set()
            async with asyncio.timeout(5):
                await world.control.until_acked("fenced", seq)
            assert not reading.lifted.is_set(), "the prefetch still reads"
            reading.lifted.set()
            await gateway.close()
            await apart.quiet()


class Clock:
    """`time.monotonic`, which moves when told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s


async def test_waiting_for_an_engine_that_copies_slowly_is_no_time_of_the_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staging holds two of these blocks: each further one waits for `Copied`."""
    block_bytes = 64 // PAGE * 65536 * LAYERS
    async with harness(tmp_path, host_bytes=32 * MIB, nvme_path=None) as world:
        assert world.sidecar.settings.staging_bytes < 3 * block_bytes
        engine = await Prompted.connect(world, 64 * 6, 65536)
        spans: list[tuple[int, tuple[()], tuple[Any, ...]]] = [
            (engine.tokens, (), (world.tenant.everyone,))
        ]
        await engine.open("saved", spans)
        stored = 0
        while stored < 6:
            engine.worker.send(Save("saved", 1, engine.tokens))
            for slot in (await engine.worker.expect(Slots)).slots:
                engine.worker.send(Filled(1, slot.offset, True))
            stored += (await engine.worker.expect(SaveDone)).stored
        assert await engine.open("r", spans) == engine.tokens
        seen: list[float] = []
        clock = Clock()
        monkeypatch.setattr("sidecar.transfers.load.time.monotonic", clock)
        appraiser = world.sidecar.appraiser

        def observe(tier: TierName, nbytes: int, queue_s: float, service_s: float) -> None:
            seen.append(queue_s + service_s)

        monkeypatch.setattr(appraiser, "observe_restore", observe)
        engine.worker.send(Load("r", 1, 0, engine.tokens))
        for _ in range(3):
            parts = [await engine.worker.expect(Part) for _ in range(2)]
            clock.now_s += 10  # the engine copies, and nothing is being opened
            for part in parts:
                engine.worker.send(Copied(1, part.offset))
        await engine.worker.expect(LoadDone)
        await engine.close()
        assert len(seen) == 6
        assert max(seen) < 5
