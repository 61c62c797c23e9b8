"""Degradation goes up at once, comes back slowly and by itself, and never flaps."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.clocks import Clocks
from sidecar.degrade.pressure import (
    Effects,
    Gauge,
    Ladder,
    Ladders,
    Pressure,
    Readings,
    Standing,
    advance,
    effects,
)
from sidecar.degrade.stance import Action, Stance
from sidecar.record.events import EventKind, Events
from tests.sidecar.harness import ManualClock

LADDER = Ladder((0.7, 0.9), slack=0.2, rise_s=1.0, rest_s=5.0)
S = 1_000_000_000


class Levers:
    """Remembers what was pulled."""

    def __init__(self) -> None:
        self.pulled: list[tuple[str, object]] = []

    def pause_prefetch(self, reason: str) -> None:
        self.pulled.append(("pause", reason))

    def resume_prefetch(self, reason: str) -> None:
        self.pulled.append(("resume", reason))

    def admit_to_disk(self, factor: float) -> None:
        self.pulled.append(("admit", factor))


class Rig:
    """A `Pressure` under a clock that is moved by hand."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        count = iter(range(1, 10**9))
        self.events = Events(lambda: next(count), Clocks(self.clock))
        self.levers = Levers()
        self.pressure = Pressure(Ladders(), self.levers, self.events, self.clock)

    def look(
        self,
        seconds: float = 1.0,
        engines: dict[str, float] | None = None,
        **gauges: float,
    ) -> Effects:
        """The value held for so long, looked at each half second."""
        readings = Readings({Gauge(name): value for name, value in gauges.items()}, engines or {})
        for _ in range(max(1, math.ceil(seconds * 2))):
            self.clock.advance(0.5)
            self.pressure.observe(readings)
        return self.pressure.effects

    def told(self, kind: EventKind) -> list[tuple[str, dict[str, float]]]:
        found = self.events.after(0, 10**6)
        return [(event.subject, dict(event.numbers)) for event in found if event.kind is kind]


def test_up_after_the_rise_time_to_the_right_rung_at_once() -> None:
    standing = advance(LADDER, Standing(), 0.95, 0)
    assert standing.rung == 0
    assert advance(LADDER, standing, 0.95, S).rung == 2
    assert advance(LADDER, standing, 0.75, S).rung == 1


