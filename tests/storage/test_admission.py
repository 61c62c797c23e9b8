"""Admission learns who comes back, weighs it against the write, and thrash raises the bar."""

from __future__ import annotations

import pytest

from storage.admission import Admission, AdmissionSettings
from storage.block import BlockAddress
from storage.retention import BlockKind, Retention
from storage.stages import Candidate, Unwanted, Wanted
from strongroom.blocks import BlockId
from strongroom.identity import ComponentId

MIB = 1024 * 1024
NBYTES = 32 * MIB
HISTORY = Retention.of(BlockKind.HISTORY)
SYSTEM = Retention.of(BlockKind.SYSTEM)
EVERY = AdmissionSettings(sample_every=1)


class Clock:
    """Moved by hand."""

    def __init__(self) -> None:
        self.now_ns = 10**12

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


def candidate(number: int, retention: Retention = HISTORY, uses: int = 1) -> Candidate:
    address = BlockAddress(BlockId(number.to_bytes(32, "little")), 0)
    return Candidate(address, ComponentId("1" * 32), NBYTES, retention, uses)


def admission(
    saved_s: float | None = 0.01, settings: AdmissionSettings = EVERY, clock: Clock | None = None
) -> Admission:
    return Admission(clock or Clock(), settings, lambda _: saved_s)


def admitted(policy: Admission, numbers: range, retention: Retention = HISTORY) -> int:
    return sum(isinstance(policy.decide(candidate(n, retention)), Wanted) for n in numbers)


def leave_unused(policy: Admission, numbers: range, retention: Retention = HISTORY) -> None:
    for number in numbers:
        policy.decide(candidate(number, retention))
        policy.written(candidate(number).address, NBYTES)
        policy.evicted(candidate(number).address)


def come_back(policy: Admission, numbers: range, retention: Retention = HISTORY) -> None:
    for number in numbers:
        policy.decide(candidate(number, retention))
        policy.written(candidate(number).address, NBYTES)
        policy.used(candidate(number).address)


def test_while_costs_are_unknown_everything_is_admitted() -> None:
    policy = admission(saved_s=None)
    leave_unused(policy, range(500))
    assert admitted(policy, range(1000, 1100)) == 100


def test_a_write_that_saves_nothing_is_refused_and_one_in_so_many_is_tried() -> None:
    policy = admission(saved_s=0.0)
    assert admitted(policy, range(EVERY.try_every * 4)) == 4
    assert policy.statistics().refused == {"benefit": EVERY.try_every * 4 - 4}


def test_a_kind_that_never_comes_back_is_refused_and_one_that_does_is_admitted() -> None:
    # 32 MiB: the write counts 0.0017 s; 0.01 s are saved each time that the block is wanted.
    policy = admission(settings=AdmissionSettings(sample_every=1, thrash_weight=0.0))
    leave_unused(policy, range(300), HISTORY)
    come_back(policy, range(1000, 1300), SYSTEM)
    assert policy.chance(candidate(0, HISTORY)) < 0.05
    assert policy.chance(candidate(0, SYSTEM)) > 0.95
    assert admitted(policy, range(5000, 5032), HISTORY) <= 1
    assert admitted(policy, range(6000, 6032), SYSTEM) == 32


def test_more_uses_are_a_class_of_their_own() -> None:
    policy = admission()
    leave_unused(policy, range(300))
    for number in range(1000, 1300):
        policy.decide(candidate(number, uses=3))
        policy.used(candidate(number).address)
    assert policy.chance(candidate(0, uses=1)) < 0.05
    assert policy.chance(candidate(0, uses=2)) > 0.95


def test_what_was_refused_and_is_saved_again_was_wanted() -> None:
    """Otherwise a class that was refused once would be refused for ever."""
    settings = AdmissionSettings(sample_every=1, try_every=10**6, thrash_weight=0.0)
    policy = admission(saved_s=0.002, settings=settings)
    leave_unused(policy, range(300))
    assert admitted(policy, range(1000, 1100)) == 0
    for _ in range(40):
        for number in range(1000, 1100):
            if isinstance(policy.decide(candidate(number)), Wanted):
                policy.used(candidate(number).address)
    assert policy.chance(candidate(0)) > 0.9
    assert admitted(policy, range(2000, 2100)) > 90


