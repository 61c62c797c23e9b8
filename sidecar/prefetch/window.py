"""When a prefetch begins: late enough not to be evicted again, early enough to be there.

The bandwidth is what finished prefetches have measured, each under whatever else ran beside it,
smoothed; before the first one it is a setting. A prefetch of n bytes for a request that starts
at T begins at T - margin - slack x n / bandwidth, or at once when that is over.
"""

from __future__ import annotations

from dataclasses import dataclass

from strongroom.clock import Clock

_NS = 1_000_000_000
_NEWEST_WEIGHT = 0.25
"""How much the newest measurement counts: the last eight make up nine tenths."""


@dataclass(frozen=True, slots=True)
class WindowSettings:
    """`slack` multiplies the time that the bytes need at the measured bandwidth."""

    bandwidth_bytes_s: float = 500e6
    slack: float = 1.5
    margin_ns: int = 20_000_000


class Window:
    """Measures, and answers when to begin. Used on the event loop's thread."""

    def __init__(self, settings: WindowSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._bandwidth_bytes_s = settings.bandwidth_bytes_s
        self._measured = False

    @property
    def bandwidth_bytes_s(self) -> float:
        return self._bandwidth_bytes_s

    def measured(self, nbytes: int, took_ns: int) -> None:
        """`nbytes` were brought in `took_ns`."""
        if took_ns <= 0 or nbytes <= 0:
            return
        found = nbytes * _NS / took_ns
        if self._measured:
            self._bandwidth_bytes_s += _NEWEST_WEIGHT * (found - self._bandwidth_bytes_s)
        else:
            self._bandwidth_bytes_s = found
            self._measured = True

    def begin_ns(self, start_ns: int, nbytes: int) -> int:
        """When to begin to bring `nbytes` for what starts at `start_ns`; perhaps in the past."""
        lead_ns = self._settings.slack * nbytes * _NS / self._bandwidth_bytes_s
        return start_ns - self._settings.margin_ns - int(lead_ns)
