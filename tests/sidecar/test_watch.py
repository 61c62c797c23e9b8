"""The watch on a running sidecar: pressure and breakers reach verdicts, saves and prefetch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sidecar.clocks import Clocks
from sidecar.degrade.conditions import Condition
from sidecar.degrade.gauges import OTHER, Gauges, TenantUse, top_tenants
from sidecar.degrade.pressure import Gauge, Ladder, Ladders, Readings
from sidecar.degrade.reports import Reports
from sidecar.degrade.stance import Action
from sidecar.degrade.watch import Watch
from sidecar.operations.metrics import exposition
from sidecar.record.events import EventKind, Events, Sequence
from sidecar.record.journal import Journal
from sidecar.record.reasons import Reason
from storage.tiers.protocol import TierName, TierStatistics
from strongroom.identity import ComponentId
from strongroom.wire.frames import Failure, Finish, Ping, Pong, Report
from tests.sidecar.conftest import PROMPT, Stored
from tests.sidecar.control_plane import MODEL, FakeControlPlane
from tests.sidecar.harness import ENGINE, MIB, ManualClock, World, harness
from tests.sidecar.test_session import until


def report(free: int, **changes: int) -> Report:
    fields = {
        "pages": 1000, "free_pages": free, "running": 1, "waiting": 0, "prefill_tokens": 0,
        "prefill_us": 0, "busy_us": 0, "idle_us": 0,
    }  # fmt: skip
    return Report(**(fields | changes))


async def told(stored: Stored, frame: Report) -> None:
    """Sent, and known to be read: frames of a connection are handled in order."""
    wire = stored.engine.scheduler
    wire.send(frame)
    wire.send(Ping(7))
    assert (await wire.expect(Pong)).number == 7


def in_force(watch: Watch) -> Action:
    """By the breakers."""
    return watch.breakers.action


def stand_once(world: World, **gauges: float) -> None:
    """Let the watch see these values."""
    readings = Readings({Gauge(name): value for name, value in gauges.items()}, {})
    world.sidecar.watch.pressure.observe(readings)


@pytest.fixture
async def stored(tmp_path: Path) -> AsyncIterator[Stored]:
    """A stored prompt, ladders without rise and rest, and nobody who looks but the test."""
    async with harness(tmp_path, watch_interval_s=3600, pressure_limit_tokens=130) as world:
        engine = await world.engine()
        granted = world.control.grant(world.tenant, PROMPT)
        assert await engine.compute_and_save("saved", granted) == 5
        ladders = Ladders()
        world.sidecar.watch.pressure._ladders = Ladders(
            {gauge: at_once(ladder) for gauge, ladder in ladders.gauges.items()},
            at_once(ladders.engine),
        )
        yield Stored(world, engine, PROMPT)


def at_once(ladder: Ladder) -> Ladder:
    return replace(ladder, rise_s=0.0, rest_s=0.0)


async def test_a_short_engine_gets_less_in_steps_and_all_of_it_back(stored: Stored) -> None:
    watch = stored.world.sidecar.watch
    seen = []
    for number, free in enumerate((500, 90, 55, 25, 5)):
        await told(stored, report(free))
        watch.look()
        seen.append(await stored.hits(f"r{number}", stored.grant()))
    # none, stop prefetch, limit (blocks that end within 130 tokens), recompute, engine-only
    assert seen == [288, 288, 128, 0, 0]
    assert watch.stance(ENGINE).action is Action.ENGINE_ONLY
    # What one engine says of its pages is for that engine alone.
    assert stored.world.sidecar.prefetcher.statistics().paused == ()
    assert watch.stance("another").prefetches
    await told(stored, report(900))
    for _ in range(5):
        watch.look()
    assert await stored.hits("back", stored.grant()) == 288
    assert stored.world.sidecar.prefetcher.statistics().paused == ()


async def test_what_was_not_limited_is_restored_and_ends_where_the_limit_is(
    stored: Stored,
) -> None:
    await told(stored, report(55))
    stored.world.sidecar.watch.look()
    assert await stored.hits("limited", stored.grant()) == 128
    assert (await stored.engine.load("limited", 0, 128)).ok
    assert not (await stored.engine.load("limited", 0, 288)).ok


async def test_under_recompute_a_prompt_is_saved_and_under_engine_only_it_is_not(
    stored: Stored,
) -> None:
    world = stored.world
    for free, blocks in ((25, 5), (5, 0)):
        await told(stored, report(free))
        world.sidecar.watch.look()
        prompt = [free * 1000 + token for token in PROMPT]
        granted = world.control.grant(world.tenant, prompt)
        verdict = await stored.engine.open(f"p{free}", granted)
        assert (verdict.allowed, verdict.tokens, verdict.save) == (True, 0, blocks > 0)
        assert await stored.engine.save(f"p{free}", prompt, 288) == blocks
        stored.engine.scheduler.send(Finish(f"p{free}"))


async def test_a_full_host_queue_takes_no_new_swap_outs_and_goes_on_restoring(
    stored: Stored,
) -> None:
    world = stored.world
    prompt = [7000 + token for token in PROMPT]
    granted = world.control.grant(world.tenant, prompt)
    await stored.engine.open("new", granted)
    stand_once(world, host_queue=0.95)
    assert await stored.engine.save("new", prompt, 288) == 0
    assert await stored.hits("old", stored.grant()) == 288
    assert (await stored.engine.load("old", 0, 288)).ok
    stand_once(world, host_queue=0.0)
    assert await stored.engine.save("new", prompt, 288) == 5


async def test_a_full_disk_queue_lowers_what_the_disk_admits(stored: Stored) -> None:
    world = stored.world
    await world.sidecar.store.flush()
    for number, (value, factor, on_disk) in enumerate(
        ((0.95, 0.0, 5), (0.0, 0.5, 0), (0.0, 1.0, 10))
    ):
        stand_once(world, disk_queue=value)
        assert world.sidecar.admission.statistics().pressure == factor
        if on_disk:
            prompt = [(number + 2) * 10_000 + token for token in PROMPT]
            granted = world.control.grant(world.tenant, prompt)
            assert await stored.engine.compute_and_save(f"p{number}", granted) == 5
            await world.sidecar.store.flush()
            nvme = world.sidecar.gauges().tier(TierName.NVME)
            assert nvme is not None
            assert nvme.blocks == on_disk


async def test_a_tripped_breaker_is_engine_only_for_every_engine(stored: Stored) -> None:
    breakers = stored.world.sidecar.watch.breakers
    breakers.note(Condition.CHECKSUM, 3, 3)
    verdict = await stored.engine.open("tripped", stored.grant())
    # Allowed: the engine's own prefix cache is used. Nothing is restored, nothing saved.
    assert (verdict.allowed, verdict.tokens, verdict.save) == (True, 0, False)
    breakers.clear(Condition.CHECKSUM)
    assert await stored.hits("cleared", stored.grant()) == 288


async def test_blocks_that_do_not_open_trip_the_breaker(stored: Stored) -> None:
    watch = stored.world.sidecar.watch
    for number in range(3):
        assert await stored.hits(f"r{number}", stored.grant()) == 288
    arena = stored.world.sidecar.store._host._arena.view
    arena[:] = bytes(byte ^ 0xFF for byte in bytes(arena[:]))
    for number in range(3):
        assert in_force(watch) is Action.NONE
        start = 64 * number
        assert not (await stored.engine.load(f"r{number}", start, start + 64)).ok
    await until(lambda: in_force(watch) is Action.ENGINE_ONLY)


async def test_restores_slower_than_was_promised_trip_and_faster_ones_do_not(
    stored: Stored,
) -> None:
    watch = stored.world.sidecar.watch
    assert watch._sources is not None
    for promised_s, action in ((None, Action.NONE), (10.0, Action.NONE), (0.0, Action.ENGINE_ONLY)):
        watch.attach(replace(watch._sources, promised_s=partial(always, promised_s)))
        for _ in range(120):
            watch.load_ended(
                ENGINE, "r", "t", Reason.NONE, tier="host", tokens=64, nbytes=1, seconds=0.01
            )
        assert in_force(watch) is action
    assert watch.stance("another", "t").action is Action.NONE


async def test_faults_in_a_row_trip_and_policy_is_no_fault(stored: Stored) -> None:
    watch = stored.world.sidecar.watch

    def ended(reason: Reason) -> None:
        watch.load_ended(ENGINE, "r", "t", reason, tier="", tokens=0, nbytes=0, seconds=0.01)

    for reason in (Reason.REVOKED, Reason.CANCELLED, Reason.LEASE, Reason.QUOTA, Reason.ABSENT):
        for _ in range(50):
            ended(reason)
    for _ in range(19):
        ended(Reason.EXPIRED)
    ended(Reason.NONE)
    for _ in range(19):
        ended(Reason.EXPIRED)
    assert in_force(watch) is Action.NONE
    ended(Reason.EXPIRED)
    assert watch.stance(ENGINE).action is Action.ENGINE_ONLY
    assert watch.stance("another").action is Action.NONE


def always(seconds: float | None, _engine: str, _request: object) -> float | None:
    return seconds


@pytest.fixture
async def clocked(tmp_path: Path) -> AsyncIterator[tuple[Watch, ManualClock]]:
    """A watch under a clock that is moved by hand."""
    async with harness(tmp_path, watch_interval_s=3600) as world:
        watch, clock = world.sidecar.watch, ManualClock()
        clocks = Clocks(clock)
        watch._clocks = watch.breakers._clocks = clocks
        watch.reports = Reports(clock)
        yield watch, clock


SECOND = 1_000_000


def run_engine(
    watch: Watch, clock: ManualClock, seconds: int, idle_us: int, *, engine: str = ENGINE
) -> None:
    """A report a second, of which `idle_us` were spent waiting for loads and the rest computing."""
    latest = watch.reports.latest().get(engine)
    busy, idle = (0, 0) if latest is None else (latest.report.busy_us, latest.report.idle_us)
    if latest is None:
        watch.reported(engine, report(500))
    for _ in range(seconds):
        clock.advance(1)
        busy, idle = busy + SECOND - idle_us, idle + idle_us
        watch.reported(engine, report(500, busy_us=busy, idle_us=idle))


async def test_a_rise_of_the_engines_idle_time_trips_and_a_level_does_not(
    clocked: tuple[Watch, ManualClock],
) -> None:
    watch, clock = clocked
    run_engine(watch, clock, 120, SECOND // 2)
    assert in_force(watch) is Action.NONE
    run_engine(watch, clock, 30, SECOND * 8 // 10)
    assert watch.stance(ENGINE).action is Action.ENGINE_ONLY
    assert watch.stance("another").action is Action.NONE


async def test_waiting_for_loads_that_save_as_much_computing_is_no_idle_time(
    clocked: tuple[Watch, ManualClock],
) -> None:
    """Cold prompts first, so that nothing is loaded; then one user whose loads pay off."""
    watch, clock = clocked
    assert watch._sources is not None
    for saved_s, action in ((2.0, Action.NONE), (0.01, Action.ENGINE_ONLY)):
        watch.attach(replace(watch._sources, recompute_s=partial(always, saved_s)))
        run_engine(watch, clock, 60, 0)
        for number in range(120):
            watch.load_ended(
                ENGINE, f"{number}", "t", Reason.NONE, tier="nvme", tokens=64, nbytes=1, seconds=0.4
            )
            run_engine(watch, clock, 1, SECOND * 4 // 10)
        assert in_force(watch) is action


async def test_a_report_of_more_time_than_has_passed_counts_for_nothing(
    clocked: tuple[Watch, ManualClock],
) -> None:
    watch, clock = clocked
    run_engine(watch, clock, 60, 0)
    clock.advance(1)
    told = watch.reports.latest()[ENGINE].report
    watch.reported(ENGINE, report(500, busy_us=told.busy_us, idle_us=10**12))
    assert watch.reports.latest()[ENGINE].idle_us == 0
    assert watch.stance(ENGINE).action is Action.NONE
    # The same again, in time that did pass.
    for number in range(1, 31):
        clock.advance(1)
        idle_us = 10**12 + number * SECOND
        watch.reported(ENGINE, report(500, busy_us=told.busy_us, idle_us=idle_us))
    assert watch.stance(ENGINE).action is Action.ENGINE_ONLY


async def test_waste_and_thrash_trip_for_the_tenant_whose_blocks_they_are(
    stored: Stored,
) -> None:
    watch = stored.world.sidecar.watch
    for bad, condition in (
        (partial(watch.written, came_back=True), Condition.THRASH),
        (partial(watch.prefetched, used=False), Condition.PREFETCH_WASTE),
    ):
        for _ in range(200):
            bad("one")
        assert watch.breakers.tripped_for(condition) == ("one",)
        assert watch.stance(ENGINE, "one").action is Action.ENGINE_ONLY
        assert watch.stance(ENGINE, "another").action is Action.NONE
        watch.breakers.clear(condition)


async def test_a_look_that_fails_ends_nothing_and_lifts_nothing(
    stored: Stored, caplog: pytest.LogCaptureFixture
) -> None:
    watch = stored.world.sidecar.watch
    watch.breakers.note(Condition.CHECKSUM, 3, 3)

    def broken() -> Gauges:
        raise OSError("a gauge failed")

    assert watch._sources is not None
    watch.attach(replace(watch._sources, gauges=broken))
    watch.settings = replace(watch.settings, interval_s=0.001)
    running = asyncio.get_running_loop().create_task(watch.run())
    await until(lambda: caplog.text.count("a look at the gauges failed") >= 2)
    running.cancel()
    assert in_force(watch) is Action.ENGINE_ONLY


# Reports


@pytest.mark.parametrize(
    "bad",
    [report(1001), report(-1), report(0, pages=-5), report(0, busy_us=2**63 - 1)],
    ids=["more free than there are", "negative", "negative pages", "beyond every clock"],
)
async def test_a_report_that_cannot_be_true_ends_the_connection(
    stored: Stored, bad: Report
) -> None:
    stored.engine.scheduler.send(bad)
    assert (await stored.engine.scheduler.expect(Failure)).code == "protocol"


async def test_reports_are_compared_with_the_one_before_and_an_engine_may_start_anew(
    stored: Stored,
) -> None:
    reports = stored.world.sidecar.watch.reports
    await told(stored, report(500, busy_us=100, prefill_us=50, prefill_tokens=8))
    await told(stored, report(400, busy_us=160, prefill_us=90, prefill_tokens=24))
    latest = reports.latest()[ENGINE]
    assert (latest.busy_us, latest.prefill_us, latest.prefill_tokens) == (60, 40, 16)
    assert latest.pages_used == pytest.approx(0.6)
    await told(stored, report(400, busy_us=10))
    assert reports.latest()[ENGINE].busy_us == 0
    await stored.engine.scheduler.close()
    await until(lambda: ENGINE not in reports.latest())


async def test_an_engine_that_cannot_tell_its_pages_stands_on_no_ladder(stored: Stored) -> None:
    await told(stored, report(0, pages=0))
    stored.world.sidecar.watch.look()
    assert stored.world.sidecar.watch.stance(ENGINE).action is Action.NONE


async def test_a_report_that_is_old_says_nothing_any_more(stored: Stored) -> None:
    watch = stored.world.sidecar.watch
    await told(stored, report(5))
    watch.look()
    assert watch.stance(ENGINE).action is Action.ENGINE_ONLY
    watch.settings = replace(watch.settings, report_stale_s=0.0)
    watch.look()
    assert watch.stance(ENGINE).action is Action.NONE


# Gauges and events


async def test_every_gauge_is_read(stored: Stored) -> None:
    await stored.world.sidecar.store.flush()
    await told(stored, report(600))
    gauges = stored.world.sidecar.gauges()
    host, nvme = gauges.tier(TierName.HOST), gauges.tier(TierName.NVME)
    assert host is not None
    assert nvme is not None
    assert host.used_bytes > 0
    assert host.blocks == nvme.blocks == 5
    assert {queue.name for queue in gauges.queues} == {"strongroom-crypto", "strongroom-disk"}
    assert gauges.nvme_free_bytes == nvme.capacity_bytes - nvme.used_bytes
    assert gauges.file_systems_free_bytes[0] > 0
    assert (gauges.orphans.unconfirmed, gauges.orphans.retired) == (0, 0)
    assert {use.tier for use in gauges.tenants} == {TierName.HOST, TierName.NVME}
    assert gauges.engines[ENGINE].report.free_pages == 600


async def test_a_look_leaves_out_what_grows_with_namespaces_and_tenants(stored: Stored) -> None:
    sidecar = stored.world.sidecar
    assert sidecar.gauges().tenants
    assert sidecar.gauges(inventory=False).tenants == ()
    assert sidecar.gauges(inventory=False).tiers == sidecar.gauges().tiers

    def walked() -> None:
        raise AssertionError("a look walked every namespace")

    assert sidecar.watch._sources is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(sidecar.store), "namespaces_on_disk", lambda _: walked())
        sidecar.watch.look()
        with pytest.raises(AssertionError, match="every namespace"):
            sidecar.gauges()


async def test_every_device_of_the_tier_has_its_free_space_shown(tmp_path: Path) -> None:
    folders = (tmp_path / "a", tmp_path / "b")
    async with harness(tmp_path, nvme_path=None, nvme_paths=folders, nvme_bytes=8 * MIB) as world:
        assert set(world.sidecar.gauges().file_systems_free_bytes) == {0, 1}
        text = exposition(world.sidecar.snapshot()).decode()
        for device in "01":
            assert f'strongroom_nvme_file_system_free_bytes{{device="{device}"}}' in text
        assert "strongroom_nvme_devices_out 0.0" in text


async def test_transfers_hints_devices_and_costs_are_exposed(stored: Stored) -> None:
    await stored.hits("r", stored.grant())
    await stored.engine.load("r", 0, 288)
    await stored.world.sidecar.store.flush()
    watch = stored.world.sidecar.watch
    for _ in range(200):
        watch.written("one", came_back=True)
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(
            exposition(stored.world.sidecar.snapshot()).decode()
        )
        for sample in family.samples
    }
    assert samples["strongroom_save_blocks_total", "stored"] == 5
    assert samples["strongroom_save_bytes_total",] > 0
    assert samples["strongroom_hints_total", "taken"] == 0
    assert samples["strongroom_onboard_blocks_total", "failed"] == 0
    assert samples["strongroom_nvme_refused_total", "budget"] == 0
    assert samples["strongroom_nvme_refused_total", "floor"] == 0
    assert samples["strongroom_nvme_written_bytes_total",] > 0
    assert samples["strongroom_breaker_tripped_for", "thrash"] == 1
    costs = [value for name, value in samples.items() if "restore_cost_seconds" in name[0]]
    assert len(costs) == 6
    assert all(cost >= 0 for cost in costs)


async def test_records_are_orphans_until_their_namespace_is_known_to_be_alive(
    tmp_path: Path,
) -> None:
    control = FakeControlPlane()
    async with harness(tmp_path, control) as world:
        engine = await world.engine()
        granted = world.control.grant(world.tenant, PROMPT)
        await engine.compute_and_save("saved", granted)
    async with harness(tmp_path, control, watch_interval_s=3600) as world:
        # Asked about after the start, and alive: no orphans. Without the answer they were.
        await until(lambda: world.sidecar.gauges().orphans.unconfirmed == 0)
        world.sidecar.invalidation.alive = frozenset()
        assert world.sidecar.gauges().orphans.unconfirmed == 5


def test_tenants_beyond_the_largest_are_one() -> None:
    uses = [
        TenantUse(tier, ComponentId(f"{number:032x}"), number, 100)
        for tier in (TierName.HOST, TierName.NVME)
        for number in range(1, 31)
    ]
    top = top_tenants(uses, 5)
    assert len(top) == 12
    assert [use.used_bytes for use in top[:5]] == [30, 29, 28, 27, 26]
    assert (top[5].tenant, top[5].used_bytes, top[5].cap_bytes) == (OTHER, sum(range(1, 26)), None)
    assert len(top_tenants(uses, 30)) == 60


async def test_what_happens_to_a_request_is_told_in_order(stored: Stored) -> None:
    watch = stored.world.sidecar.watch
    before = watch.events.last
    await stored.hits("r", stored.grant())
    await stored.engine.load("r", 0, 288)
    await until(lambda: watch.events.last >= before + 5)
    events = watch.events.after(before, 10)
    assert [event.kind for event in events] == [
        EventKind.REQUEST_START,
        EventKind.PREFIX_HIT,
        EventKind.SWAP_IN_START,
        EventKind.SWAP_IN_DONE,
        EventKind.ENGINE_ACCEPTED,
    ]
    assert {event.request for event in events} == {"r"}
    started, hit, begun, done, accepted = events
    assert (started.model, started.tokens) == (MODEL, len(stored.prompt))
    assert {event.tenant for event in events[1:]} == {stored.world.tenant.id}
    assert hit.tokens == begun.tokens == done.tokens == accepted.tokens == 288
    assert begun.tier_from == done.tier_from == "host"
    assert accepted.nbytes == done.nbytes > 0


async def test_a_save_is_told_from_its_reservation_to_its_end(world: World) -> None:
    engine = await world.engine()
    granted = world.control.grant(world.tenant, PROMPT)
    events = world.sidecar.watch.events
    assert await engine.compute_and_save("w", granted) == 5
    kinds = [EventKind.BLOCK_RESERVED, EventKind.SWAP_OUT_START, EventKind.SWAP_OUT_DONE]
    await until(lambda: events.after(0, 100)[-1].kind is EventKind.SWAP_OUT_DONE)
    told = [event for event in events.after(0, 100) if event.kind in kinds]
    assert [event.kind for event in told] == kinds
    assert told[0].numbers == told[2].numbers == {"blocks": 5}
    assert told[0].nbytes == told[2].nbytes


async def test_a_miss_names_the_layer_that_missed(stored: Stored) -> None:
    """Events only: the engine's answers are one and the same."""
    events = stored.world.sidecar.watch.events
    before = events.last
    assert await stored.hits("denied", stored.grant(), salt="other") == -1
    other = stored.world.control.tenant()
    assert await stored.hits("absent", stored.world.control.grant(other, stored.prompt)) == 0
    await until(lambda: events.last >= before + 4)
    missed = {
        event.request: event.reason
        for event in events.after(before, 10)
        if event.kind is EventKind.PREFIX_MISS
    }
    assert missed == {"denied": "identity", "absent": "absent"}


