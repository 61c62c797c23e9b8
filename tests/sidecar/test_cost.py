"""What is observed becomes live quantiles that fade, and that take bounded memory."""

from __future__ import annotations

import math
from random import Random  # noqa: TID251 - seeded

import pytest

from sidecar.cost.fading import Fading
from sidecar.cost.model import CostModel, CostSettings
from storage.tiers.protocol import TierName
from strongroom.wire.frames import Report
from tests.sidecar.harness import ManualClock

MIB = 1024 * 1024
SETTINGS = CostSettings(half_window_s=30.0, observations_min=8)


def report(prefill_tokens: int, prefill_us: int, waiting: int = 0) -> Report:
    return Report(100, 100, 0, waiting, prefill_tokens, prefill_us, 0, 0)


def model(clock: ManualClock) -> CostModel:
    return CostModel(clock, SETTINGS)


def restores(clock: ManualClock, costs: CostModel, number: int, seconds: float) -> None:
    for _ in range(number):
        clock.advance(seconds)
        costs.observe_restore(TierName.NVME, 32 * MIB, 0.0, seconds)


def test_nothing_is_known_before_enough_was_observed() -> None:
    clock = ManualClock()
    costs = model(clock)
    restores(clock, costs, 7, 0.1)
    assert costs.restore_quantile(TierName.NVME, 32 * MIB, 0.5) is None
    restores(clock, costs, 1, 0.1)
    assert costs.restore_quantile(TierName.NVME, 32 * MIB, 0.5) == pytest.approx(0.1, rel=0.03)
    assert costs.restore_quantile(TierName.HOST, 32 * MIB, 0.5) is None


def test_quantiles_are_within_the_sketch_error_of_the_exact_ones() -> None:
    clock, random = ManualClock(), Random(3)
    fading = Fading(1000.0)
    values = [random.lognormvariate(-4, 1.0) for _ in range(4000)]
    for value in values:
        fading.add(value, clock())
    values.sort()
    for q in (0.5, 0.95, 0.99):
        exact = values[math.ceil(q * len(values)) - 1]
        assert fading.quantile(q, clock()) == pytest.approx(exact, rel=0.025)


def test_a_disk_that_became_slow_is_noticed_within_two_half_windows() -> None:
    clock = ManualClock()
    costs = model(clock)
    restores(clock, costs, 400, 0.02)
    before = costs.drain(TierName.NVME, 0.5)
    restores(clock, costs, 300, 0.2)
    after = costs.drain(TierName.NVME, 0.5)
    assert before is not None
    assert after is not None
    assert after.value == pytest.approx(10 * before.value, rel=0.1)


def test_what_has_faded_is_the_last_known_figure_and_is_said_to_be_stale() -> None:
    clock = ManualClock()
    costs = model(clock)
    restores(clock, costs, 20, 0.05)
    fresh = costs.drain(TierName.NVME, 0.5)
    assert fresh is not None
    assert not fresh.stale
    clock.advance(61)
    stale = costs.drain(TierName.NVME, 0.5)
    assert stale is not None
    assert stale.stale
    assert stale.value == fresh.value
    assert costs.restore_quantile(TierName.NVME, 32 * MIB, 0.5) is None


def test_what_runs_side_by_side_drains_faster_than_any_one_of_it() -> None:
    clock = ManualClock()
    costs = model(clock)
    for _ in range(50):
        clock.advance(0.1)
        for _ in range(4):  # four reads of 0.1 s that ran together
            costs.observe_restore(TierName.NVME, 32 * MIB, 0.0, 0.1)
    drain = costs.drain(TierName.NVME, 0.5)
    assert drain is not None
    assert drain.value * 32 * MIB == pytest.approx(0.1 / 4, rel=0.1)
    assert costs.restore_quantile(TierName.NVME, 32 * MIB, 0.5) == pytest.approx(0.1, rel=0.03)


def test_a_size_that_was_not_seen_is_taken_in_proportion_from_the_nearest() -> None:
    clock = ManualClock()
    costs = model(clock)
    restores(clock, costs, 10, 0.1)
    assert costs.restore_quantile(TierName.NVME, 64 * MIB, 0.5) == pytest.approx(0.2, rel=0.03)
    assert costs.restore_quantile(TierName.NVME, 16 * MIB, 0.5) == pytest.approx(0.05, rel=0.03)


def test_the_recompute_rate_comes_from_the_differences_of_reports() -> None:
    clock = ManualClock()
    costs = model(clock)
    for second in range(1, 11):
        clock.advance(1)
        costs.observe_report("a", report(10_000 * second, 500_000 * second), prompts=2)
    assert costs.prefill_quantile(4000, 0.5, "a") == pytest.approx(4000 * 50e-6, rel=0.03)
    assert costs.prefill_quantile(4000, 0.5, "b") is None
    assert costs.engine_busy("a") == pytest.approx(0.5, abs=0.15)


