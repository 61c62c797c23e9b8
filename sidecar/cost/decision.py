"""Restore, recompute, or restore a part: what brings the first token sooner (DESIGN section 9).

    restore n tokens:  max(wait of the tiers + bringing n, steps before) + shared step + the rest
    recompute:         steps before + shared step + computing all

A request keeps its place in the engine's queue while its prefix is brought, hence the maximum:
what is brought while one would have waited anyway is free. An engine computes those who wait in
batches: what would share this prompt's own step is no time to bring in, since who comes after the
step has begun waits for the next one. Blocks are brought from the front, so that a choice is a
number of blocks. Loads of a tier take turns: the more one wants, the longer one waits.

To that comes what the choice costs others: the time that it takes from a busy engine or a busy
tier, times what a second there delays those who come until it is idle: the more, the longer its
queue (`TierPrice.shadow`, `Prices.prefill_shadow`). An engine serves in order: a long prompt
delays those as well who come while it is computed (`prefill_growth`); a load delays those that are
there by its turns. Without it each request takes what is best for itself, and a link or an engine
near its limit is pushed over it. What a request gives up for others is bounded.

Rules:
- Everything here is pure: prices and queues are handed in as values, nothing waits, nothing is
  read. The simulator imports this very module.
- Never more than the hit, and whole blocks only.
- What is unknown is restored: a cold start restores what comes soon by what is assumed, as long as
  not much is being brought blindly already. Once the engine and one tier are known, another tier
  that is not is taken to be what is assumed of it: its first loads are how it becomes known. A tier
  whose figures have faded, and which nobody uses, is asked for a few blocks again, so that it can
  be found to have recovered.
- Both sides are priced at the quantile of the SLO. Bringing a quarter of the hit or more is one
  side, less than that the other. To change sides, the other must be better by a margin of what
  computing the hit takes (hysteresis); within a side the best length is taken, of equally good
  ones the longest, since it leaves the engine more time for others.
- A dearer tier never makes the choice longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from storage.tiers.protocol import TierName


class Why(StrEnum):
    """What a decision rests on."""

    COLD = "cold"
    """Too little is known."""
    CHEAPER = "cheaper"
    HELD = "held"
    """The other side was better, and not by the margin."""
    PROBE = "probe"
    """To learn what the tier costs now."""
    NOTHING = "nothing"
    """There is no hit."""
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Restore:
    """Bring the whole hit. `ours_s` and `other_s`: the estimates of this and of the other side."""

    tokens: int
    why: Why
    ours_s: float = 0.0
    other_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Partial:
    """Bring the first `tokens` tokens and compute the rest."""

    tokens: int
    why: Why
    ours_s: float = 0.0
    other_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Recompute:
    """Bring nothing."""

    why: Why
    ours_s: float = 0.0
    other_s: float = 0.0

    @property
    def tokens(self) -> int:
        return 0


Decision = Restore | Partial | Recompute


class Stored(msgspec.Struct, frozen=True):
    """One block of the hit: where it ends in the prompt, where it lies, its bytes on all ranks.

    Ten of them are made for each verdict, and a frozen dataclass takes seven times as long.
    """

    end: int
    tier: TierName
    nbytes: int


@dataclass(frozen=True, slots=True)
class Offer:
    """A prompt and its hit, block after block from the front."""

    prompt_tokens: int
    hit: tuple[Stored, ...]

    def __post_init__(self) -> None:
        end = 0
        for block in self.hit:
            if block.end <= end:
                raise ValueError("blocks follow one another")
            end = block.end
        if end > self.prompt_tokens:
            raise ValueError("the hit is longer than the prompt")


@dataclass(frozen=True, slots=True)
class TierPrice:
    """What bringing costs: `wait_s` once, `fixed_s` once, `byte_s` for each byte."""

    wait_s: float
    fixed_s: float
    byte_s: float
    known: bool = True
    stale: bool = False
    idle: bool = False
    """Nothing is being brought from it."""
    shadow: float = 0.0
    """Seconds that those to come lose for each second that this takes."""
    others: tuple[int, ...] = ()
    """Bytes that each load in flight has left, ascending; `wait_s` is what all of them take.
    Loads take turns: who wants little waits for as much of each of them, no more."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Queues now, and costs at the SLO's quantile. None: unknown."""

    tiers: Mapping[TierName, TierPrice]
    """Of every tier in the offer."""
    prefill_wait_s: float
    """Until the engine has computed what is before this prompt, by those who still load too."""
    prefill_token_s: float | None
    prefill_shadow: float = 0.0
    prefill_growth: float = 0.0
    """So much more shadow for each second that this prompt computes: of those who come then."""
    prefill_shared_s: float = 0.0
    """Of the wait, what is computed in the same step as this prompt: who comes later misses it."""
    prefill_step_s: float = 0.0
    """What a step costs beside its tokens."""


