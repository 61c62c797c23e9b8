"""From what is observed and what is outstanding to a decision: prices, `decide`, promise.

The one place where `CostModel`, `Backlog` and `decide` meet. The judge asks it for each hit; the
simulator asks the same object. It reads memory and the clock that it was given, and never waits.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from sidecar.cost.backlog import Backlog
from sidecar.cost.decision import (
    Decision,
    DecisionSettings,
    Lean,
    Offer,
    Prices,
    Recompute,
    Restore,
    TierPrice,
    Why,
    decide,
    lean_after,
)
from sidecar.cost.model import CostModel, CostSettings
from storage.tiers.protocol import TierName
from strongroom.clock import Clock
from strongroom.wire.frames import Report

_MEDIAN: Final = 0.5
_PROBE_NS: Final = 60 * 10**9
_PROBE_NS_MAX: Final = 16 * _PROBE_NS
_SAVED_WEIGHT: Final = 0.02
"""Weight of the newest offer in what NVMe was found to save."""
_PROMISES_MAX: Final = 8192
"""Of requests that nobody said are over, the oldest go."""
_PIECE_BYTES: Final = 8 * 1024 * 1024
"""What one drain observation is about; a restore of m of them varies less than one does."""


@dataclass(frozen=True, slots=True)
class AppraisalSettings:
    """`quantile`: the SLO's. `enabled` false restores every hit."""

    enabled: bool = True
    quantile: float = 0.95
    decision: DecisionSettings = field(default_factory=DecisionSettings)
    cost: CostSettings = field(default_factory=CostSettings)
    promise_s: float = 30.0
    idle_share_min: float = 0.1
    """A server is taken to be idle at least so much of the time: every busy period ends."""
    assumed_bytes_s: float = 2e9
    """How fast a tier is taken to be that was never observed; only its queue is judged by it."""
    engines_max: int = 256


@dataclass(frozen=True, slots=True)
class AppraisalStatistics:
    """How often each kind of decision was taken, by its reason."""

    decisions: Mapping[tuple[str, str], int]
    restoring_bytes: Mapping[TierName, int]


@dataclass(frozen=True, slots=True)
class Weighed:
    """A decision, and what it was taken on."""

    offer: Offer
    prices: Prices | None
    """None where there was nothing to decide."""
    decision: Decision


@dataclass(slots=True)
class _Probes:
    """When a tier may be probed again: each probe that changed nothing doubles the pause."""

    due_ns: int
    pause_ns: int