def test_an_engine_that_restarted_counts_from_zero_and_never_backwards() -> None:
    clock = ManualClock()
    costs = model(clock)
    costs.observe_report("a", report(1_000_000, 50_000_000))
    clock.advance(1)
    costs.observe_report("a", report(1000, 100_000))
    clock.advance(1)
    costs.observe_report("a", report(1000, 100_000))
    per_token = costs.prefill_per_token("a", 1000, 0.5)
    assert per_token is not None
    assert per_token.value > 0


def test_prompts_of_another_size_have_another_rate() -> None:
    clock = ManualClock()
    costs = model(clock)
    for _ in range(10):
        costs.observe_prefill(8192, 8192 * 40e-6)
        costs.observe_prefill(128, 128 * 200e-6)
    assert costs.prefill_quantile(8192, 0.5) == pytest.approx(8192 * 40e-6, rel=0.03)
    assert costs.prefill_quantile(128, 0.5) == pytest.approx(128 * 200e-6, rel=0.03)


def test_memory_is_bounded_whatever_is_observed() -> None:
    clock, random = ManualClock(), Random(5)
    costs = CostModel(clock, CostSettings(engines_max=4))
    for number in range(20_000):
        clock.advance(0.01)
        seconds = 10 ** random.uniform(-7, 3)
        costs.observe_restore(TierName.HOST, 1 << random.randrange(45), seconds, seconds)
        costs.observe_prefill(1 << random.randrange(24), seconds, engine=f"e{number}")
    sketches = [
        sketch
        for parts in (costs._tiers[TierName.HOST]._total, costs._tiers[TierName.HOST]._queue)
        for fading in parts.values()
        for sketch in (fading._now, fading._earlier)
        if sketch is not None
    ]
    assert len(sketches) <= 2 * 2 * 26
    assert max(sketch._store.length() for sketch in sketches) <= 512
    assert len(costs._engines) == 4


def test_rows_name_every_class_that_was_seen_lately() -> None:
    clock = ManualClock()
    costs = model(clock)
    restores(clock, costs, 10, 0.1)
    (row,) = costs.rows()
    assert (row.tier, row.bytes_class, row.count) == (TierName.NVME, 32 * MIB, 10)
    assert row.service_s[1] == pytest.approx(0.1, rel=0.03)
    clock.advance(100)
    assert costs.rows() == ()


def test_blocks_of_many_sizes_are_known_when_there_are_enough_in_all() -> None:
    model = CostModel(ManualClock(), CostSettings(observations_min=8))
    for power in range(4):
        model.observe_restore(TierName.NVME, MIB << power, 0.0, 0.01 * 2**power)
    assert model.latency(TierName.NVME, MIB, 0.5) is None
    for power in range(4):
        model.observe_restore(TierName.NVME, MIB << power, 0.0, 0.01 * 2**power)
    known = model.latency(TierName.NVME, MIB, 0.5)
    assert known is not None
    assert known.value == pytest.approx(0.01, rel=0.1)


def test_the_first_report_of_another_life_counts_whole() -> None:
    model = CostModel(ManualClock(), SETTINGS)
    model.observe_report("e", Report(9, 9, 0, 0, 16_000, 1_600_000, 0, 0))
    model.observe_report("e", Report(9, 9, 0, 0, 1_000, 1_000_000, 0, 0))
    known = model.prefill_per_token("e", 1_000, 0.5)
    assert known is not None
    assert known.value == pytest.approx(1e-3, rel=0.05)


def steps_of(costs: CostModel, clock: ManualClock, *, counted: bool) -> None:
    """Steps of 12 ms and 20 us a token, some with many tokens, some with few."""
    tokens = micros = steps = 0
    costs.observe_report("e", Report(9, 9, 0, 0, 0, 0, 0, 0))
    for number in range(80):
        clock.advance(0.1)
        in_steps, each = (2, 512) if number % 2 else (1, 4096)
        steps += in_steps
        tokens += in_steps * each
        micros += in_steps * (12_000 + each * 20)
        told = steps if counted else 0
        costs.observe_report("e", Report(9, 9, 1, 0, tokens, micros, 0, 0, told), prompts=1)


def test_a_steps_own_cost_is_told_apart_from_its_tokens() -> None:
    clock = ManualClock()
    costs = model(clock)
    steps_of(costs, clock, counted=True)
    step = costs.engine_step("e")
    assert step.fixed_s == pytest.approx(0.012, rel=0.1)
    for tokens in (1024, 4096):
        known = costs.prefill_per_token("e", tokens, 0.5)
        assert known is not None
        assert known.value == pytest.approx(20e-6, rel=0.15)
    # A report is of 0.1 s: 82 ms of tokens in one, 20 ms in the other; with its steps' own cost
    # the engine would look half as busy again.
    assert costs.engine_busy("e") == pytest.approx(0.8 * (0.082 + 0.020) / 0.2, abs=0.05)


def test_an_engine_that_does_not_count_its_steps_has_no_cost_beside_its_tokens() -> None:
    clock = ManualClock()
    costs = model(clock)
    steps_of(costs, clock, counted=False)
    assert costs.engine_step("e").fixed_s == 0.0
    known = costs.prefill_per_token("e", 1024, 0.5)
    assert known is not None
    assert known.value == pytest.approx(20e-6 + 0.012 / 512, rel=0.1)
