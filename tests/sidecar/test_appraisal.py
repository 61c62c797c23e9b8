"""A verdict shrinks to what is brought sooner than computed, and says so on record only."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sidecar.cost.appraisal import Appraiser
from sidecar.cost.decision import Offer, Partial, Recompute, Restore, Stored, Why
from storage.tiers.protocol import TierName
from strongroom.log import InvalidationKind
from strongroom.wire.frames import Finish, Report
from tests.sidecar.conftest import PROMPT
from tests.sidecar.harness import ENGINE, ManualClock, World, harness

TOKENS = 320
HIT = 304  # whole pages, and not the last token
SLOW_S, FAST_S = 2.0, 0.00001


def teach(world: World, restore_s: float, token_s: float) -> None:
    """What the sidecar has seen of the host tier and of the engine."""
    appraiser = world.sidecar.appraiser
    for _ in range(20):
        appraiser.observe_restore(TierName.HOST, 64 * 1024, 0.0, restore_s)
    for _ in range(300):  # enough bytes for a drain rate
        appraiser.cost._tiers[TierName.HOST]._drain.add(
            restore_s / (64 * 1024), world.sidecar.clocks.boot(), 8.0
        )
    appraiser.observe_report(ENGINE, Report(9, 9, 0, 0, 0, 0, 0, 0))
    appraiser.observe_report(ENGINE, Report(9, 9, 0, 0, 100_000, int(1e11 * token_s), 0, 0))


async def verdict_tokens(world: World, **overrides: object) -> int:
    engine = await world.engine()
    granted = world.control.grant(world.tenant, range(TOKENS))
    await engine.compute_and_save("first", granted)
    teach(world, **overrides)  # type: ignore[arg-type]
    return (await engine.open("second", granted)).tokens


async def test_a_slow_restore_is_computed_and_the_record_says_cost(tmp_path: Path) -> None:
    async with harness(tmp_path) as world:
        assert await verdict_tokens(world, restore_s=SLOW_S, token_s=1e-6) == 0
        assert world.sidecar.audit.counts["lookup", "miss", "cost"] == 1


async def test_a_fast_restore_is_brought_whole(tmp_path: Path) -> None:
    async with harness(tmp_path) as world:
        assert await verdict_tokens(world, restore_s=FAST_S, token_s=1e-3) > 0
        assert world.sidecar.audit.counts["lookup", "hit", ""] == 1


async def test_the_setting_switches_it_off(tmp_path: Path) -> None:
    async with harness(tmp_path, cost_model=False) as world:
        assert await verdict_tokens(world, restore_s=SLOW_S, token_s=1e-6) > 0


async def test_loads_are_observed_and_nothing_stays_outstanding(tmp_path: Path) -> None:
    async with harness(tmp_path) as world:
        engine = await world.engine()
        granted = world.control.grant(world.tenant, range(TOKENS))
        await engine.compute_and_save("first", granted)
        verdict = await engine.open("second", granted)
        appraiser = world.sidecar.appraiser
        assert appraiser.backlog.restoring_bytes(TierName.HOST) > 0
        assert (await engine.load("second", 0, verdict.tokens)).ok
        assert appraiser.backlog.restoring_bytes(TierName.HOST) == 0
        assert sum(row.count for row in appraiser.cost.rows()) > 0
        engine.scheduler.send(Finish("second"))


def offer(blocks: int = 8) -> Offer:
    hit = tuple(Stored((n + 1) * 256, TierName.NVME, 32 * 2**20) for n in range(blocks))
    return Offer(blocks * 256 + 128, hit)


def test_a_cold_start_restores_until_something_is_known() -> None:
    clock = ManualClock()
    appraiser = Appraiser(clock)
    # As much as 0.1 s brings by what is assumed.
    assert appraiser.choose("e", "1", offer()) == Partial(5 * 256, Why.COLD)
    # The first is not there yet: no more is piled on a disk that nobody has seen.
    assert appraiser.choose("e", "2", offer()) == Recompute(Why.COLD)
    appraiser.brought("e", "1")
    assert appraiser.choose("e", "3", offer(4)) == Restore(4 * 256, Why.COLD)


def test_what_nvme_spares_is_learnt_from_what_was_decided() -> None:
    clock = ManualClock()
    appraiser = Appraiser(clock)
    assert appraiser.saved_seconds(1) is None
    for _ in range(40):
        clock.advance(0.02)
        appraiser.observe_restore(TierName.NVME, 32 * 2**20, 0.0, 0.02)
    appraiser.observe_report("e", Report(9, 9, 0, 0, 100_000, 10_000_000, 0, 0))
    clock.advance(25)  # nobody waits for the disk any more
    appraiser.choose("e", "1", offer())
    saved = appraiser.saved_seconds(32 * 2**20)
    assert saved is not None
    assert saved == pytest.approx(256 * 100e-6, rel=0.2)


def test_an_engine_that_left_leaves_nothing() -> None:
    appraiser = Appraiser(ManualClock())
    appraiser.choose("e", "1", offer())
    appraiser.forget("e")
    assert appraiser.statistics().restoring_bytes[TierName.NVME] == 0


def test_a_load_is_promised_to_beat_the_queue_and_the_computing_that_it_replaces() -> None:
    clock = ManualClock()
    appraiser = Appraiser(clock)
    for _ in range(40):
        clock.advance(0.02)
        appraiser.observe_restore(TierName.NVME, 32 * 2**20, 0.0, 0.02)
    assert appraiser.choose("e", "cold", offer()).why is Why.COLD
    assert appraiser.promised_seconds("e", "cold") is None
    appraiser.forget("e")
    appraiser.observe_report("e", Report(9, 9, 0, 0, 100_000, 10_000_000, 0, 0))
    for number in range(20):  # prompts without a hit: 200 ms each are owed
        appraiser.choose("e", f"q{number}", Offer(2000, ()))
    decision = appraiser.choose("e", "warm", offer())
    assert isinstance(decision, Restore)
    promised = appraiser.promised_seconds("e", "warm")
    # Bringing takes longer than computing alone would, and is not slow for that.
    assert promised == pytest.approx(20 * 0.2 + 8 * 256 * 100e-6, rel=0.2)
    appraiser.dropped("e", "warm")
    assert appraiser.promised_seconds("e", "warm") is None


def test_a_second_of_a_server_costs_more_the_longer_its_queue() -> None:
    clock = ManualClock()
    appraiser = Appraiser(clock)
    appraiser.observe_report("e", Report(9, 9, 0, 0, 0, 0, 0, 0))
    clock.advance(1)
    appraiser.observe_report("e", Report(9, 9, 1, 0, 10_000, 500_000, 0, 0))
    idle = appraiser.prices("e", offer()).prefill_shadow
    for number in range(10):
        appraiser.backlog.promise("e", str(number), {}, 20_000)
    queued = appraiser.prices("e", offer())
    assert queued.prefill_wait_s == pytest.approx(10.0, rel=0.1)
    assert queued.prefill_shadow > idle + 3


def test_those_who_load_keep_their_place_before_one_that_is_computed() -> None:
    appraiser = Appraiser(ManualClock())
    appraiser.observe_report("e", Report(9, 9, 0, 0, 10_000, 1_000_000, 0, 0))
    assert appraiser.prices("e", offer()).prefill_wait_s == 0.0
    appraiser.backlog.promise("e", "1", {TierName.NVME: 1}, 10_000)
    assert appraiser.prices("e", offer()).prefill_wait_s == pytest.approx(1.0, rel=0.1)


async def test_a_fence_drops_what_was_promised_and_a_live_request_keeps_it(tmp_path: Path) -> None:
    async with harness(tmp_path) as world:
        engine = await world.engine()
        granted = world.control.grant(world.tenant, range(TOKENS))
        await engine.compute_and_save("first", granted)
        assert (await engine.open("second", granted)).tokens
        backlog = world.sidecar.appraiser.backlog
        assert backlog.restoring_bytes(TierName.HOST) > 0
        entry = world.control.append(
            InvalidationKind.SUBJECT, tenant=world.tenant.id, subject=granted.claims.sub
        )
        assert await world.sidecar.log.reach(world.control.epoch, entry.seq, 20)
        assert backlog.restoring_bytes(TierName.HOST) == 0


def test_probes_that_change_nothing_get_rarer() -> None:
    clock = ManualClock()
    appraiser = Appraiser(clock)
    for _ in range(40):
        clock.advance(0.5)
        appraiser.observe_restore(TierName.NVME, 32 * 2**20, 0.0, 0.5)
    appraiser.observe_report("e", Report(9, 9, 0, 0, 100_000, 1_000_000, 0, 0))

    def probed() -> bool:
        probe = appraiser.choose("e", "1", offer()).why is Why.PROBE
        appraiser.dropped("e", "1")
        return probe

    assert not probed()
    clock.advance(100)  # nothing is known any more
    assert probed()
    assert not probed()
    clock.advance(61)
    assert probed()
    clock.advance(61)
    assert not probed()
    clock.advance(61)
    assert probed()


async def test_a_scheduler_that_is_replaced_leaves_no_promise(tmp_path: Path) -> None:
    async with harness(tmp_path) as world:
        engine = await world.engine()
        granted = world.control.grant(world.tenant, PROMPT)
        assert await engine.compute_and_save("saved", granted) == 5
        assert (await engine.open("r", granted)).tokens == 288
        backlog = world.sidecar.appraiser.backlog
        assert backlog.restoring_bytes(TierName.HOST) > 0
        newer = await world.connect("scheduler")
        async with asyncio.timeout(20):
            while backlog.restoring_bytes(TierName.HOST):
                await asyncio.sleep(0)
        await newer.close()


async def test_each_rank_brings_its_part_of_a_promise(tmp_path: Path) -> None:
    async with harness(tmp_path) as world:
        engine = await world.engine(2)
        granted = world.control.grant(world.tenant, PROMPT)
        await engine.open("w", granted)
        for rank in (0, 1):
            assert await engine.save("w", PROMPT, 288, rank) == 5
        assert (await engine.open("r", granted)).tokens == 288
        backlog = world.sidecar.appraiser.backlog
        whole = backlog.restoring_bytes(TierName.HOST)
        for rank, left in ((0, whole // 2), (1, 0)):
            assert (await engine.load("r", 0, 288, rank)).ok
            async with asyncio.timeout(20):
                while backlog.restoring_bytes(TierName.HOST) != left:
                    await asyncio.sleep(0)
