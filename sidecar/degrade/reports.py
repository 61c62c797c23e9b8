"""What engines say of themselves: the latest `Report` of each, and what changed since the last.

Used for cost and degradation alone. A report is checked at the door; counters that step back
mean that the engine started anew, and the next report is compared with this one. So is one whose
counters moved on by more time than has passed: what happened between the two is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from strongroom.clock import Clock
from strongroom.errors import ProtocolViolation
from strongroom.wire.frames import Report

COUNTER_MAX: int = 2**62
_SLACK_US = 1_000_000
"""Reports may wait on their way, and then come together."""


@dataclass(frozen=True, slots=True)
class Reported:
    """The latest report of one engine; differences are since the one before, else 0."""

    report: Report
    at_ns: int
    prefill_tokens: int = 0
    prefill_us: int = 0
    busy_us: int = 0
    idle_us: int = 0

    @property
    def pages_used(self) -> float | None:
        """Of all; None where the engine could not tell."""
        if not self.report.pages:
            return None
        return 1.0 - self.report.free_pages / self.report.pages


def checked(report: Report) -> Report:
    """`report`, if it can be true; raises `ProtocolViolation` otherwise."""
    values = (
        report.pages, report.free_pages, report.running, report.waiting,
        report.prefill_tokens, report.prefill_us, report.busy_us, report.idle_us,
        report.prefill_steps,
    )  # fmt: skip
    if min(values) < 0 or max(values) > COUNTER_MAX or report.free_pages > report.pages:
        raise ProtocolViolation("a report's numbers contradict each other", field="report")
    return report


class Reports:
    """By engine. An engine without a scheduler connection is forgotten by its session."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._latest: dict[str, Reported] = {}

    def take(self, engine: str, report: Report) -> Reported:
        """Keep a report; raises `ProtocolViolation` for one that cannot be true."""
        report = checked(report)
        before = self._latest.get(engine)
        now = self._clock()
        new = Reported(report, now)
        if before is not None:
            old = before.report
            steps = (
                report.prefill_tokens - old.prefill_tokens,
                report.prefill_us - old.prefill_us,
                report.busy_us - old.busy_us,
                report.idle_us - old.idle_us,
            )
            passed_us = (now - before.at_ns) // 1000 + _SLACK_US
            if min(steps) >= 0 and steps[2] + steps[3] <= passed_us and steps[1] <= passed_us:
                new = Reported(report, now, *steps)
        self._latest[engine] = new
        return new

    def forget(self, engine: str) -> None:
        """The engine is gone."""
        self._latest.pop(engine, None)

    def latest(self) -> Mapping[str, Reported]:
        """Of every engine that reports."""
        return dict(self._latest)
