"""What was observed and fades: quantiles of the last minute, and how busy something was.

Rules:
- An observation counts for one to two half-windows. What was known before is kept as the last
  known figure, and is said to be stale.
- Memory is bounded: sketches are of bounded size.
- Sizes are classes of powers of two. An unobserved class is answered from the nearest observed
  one.
- Times are nanoseconds of a clock that only grows.

Sketches are DDSketch (Masson, Rim, Lee: VLDB 2019), relative error 2%.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import msgspec
from ddsketch import LogCollapsingLowestDenseDDSketch

_NS: Final = 1e9
_RELATIVE_ERROR: Final = 0.02
_BINS_MAX: Final = 512
"""At 2% these span 1e8: from a microsecond to more than a minute."""
_BUSY_S: Final = 5.0
"""Over how long a busy share is averaged."""
_REFRESH_EVERY: Final = 16
"""A cached quantile is computed anew after 1/16 more observations."""


class Known(msgspec.Struct, frozen=True):
    """A figure. `stale` when it is what was known before everything observed had faded."""

    value: float
    stale: bool


class Fading:
    """A sketch of the last one to two half-windows."""

    __slots__ = (
        "_cached",
        "_earlier",
        "_earlier_count",
        "_half_ns",
        "_last",
        "_now",
        "_now_count",
        "_turn_ns",
    )

    def __init__(self, half_window_s: float) -> None:
        self._half_ns = int(half_window_s * _NS)
        self._now: LogCollapsingLowestDenseDDSketch | None = None
        self._earlier: LogCollapsingLowestDenseDDSketch | None = None
        # What the sketches have counted: each verdict asks for it some thirty times.
        self._now_count = 0.0
        self._earlier_count = 0.0
        self._turn_ns = 0
        self._cached: dict[float, tuple[float, float]] = {}
        self._last: dict[float, float] = {}

    def add(self, value: float, now_ns: int, weight: float = 1.0) -> None:
        """Count one observation; `weight` counts it as so many."""
        self._fade(now_ns)
        if self._now is None:
            self._now = _sketch()
        self._now.add(max(value, 0.0), weight)
        self._now_count += weight

    def count(self, now_ns: int) -> float:
        """How much was observed and has not faded."""
        if now_ns >= self._turn_ns:
            self._fade(now_ns)
        return self._now_count + self._earlier_count

    def quantile(self, q: float, now_ns: int) -> float | None:
        """None when nothing is left of what was observed."""
        count = self.count(now_ns)
        if not count:
            return None
        cached = self._cached.get(q)
        if cached is not None and abs(count - cached[0]) * _REFRESH_EVERY <= cached[0]:
            return cached[1]
        value = self._merged().get_quantile_value(q)
        if value is None:
            return None
        self._cached[q] = (count, float(value))
        self._last[q] = float(value)
        return float(value)

    def last(self, q: float) -> float | None:
        """The quantile when it was last computed, however long ago."""
        return self._last.get(q)

    def _merged(self) -> LogCollapsingLowestDenseDDSketch:
        if self._earlier is None or self._now is None:
            return self._now or self._earlier or _sketch()
        merged = _sketch()
        merged.merge(self._earlier)
        merged.merge(self._now)
        return merged

    def _fade(self, now_ns: int) -> None:
        if now_ns < self._turn_ns:
            return
        # Two half-windows without an observation leave nothing.
        fresh = now_ns < self._turn_ns + self._half_ns
        self._earlier = self._now if fresh else None
        self._earlier_count = self._now_count if fresh else 0.0
        self._now = None
        self._now_count = 0.0
        self._turn_ns = now_ns + self._half_ns
        self._cached.clear()


def _sketch() -> LogCollapsingLowestDenseDDSketch:
    return LogCollapsingLowestDenseDDSketch(_RELATIVE_ERROR, _BINS_MAX)


class Busy:
    """How busy something was over the last seconds: the share of time, 0 to 1."""

    __slots__ = ("_as_of_ns", "_value")

    def __init__(self) -> None:
        self._as_of_ns = 0
        self._value = 0.0

    def add(self, busy_s: float, now_ns: int) -> None:
        """It was busy for `busy_s` until now, or as long as since the last time at most."""
        passed_s = (now_ns - self._as_of_ns) / _NS
        if passed_s <= 0:
            return
        keep = math.exp(-passed_s / _BUSY_S)
        self._value = self._value * keep + min(busy_s / passed_s, 1.0) * (1.0 - keep)
        self._as_of_ns = now_ns

    def value(self, now_ns: int) -> float:
        """What was busy and is idle since fades."""
        passed_s = max(0.0, (now_ns - self._as_of_ns) / _NS)
        return self._value * math.exp(-passed_s / _BUSY_S)


def size_class(size: int, classes: range) -> int:
    """The power of two below, within `classes`."""
    return min(max(max(size, 1).bit_length() - 1, classes.start), classes.stop - 1)


def by_distance(wanted: int, classes: range) -> Iterator[int]:
    """The class itself, then its neighbours, the larger one first."""
    yield wanted
    for step in range(1, len(classes)):
        for each in (wanted + step, wanted - step):
            if each in classes:
                yield each


def nearest_last(
    parts: dict[int, Fading], wanted: int, classes: range, q: float
) -> tuple[int, float] | None:
    """The nearest class for which there is a last known figure, and the figure."""
    for each in by_distance(wanted, classes):
        part = parts.get(each)
        last = None if part is None else part.last(q)
        if last is not None:
            return each, last
    return None
