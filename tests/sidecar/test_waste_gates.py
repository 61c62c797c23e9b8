"""Waste of one tenant's prefetches stops its own; waste of many stops the node's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sidecar.prefetch.waste import CoolingDown, Flowing, WasteSettings
from sidecar.prefetch.waste_gates import NODE_TIMES, Passed, WasteGates
from strongroom.identity import ComponentId
from tests.storage.support import FakeClock

SETTINGS = WasteSettings(
    limit=0.5, window_ns=10**12, blocks_min=4, cool_down_ns=10**9, probe_blocks=2
)
FLOOD, QUIET = ComponentId("f" * 32), ComponentId("a" * 32)


class Gates:
    def __init__(self, settings: WasteSettings = SETTINGS) -> None:
        self.clock = FakeClock()
        self.closed: list[ComponentId | None] = []
        self.gates = WasteGates(settings, self.clock, self.closed.append)

    def wastes(self, tenant: ComponentId, count: int, nbytes: int = 100) -> int:
        """How many of so many were admitted, all of which are wasted."""
        admitted = 0
        for _ in range(count):
            passed = self.gates.admit(tenant)
            if passed is not None:
                admitted += 1
                self.gates.wasted(passed, nbytes)
        return admitted


def test_one_tenants_waste_stops_its_own_and_nobody_elses() -> None:
    at = Gates()
    assert at.wastes(FLOOD, 1000) == SETTINGS.blocks_min
    assert at.closed == [FLOOD]
    assert at.gates.stopped(FLOOD)
    assert not at.gates.stopped(QUIET)
    passed = at.gates.admit(QUIET)
    assert passed is not None
    at.gates.used(passed, 100)
    assert (at.gates.tenants_stopped, at.gates.trips) == (1, 1)
    for _ in range(50):
        at.clock.advance_s(3600)
        at.wastes(FLOOD, 1000)
    assert set(at.closed) == {FLOOD}, "however often it tries again"
    assert at.gates.admit(QUIET) is not None


def test_what_was_on_its_way_when_a_tenant_was_stopped_does_not_count_for_the_node() -> None:
    at = Gates()
    passed = [at.gates.admit(FLOOD) for _ in range(100)]
    for one in passed:
        assert one is not None
        at.gates.wasted(one, 100)
    assert at.closed == [FLOOD]
    assert not at.gates.stopped(QUIET)


def test_the_waste_of_many_stops_the_node_although_none_reached_its_own_limit() -> None:
    at = Gates()
    tenants = [ComponentId(f"{number:032x}") for number in range(2 * NODE_TIMES)]
    for tenant in tenants:
        at.wastes(tenant, SETTINGS.blocks_min - 1)
    assert at.closed == [None]
    assert at.gates.stopped(QUIET)
    assert isinstance(at.gates.state, CoolingDown)
    at.clock.advance_s(2)
    for _ in range(SETTINGS.probe_blocks):
        passed = at.gates.admit(QUIET)
        assert passed is not None
        at.gates.used(passed, 100)
    assert isinstance(at.gates.state, Flowing)


MANY = WasteSettings(limit=0.5, window_ns=10**12, blocks_min=32, probe_blocks=8)
"""As they are set."""


def test_one_tenants_large_blocks_do_not_stop_the_node_and_three_tenants_do() -> None:
    """One block fewer than its own gate judges, eight times as large as those of the others."""
    at = Gates(MANY)
    at.wastes(FLOOD, MANY.blocks_min - 1, 800)
    for _ in range(5 * MANY.blocks_min):
        passed = at.gates.admit(QUIET)
        assert passed is not None
        at.gates.used(passed, 100)
        assert at.gates.ratio <= 0.5
    assert at.closed == []
    # What is capped is one tenant's part: three that waste as much are another thing.
    for number in (1, 2):
        at.wastes(ComponentId(f"{number:032x}"), MANY.blocks_min - 1, 800)
    assert at.closed == [None]
    assert at.gates.stopped(QUIET)


def test_no_tenant_takes_all_of_the_nodes_probe_nor_fails_it_alone() -> None:
    at = Gates(MANY)
    for number in range(2 * NODE_TIMES):
        at.wastes(ComponentId(f"{number:032x}"), MANY.blocks_min - 1)
    assert at.closed == [None]
    at.clock.advance_s(31)
    mine = [at.gates.admit(FLOOD) for _ in range(MANY.probe_blocks)]
    taken = [one for one in mine if one is not None]
    assert len(taken) == MANY.probe_blocks // NODE_TIMES
    passed = at.gates.admit(QUIET)
    assert passed is not None, "who comes behind it finds a place"
    at.gates.used(passed, 100)
    # It comes back for more as its blocks settle, and wastes all of them.
    while taken:
        at.gates.wasted(taken.pop(), 800)
        taken += [one for one in (at.gates.admit(FLOOD),) if one is not None]
        if at.gates.state == Flowing():
            break
    assert at.closed == [None]
    assert at.gates.admit(QUIET) is not None


def test_a_probe_that_many_waste_stops_the_node_again() -> None:
    at = Gates(MANY)
    tenants = [ComponentId(f"{number:032x}") for number in range(2 * NODE_TIMES)]
    for tenant in tenants:
        at.wastes(tenant, MANY.blocks_min - 1)
    at.clock.advance_s(31)
    for tenant in tenants:
        at.wastes(tenant, 1)
    assert at.closed.count(None) == 2


def test_tenants_that_nothing_is_known_against_are_forgotten() -> None:
    at = Gates()
    at.wastes(FLOOD, 10)
    for number in range(5000):
        passed = at.gates.admit(ComponentId(f"{number:032x}"))
        assert passed is not None
        at.gates.used(passed, 100)
    assert len(at.gates._tenants) <= 1025
    assert at.gates.stopped(FLOOD), "and who is stopped is not"


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["used", "wasted", "withdrawn"]))))
def test_every_block_that_was_admitted_settles_once_in_any_order(
    script: list[tuple[int, str]],
) -> None:
    at = Gates()
    out: list[Passed] = []
    for number, (which, ending) in enumerate(script):
        at.clock.advance_s(0.2)
        if len(out) < 3 or number % 2:
            passed = at.gates.admit(ComponentId(f"{which:032x}"))
            if passed is not None:
                out.append(passed)
        elif out:
            passed = out.pop(which % len(out))
            if ending == "withdrawn":
                at.gates.withdrawn(passed)
            else:
                getattr(at.gates, ending)(passed, 100)
        assert sum(one.out for one in at.gates._tenants.values()) == len(out)
    for passed in out:
        at.gates.withdrawn(passed)
    at.clock.advance_s(10**5)
    assert at.gates.admit(QUIET) is not None, "nothing keeps it stopped"
