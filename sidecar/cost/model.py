"""What restoring and recomputing cost here and now: live quantiles, from what was observed.

Rules:
- Every figure fades: an observation counts for one to two half-windows, so that a disk that has
  become slow, or fast again, is noticed. What was known before is kept as the last known figure
  and is said to be stale.
- Nothing is known before enough was observed; whoever asks gets None and decides safely.
- Memory is bounded: sketches of bounded size, for a fixed number of size classes and engines.
- Sizes are classes of powers of two. An unobserved class is answered from the nearest observed
  one, in proportion to the size.
- Times are seconds, sizes bytes; the clock is handed in (nanoseconds that only grow).

Sketches are DDSketch (Masson, Rim, Lee: VLDB 2019), relative error 2%.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import msgspec
from ddsketch import LogCollapsingLowestDenseDDSketch

from storage.tiers.protocol import TierName
from strongroom.clock import Clock
from strongroom.wire.frames import Report

_NS: Final = 1e9
_RELATIVE_ERROR: Final = 0.02
_BINS_MAX: Final = 512
"""At 2% these span 1e8: from a microsecond to more than a minute."""
_BUSY_S: Final = 5.0
"""Over how long a busy share is averaged."""
_BYTES_CLASSES: Final = range(12, 38)
"""Restores from 4 KiB to 128 GiB; what is smaller or larger joins the last class."""
_REPORT_TOKENS_MAX: Final = 65536
"""Most tokens that one report counts for."""
_TOKENS_CLASSES: Final = range(4, 21)
_REFRESH_EVERY: Final = 16
"""A cached quantile is computed anew after 1/16 more observations."""


@dataclass(frozen=True, slots=True)
class CostSettings:
    """How long an observation counts, and how many make a figure."""

    half_window_s: float = 30.0
    observations_min: int = 8
    reports_min: int = 1
    engines_max: int = 256


class Known(msgspec.Struct, frozen=True):
    """A figure. `stale` when it is what was known before everything observed had faded."""

    value: float
    stale: bool


@dataclass(frozen=True, slots=True)
class CostRow:
    """One class of one tier, for metrics: P50, P95 and P99 of each part, in seconds."""

    tier: TierName
    bytes_class: int
    count: int
    queue_s: tuple[float, float, float]
    service_s: tuple[float, float, float]
    total_s: tuple[float, float, float]


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


class _Restores:
    """What was seen of one tier."""

    def __init__(self, settings: CostSettings) -> None:
        half = settings.half_window_s
        self._half_window_s = half
        # By class, of those that were seen: whoever asks looks at these alone.
        self.queue: dict[int, Fading] = {}
        self.service: dict[int, Fading] = {}
        self.total: dict[int, Fading] = {}
        self.drain = Fading(half)
        """Seconds a byte while the tier was busy, whatever ran side by side, weighted by bytes."""
        self.busy = Busy()
        self.busy_until_ns = 0
        self.slice_ns = 0
        self.slice_bytes = 0

    def add(self, each: int, queue_s: float, service_s: float, now_ns: int) -> None:
        """One restore of a class."""
        if each not in self.total:
            for parts in (self.queue, self.service, self.total):
                parts[each] = Fading(self._half_window_s)
        self.queue[each].add(queue_s, now_ns)
        self.service[each].add(service_s, now_ns)
        self.total[each].add(queue_s + service_s, now_ns)


class _Prefills:
    """What was seen of one engine."""

    def __init__(self, settings: CostSettings) -> None:
        self.per_token: dict[int, Fading] = {}
        """By class, of those that were seen."""
        self.reports = Fading(settings.half_window_s)
        self.busy = Busy()
        self.earlier: Report | None = None


_SLICE_BYTES: Final = 8 * 1024 * 1024
"""Busy time is cut into pieces of this many bytes at least: one piece is one drain observation."""


class CostModel:
    """Live costs by tier and engine. Used on the event loop's thread; never waits."""

    def __init__(self, clock: Clock, settings: CostSettings | None = None) -> None:
        self._clock = clock
        self._settings = settings or CostSettings()
        self._tiers: dict[TierName, _Restores] = {}
        self._engines: OrderedDict[str, _Prefills] = OrderedDict()

    # Observing

    def observe_restore(
        self, tier: TierName, nbytes: int, queue_s: float, service_s: float
    ) -> None:
        """`nbytes` have just come out of `tier`: what they waited, and how long they took."""
        if nbytes <= 0:
            return
        now = self._clock()
        seen = self._tiers.get(tier)
        if seen is None:
            seen = self._tiers[tier] = _Restores(self._settings)
        queue_s, service_s = max(queue_s, 0.0), max(service_s, 0.0)
        seen.add(_class(nbytes, _BYTES_CLASSES), queue_s, service_s, now)
        # The union of the busy intervals, as they end in order: what ran side by side drains
        # faster than any one of it.
        begun = max(now - int((queue_s + service_s) * _NS), seen.busy_until_ns)
        seen.slice_ns += max(now - begun, 0)
        seen.busy.add(max(now - begun, 0) / _NS, now)
        seen.slice_bytes += nbytes
        seen.busy_until_ns = now
        if seen.slice_bytes >= _SLICE_BYTES and seen.slice_ns:
            seen.drain.add(seen.slice_ns / _NS / seen.slice_bytes, now, seen.slice_bytes)
            seen.slice_ns = seen.slice_bytes = 0

    def observe_prefill(
        self, tokens: int, seconds: float, *, prompts: int = 1, engine: str = ""
    ) -> None:
        """An engine computed `tokens` of `prompts` prompts in `seconds`."""
        if tokens <= 0 or seconds <= 0 or prompts <= 0:
            return
        now = self._clock()
        prefills = self._engine(engine)
        each = _class(tokens // prompts, _TOKENS_CLASSES)
        part = prefills.per_token.get(each)
        if part is None:
            part = prefills.per_token[each] = Fading(self._settings.half_window_s)
        part.add(seconds / tokens, now, min(tokens, _REPORT_TOKENS_MAX))
        prefills.reports.add(1.0, now)

    def observe_report(self, engine: str, report: Report, prompts: int = 1) -> None:
        """What changed since the engine's last report; `prompts` of its were begun meanwhile.

        A counter that has stepped back is another life of the engine: its first report.
        """
        prefills = self._engine(engine)
        earlier, prefills.earlier = prefills.earlier, report
        if earlier is None or report.prefill_tokens < earlier.prefill_tokens:
            # All that it has computed so far: better than nothing.
            tokens, micros = report.prefill_tokens, report.prefill_us
        else:
            tokens = report.prefill_tokens - earlier.prefill_tokens
            micros = report.prefill_us - earlier.prefill_us
            prefills.busy.add(max(micros, 0) / 1e6, self._clock())
        if tokens > 0 and micros > 0:
            self.observe_prefill(tokens, micros / 1e6, prompts=max(prompts, 1), engine=engine)

    def forget(self, engine: str) -> None:
        """The engine has left."""
        self._engines.pop(engine, None)

    # Asking

    def restore_quantile(self, tier: TierName, nbytes: int, q: float) -> float | None:
        """Seconds from wanting `nbytes` of `tier` to having them; None when too little is known."""
        known = self._restore_known(tier, nbytes, q)
        return None if known is None else known.value

    def latency(self, tier: TierName, nbytes: int, q: float) -> Known | None:
        """Seconds that one restore of `nbytes` takes once it is its turn."""
        seen = self._tiers.get(tier)
        return None if seen is None else self._of_class(seen.service, nbytes, q)

    def drain(self, tier: TierName, q: float) -> Known | None:
        """Seconds a byte while the tier works, with all that runs side by side."""
        seen = self._tiers.get(tier)
        if seen is None:
            return None
        value = seen.drain.quantile(q, self._clock())
        if value is not None:
            return Known(value, stale=False)
        value = seen.drain.last(q)
        return None if value is None else Known(value, stale=True)

    def tier_busy(self, tier: TierName) -> float:
        """The share of the last seconds in which the tier was bringing something."""
        seen = self._tiers.get(tier)
        return 0.0 if seen is None else seen.busy.value(self._clock())

    def engine_busy(self, engine: str) -> float:
        """The share of the last seconds in which the engine was computing prompts."""
        prefills = self._engines.get(engine)
        return 0.0 if prefills is None else prefills.busy.value(self._clock())

    def prefill_per_token(self, engine: str, tokens: int, q: float) -> Known | None:
        """Seconds a token for a prompt that computes about `tokens`."""
        prefills = self._engines.get(engine)
        if prefills is None:
            return None
        now = self._clock()
        if prefills.reports.count(now) < self._settings.reports_min:
            wanted = _class(tokens, _TOKENS_CLASSES)
            nearest = _nearest_last(prefills.per_token, wanted, _TOKENS_CLASSES, q)
            return None if nearest is None else Known(nearest[1], stale=True)
        for each in _by_distance(_class(tokens, _TOKENS_CLASSES), _TOKENS_CLASSES):
            part = prefills.per_token.get(each)
            value = None if part is None else part.quantile(q, now)
            if value is not None:
                return Known(value, stale=False)
        return None

    def prefill_quantile(self, tokens: int, q: float, engine: str = "") -> float | None:
        """Seconds to compute `tokens`; None when too little is known."""
        known = self.prefill_per_token(engine, tokens, q)
        return None if known is None else known.value * tokens

    def rows(self) -> tuple[CostRow, ...]:
        """What is known of every tier and size class that has been seen lately."""
        now = self._clock()
        return tuple(
            CostRow(
                tier=tier,
                bytes_class=1 << each,
                count=int(seen.total[each].count(now)),
                queue_s=_three(seen.queue[each], now),
                service_s=_three(seen.service[each], now),
                total_s=_three(seen.total[each], now),
            )
            for tier, seen in self._tiers.items()
            for each in sorted(seen.total)
            if seen.total[each].count(now)
        )

    # Inside

    def _restore_known(self, tier: TierName, nbytes: int, q: float) -> Known | None:
        seen = self._tiers.get(tier)
        return None if seen is None else self._of_class(seen.total, nbytes, q)

    def _of_class(self, parts: dict[int, Fading], nbytes: int, q: float) -> Known | None:
        now = self._clock()
        wanted = _class(nbytes, _BYTES_CLASSES)
        counts = {each: part.count(now) for each, part in parts.items()}
        if not counts:
            return None
        enough = self._settings.observations_min
        if sum(counts.values()) >= enough > max(counts.values()):
            # Blocks of many sizes, enough in all: the size that was seen most.
            enough = int(max(counts.values()))
        for each in _by_distance(wanted, _BYTES_CLASSES):
            if counts.get(each, 0.0) >= enough:
                value = parts[each].quantile(q, now)
                assert value is not None
                return Known(value * _scale(each, wanted), stale=False)
        nearest = _nearest_last(parts, wanted, _BYTES_CLASSES, q)
        if nearest is None:
            return None
        each, last = nearest
        return Known(last * _scale(each, wanted), stale=True)

    def _engine(self, engine: str) -> _Prefills:
        prefills = self._engines.get(engine)
        if prefills is None:
            prefills = self._engines[engine] = _Prefills(self._settings)
            while len(self._engines) > self._settings.engines_max:
                self._engines.popitem(last=False)
        self._engines.move_to_end(engine)
        return prefills


def _class(size: int, classes: range) -> int:
    return min(max(max(size, 1).bit_length() - 1, classes.start), classes.stop - 1)


def _scale(observed: int, wanted: int) -> float:
    return float(2.0 ** (wanted - observed))


def _by_distance(wanted: int, classes: range) -> Iterator[int]:
    """The class itself, then its neighbours, the larger one first."""
    yield wanted
    for step in range(1, len(classes)):
        for each in (wanted + step, wanted - step):
            if each in classes:
                yield each


def _nearest_last(
    parts: dict[int, Fading], wanted: int, classes: range, q: float
) -> tuple[int, float] | None:
    """The nearest class for which there is a last known figure, and the figure."""
    for each in _by_distance(wanted, classes):
        part = parts.get(each)
        last = None if part is None else part.last(q)
        if last is not None:
            return each, last
    return None


def _three(part: Fading, now_ns: int) -> tuple[float, float, float]:
    p50, p95, p99 = (part.quantile(q, now_ns) or 0.0 for q in (0.5, 0.95, 0.99))
    return p50, p95, p99
