"""What bringing blocks from one tier costs here and now: live quantiles, from what was observed.

Rules:
- Latencies are kept by size class. An unobserved class is answered from the nearest observed one,
  in proportion to the size.
- The drain rate is of busy time alone, the union of busy intervals: what is read side by side is
  not counted twice.
- Nothing is known before enough was observed; whoever asks gets None and decides safely.
- Times are seconds, sizes bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sidecar.cost.fading import Busy, Fading, Known, by_distance, nearest_last, size_class
from storage.tiers.protocol import TierName

_NS: Final = 1e9
_CLASSES: Final = range(12, 38)
"""Restores from 4 KiB to 128 GiB; what is smaller or larger joins the last class."""
_SLICE_BYTES: Final = 8 * 1024 * 1024
"""Busy time is cut into pieces of this many bytes at least: one piece is one drain observation."""


@dataclass(frozen=True, slots=True)
class CostRow:
    """One class of one tier, for metrics: P50, P95 and P99 of each part, in seconds."""

    tier: TierName
    bytes_class: int
    count: int
    queue_s: tuple[float, float, float]
    service_s: tuple[float, float, float]
    total_s: tuple[float, float, float]


class TierCosts:
    """What was seen of one tier."""

    def __init__(self, half_window_s: float, observations_min: int) -> None:
        self._half_window_s = half_window_s
        self._observations_min = observations_min
        # By class, of those that were seen: whoever asks looks at these alone.
        self._queue: dict[int, Fading] = {}
        self._service: dict[int, Fading] = {}
        self._total: dict[int, Fading] = {}
        self._drain = Fading(half_window_s)
        """Seconds a byte while the tier was busy, weighted by bytes."""
        self._busy = Busy()
        self._busy_until_ns = 0
        self._slice_ns = 0
        self._slice_bytes = 0

    def add(self, nbytes: int, queue_s: float, service_s: float, now_ns: int) -> None:
        """`nbytes` have just come: what they waited, and how long they took."""
        each = size_class(nbytes, _CLASSES)
        if each not in self._total:
            for parts in (self._queue, self._service, self._total):
                parts[each] = Fading(self._half_window_s)
        self._queue[each].add(queue_s, now_ns)
        self._service[each].add(service_s, now_ns)
        self._total[each].add(queue_s + service_s, now_ns)
        # The union of the busy intervals, as they end in order: what ran side by side drains
        # faster than any one of it.
        begun_ns = max(now_ns - int((queue_s + service_s) * _NS), self._busy_until_ns)
        busy_ns = max(now_ns - begun_ns, 0)
        self._busy.add(busy_ns / _NS, now_ns)
        self._busy_until_ns = now_ns
        self._slice_ns += busy_ns
        self._slice_bytes += nbytes
        if self._slice_bytes >= _SLICE_BYTES and self._slice_ns:
            self._drain.add(self._slice_ns / _NS / self._slice_bytes, now_ns, self._slice_bytes)
            self._slice_ns = self._slice_bytes = 0

    def total(self, nbytes: int, q: float, now_ns: int) -> Known | None:
        """Seconds from wanting `nbytes` to having them."""
        return self._of_class(self._total, nbytes, q, now_ns)

    def latency(self, nbytes: int, q: float, now_ns: int) -> Known | None:
        """Seconds that one restore of `nbytes` takes once it is its turn."""
        return self._of_class(self._service, nbytes, q, now_ns)

    def drain(self, q: float, now_ns: int) -> Known | None:
        """Seconds a byte while the tier works, with all that runs side by side."""
        value = self._drain.quantile(q, now_ns)
        if value is not None:
            return Known(value, stale=False)
        value = self._drain.last(q)
        return None if value is None else Known(value, stale=True)

    def busy(self, now_ns: int) -> float:
        """The share of the last seconds in which something was brought."""
        return self._busy.value(now_ns)

    def rows(self, tier: TierName, now_ns: int) -> list[CostRow]:
        """What is known of every size class that has been seen lately."""
        return [
            CostRow(
                tier=tier,
                bytes_class=1 << each,
                count=int(total.count(now_ns)),
                queue_s=_three(self._queue[each], now_ns),
                service_s=_three(self._service[each], now_ns),
                total_s=_three(total, now_ns),
            )
            for each, total in sorted(self._total.items())
            if total.count(now_ns)
        ]

    def _of_class(
        self, parts: dict[int, Fading], nbytes: int, q: float, now_ns: int
    ) -> Known | None:
        wanted = size_class(nbytes, _CLASSES)
        counts = {each: part.count(now_ns) for each, part in parts.items()}
        if not counts:
            return None
        enough = self._observations_min
        if sum(counts.values()) >= enough > max(counts.values()):
            # Blocks of many sizes, enough in all: the size that was seen most.
            enough = int(max(counts.values()))
        for each in by_distance(wanted, _CLASSES):
            if counts.get(each, 0.0) >= enough:
                value = parts[each].quantile(q, now_ns)
                assert value is not None
                return Known(value * _scale(each, wanted), stale=False)
        nearest = nearest_last(parts, wanted, _CLASSES, q)
        if nearest is None:
            return None
        each, last = nearest
        return Known(last * _scale(each, wanted), stale=True)


def _scale(observed: int, wanted: int) -> float:
    return float(2.0 ** (wanted - observed))


def _three(part: Fading, now_ns: int) -> tuple[float, float, float]:
    p50, p95, p99 = (part.quantile(q, now_ns) or 0.0 for q in (0.5, 0.95, 0.99))
    return p50, p95, p99
