"""What is outstanding is counted, and nothing that is forgotten stays for ever."""

from __future__ import annotations

import pytest

from sidecar.cost.backlog import Backlog
from storage.tiers.protocol import TierName
from strongroom.wire.frames import Report
from tests.sidecar.harness import ManualClock

HOST, NVME = TierName.HOST, TierName.NVME


def report(tokens: int, micros: int, waiting: int) -> Report:
    return Report(100, 100, 0, waiting, tokens, micros, 0, 0)


def test_bytes_are_outstanding_until_they_are_moved() -> None:
    backlog = Backlog(ManualClock())
    backlog.promise("e", "1", {HOST: 100, NVME: 200}, 10)
    backlog.promise("e", "2", {NVME: 50}, 10)
    assert (backlog.restoring_bytes(HOST), backlog.restoring_bytes(NVME)) == (100, 250)
    backlog.moved("e", "1", NVME, 150)
    assert backlog.restoring_bytes(NVME) == 100
    backlog.brought("e", "1")
    assert (backlog.restoring_bytes(HOST), backlog.restoring_bytes(NVME)) == (0, 50)
    backlog.dropped("e", "2")
    backlog.dropped("e", "2")
    assert backlog.restoring_bytes(NVME) == 0


def test_a_block_that_changed_its_tier_meanwhile_is_counted_once() -> None:
    backlog = Backlog(ManualClock())
    backlog.promise("e", "1", {NVME: 200}, 10)
    backlog.moved("e", "1", HOST, 200)  # prefetched since
    assert backlog.restoring_bytes(NVME) == 0
    assert backlog.restoring_bytes(HOST) == 0


def test_a_promise_that_nobody_ends_expires() -> None:
    clock = ManualClock()
    backlog = Backlog(clock, promise_s=30)
    backlog.promise("e", "1", {HOST: 100}, 10)
    clock.advance(29)
    assert backlog.restoring_bytes(HOST) == 100
    clock.advance(2)
    assert backlog.restoring_bytes(HOST) == 0
    backlog.moved("e", "1", HOST, 100)
    assert backlog.restoring_bytes(HOST) == 0


def test_promises_are_bounded_in_number() -> None:
    backlog = Backlog(ManualClock(), promises_max=3)
    for number in range(10):
        backlog.promise("e", str(number), {HOST: 1}, 0)
    assert backlog.restoring_bytes(HOST) == 3


def test_tokens_are_owed_once_the_prefix_is_there() -> None:
    backlog = Backlog(ManualClock())
    backlog.promise("e", "1", {HOST: 100}, 400)
    assert backlog.owed_tokens("e") == 0
    backlog.brought("e", "1")
    assert backlog.owed_tokens("e") == 400
    backlog.promise("e", "2", {}, 1000)
    assert backlog.owed_tokens("e") == 1400


def test_a_promise_ends_with_the_last_of_its_ranks() -> None:
    backlog = Backlog(ManualClock())
    backlog.promise("e", "1", {HOST: 100}, 400)
    backlog.moved("e", "1", HOST, 50)
    backlog.brought("e", "1", ranks=2)
    assert (backlog.restoring_bytes(HOST), backlog.owed_tokens("e")) == (50, 0)
    backlog.moved("e", "1", HOST, 50)
    backlog.brought("e", "1", ranks=2)
    assert (backlog.restoring_bytes(HOST), backlog.owed_tokens("e")) == (0, 400)


def test_a_request_that_is_dropped_while_it_loads_owes_nothing() -> None:
    backlog = Backlog(ManualClock())
    backlog.promise("e", "1", {HOST: 100}, 400)
    backlog.dropped("e", "1")
    assert backlog.owed_tokens("e") == 0


def test_what_is_owed_goes_down_by_reports_and_by_the_clock_between_them() -> None:
    clock = ManualClock()
    backlog = Backlog(clock)
    backlog.reported("e", report(0, 0, 0))
    for number in range(10):
        backlog.promise("e", str(number), {}, 1000)
    clock.advance(1)
    assert backlog.reported("e", report(4000, 1_000_000, 6)) == 10
    assert backlog.owed_tokens("e") == 6000
    clock.advance(0.5)
    assert backlog.owed_tokens("e") == pytest.approx(4000, abs=1)
    clock.advance(0.5)
    backlog.reported("e", report(8000, 2_000_000, 2))
    assert backlog.owed_tokens("e") == pytest.approx(2000, abs=1)


def test_an_engine_where_nobody_waits_owes_nothing() -> None:
    backlog = Backlog(ManualClock())
    backlog.promise("e", "1", {}, 100_000)  # found in the engine's own cache
    backlog.reported("e", report(0, 0, 0))
    backlog.reported("e", report(0, 0, 0))
    assert backlog.owed_tokens("e") == 0


