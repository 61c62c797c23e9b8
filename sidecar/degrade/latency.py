"""Histograms with fixed bounds: cheap to add to, and what Prometheus can add up over nodes."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

BOUNDS_S: Final = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LatencyStatistics:
    """`counts[i]` durations were at most `BOUNDS_S[i]` and above the one before; the last bucket
    has no bound.
    """

    counts: tuple[int, ...]
    sum_s: float

    @property
    def total(self) -> int:
        return sum(self.counts)


class Latency:
    """One histogram of durations."""

    __slots__ = ("_counts", "_sum_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    def statistics(self) -> LatencyStatistics:
        """A frozen snapshot."""
        return LatencyStatistics(tuple(self._counts), self._sum_s)
