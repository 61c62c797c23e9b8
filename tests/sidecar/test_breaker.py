"""Each condition trips at its threshold and not below; security trips outlive everything but an
operator, and the second look stops what the first let through.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from sidecar.clocks import Clocks
from sidecar.degrade.breaker import ABOUT_MAX, Breakers, BreakerSettings
from sidecar.degrade.conditions import (
    REFUSING,
    RULES,
    SCOPES,
    SECURITY,
    Armed,
    Condition,
    Probation,
    Scope,
    Tripped,
)
from sidecar.degrade.measures import Count, Measure, Ratio, Rise, Streak
from sidecar.degrade.stance import Action
from sidecar.record.events import EventKind, Events
from strongroom.errors import Conflict, Missing, Misuse, Unavailable
from tests.sidecar.harness import ManualClock

PERFORMANCE = sorted(set(Condition) - SECURITY)


class Rig:
    """Breakers in a state directory, under a clock that is moved by hand."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = ManualClock()
        count = iter(range(1, 10**9))
        self.fenced = 0
        self.events = Events(lambda: next(count), Clocks(self.clock))
        self.breakers = self.start()

    def start(self) -> Breakers:
        """A new life over the same directory."""
        return Breakers(
            self.directory, BreakerSettings(), self.events, Clocks(self.clock), self._fence
        )

    def _fence(self) -> None:
        self.fenced += 1

    def trip(self, condition: Condition, about: str = "") -> None:
        """As many bad cases as it takes."""
        if condition is Condition.ENGINE_IDLE:
            for _ in range(32):  # what it rises from
                self.breakers.note(condition, 0, 1_000_000, about)
                self.clock.advance(1)
        cases = 1_000_000 if condition is Condition.ENGINE_IDLE else 1
        for _ in range(1000):
            if about in self.breakers.tripped_for(condition):
                return
            self.breakers.note(condition, cases, cases, about)
        raise AssertionError(condition)

    def wait(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.clock.advance(1)
            self.breakers.tick()

    def action(self) -> Action:
        return self.breakers.action

    def kinds(self) -> list[EventKind]:
        return [event.kind for event in self.events.after(0, 10**6)]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


# The ways to measure


def test_a_ratio_needs_enough_cases_and_more_than_its_threshold() -> None:
    measure = Measure(Ratio(threshold=0.05, minimum=100, window_s=60))
    for number in range(100):
        assert measure.trips(0) is None
        measure.add(number < 5, 1, 0)
    assert measure.reading(0) == pytest.approx(0.05)
    assert measure.trips(0) is None
    measure.add(1, 1, 0)
    assert measure.trips(0) == pytest.approx(6 / 101)


def test_what_is_older_than_the_window_counts_no_more() -> None:
    measure = Measure(Count(threshold=3, window_s=60))
    measure.add(2, 2, 0)
    assert measure.trips(59 * 10**9) is None
    measure.add(1, 1, 30 * 10**9)
    assert measure.trips(30 * 10**9) == 3
    assert measure.trips(70 * 10**9) is None


def test_one_good_case_ends_a_streak() -> None:
    measure = Measure(Streak(threshold=3, window_s=60))
    for bad in (1, 1, 0, 1, 1):
        measure.add(bad, 1, 0)
        assert measure.trips(0) is None
    measure.add(1, 1, 0)
    assert measure.trips(0) == 3


def test_a_rise_is_against_the_best_of_the_windows_before() -> None:
    measure = Measure(Rise(threshold=0.2, minimum=10, window_s=10))
    now = 0
    for _ in range(60):  # an engine that always waits for a quarter of its time
        now += 10**9
        measure.add(2.5, 10, now)
    assert measure.trips(now) is None
    for _ in range(12):
        now += 10**9
        measure.add(6, 10, now)
    assert measure.trips(now) is not None


def test_a_level_is_no_rise_while_there_is_nothing_that_it_rose_from() -> None:
    measure = Measure(Rise(threshold=0.2, minimum=10, window_s=10))
    for second in range(10):
        measure.add(9, 10, second * 10**9)
        assert measure.trips(second * 10**9) is None


# Conditions


@pytest.mark.parametrize("condition", sorted(Condition))
def test_every_condition_trips_to_what_is_allowed_to_it(rig: Rig, condition: Condition) -> None:
    rig.trip(condition)
    expected = Action.REFUSE if condition in REFUSING else Action.ENGINE_ONLY
    assert rig.action() is expected
    assert rig.fenced == (condition in REFUSING)
    assert EventKind.BREAKER_TRIPPED in rig.kinds()


@pytest.mark.parametrize("condition", sorted(Condition))
def test_no_condition_trips_on_good_cases(rig: Rig, condition: Condition) -> None:
    for _ in range(2000):
        rig.breakers.note(condition, 0, 10_000)
        rig.clock.advance(0.1)
    rig.breakers.tick()
    assert rig.action() is Action.NONE


def test_more_than_one_in_twenty_restores_above_recompute_is_a_p95_above_it(rig: Rig) -> None:
    for number in range(200):
        rig.breakers.note(Condition.RESTORE_SLOW, number % 20 == 19, 1)
    assert rig.action() is Action.NONE
    for _ in range(3):
        rig.breakers.note(Condition.RESTORE_SLOW, 1, 1)
    assert rig.action() is Action.ENGINE_ONLY


def test_a_trip_keeps_the_events_of_its_window(rig: Rig) -> None:
    rig.events.emit(EventKind.SWAP_IN_DONE, request="long ago")
    rig.clock.advance(3600)
    rig.events.emit(EventKind.SWAP_IN_FAILED, request="just now", reason="integrity")
    rig.trip(Condition.CHECKSUM)
    state = rig.breakers.states()[Condition.CHECKSUM]
    assert isinstance(state, Tripped)
    assert [event.request for event in state.trip.evidence if event.request] == ["just now"]


# Whom they are about


@pytest.mark.parametrize("condition", PERFORMANCE)
def test_a_performance_trip_is_for_whom_it_is_about_and_for_nobody_else(
    rig: Rig, condition: Condition
) -> None:
    rig.trip(condition, "a")
    of_engine = SCOPES[condition] is Scope.ENGINE
    theirs = ("a", "t") if of_engine else ("e", "a")
    assert rig.breakers.action_for(*theirs) is Action.ENGINE_ONLY
    # The other scope's name is not mistaken for this one's.
    others = (("b", "t"), ("e", "a")) if of_engine else (("e", "b"), ("a", "t"))
    for engine, tenant in others:
        assert rig.breakers.action_for(engine, tenant) is Action.NONE
    assert rig.breakers.tripped_for(condition) == ("a",)
    rig.trip(condition, "b")
    rig.breakers.clear(condition)
    assert rig.breakers.tripped_for(condition) == ()
    assert rig.action() is Action.NONE


@pytest.mark.parametrize("condition", sorted(SECURITY))
def test_a_security_trip_is_for_the_whole_node(rig: Rig, condition: Condition) -> None:
    rig.trip(condition)
    expected = Action.REFUSE if condition in REFUSING else Action.ENGINE_ONLY
    assert rig.breakers.action_for("any", "one") is expected


def test_breakers_of_engines_and_tenants_are_bounded_and_a_trip_is_not_pushed_out(
    rig: Rig,
) -> None:
    rig.trip(Condition.THRASH, "tripped")
    for number in range(2 * ABOUT_MAX):
        rig.breakers.note(Condition.THRASH, 1, 1, f"{number}")
    assert len(rig.breakers) <= ABOUT_MAX + len(SECURITY)
    assert rig.breakers.tripped_for(Condition.THRASH) == ("tripped",)


def test_a_refusing_trip_is_kept_and_fences_although_it_cannot_be_told(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rig.events, "emit", full)
    with pytest.raises(OSError, match="No space"):
        rig.breakers.note(Condition.CROSS_TENANT, 1, 1)
    assert rig.fenced == 1
    with pytest.raises(Unavailable):
        rig.breakers.check()
    monkeypatch.undo()
    assert rig.start().action is Action.REFUSE


# Coming back


@pytest.mark.parametrize("condition", PERFORMANCE)
def test_a_performance_trip_comes_back_through_cooldown_and_probation(
    rig: Rig, condition: Condition
) -> None:
    rig.trip(condition)
    rig.wait(59)
    assert isinstance(rig.breakers.states()[condition], Tripped)
    rig.wait(2)
    assert isinstance(rig.breakers.states()[condition], Probation)
    assert rig.action() is Action.NONE
    rig.wait(121)
    assert isinstance(rig.breakers.states()[condition], Armed)
    assert rig.kinds()[-1] is EventKind.BREAKER_CLEARED


def test_a_trip_in_probation_doubles_the_cooldown(rig: Rig) -> None:
    for cooldown in (60, 120, 240):
        rig.trip(Condition.THRASH)
        rig.wait(cooldown - 1)
        assert isinstance(rig.breakers.states()[Condition.THRASH], Tripped)
        rig.wait(2)
        assert isinstance(rig.breakers.states()[Condition.THRASH], Probation)
    rig.wait(121)
    rig.trip(Condition.THRASH)
    state = rig.breakers.states()[Condition.THRASH]
    assert isinstance(state, Tripped)
    assert state.cooldown_s == 60


@pytest.mark.parametrize("condition", sorted(SECURITY))
def test_a_security_trip_ends_by_nothing_but_an_operator(rig: Rig, condition: Condition) -> None:
    rig.trip(condition)
    in_force = rig.breakers.action
    rig.wait(7200)
    for _ in range(1000):
        rig.breakers.note(condition, 0, 1)
    assert rig.action() is in_force
    rig.breakers = rig.start()
    assert rig.action() is in_force
    state = rig.breakers.states()[condition]
    assert isinstance(state, Tripped)
    assert state.trip.at
    rig.breakers.clear(condition)
    assert rig.action() is Action.NONE
    rig.breakers = rig.start()
    assert rig.action() is Action.NONE


@pytest.mark.parametrize("condition", PERFORMANCE)
def test_an_operator_clears_a_performance_trip_at_once(rig: Rig, condition: Condition) -> None:
    rig.trip(condition)
    rig.breakers.clear(condition)
    assert rig.action() is Action.NONE
    assert rig.kinds()[-1] is EventKind.ACTION


def test_clearing_says_what_is_wrong_with_the_wish(rig: Rig) -> None:
    with pytest.raises(Missing):
        rig.breakers.clear("nothing")
    with pytest.raises(Conflict):
        rig.breakers.clear(Condition.THRASH)


def test_one_cleared_breaker_leaves_the_other_in_force(rig: Rig) -> None:
    rig.trip(Condition.CROSS_TENANT)
    rig.trip(Condition.THRASH)
    rig.breakers.clear(Condition.CROSS_TENANT)
    assert rig.action() is Action.ENGINE_ONLY
    rig.breakers.check()


def test_a_refusing_trip_stops_every_release_and_an_engine_only_one_does_not(rig: Rig) -> None:
    rig.breakers.check()
    rig.trip(Condition.CHECKSUM)
    rig.breakers.check()
    rig.trip(Condition.READABLE)
    with pytest.raises(Unavailable):
        rig.breakers.check()


@pytest.mark.parametrize("content", [b"", b"[", b'{"condition": 1}', b"[1]"])
def test_a_record_that_cannot_be_read_trips_every_security_breaker(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "trips.json"
    path.touch(mode=0o600)
    path.write_bytes(content)
    rig = Rig(tmp_path)
    tripped = {name for name, s in rig.breakers.states().items() if isinstance(s, Tripped)}
    assert tripped == SECURITY
    assert rig.action() is Action.REFUSE


def test_a_record_that_others_could_have_written_stops_the_start(tmp_path: Path) -> None:
    path = tmp_path / "trips.json"
    path.write_bytes(b"[]")
    path.chmod(0o666)
    with pytest.raises(Misuse):
        Rig(tmp_path)


def test_a_trip_that_cannot_be_written_is_in_force_and_written_later(rig: Rig) -> None:
    blocked = rig.directory / "trips.json.new"
    blocked.mkdir()
    rig.trip(Condition.CROSS_TENANT)
    assert rig.action() is Action.REFUSE
    with pytest.raises(Unavailable):
        rig.breakers.clear(Condition.CROSS_TENANT)
    assert rig.action() is Action.REFUSE
    blocked.rmdir()
    rig.breakers.tick()
    rig.breakers = rig.start()
    assert rig.action() is Action.REFUSE


def test_every_condition_has_a_rule() -> None:
    rules: Mapping[Condition, object] = RULES
    assert set(rules) == set(SCOPES) == set(Condition)