def test_a_spike_shorter_than_the_rise_time_is_no_step() -> None:
    standing = advance(LADDER, Standing(), 0.95, 0)
    standing = advance(LADDER, standing, 0.1, S // 2)
    assert advance(LADDER, standing, 0.95, S).rung == 0


def test_down_one_rung_at_a_time_each_after_its_rest() -> None:
    standing = Standing(2)
    rungs = []
    for second in range(16):
        standing = advance(LADDER, standing, 0.0, second * S)
        rungs.append(standing.rung)
    assert rungs == [2] * 5 + [1] * 6 + [0] * 5


def test_within_the_slack_nothing_moves() -> None:
    standing = Standing(1)
    for second in range(100):
        standing = advance(LADDER, standing, 0.55, second * S)
    assert standing.rung == 1


@given(st.lists(st.floats(0, 1.2), min_size=1, max_size=200), st.floats(0.05, 3))
def test_a_round_trip_takes_the_rest_time_at_least(values: list[float], step_s: float) -> None:
    """No flapping: between two rises there is a fall, and each fall has rested."""
    standing, now = Standing(), 0
    changes: list[tuple[int, int]] = []
    for value in values:
        after = advance(LADDER, standing, value, now)
        if after.rung != standing.rung:
            changes.append((now, after.rung - standing.rung))
        standing, now = after, now + int(step_s * S)
    for (before, _), (at, move) in pairwise(changes):
        if move < 0:
            assert move == -1
            assert at - before >= LADDER.rest_s * S - step_s * S
    assert 0 <= standing.rung <= 2


def test_host_queue_full_pauses_swap_outs_and_only_those() -> None:
    rig = Rig()
    assert rig.look(host_queue=0.95) == Effects(swap_outs_paused=True)
    assert rig.look(10, host_queue=0.1) == Effects()
    assert rig.levers.pulled == []
    assert rig.told(EventKind.ACTION) == [
        ("swap_outs_paused", {"value": 1.0}),
        ("swap_outs_paused", {"value": 0.0}),
    ]


def test_disk_queue_full_lowers_admission_and_brings_it_back() -> None:
    rig = Rig()
    rig.look(disk_queue=0.75)
    rig.look(disk_queue=0.95)
    rig.look(30, disk_queue=0.0)
    assert rig.levers.pulled == [("admit", 0.5), ("admit", 0.0), ("admit", 0.5), ("admit", 1.0)]
    steps = [numbers for subject, numbers in rig.told(EventKind.PRESSURE)]
    assert [(step["from"], step["to"]) for step in steps] == [(0, 1), (1, 2), (2, 1), (1, 0)]


def test_a_failing_device_gets_no_more_writes_and_half_of_them_on_trial() -> None:
    rig = Rig()
    assert rig.look(nvme_errors=0.6).disk_admission == 0.0
    assert rig.look(29, nvme_errors=0.0).disk_admission == 0.0
    assert rig.look(10, nvme_errors=0.0).disk_admission == 0.5
    assert rig.look(40, nvme_errors=0.0).disk_admission == 1.0


def test_a_host_tier_that_cannot_evict_stops_prefetch_first_and_swap_outs_then() -> None:
    rig = Rig()
    assert rig.look(2, host_tier=0.9) == Effects(prefetch_stopped=True)
    assert rig.look(2, host_tier=0.97) == Effects(prefetch_stopped=True, swap_outs_paused=True)
    assert rig.look(30, host_tier=0.2) == Effects()
    assert rig.levers.pulled == [("pause", "pressure"), ("resume", "pressure")]


def test_an_engine_short_of_pages_goes_through_the_steps_in_their_order() -> None:
    rig = Rig()
    seen = []
    for used in (0.5, 0.91, 0.95, 0.98, 0.995):
        rig.look(3, engines={"a": used, "b": 0.3})
        seen.append(rig.pressure.action("a"))
        assert rig.pressure.action("b") is Action.NONE
    assert seen == [
        Action.NONE,
        Action.STOP_PREFETCH,
        Action.LIMIT_CONTEXT,
        Action.RECOMPUTE,
        Action.ENGINE_ONLY,
    ]
    # The node's prefetching goes on, for the other engine.
    assert not rig.look(0.5, engines={"a": 0.995, "b": 0.3}).prefetch_stopped
    assert not rig.look(60, engines={"a": 0.5, "b": 0.3}).prefetch_stopped
    assert rig.pressure.action("a") is Action.NONE


def test_an_engine_that_is_gone_holds_nothing_back() -> None:
    rig = Rig()
    rig.look(3, engines={"a": 0.995})
    assert rig.pressure.action("a") is Action.ENGINE_ONLY
    rig.look(0.5)
    assert rig.pressure.action("a") is Action.NONE


def test_a_reading_that_is_missing_changes_nothing() -> None:
    rig = Rig()
    rig.look(disk_queue=0.95)
    assert rig.look(100, host_queue=0.1).disk_admission == 0.0


def test_effects_never_grow_weaker_with_a_higher_rung() -> None:
    for gauge in Gauge:
        for rung in range(3):
            low, high = effects({gauge: rung}), effects({gauge: rung + 1})
            assert high.disk_admission <= low.disk_admission
            assert high.swap_outs_paused >= low.swap_outs_paused
            assert high.prefetch_stopped >= low.prefetch_stopped


@pytest.mark.parametrize(
    ("action", "saves", "prefetches", "refuses", "limit"),
    [
        (Action.NONE, True, True, False, None),
        (Action.STOP_PREFETCH, True, False, False, None),
        (Action.LIMIT_CONTEXT, True, False, False, 512),
        (Action.RECOMPUTE, True, False, False, 0),
        (Action.ENGINE_ONLY, False, False, False, 0),
        (Action.REFUSE, False, False, True, 0),
    ],
)
def test_each_stance_contains_the_ones_before(
    action: Action, saves: bool, prefetches: bool, refuses: bool, limit: int | None
) -> None:
    stance = Stance.of(action, 512)
    assert (stance.saves, stance.prefetches, stance.refuses) == (saves, prefetches, refuses)
    assert stance.limit_tokens == limit
    assert stance.allows(512) is (limit is None or limit >= 512)
    assert stance.allows(513) is (limit is None)