class Lean(StrEnum):
    """Which side was taken last."""

    RESTORE = "restore"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class DecisionSettings:
    """`margin`: how much better the other side must be, as a share of what the hit takes to
    compute. `side`: the share of the hit from which on bringing counts as restoring."""

    margin: float = 0.2
    side: float = 0.25
    gain_min: float = 0.12
    """A little is brought only where it gains this share of what recomputing would take."""
    sacrifice: float = 0.3
    """What a request may lose for others, as a share of the least that it can take: one that
    gives up more becomes one of the slow ones itself."""
    probe_blocks: int = 2
    cold_wait_s: float = 0.1
    """No more is brought blindly than takes so long, with what is to be brought first."""


def decide(
    offer: Offer, prices: Prices, lean: Lean, settings: DecisionSettings | None = None
) -> Decision:
    """The decision for one request; see the module's rules."""
    settings = settings or DecisionSettings()
    if not offer.hit:
        return Recompute(Why.NOTHING)
    whole = offer.hit[-1].end
    token_s = prices.prefill_token_s
    used = [prices.tiers[tier] for tier in {block.tier for block in offer.hit}]
    if token_s is None or not any(price.known for price in used):
        return _blind(offer, prices, settings)
    own, all_in = _times(offer, prices, token_s)
    bound = min(own) * (1.0 + settings.sacrifice)
    first = _first_of_restoring(offer, settings)
    little = _best(own, all_in, bound, range(first))
    much = _best(own, all_in, bound, range(first, len(own)))
    margin_s = settings.margin * whole * token_s
    taken = _side(all_in, little, much, lean, margin_s)
    if taken < first and all_in[0] - all_in[taken] < settings.gain_min * own[0]:
        taken = 0
    better = min(all_in[each] for each in (little, much) if each is not None)
    held = all_in[taken] > better + settings.gain_min * own[0]
    why = Why.HELD if held else Why.CHEAPER
    if not taken:
        taken = _probe(offer, prices, settings)
        if not taken:
            return Recompute(why, own[0], min(own[1:]))
        why = Why.PROBE
    return _bring(offer, taken, why, own[taken], own[0])


def lean_after(
    decision: Decision, offer: Offer, before: Lean, settings: DecisionSettings | None = None
) -> Lean:
    """What the next decision leans to; a probe and a cold start say nothing."""
    if decision.why in {Why.COLD, Why.OFF, Why.PROBE, Why.NOTHING}:
        return before
    first = _first_of_restoring(offer, settings or DecisionSettings())
    much = decision.tokens >= offer.hit[first - 1].end
    return Lean.RESTORE if much else Lean.RECOMPUTE


def _side(
    all_in: Sequence[float], little: int | None, much: int | None, lean: Lean, margin_s: float
) -> int:
    """The side that it leans to, unless the other is better by the margin or this one is none."""
    if little is None or much is None:
        taken = much if little is None else little
        assert taken is not None  # the best for oneself is on one of the sides
        return taken
    if lean is Lean.RESTORE:
        return little if all_in[little] < all_in[much] - margin_s else much
    return much if all_in[much] < all_in[little] - margin_s else little


