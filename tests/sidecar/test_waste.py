"""The share of wasted bytes: when it stops prefetching, and how that starts again."""

from __future__ import annotations

import pytest

from sidecar.prefetch.waste import (
    Admitted,
    CoolingDown,
    Flowing,
    Probing,
    WasteGate,
    WasteSettings,
    WasteState,
)
from tests.storage.support import FakeClock

SECOND = 10**9
SETTINGS = WasteSettings(
    limit=0.5,
    window_ns=10 * SECOND,
    blocks_min=4,
    cool_down_ns=5 * SECOND,
    probe_blocks=2,
)


class Gate:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.told = 0
        self.gate = WasteGate(SETTINGS, self.clock, self._tripped)

    def _tripped(self) -> None:
        self.told += 1

    def state(self) -> WasteState:
        return self.gate.state

    def admit(self) -> Admitted:
        admitted = self.gate.admit()
        assert admitted is not None
        return admitted

    def waste(self, count: int) -> None:
        for _ in range(count):
            self.gate.wasted(self.admit(), 100)

    def use(self, count: int) -> None:
        for _ in range(count):
            self.gate.used(self.admit(), 100)


@pytest.fixture
def gate() -> Gate:
    return Gate()


def test_a_share_at_the_limit_flows_and_one_above_it_stops(gate: Gate) -> None:
    gate.use(2)
    gate.waste(2)
    assert gate.state() == Flowing()
    assert gate.gate.ratio == 0.5
    gate.waste(1)
    assert isinstance(gate.state(), CoolingDown)
    assert (gate.gate.admit(), gate.told, gate.gate.trips) == (None, 1, 1)


def test_too_few_blocks_say_nothing(gate: Gate) -> None:
    gate.waste(3)
    assert gate.state() == Flowing()
    gate.waste(1)
    assert isinstance(gate.state(), CoolingDown)


def test_what_is_older_than_the_window_counts_no_more(gate: Gate) -> None:
    gate.waste(3)
    gate.clock.advance_s(11)
    assert gate.gate.ratio == 0.0
    gate.use(3)
    gate.waste(1)
    assert gate.state() == Flowing()
    assert gate.gate.ratio == 0.25


def test_bytes_count_and_not_blocks(gate: Gate) -> None:
    for _ in range(9):
        gate.gate.wasted(gate.admit(), 1)
        gate.gate.used(gate.admit(), 100)
    assert gate.state() == Flowing()


def test_after_a_clean_probe_it_flows_again(gate: Gate) -> None:
    gate.waste(4)
    gate.clock.advance_s(4.9)
    assert gate.gate.admit() is None
    gate.clock.advance_s(0.2)
    first, second = gate.admit(), gate.admit()
    assert isinstance(gate.state(), Probing)
    assert gate.gate.admit() is None  # a probe is small
    gate.gate.used(first, 100)
    assert isinstance(gate.state(), Probing)
    gate.gate.used(second, 100)
    assert gate.state() == Flowing()
    assert gate.gate.ratio == 0.0


def test_a_wasted_probe_pauses_twice_as_long_each_time_up_to_a_bound(gate: Gate) -> None:
    gate.waste(4)
    paused = []
    for _ in range(8):
        state = gate.state()
        assert isinstance(state, CoolingDown)
        paused.append(state.paused_ns // SECOND)
        gate.clock.advance_s(paused[-1])
        gate.waste(2)
    assert paused == [5, 10, 20, 40, 80, 160, 160, 160]


def test_a_probe_that_never_arrives_gives_its_place_back(gate: Gate) -> None:
    gate.waste(4)
    gate.clock.advance_s(6)
    for _ in range(5):
        held = [gate.admit(), gate.admit()]
        assert gate.gate.admit() is None
        for admitted in held:
            gate.gate.withdrawn(admitted)
    gate.use(2)
    assert gate.state() == Flowing()


def test_what_was_issued_before_a_trip_is_no_part_of_the_probe(gate: Gate) -> None:
    before = [gate.admit() for _ in range(4)]
    gate.waste(4)
    gate.clock.advance_s(6)
    probes = [gate.admit(), gate.admit()]
    for admitted in before:
        gate.gate.wasted(admitted, 100)
    gate.gate.withdrawn(before[0])
    assert gate.gate.admit() is None
    for admitted in probes:
        gate.gate.used(admitted, 100)
    assert gate.state() == Flowing()