async def test_an_invalidation_is_told_with_what_it_stopped(stored: Stored) -> None:
    world = stored.world
    events = world.sidecar.watch.events
    assert await stored.hits("r", stored.grant()) == 288
    entry = world.control.revoke(world.tenant.everyone)
    async with asyncio.timeout(20):
        await world.control.until_acked("fenced", entry.seq)
    (told,) = [one for one in events.after(0, 1000) if one.kind is EventKind.INVALIDATION]
    assert told.subject == entry.kind.value
    assert told.numbers["seq"] == entry.seq
    assert told.numbers["namespaces"] >= 1
    assert told.numbers["requests"] >= 1


def test_evictions_are_one_event_a_tier_and_look(tmp_path: Path) -> None:
    events = Events(Sequence(tmp_path).take, Clocks(ManualClock()))
    journal = Journal(events)
    for host, nvme in ((0, 0), (7, 0), (7, 2), (9, 1000)):
        journal.look(
            TierStatistics(name, evictions=count)
            for name, count in ((TierName.HOST, host), (TierName.NVME, nvme))
        )
    assert [(one.tier_from, dict(one.numbers)) for one in events.after(0, 10)] == [
        ("host", {"blocks": 7}),
        ("nvme", {"blocks": 2}),
        ("host", {"blocks": 2}),
        ("nvme", {"blocks": 998}),
    ]