def _times(offer: Offer, prices: Prices, token_s: float) -> tuple[list[float], list[float]]:
    """Seconds to the first token when 0, 1, 2, ... blocks are brought, and with others' loss."""
    wait = prices.prefill_wait_s
    step_s = prices.prefill_step_s
    shared_s = min(prices.prefill_shared_s, wait)
    own = [wait + step_s + offer.prompt_tokens * token_s]
    all_in = [own[0] + _others_loss(offer.prompt_tokens * token_s, prices)]
    turns: dict[TierName, _Turns] = {}
    queue_s = bring_s = shadow_s = 0.0
    for block in offer.hit:
        price = prices.tiers[block.tier]
        turn = turns.get(block.tier)
        if turn is None:
            turn = turns[block.tier] = _Turns(price)
            bring_s += price.fixed_s
        before_s = turn.wait_s
        turn.take(block.nbytes)
        queue_s = max(queue_s, turn.wait_s)
        bring_s += block.nbytes * price.byte_s
        shadow_s += block.nbytes * price.byte_s * price.shadow + (turn.wait_s - before_s)
        rest_s = (offer.prompt_tokens - block.end) * token_s
        own.append(max(queue_s + bring_s, wait - shared_s) + shared_s + step_s + rest_s)
        all_in.append(own[-1] + shadow_s + _others_loss(rest_s, prices))
    return own, all_in


def _others_loss(computing_s: float, prices: Prices) -> float:
    """What others lose when this prompt computes for so long: an engine serves in order."""
    return computing_s * (prices.prefill_shadow + computing_s * prices.prefill_growth)


class _Turns:
    """How long one waits for a tier whose loads take turns, the more, the more one wants."""

    __slots__ = ("_brought", "_byte_s", "_others", "_passed", "wait_s")

    def __init__(self, price: TierPrice) -> None:
        self._others = price.others
        total = sum(price.others)
        self._byte_s = price.wait_s / total if total else 0.0
        self._passed = 0
        """So many of the others have no more left than was brought."""
        self._brought = 0
        self.wait_s = 0.0 if total else price.wait_s

    def take(self, nbytes: int) -> None:
        """So much more is brought: each of the others has had as much meanwhile, or all it had."""
        others, upto = self._others, self._brought + nbytes
        waited = 0
        while self._passed < len(others) and others[self._passed] <= upto:
            waited += others[self._passed] - self._brought
            self._passed += 1
        waited += nbytes * (len(others) - self._passed)
        self._brought = upto
        self.wait_s += waited * self._byte_s


def _first_of_restoring(offer: Offer, settings: DecisionSettings) -> int:
    """From how many blocks on it counts as restoring; one at least."""
    least = settings.side * offer.hit[-1].end
    return next(number for number, block in enumerate(offer.hit, 1) if block.end >= least)


def _best(
    own: Sequence[float], all_in: Sequence[float], bound: float, lengths: range
) -> int | None:
    """The best of these lengths within the bound; of equally good ones the longest."""
    within = [length for length in lengths if own[length] <= bound]
    return min(within, key=lambda length: (all_in[length], -length), default=None)


def _blind(offer: Offer, prices: Prices, settings: DecisionSettings) -> Decision:
    """As much as comes soon enough by what is known or assumed, a few blocks at least."""
    # What is brought while one would wait for the engine anyway is free.
    free_s = max(settings.cold_wait_s, prices.prefill_wait_s)
    bring_s, blocks = 0.0, 0
    for block in offer.hit:
        price = prices.tiers[block.tier]
        if price.wait_s > free_s:
            break
        bring_s += block.nbytes * price.byte_s
        if price.wait_s + bring_s > free_s and (price.wait_s or blocks >= settings.probe_blocks):
            break
        blocks += 1
    return _bring(offer, blocks, Why.COLD, 0.0, 0.0) if blocks else Recompute(Why.COLD)


def _probe(offer: Offer, prices: Prices, settings: DecisionSettings) -> int:
    """How many blocks to bring just to learn: only from tiers that are stale and idle."""
    first = prices.tiers[offer.hit[0].tier]
    if not (first.stale and first.idle):
        return 0
    return min(settings.probe_blocks, len(offer.hit))


def _bring(offer: Offer, blocks: int, why: Why, ours_s: float, other_s: float) -> Decision:
    tokens = offer.hit[blocks - 1].end
    if blocks == len(offer.hit):
        return Restore(tokens, why, ours_s, other_s)
    return Partial(tokens, why, ours_s, other_s)
