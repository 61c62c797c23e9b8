"""Prefetching over the real tiers: what moves, what it counts as, how it ends at every await."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sidecar.prefetch.budget import Denial
from sidecar.prefetch.patience import PatienceSettings, PrefetchPolicy
from sidecar.prefetch.prefetcher import Prefetch
from sidecar.prefetch.statistics import PrefetchState
from sidecar.prefetch.waste import WasteSettings
from sidecar.prefetch.window import Window, WindowSettings
from storage.block import BlockAddress
from storage.fence import Fence
from storage.tiers.protocol import TierName
from tests.sidecar.prefetch_support import RECORD, Scene, push_out, scene, turns, until
from tests.storage.support import FakeClock, component, namespace

SECOND = 10**9


@pytest.fixture
async def at(tmp_path: Path) -> AsyncIterator[Scene]:
    async with scene(tmp_path) as made:
        yield made


def begin(
    at: Scene,
    addresses: list[BlockAddress],
    *,
    grant: str = "g",
    fence: Fence | None = None,
    start_in_s: float | None = None,
) -> Prefetch:
    made = at.prefetcher.begin(
        grant,
        at.fence if fence is None else fence,
        addresses,
        None if start_in_s is None else int(start_in_s * SECOND),
        tenant=component(1),
    )
    assert made is not None
    return made


async def in_host(at: Scene, addresses: list[BlockAddress]) -> list[bool]:
    return [at.store.tier_of(address) is TierName.HOST for address in addresses]


def read(at: Scene, addresses: list[BlockAddress]) -> None:
    """What a load reports after it has opened these blocks."""
    for address in addresses:
        tier = at.store.tier_of(address)
        assert tier is not None
        at.prefetcher.was_read(address, tier)


async def test_blocks_come_into_host_memory_and_are_used_when_they_are_read(at: Scene) -> None:
    addresses = await at.on_nvme(1, 2, 3)
    begin(at, addresses)
    await at.quiet()
    assert await in_host(at, addresses) == [True] * 3
    found = at.prefetcher.statistics()
    assert (found.issued, found.completed, found.used) == (3, 3, 0)
    assert found.pending_bytes == found.completed_bytes == 3 * RECORD
    read(at, addresses)
    found = at.prefetcher.statistics()
    assert (found.used, found.used_bytes, found.wasted) == (3, 3 * RECORD, 0)
    assert at.settled()


async def test_what_is_in_host_memory_or_nowhere_is_not_moved(at: Scene) -> None:
    (there,) = await at.on_nvme(1)
    begin(at, [there])
    await at.quiet()
    begin(at, [there, BlockAddress(there.block, 7)], grant="other")
    await at.quiet()
    assert at.shelf.moved == [there]
    assert at.prefetcher.statistics().issued == 1


@pytest.mark.parametrize("why", ["fence", "retired", "neither"])
async def test_a_fenced_or_retired_prefetch_moves_nothing(at: Scene, why: str) -> None:
    addresses = await at.on_nvme(1, 2)
    if why == "fence":
        at.fence.cut()
    if why == "retired":
        at.store.retire({namespace(1)})
    begin(at, addresses)
    await at.quiet()
    assert await in_host(at, addresses) == [why == "neither"] * 2
    assert at.prefetcher.statistics().completed == (2 if why == "neither" else 0)
    for address in addresses:
        at.prefetcher.was_read(address, TierName.HOST)
    assert at.settled()


PLACES = ["enter", "before 0", "after 0", "before 1", "after 1", "before 2", "after 2", "leave"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("how", ["stop", "fence", "retire", "pause", "shutdown"])
async def test_ended_at_any_await_it_leaves_no_reservation(
    tmp_path: Path, place: str, how: str
) -> None:
    async with scene(tmp_path) as at:
        addresses = await at.on_nvme(1, 2, 3)
        barrier = at.shelf.at(place)
        prefetch = begin(at, addresses)
        await barrier.arrived.wait()
        landed = at.prefetcher.statistics().completed
        on_its_way = at.prefetcher.statistics().on_its_way_bytes
        assert on_its_way == (3 - landed) * RECORD
        assert at.prefetcher.faults() == ()
        match how:
            case "stop":
                prefetch.stop()
                prefetch.stop()
            case "fence":
                at.fence.cut()
                prefetch.stop()
            case "retire":
                at.store.retire({namespace(1)})
                barrier.lifted.set()
            case "pause":
                at.prefetcher.pause("test")
            case _:
                pass
        if how == "shutdown":
            for task in at.prefetcher._running.values():
                task.cancel()
        await at.quiet()
        found = at.prefetcher.statistics()
        assert found.on_its_way_bytes == 0
        if how in {"stop", "fence"}:
            assert landed <= found.wasted == found.completed
            assert at.settled()
        elif how == "retire":
            at.sweep()
            assert [at.store.tier_of(address) for address in addresses] == [None] * 3
            assert not found.completed or place != "enter"
            assert at.settled()
        else:
            assert found.pending_bytes == found.completed_bytes
            prefetch.stop()
            assert at.settled()
        if how != "retire":
            assert at.shelf.moved == addresses[: len(at.shelf.moved)]


@pytest.mark.parametrize("phase", ["before its first step", "in its window", "waiting its turn"])
async def test_stopped_before_it_reads_it_moves_nothing(tmp_path: Path, phase: str) -> None:
    async with scene(tmp_path, readers=1) as at:
        (first, second) = await at.on_nvme(1, 2)
        held = None
        if phase == "waiting its turn":
            barrier = at.shelf.at("enter")
            held = begin(at, [first], grant="held")
            await barrier.arrived.wait()
        start_in_s = 60.0 if phase == "in its window" else None
        prefetch = begin(at, [second], start_in_s=start_in_s)
        if phase != "before its first step":
            await turns()
        prefetch.stop()
        await until(lambda: at.prefetcher.statistics().pending == (held is not None))
        if held is not None:
            held.stop()
        await at.quiet()
        assert second not in at.shelf.moved
        assert at.settled()
        # The turn was given back: the next one reads.
        at.shelf.barriers.clear()
        begin(at, [second], grant="next")
        await at.quiet()
        assert await in_host(at, [second]) == [True]


async def test_a_read_that_hangs_is_given_up_and_counted(tmp_path: Path) -> None:
    async with scene(tmp_path, read_s=0.01) as at:
        addresses = await at.on_nvme(1, 2)
        at.shelf.at("enter")
        prefetch = begin(at, addresses)
        await at.quiet()
        found = at.prefetcher.statistics()
        assert (found.completed, found.failed, found.cancelled) == (0, 2, 0)
        prefetch.stop()
        assert at.settled()


async def test_a_block_that_cannot_be_read_ends_the_chain(at: Scene) -> None:
    addresses = await at.on_nvme(1, 2, 3)
    barrier = at.shelf.at("enter")
    prefetch = begin(at, addresses)
    await barrier.arrived.wait()
    nvme = at.store._residency.nvme
    assert nvme is not None
    nvme.drop(addresses[1])
    barrier.lifted.set()
    await at.quiet()
    found = at.prefetcher.statistics()
    assert (found.completed, found.failed, found.issued) == (1, 2, 3)
    prefetch.stop()
    assert at.settled()


async def test_a_fault_of_ours_ends_one_prefetch_and_leaves_nothing_reserved(
    at: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    addresses = await at.on_nvme(1, 2, 3)
    begin(at, addresses, start_in_s=60)
    await until(lambda: bool(at.wait.until_ns))
    at.shelf.faulty.add(addresses[2])  # two blocks are issued by then
    at.wait.advance_s(60)
    await at.quiet()
    found = at.prefetcher.statistics()
    assert (found.crashed, found.issued, found.cancelled) == (1, 2, 2)
    assert at.settled()
    assert "a prefetch failed" in caplog.text
    at.shelf.faulty.clear()
    begin(at, addresses)
    await at.quiet()
    assert await in_host(at, addresses) == [True] * 3


async def test_two_prefetches_of_one_block_move_it_once(at: Scene) -> None:
    addresses = await at.on_nvme(1, 2)
    barrier = at.shelf.at("before 0")
    first = begin(at, addresses, grant="a")
    await barrier.arrived.wait()
    begin(at, addresses, grant="b")
    await turns()
    barrier.lifted.set()
    await at.quiet()
    assert at.shelf.moved == addresses
    first.stop()
    assert at.prefetcher.statistics().wasted == 0  # the other one still expects to read them
    read(at, addresses)
    assert at.prefetcher.statistics().used == 2
    assert at.settled()


async def test_a_block_whose_bringer_is_stopped_is_brought_by_the_other(at: Scene) -> None:
    addresses = await at.on_nvme(1, 2)
    barrier = at.shelf.at("before 0")
    first = begin(at, addresses, grant="a", fence=Fence())
    await barrier.arrived.wait()
    begin(at, addresses, grant="b")
    await turns()
    at.shelf.barriers.clear()
    first.stop()
    await at.quiet()
    assert await in_host(at, addresses) == [True, True]
    read(at, addresses)
    assert at.prefetcher.statistics().used == 2
    assert at.settled()


# Budgets


async def test_a_tenant_gets_its_part_and_the_other_still_gets_its_own(tmp_path: Path) -> None:
    async with scene(tmp_path, total_bytes=5 * RECORD, tenant_bytes=3 * RECORD) as at:
        mine = await at.on_nvme(1, 2, 3, 4)
        theirs = await at.on_nvme(11, 12, 13, tenant=2, room=2)
        begin(at, mine)
        await at.quiet()
        assert await in_host(at, mine) == [True, True, True, False]
        begin(at, theirs, grant="theirs")
        await at.quiet()
        assert await in_host(at, theirs) == [True, True, False]
        found = at.prefetcher.statistics()
        assert dict(found.refused) == {Denial.TENANT_BUDGET: 1, Denial.BUDGET: 1}
        assert dict(found.by_tenant) == {component(1): 3 * RECORD, component(2): 2 * RECORD}
        # Room that was read is room again.
        read(at, mine[:3])
        begin(at, theirs, grant="again")
        await at.quiet()
        assert await in_host(at, theirs) == [True, True, True]
        read(at, theirs)
        assert at.settled()


async def test_too_many_prefetches_at_once_are_refused_and_counted(tmp_path: Path) -> None:
    async with scene(tmp_path, pending_max=1) as at:
        addresses = await at.on_nvme(1, 2)
        prefetch = begin(at, addresses[:1], start_in_s=60)
        assert at.prefetcher.begin("h", at.fence, addresses[1:]) is None
        assert dict(at.prefetcher.statistics().refused) == {Denial.PENDING: 1}
        prefetch.stop()
        await at.quiet()
        begin(at, addresses[1:])


async def test_a_block_evicted_or_left_unread_is_wasted_and_frees_its_room(at: Scene) -> None:
    addresses = await at.on_nvme(1, 2)
    begin(at, addresses)
    await at.quiet()
    push_out(at.store, addresses[0])
    at.sweep()
    assert at.prefetcher.statistics().wasted == 1
    at.clock.advance_s(29)
    at.sweep()
    assert at.prefetcher.statistics().wasted == 1
    at.clock.advance_s(2)
    at.sweep()
    assert at.prefetcher.statistics().wasted == 2
    assert at.settled()


async def test_a_reservation_that_leaked_is_taken_back_and_counted(tmp_path: Path) -> None:
    async with scene(tmp_path, total_bytes=RECORD, tenant_bytes=RECORD) as at:
        (wanted,) = await at.on_nvme(1)
        at.prefetcher._budget.reserve(component(1), RECORD)  # as a bug would leave it
        assert at.prefetcher.faults() != ()
        begin(at, [wanted])
        await at.quiet()
        assert await in_host(at, [wanted]) == [False]
        at.sweep()
        assert at.prefetcher.statistics().leaked == 1
        begin(at, [wanted])
        await at.quiet()
        assert await in_host(at, [wanted]) == [True]


# The window


async def test_it_begins_in_its_window_and_not_before(tmp_path: Path) -> None:
    window = WindowSettings(bandwidth_bytes_s=2 * RECORD, slack=2.0, margin_ns=SECOND)
    async with scene(tmp_path, window=window) as at:
        addresses = await at.on_nvme(1, 2)
        begin(at, addresses, start_in_s=10)
        await until(lambda: bool(at.wait.until_ns))
        # Two records take one second; twice that and the margin before the start.
        assert at.wait.until_ns == [at.clock() + 7 * SECOND]
        at.wait.advance_s(6.9)
        await turns()
        assert at.shelf.moved == []
        at.wait.advance_s(0.2)
        await at.quiet()
        assert at.shelf.moved == addresses
        assert at.prefetcher.statistics().deadline_missed == 0


async def test_what_lands_after_its_expected_start_has_missed_its_deadline(at: Scene) -> None:
    addresses = await at.on_nvme(1, 2)
    barrier = at.shelf.at("before 1")
    begin(at, addresses, start_in_s=0.01)
    await barrier.arrived.wait()
    at.wait.advance_s(1)
    barrier.lifted.set()
    await at.quiet()
    found = at.prefetcher.statistics()
    assert (found.completed, found.deadline_missed, found.deadline_missed_bytes) == (2, 1, RECORD)


async def test_a_start_beyond_the_horizon_is_refused(at: Scene) -> None:
    assert at.prefetcher.begin("g", at.fence, [], 301 * SECOND) is None
    assert dict(at.prefetcher.statistics().refused) == {Denial.LATE: 1}


def test_the_bandwidth_is_measured_and_smoothed() -> None:
    window = Window(WindowSettings(bandwidth_bytes_s=1.0), FakeClock())
    window.measured(100, SECOND)
    assert window.bandwidth_bytes_s == 100.0
    window.measured(200, SECOND)
    assert window.bandwidth_bytes_s == 125.0
    window.measured(0, SECOND)
    window.measured(100, 0)
    assert window.bandwidth_bytes_s == 125.0


# Waste and pauses


async def test_waste_above_its_limit_stops_it_and_a_clean_probe_starts_it_again(
    tmp_path: Path,
) -> None:
    waste = WasteSettings(
        limit=0.5, window_ns=600 * SECOND, blocks_min=2, cool_down_ns=5 * SECOND, probe_blocks=1
    )
    async with scene(tmp_path, waste=waste) as at:
        addresses = await at.on_nvme(*range(1, 8))
        held = at.shelf.at("before 2")
        begin(at, addresses[4:], grant="runs")
        await held.arrived.wait()
        at.shelf.barriers.clear()
        useless = begin(at, addresses[:2], grant="useless")
        await until(lambda: at.prefetcher.statistics().pending == 1)
        useless.stop()
        # The other one that was running has been stopped by it, and the next is refused.
        await at.quiet()
        found = at.prefetcher.statistics()
        assert (found.state, found.trips) == (PrefetchState.COOLING_DOWN, 1)
        assert at.prefetcher.begin("g", at.fence, addresses[2:4], tenant=component(1)) is None
        assert at.prefetcher.begin("other", at.fence, [], tenant=component(2)) is not None
        assert found.on_its_way_bytes == 0
        # What it had brought is useful still.
        read(at, addresses[4:6])
        assert at.prefetcher.statistics().used == 2
        at.wait.advance_s(5)
        begin(at, addresses[2:4])
        await at.quiet()
        assert await in_host(at, addresses[2:4]) == [True, False]
        assert at.prefetcher.statistics().state is PrefetchState.PROBING
        read(at, addresses[2:3])
        assert at.prefetcher.statistics().state is PrefetchState.FLOWING
        begin(at, addresses[2:4])
        await at.quiet()
        assert await in_host(at, addresses[2:4]) == [True, True]


async def test_a_pause_stops_what_runs_until_every_reason_is_taken_back(at: Scene) -> None:
    addresses = await at.on_nvme(1, 2)
    barrier = at.shelf.at("before 1")
    begin(at, addresses)
    await barrier.arrived.wait()
    at.prefetcher.pause("host")
    at.prefetcher.pause("disk")
    await at.quiet()
    at.shelf.barriers.clear()
    assert at.prefetcher.statistics().state is PrefetchState.PAUSED
    assert at.prefetcher.begin("g", at.fence, addresses) is None
    at.prefetcher.resume("host")
    assert at.prefetcher.begin("g", at.fence, addresses) is None
    assert at.prefetcher.statistics().paused == ("disk",)
    at.prefetcher.resume()
    begin(at, addresses)
    await at.quiet()
    assert await in_host(at, addresses) == [True, True]


# What a load does about one that is under way


def patient(policy: PrefetchPolicy) -> PatienceSettings:
    return PatienceSettings(policy, base_ns=2 * SECOND, per_1k_tokens_ns=SECOND)


async def under_way(at: Scene) -> list[BlockAddress]:
    """Two blocks: the first has landed, the second is being read."""
    addresses = await at.on_nvme(1, 2)
    barrier = at.shelf.at("before 1")
    begin(at, addresses)
    await barrier.arrived.wait()
    return addresses


async def test_best_effort_waits_for_nothing_and_ends_the_prefetch(tmp_path: Path) -> None:
    async with scene(tmp_path, patience=patient(PrefetchPolicy.BEST_EFFORT)) as at:
        addresses = await under_way(at)
        until_ns = at.clock() + 30 * SECOND
        other = at.prefetcher.load_begins("another grant", 64, until_ns)
        await other.until_here(addresses[0])
        assert at.prefetcher.statistics().pending == 1
        patience = at.prefetcher.load_begins("g", 64, until_ns)
        for address in addresses:
            await patience.until_here(address)
        await at.quiet()
        found = at.prefetcher.statistics()
        assert (found.completed + found.cancelled, found.deadline_missed) == (2, 1)
        assert found.completed >= 1
        read(at, addresses)
        assert at.prefetcher.statistics().used == found.completed
        assert at.settled()


async def test_wait_complete_waits_for_the_block_up_to_the_loads_deadline(tmp_path: Path) -> None:
    async with scene(tmp_path, patience=patient(PrefetchPolicy.WAIT_COMPLETE)) as at:
        addresses = await under_way(at)
        patience = at.prefetcher.load_begins("g", 64, at.clock() + 30 * SECOND)
        async with asyncio.TaskGroup() as tasks:
            await patience.until_here(addresses[0])
            waiting = tasks.create_task(patience.until_here(addresses[1]))
            await turns()
            at.wait.advance_s(29)
            await turns()
            assert not waiting.done()
            at.shelf.at("before 1").lifted.set()
            await waiting
        await at.quiet()
        assert await in_host(at, addresses) == [True, True]
        read(at, addresses)
        found = at.prefetcher.statistics()
        assert (found.used, found.deadline_missed) == (2, 1)
        assert at.settled()


async def test_wait_complete_gives_up_at_the_loads_deadline(tmp_path: Path) -> None:
    async with scene(tmp_path, patience=patient(PrefetchPolicy.WAIT_COMPLETE)) as at:
        addresses = await under_way(at)
        patience = at.prefetcher.load_begins("g", 64, at.clock() + 30 * SECOND)
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(patience.until_here(addresses[1]))
            await turns()
            at.wait.advance_s(30)
            await waiting
        assert at.prefetcher.statistics().on_its_way_bytes == RECORD


async def test_timeout_waits_a_base_and_more_for_more_tokens(tmp_path: Path) -> None:
    async with scene(tmp_path, patience=patient(PrefetchPolicy.TIMEOUT)) as at:
        addresses = await under_way(at)
        patience = at.prefetcher.load_begins("g", 3000, at.clock() + 30 * SECOND)
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(patience.until_here(addresses[1]))
            await turns()
            at.wait.advance_s(4.9)
            await turns()
            assert not waiting.done()
            at.wait.advance_s(0.2)
            await waiting
        await patience.until_here(addresses[1])  # the time is for the whole load
        assert PatienceSettings(PrefetchPolicy.TIMEOUT).until_ns(0, 10**6, 7) == 7


@pytest.mark.parametrize("how", ["the load is stopped", "the prefetch is stopped"])
async def test_waiting_ends_with_the_load_or_the_prefetch(tmp_path: Path, how: str) -> None:
    async with scene(tmp_path, patience=patient(PrefetchPolicy.WAIT_COMPLETE)) as at:
        addresses = await at.on_nvme(1)
        barrier = at.shelf.at("before 0")
        prefetch = begin(at, addresses)
        await barrier.arrived.wait()
        patience = at.prefetcher.load_begins("g", 64, at.clock() + 30 * SECOND)
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(patience.until_here(addresses[0]))
            await turns()
            if how == "the load is stopped":
                patience.give_up()
            else:
                prefetch.stop()
            await waiting
        await patience.until_here(addresses[0])


@pytest.mark.parametrize("policy", list(PrefetchPolicy))
async def test_a_load_ends_a_prefetch_that_waits_for_its_window(
    tmp_path: Path, policy: PrefetchPolicy
) -> None:
    async with scene(tmp_path, patience=patient(policy)) as at:
        addresses = await at.on_nvme(1)
        begin(at, addresses, start_in_s=60)
        await until(lambda: bool(at.wait.until_ns))
        at.prefetcher.load_begins("g", 64, at.clock() + 30 * SECOND)
        await at.quiet()
        assert at.shelf.moved == []
        assert at.settled()


async def test_a_load_that_waits_gets_what_is_under_way_and_reads_the_rest_itself(
    tmp_path: Path,
) -> None:
    settings = patient(PrefetchPolicy.WAIT_COMPLETE)
    async with scene(tmp_path, patience=settings, chunk_bytes=2 * RECORD) as at:
        addresses = await at.on_nvme(1, 2, 3)
        barrier = at.shelf.at("before 1")
        begin(at, addresses)
        await barrier.arrived.wait()
        at.prefetcher.load_begins("g", 64, at.clock() + 30 * SECOND)
        barrier.lifted.set()
        await at.quiet()
        assert await in_host(at, addresses) == [True, True, False]
        assert at.prefetcher.statistics().issued == 2
