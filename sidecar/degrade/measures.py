"""How a breaker's condition is measured: four ways to turn counts into one number.

Each keeps what it needs of the last `window_s` seconds in a few buckets, whatever the rate.
`reading` is None while there is too little to judge by.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from sidecar.clocks import NS

_BUCKETS: Final = 12
_HISTORY: Final = 10


@dataclass(frozen=True, slots=True)
class Ratio:
    """Trips when more than `threshold` of at least `minimum` cases in the window were bad."""

    threshold: float
    minimum: int
    window_s: float


@dataclass(frozen=True, slots=True)
class Count:
    """Trips at `threshold` cases in the window."""

    threshold: float
    window_s: float


@dataclass(frozen=True, slots=True)
class Streak:
    """Trips at `threshold` bad cases in a row, with no good one between, in the window."""

    threshold: float
    window_s: float


@dataclass(frozen=True, slots=True)
class Rise:
    """Trips when the bad share is `threshold` above the lowest of the ten windows before; without
    a window before there is nothing that it could have risen from."""

    threshold: float
    minimum: int
    window_s: float


Rule = Ratio | Count | Streak | Rise


class Window:
    """Bad cases and all cases of the last `window_s` seconds, in buckets."""

    def __init__(self, window_s: float) -> None:
        self._bucket_ns = max(1, int(window_s * NS / _BUCKETS))
        self._buckets: deque[tuple[int, float, float]] = deque(maxlen=_BUCKETS)

    def add(self, bad: float, cases: float, now_ns: int) -> None:
        number = now_ns // self._bucket_ns
        if self._buckets and self._buckets[-1][0] == number:
            _, had_bad, had = self._buckets.pop()
            bad, cases = bad + had_bad, cases + had
        self._buckets.append((number, bad, cases))

    def totals(self, now_ns: int) -> tuple[float, float]:
        """Bad and all."""
        oldest = now_ns // self._bucket_ns - _BUCKETS
        live = [bucket for bucket in self._buckets if bucket[0] > oldest]
        return sum(bucket[1] for bucket in live), sum(bucket[2] for bucket in live)

    def clear(self) -> None:
        self._buckets.clear()


class Measure:
    """One rule's numbers."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._window = Window(rule.window_s)
        self._streak = 0.0
        self._last_bad_ns = 0
        self._earlier: deque[float] = deque(maxlen=_HISTORY)
        self._rolled_ns: int | None = None

    def add(self, bad: float, cases: float, now_ns: int) -> None:
        """`bad` of `cases` were bad."""
        if isinstance(self.rule, Rise):
            self._roll(self.rule, now_ns)
        self._window.add(bad, cases, now_ns)
        if cases > bad:
            self._streak = 0.0
        elif bad:
            if now_ns - self._last_bad_ns > self.rule.window_s * NS:
                self._streak = 0.0
            self._streak += bad
            self._last_bad_ns = now_ns

    def reading(self, now_ns: int) -> float | None:
        """The number that is compared with the threshold."""
        bad, cases = self._window.totals(now_ns)
        match self.rule:
            case Ratio(minimum=minimum):
                return bad / cases if cases >= minimum else None
            case Count():
                return bad
            case Streak(window_s=window_s):
                stale = now_ns - self._last_bad_ns > window_s * NS
                return 0.0 if stale else self._streak
            case Rise(minimum=minimum):
                if cases < minimum or not self._earlier:
                    return None
                return bad / cases - min(self._earlier)

    def trips(self, now_ns: int) -> float | None:
        """The reading, if it is beyond the threshold."""
        reading = self.reading(now_ns)
        if reading is None:
            return None
        match self.rule:
            case Ratio(threshold=threshold) | Rise(threshold=threshold):
                return reading if reading > threshold else None
            case Count(threshold=threshold) | Streak(threshold=threshold):
                return reading if reading >= threshold else None

    def clear(self) -> None:
        """Begin anew; what earlier windows were like is kept."""
        self._window.clear()
        self._streak = 0.0

    def _roll(self, rule: Rise, now_ns: int) -> None:
        """Once a window, keep its share as one that later ones are compared with."""
        if self._rolled_ns is None:
            self._rolled_ns = now_ns
        if now_ns - self._rolled_ns < rule.window_s * NS:
            return
        bad, cases = self._window.totals(now_ns)
        if cases >= rule.minimum:
            self._earlier.append(bad / cases)
        self._rolled_ns = now_ns
