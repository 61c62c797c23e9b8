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
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.closed: list[ComponentId | None] = []
        self.gates = WasteGates(SETTINGS, self.clock, self.closed.append)

    def wastes(self, tenant: ComponentId, count: int) -> int:
        """How many of so many were admitted, all of which are wasted."""
        admitted = 0
        for _ in range(count):
            passed = self.gates.admit(tenant)
            if passed is not None:
                admitted += 1
                self.gates.wasted(passed, 100)
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
