"""What restoring and recomputing cost here and now: every tier's costs and every engine's.

Rules:
- Every figure fades: an observation counts for one to two half-windows, so that a disk that has
  become slow, or fast again, is noticed. What was known before is kept as the last known figure
  and is said to be stale.
- Nothing is known before enough was observed; whoever asks gets None and decides safely.
- Memory is bounded: sketches of bounded size, for a fixed number of size classes and engines.
- Times are seconds, sizes bytes; the clock is handed in (nanoseconds that only grow).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from sidecar.cost.fading import Known
from sidecar.cost.prefills import EngineCosts, StepCost
from sidecar.cost.restores import CostRow, TierCosts
from storage.tiers.protocol import TierName
from strongroom.clock import Clock
from strongroom.wire.frames import Report


@dataclass(frozen=True, slots=True)
class CostSettings:
    """How long an observation counts, and how many make a figure."""

    half_window_s: float = 30.0
    observations_min: int = 8
    reports_min: int = 1
    engines_max: int = 256


class CostModel:
    """Live costs by tier and engine. Used on the event loop's thread; never waits."""

    def __init__(self, clock: Clock, settings: CostSettings | None = None) -> None:
        self._clock = clock
        self._settings = settings or CostSettings()
        self._tiers: dict[TierName, TierCosts] = {}
        self._engines: OrderedDict[str, EngineCosts] = OrderedDict()

    # Observing

    def observe_restore(
        self, tier: TierName, nbytes: int, queue_s: float, service_s: float
    ) -> None:
        """`nbytes` have just come out of `tier`: what they waited, and how long they took."""
        if nbytes <= 0:
            return
        seen = self._tiers.get(tier)
        if seen is None:
            half_s, least = self._settings.half_window_s, self._settings.observations_min
            seen = self._tiers[tier] = TierCosts(half_s, least)
        seen.add(nbytes, max(queue_s, 0.0), max(service_s, 0.0), self._clock())

    def observe_prefill(
        self, tokens: int, seconds: float, *, prompts: int = 1, steps: int = 0, engine: str = ""
    ) -> None:
        """An engine computed `tokens` of `prompts` prompts in `seconds`."""
        if tokens > 0 and seconds > 0 and prompts > 0:
            self._engine(engine).add(tokens, seconds, prompts, steps, self._clock())

    def observe_report(self, engine: str, report: Report, prompts: int = 1) -> None:
        """What changed since the engine's last report; `prompts` of its were begun meanwhile."""
        self._engine(engine).reported(report, prompts, self._clock())

    def forget(self, engine: str) -> None:
        """The engine has left."""
        self._engines.pop(engine, None)

    # Asking

    def restore_quantile(self, tier: TierName, nbytes: int, q: float) -> float | None:
        """Seconds from wanting `nbytes` of `tier` to having them; None when too little is known."""
        seen = self._tiers.get(tier)
        known = None if seen is None else seen.total(nbytes, q, self._clock())
        return None if known is None else known.value

    def latency(self, tier: TierName, nbytes: int, q: float) -> Known | None:
        """Seconds that one restore of `nbytes` takes once it is its turn."""
        seen = self._tiers.get(tier)
        return None if seen is None else seen.latency(nbytes, q, self._clock())

    def drain(self, tier: TierName, q: float) -> Known | None:
        """Seconds a byte while the tier works, with all that runs side by side."""
        seen = self._tiers.get(tier)
        return None if seen is None else seen.drain(q, self._clock())

    def tier_busy(self, tier: TierName) -> float:
        """The share of the last seconds in which the tier was bringing something."""
        seen = self._tiers.get(tier)
        return 0.0 if seen is None else seen.busy(self._clock())

    def engine_busy(self, engine: str) -> float:
        """The share of the last seconds that the engine needed for tokens of prompts."""
        seen = self._engines.get(engine)
        return 0.0 if seen is None else seen.busy(self._clock())

    def engine_step(self, engine: str) -> StepCost:
        """What a step of the engine costs beside its tokens, and how many it has."""
        seen = self._engines.get(engine)
        return StepCost() if seen is None else seen.step()

    def prefill_per_token(self, engine: str, tokens: int, q: float) -> Known | None:
        """Seconds that one more token takes, of a prompt that computes about `tokens`."""
        seen = self._engines.get(engine)
        return None if seen is None else seen.per_token(tokens, q, self._clock())

    def prefill_quantile(self, tokens: int, q: float, engine: str = "") -> float | None:
        """Seconds to compute `tokens` in a step; None when too little is known."""
        known = self.prefill_per_token(engine, tokens, q)
        return None if known is None else self.engine_step(engine).fixed_s + known.value * tokens

    def rows(self) -> tuple[CostRow, ...]:
        """What is known of every tier and size class that has been seen lately."""
        now = self._clock()
        return tuple(row for tier, seen in self._tiers.items() for row in seen.rows(tier, now))

    # Inside

    def _engine(self, engine: str) -> EngineCosts:
        seen = self._engines.get(engine)
        if seen is None:
            half_s, least = self._settings.half_window_s, self._settings.reports_min
            seen = self._engines[engine] = EngineCosts(half_s, least)
            while len(self._engines) > self._settings.engines_max:
                self._engines.popitem(last=False)
        self._engines.move_to_end(engine)
        return seen