class Appraiser:
    """Used on the event loop's thread."""

    def __init__(self, clock: Clock, settings: AppraisalSettings | None = None) -> None:
        self._settings = settings or AppraisalSettings()
        self.cost = CostModel(clock, self._settings.cost)
        self.backlog = Backlog(clock, promise_s=self._settings.promise_s)
        self._leans: OrderedDict[str, Lean] = OrderedDict()
        self._decisions: Counter[tuple[str, str]] = Counter()
        self._saved_byte_s: float | None = None
        self._clock = clock
        self._probes: dict[TierName, _Probes] = {}
        self._promised: OrderedDict[tuple[str, str], float] = OrderedDict()

    def choose(self, engine: str, request: str, offer: Offer) -> Decision:
        """Decide, and count what follows from it as outstanding."""
        weighed = self.weigh(engine, offer)
        self.count(engine, request, weighed)
        return weighed.decision

    def weigh(self, engine: str, offer: Offer) -> Weighed:
        """Decide; nothing is outstanding because of it until it is counted."""
        lean = self._leans.get(engine, Lean.RESTORE)
        prices = self.prices(engine, offer) if offer.hit else None
        if prices is None:
            decision: Decision = Recompute(Why.NOTHING)
        elif self._settings.enabled:
            decision = decide(offer, prices, lean, self._settings.decision)
        else:
            decision = Restore(offer.hit[-1].end, Why.OFF)
        return Weighed(offer, prices, decision)

    def count(self, engine: str, request: str, weighed: Weighed) -> None:
        """The verdict was given: learn from it, and count what follows as outstanding."""
        offer, prices, decision = weighed.offer, weighed.prices, weighed.decision
        if prices is not None and self._settings.enabled:
            self._learn(offer, decision, prices)
        lean = self._leans.get(engine, Lean.RESTORE)
        self._leans[engine] = lean_after(decision, offer, lean, self._settings.decision)
        self._leans.move_to_end(engine)
        if len(self._leans) > self._settings.engines_max:
            self._leans.popitem(last=False)
        self._decisions[type(decision).__name__.lower(), decision.why.value] += 1
        self._pace_probes(offer, decision)
        self._promise(engine, request, decision, prices)
        restores: dict[TierName, int] = {}
        for block in offer.hit:
            if block.end <= decision.tokens:
                restores[block.tier] = restores.get(block.tier, 0) + block.nbytes
        self.backlog.promise(engine, request, restores, offer.prompt_tokens - decision.tokens)

    def observe_report(self, engine: str, report: Report) -> None:
        """The engine's scheduler has reported."""
        self.cost.observe_report(engine, report, prompts=self.backlog.reported(engine, report))

    def observe_restore(
        self, tier: TierName, nbytes: int, queue_s: float, service_s: float
    ) -> None:
        """A block has come out of a tier."""
        self.cost.observe_restore(tier, nbytes, queue_s, service_s)

    def moved(self, engine: str, request: str, tier: TierName, nbytes: int) -> None:
        """A part of what this request was promised has been brought."""
        self.backlog.moved(engine, request, tier, nbytes)

    def brought(self, engine: str, request: str, ranks: int = 1) -> None:
        """The request's load has ended, in whatever way, on one of `ranks`."""
        self.backlog.brought(engine, request, ranks)

    def dropped(self, engine: str, request: str) -> None:
        """The request is over."""
        self.backlog.dropped(engine, request)
        self._promised.pop((engine, request), None)

    def recompute_seconds(self, engine: str, tokens: int) -> float | None:
        """What computing so many tokens usually takes; None when too little is known."""
        return self.cost.prefill_quantile(tokens, _MEDIAN, engine)

    def promised_seconds(self, engine: str, request: str) -> float | None:
        """What bringing was to take less than: the prefill queue, and computing what is brought.

        None where it was not decided for as the faster way: too little was known, or it was
        chosen for others' sake.
        """
        return self._promised.get((engine, request))

    def saved_seconds(self, nbytes: int) -> float | None:
        """What having `nbytes` on NVMe has saved of late, by what was decided; None when unknown.

        Offers that were not taken count as nothing saved.
        """
        return None if self._saved_byte_s is None else self._saved_byte_s * nbytes

    def forget(self, engine: str) -> None:
        """The engine has left."""
        self.cost.forget(engine)
        self.backlog.forget(engine)
        self._leans.pop(engine, None)
        for key in [key for key in self._promised if key[0] == engine]:
            del self._promised[key]

    def prices(self, engine: str, offer: Offer) -> Prices:
        """Queues now and costs at the SLO's quantile, for this offer."""
        sizes: dict[TierName, int] = {}
        block_bytes: dict[TierName, int] = {}
        for block in offer.hit:
            tier = block.tier
            if tier in sizes:
                sizes[tier] += block.nbytes
            else:
                sizes[tier] = block_bytes[tier] = block.nbytes
        tiers = {
            tier: self._tier(tier, nbytes, block_bytes[tier]) for tier, nbytes in sizes.items()
        }
        token = self.cost.prefill_per_token(engine, offer.prompt_tokens, self._settings.quantile)
        usual = self.cost.prefill_per_token(
            engine, int(self.backlog.mean_tokens(engine)) or offer.prompt_tokens, _MEDIAN
        )
        usual_s = 0.0 if usual is None else usual.value
        # Those who load now keep their place: what they have left to compute comes first.
        ahead = self.backlog.owed_tokens(engine) + self.backlog.loading_tokens(engine)
        step = self.cost.engine_step(engine)
        more_steps = max(ahead / step.tokens - 1.0, 0.0) if step.tokens else 0.0
        wait_s = ahead * usual_s + more_steps * step.fixed_s
        shared_s = min(ahead, step.tokens) * usual_s
        busy, per_second = self.cost.engine_busy(engine), self.backlog.prompts_per_second(engine)
        return Prices(
            tiers=tiers,
            prefill_wait_s=wait_s,
            prefill_shared_s=shared_s,
            prefill_step_s=step.fixed_s,
            prefill_token_s=None if token is None else token.value,
            prefill_shadow=self._shadow(busy, per_second * wait_s),
            prefill_growth=self._shadow(busy, per_second / 2 - busy),
        )

    def statistics(self) -> AppraisalStatistics:
        """A frozen snapshot."""
        return AppraisalStatistics(
            decisions=dict(self._decisions),
            restoring_bytes={
                tier: self.backlog.restoring_bytes(tier) for tier in (TierName.HOST, TierName.NVME)
            },
        )

    def _promise(
        self, engine: str, request: str, decision: Decision, prices: Prices | None
    ) -> None:
        self._promised.pop((engine, request), None)
        faster = decision.why is Why.CHEAPER and decision.ours_s < decision.other_s
        if prices is None or not decision.tokens or not (faster or decision.why is Why.OFF):
            return
        if prices.prefill_token_s is None:
            return
        computing_s = decision.tokens * prices.prefill_token_s
        self._promised[engine, request] = prices.prefill_wait_s + computing_s
        if len(self._promised) > _PROMISES_MAX:
            self._promised.popitem(last=False)

    def _pace_probes(self, offer: Offer, decision: Decision) -> None:
        if decision.why is not Why.PROBE and (decision.why is not Why.CHEAPER or not self._probes):
            return
        brought = {block.tier for block in offer.hit if block.end <= decision.tokens}
        if decision.why is Why.PROBE:
            now = self._clock()
            for tier in brought:
                known = self._probes.get(tier)
                pause_ns = _PROBE_NS if known is None else min(2 * known.pause_ns, _PROBE_NS_MAX)
                self._probes[tier] = _Probes(now + pause_ns, pause_ns)
        else:
            for tier in brought:
                self._probes.pop(tier, None)

    def _learn(self, offer: Offer, decision: Decision, prices: Prices) -> None:
        """What the offer's blocks on NVMe spared the engine and those who wait for it, less what
        bringing them cost those who wait for the disk; nothing where they were not taken.
        """
        offered = sum(block.nbytes for block in offer.hit if block.tier is TierName.NVME)
        token_s = prices.prefill_token_s
        if not offered or token_s is None or decision.why in {Why.COLD, Why.PROBE}:
            return
        saved = 0.0
        begin = 0
        for block in offer.hit:
            if block.tier is TierName.NVME and block.end <= decision.tokens:
                price = prices.tiers[block.tier]
                spared_s = (block.end - begin) * token_s * (1.0 + prices.prefill_shadow)
                saved += spared_s - block.nbytes * price.byte_s * price.shadow
            begin = block.end
        newest = max(saved, 0.0) / offered
        earlier = self._saved_byte_s
        self._saved_byte_s = (
            newest if earlier is None else earlier + (newest - earlier) * _SAVED_WEIGHT
        )

    def _tier(self, tier: TierName, nbytes: int, block_bytes: int) -> TierPrice:
        usual = self.cost.drain(tier, _MEDIAN)
        slow = self.cost.drain(tier, self._settings.quantile)
        latency = self.cost.latency(tier, block_bytes, _MEDIAN)
        outstanding = self.backlog.restoring_bytes(tier)
        if usual is None or slow is None or latency is None:
            assumed = 1.0 / self._settings.assumed_bytes_s
            wait_s = outstanding * (assumed if usual is None else usual.value)
            return TierPrice(wait_s, 0.0, assumed, known=False, idle=not outstanding)
        # The mean of m pieces spreads by 1/sqrt(m) of what one piece does.
        pieces = max(1.0, nbytes / _PIECE_BYTES)
        byte_s = usual.value + (slow.value - usual.value) / math.sqrt(pieces)
        return TierPrice(
            wait_s=outstanding * usual.value,
            fixed_s=max(0.0, latency.value - block_bytes * usual.value),
            byte_s=byte_s,
            stale=usual.stale and self._may_probe(tier),
            idle=not outstanding,
            others=self.backlog.loads(tier),
            # Loads take turns: who is there already is in `others`.
            shadow=self._shadow(self.cost.tier_busy(tier), 0.0),
        )

    def _may_probe(self, tier: TierName) -> bool:
        known = self._probes.get(tier)
        return known is None or self._clock() >= known.due_ns

    def _shadow(self, busy: float, waiting: float) -> float:
        """What a second of a server costs others: it delays those who come until it is idle.

        `waiting` come in the time that its queue takes, beside those who come while one is served;
        all of it longer by what comes meanwhile. It is the mean, which adds up over all of them:
        weighed three times, as the quantile of a wait is to its mean, too much was given up.
        """
        idle = max(1.0 - busy, self._settings.idle_share_min)
        return (busy + waiting) / idle