def test_candidates_are_counted_on_the_save_path_whatever_lookups_find() -> None:
    """A lookup stops at the first miss; the blocks behind it were saved, and count."""
    policy = admission()
    for _ in range(20):  # every time computed and saved anew, never hit
        for number in range(16):
            policy.decide(candidate(number))
    assert policy.chance(candidate(0)) > 0.9


def test_thrash_raises_the_bar_and_the_bar_falls_again() -> None:
    settings = AdmissionSettings(sample_every=1, thrash_tolerated=0.5, outcomes_max=64)
    policy = admission(saved_s=0.003, settings=settings)
    come_back(policy, range(1000, 1064))  # this kind is worth its write
    assert admitted(policy, range(2000, 2010)) == 10
    for number in range(5000, 5200):  # another kind leaves as fast as it comes
        policy.decide(candidate(number, SYSTEM))
        policy.evicted(candidate(number).address)
    assert policy.thrash_rate > 0.9
    refused = 10 - admitted(policy, range(3000, 3010))
    assert refused >= 9
    assert "thrash" in policy.statistics().refused
    for number in range(6000, 6200):
        policy.decide(candidate(number, SYSTEM))
        policy.used(candidate(number).address)
        policy.evicted(candidate(number).address)
    assert policy.thrash_rate < 0.1
    assert admitted(policy, range(4000, 4010)) == 10


def test_thrash_that_is_long_ago_raises_no_bar() -> None:
    clock = Clock()
    settings = AdmissionSettings(sample_every=1, thrash_tolerated=0.5)
    policy = admission(saved_s=0.003, settings=settings, clock=clock)
    leave_unused(policy, range(300), SYSTEM)
    assert admitted(policy, range(1000, 1010)) == 0
    clock.advance(3600)
    assert admitted(policy, range(2000, 2010)) == 10


def test_a_block_that_comes_back_right_after_it_left_is_thrash() -> None:
    policy = admission()
    come_back(policy, range(10))
    for number in range(10):
        policy.evicted(candidate(number).address)
    assert policy.statistics().thrashed == 0
    for number in range(10):
        policy.decide(candidate(number))
        policy.written(candidate(number).address, NBYTES)
    assert policy.statistics().thrashed == 10


def test_who_asked_is_told_of_each_write_whose_it_was_and_whether_it_came_back() -> None:
    policy = admission()
    told: list[tuple[str, bool]] = []
    policy.told = lambda tenant, came_back: told.append((tenant, came_back))
    leave_unused(policy, range(10))
    # What left and was never wanted again is a usual cache, and nothing that came back.
    assert told == [("1" * 32, False)] * 10
    leave_unused(policy, range(10))
    assert told[10:] == [("1" * 32, True)] * 10
    assert policy.statistics().came_back == 10


def test_pressure_raises_the_bar_and_stops_everything_in_the_end() -> None:
    policy = admission(saved_s=0.004)
    assert admitted(policy, range(10)) == 10
    policy.set_pressure(0.1)
    assert admitted(policy, range(100, 110)) == 0
    policy.set_pressure(0.0)
    unknown = admission(saved_s=None)
    unknown.set_pressure(0.0)
    assert admitted(unknown, range(200, 210)) == 0
    policy.set_pressure(1.0)
    assert admitted(policy, range(300, 310)) == 10


@pytest.mark.parametrize("number", [20_000])
def test_memory_is_bounded(number: int) -> None:
    settings = AdmissionSettings(sample_every=1, sample_max=100, left_max=50)
    policy = admission(settings=settings)
    for each in range(number):
        policy.decide(candidate(each))
        if each % 2:
            policy.evicted(candidate(each).address)
    assert len(policy._followed) <= 100
    assert len(policy._left) <= 50


async def test_the_pipeline_asks_it_as_its_policy() -> None:
    assert await admission().judge(candidate(1)) == Wanted()
    assert await admission(saved_s=0.0).judge(candidate(1)) == Unwanted("benefit")