def test_a_prompt_is_owed_though_the_engine_planned_its_last_step_without_it() -> None:
    backlog = Backlog(ManualClock())
    backlog.promise("e", "1", {}, 4000)
    backlog.reported("e", report(0, 0, 0))  # said before the engine knew that it may begin
    assert backlog.owed_tokens("e") == 4000


def test_loads_are_told_by_what_each_has_left() -> None:
    backlog = Backlog(ManualClock())
    backlog.promise("e", "1", {NVME: 300}, 0)
    backlog.promise("e", "2", {NVME: 200, HOST: 50}, 0)
    backlog.moved("e", "1", NVME, 250)
    assert backlog.loads(NVME) == (50, 200)
    assert backlog.loads(HOST) == (50,)
    backlog.brought("e", "1")
    assert backlog.loads(NVME) == (200,)


def test_an_engine_that_left_is_forgotten() -> None:
    backlog = Backlog(ManualClock())
    backlog.promise("e", "1", {HOST: 100}, 400)
    backlog.promise("f", "1", {HOST: 10}, 400)
    backlog.forget("e")
    assert backlog.restoring_bytes(HOST) == 10
    assert backlog.owed_tokens("e") == 0


def test_of_those_who_wait_the_youngest_count_with_what_each_of_them_owes() -> None:
    """A mean would say 2 x 2,800: a burst of long prompts would look short."""
    backlog = Backlog(ManualClock())
    backlog.reported("e", report(0, 0, 0))
    for number, tokens in enumerate((100, 100, 100, 9000, 4700)):
        backlog.promise("e", str(number), {}, tokens)
    backlog.reported("e", report(0, 0, 2))
    backlog.reported("e", report(0, 0, 2))
    assert backlog.owed_tokens("e") == 13_700


def test_what_was_computed_is_taken_from_the_oldest() -> None:
    clock = ManualClock()
    backlog = Backlog(clock)
    backlog.reported("e", report(0, 0, 0))
    backlog.promise("e", "old", {}, 1000)
    backlog.promise("e", "new", {}, 500)
    clock.advance(1)
    backlog.reported("e", report(1000, 1_000_000, 1))
    backlog.dropped("e", "old")  # it has been computed: nothing is taken off twice
    assert backlog.owed_tokens("e") == 500
    backlog.dropped("e", "new")
    assert backlog.owed_tokens("e") == 0


def test_the_first_report_gives_the_rate_at_once() -> None:
    clock = ManualClock()
    backlog = Backlog(clock)
    for number in range(4):
        backlog.promise("e", str(number), {}, 1000)
    backlog.reported("e", report(2000, 1_000_000, 2))
    assert backlog.owed_tokens("e") == 2000
    clock.advance(0.5)
    assert backlog.owed_tokens("e") == pytest.approx(1000)


def test_what_those_who_load_will_compute_is_known_until_they_have_loaded() -> None:
    backlog = Backlog(ManualClock())
    backlog.promise("e", "1", {HOST: 100}, 400)
    assert backlog.loading_tokens("e") == 400
    backlog.brought("e", "1")
    assert (backlog.loading_tokens("e"), backlog.owed_tokens("e")) == (0, 400)
    backlog.promise("e", "2", {HOST: 100}, 300)
    backlog.dropped("e", "2")
    assert backlog.loading_tokens("e") == 0


def test_arrivals_fade() -> None:
    clock = ManualClock()
    backlog = Backlog(clock)
    for number in range(100):
        backlog.promise("e", str(number), {NVME: 1}, 1)
        clock.advance(0.5)
    assert backlog.prompts_per_second("e") == pytest.approx(2.0, rel=0.1)
    assert backlog.loads_per_second(NVME) == pytest.approx(2.0, rel=0.1)
    assert backlog.loads_per_second(HOST) == 0.0
    clock.advance(200)
    assert backlog.prompts_per_second("e") < 0.01


def test_prompts_that_are_owed_are_bounded_in_number() -> None:
    backlog = Backlog(ManualClock(), promises_max=3)
    for number in range(10):
        backlog.promise("e", str(number), {}, 5)
    assert backlog.owed_tokens("e") == 15


def test_what_was_computed_beyond_the_oldest_is_taken_from_the_next() -> None:
    clock = ManualClock()
    backlog = Backlog(clock)
    backlog.reported("e", report(0, 0, 0))
    backlog.promise("e", "old", {}, 1000)
    backlog.promise("e", "new", {}, 500)
    clock.advance(1)
    backlog.reported("e", report(1200, 1_000_000, 2))
    assert backlog.owed_tokens("e") == 300
