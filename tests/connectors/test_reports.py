"""The engine's report: counted in the scheduling thread, sent by the other, never waiting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.degrade.reports import checked
from strongroom.connectors.reports import REPORT_NS, EngineMeter, ReportBeat
from strongroom.wire.frames import EngineFrame, Report

MS = 1_000_000


class Engine:
    """A meter under a clock that the test moves."""

    def __init__(self) -> None:
        self.now_ns = 10**12
        self.meter = EngineMeter(lambda: self.now_ns)

    def step(self, passed_ms: int, tokens: int, prompt_tokens: int = 0, **load: int) -> None:
        self.now_ns += passed_ms * MS
        self.meter.stepped(
            tokens=tokens,
            prompt_tokens=prompt_tokens,
            running=load.get("running", 1),
            waiting=load.get("waiting", 0),
            loading=bool(load.get("loading", 0)),
        )

    def empty(self, passed_ms: int) -> None:
        self.now_ns += passed_ms * MS
        self.meter.emptied()


def test_time_belongs_to_the_step_that_was_planned_before_it() -> None:
    engine = Engine()
    engine.step(0, tokens=512, prompt_tokens=512)
    engine.step(40, tokens=1)
    engine.step(5, tokens=1)
    engine.empty(6)
    report = engine.meter.report()
    assert (report.prefill_tokens, report.prefill_us) == (512, 40_000)
    assert (report.busy_us, report.idle_us) == (51_000, 0)
    assert (report.running, report.waiting) == (0, 0)


def test_idle_time_counts_only_while_somebody_waits_for_a_load() -> None:
    engine = Engine()
    engine.step(0, tokens=0, waiting=1, loading=1)
    engine.step(30, tokens=0, waiting=1, loading=0)
    engine.step(50, tokens=8, prompt_tokens=8)
    engine.empty(7)
    report = engine.meter.report()
    assert (report.busy_us, report.idle_us) == (7_000, 30_000)


def test_an_engine_without_requests_is_neither_busy_nor_idle() -> None:
    engine = Engine()
    engine.step(0, tokens=1)
    engine.empty(5)
    engine.step(3_600_000, tokens=1)
    engine.empty(5)
    assert engine.meter.report().busy_us == 10_000


def test_pages_are_asked_for_when_the_report_is_made_and_a_failure_says_unknown() -> None:
    engine = Engine()
    assert (engine.meter.report().pages, engine.meter.report().free_pages) == (0, 0)
    engine.meter.pages_from(lambda: (100, 37))
    assert (engine.meter.report().pages, engine.meter.report().free_pages) == (100, 37)

    def broken() -> tuple[int, int]:
        raise RuntimeError("the engine's own object")

    engine.meter.pages_from(broken)
    assert (engine.meter.report().pages, engine.meter.report().free_pages) == (0, 0)


def test_it_is_sent_once_a_second_and_what_cannot_be_sent_is_dropped() -> None:
    sent: list[EngineFrame] = []
    reachable = False

    def send(frame: EngineFrame) -> bool:
        if reachable:
            sent.append(frame)
        return reachable

    beat = ReportBeat(EngineMeter(lambda: 0), send)
    now = REPORT_NS
    for _ in range(5):
        beat(now)
        now += REPORT_NS // 2
    assert not sent
    reachable = True
    for _ in range(10):
        beat(now)
        now += REPORT_NS // 2
    assert len(sent) == 5
    assert all(isinstance(frame, Report) for frame in sent)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 5000), st.integers(0, 4), st.integers(0, 4), st.booleans(), st.booleans()
        )
    ),
    st.tuples(st.integers(-5, 50), st.integers(-5, 80)),
)
def test_every_report_is_one_that_the_sidecar_takes_and_counters_never_step_back(
    steps: list[tuple[int, int, int, bool, bool]], pages: tuple[int, int]
) -> None:
    engine = Engine()
    engine.meter.pages_from(lambda: (max(pages[0], 0), pages[1]))
    before = engine.meter.report()
    for passed, tokens, prompt, loading, empty in steps:
        if empty:
            engine.empty(passed)
        else:
            engine.step(passed, tokens, min(prompt, tokens), loading=loading)
        report = checked(engine.meter.report())
        assert report.busy_us >= before.busy_us
        assert report.idle_us >= before.idle_us
        assert report.prefill_us <= report.busy_us
        assert report.prefill_tokens >= before.prefill_tokens
        before = report


@pytest.mark.parametrize("us", [0, 1])
def test_a_clock_that_stands_still_divides_nothing(us: int) -> None:
    engine = Engine()
    engine.step(us, tokens=1, prompt_tokens=1)
    engine.step(0, tokens=1)
    assert engine.meter.report().prefill_us == 0
