"""The decision never exceeds the hit, takes whole blocks, and follows what is cheaper."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.cost.decision import (
    Decision,
    DecisionSettings,
    Lean,
    Offer,
    Partial,
    Prices,
    Recompute,
    Restore,
    Stored,
    TierPrice,
    Why,
    decide,
    lean_after,
)
from storage.tiers.protocol import TierName

HOST, NVME = TierName.HOST, TierName.NVME
BLOCK_TOKENS, BLOCK_BYTES = 256, 32 * 2**20


def offer(host: int = 0, nvme: int = 0, rest: int = 256) -> Offer:
    tiers = [HOST] * host + [NVME] * nvme
    hit = tuple(
        Stored((number + 1) * BLOCK_TOKENS, tier, BLOCK_BYTES) for number, tier in enumerate(tiers)
    )
    return Offer(len(tiers) * BLOCK_TOKENS + rest, hit)


def price(
    bytes_s: float,
    wait_s: float = 0.0,
    *,
    known: bool = True,
    stale: bool = False,
    idle: bool = False,
) -> TierPrice:
    return TierPrice(wait_s, 0.0005, 1 / bytes_s, known=known, stale=stale, idle=idle)


def prices(
    host: TierPrice | None = None,
    nvme: TierPrice | None = None,
    token_s: float | None = 100e-6,
    wait_s: float = 0.0,
) -> Prices:
    return Prices({HOST: host or price(8e9), NVME: nvme or price(1e9)}, wait_s, token_s)


seconds = st.floats(0, 5, allow_nan=False)
tier_prices = st.builds(
    TierPrice,
    wait_s=seconds,
    fixed_s=st.floats(0, 0.05),
    byte_s=st.floats(1e-11, 1e-7),
    known=st.booleans(),
    stale=st.booleans(),
    idle=st.booleans(),
    shadow=st.floats(0, 4),
)
all_prices = st.builds(
    Prices,
    tiers=st.fixed_dictionaries({HOST: tier_prices, NVME: tier_prices}),
    prefill_wait_s=seconds,
    prefill_token_s=st.none() | st.floats(1e-6, 1e-3),
    prefill_shadow=st.floats(0, 4),
)


@st.composite
def offers(draw: st.DrawFn) -> Offer:
    steps = draw(st.lists(st.integers(16, 256), max_size=12))
    end, hit = 0, []
    for step in steps:
        end += step
        hit.append(Stored(end, draw(st.sampled_from([HOST, NVME])), step * 131072))
    return Offer(end + draw(st.integers(0, 4096)), tuple(hit))


@given(offers(), all_prices, st.sampled_from(Lean))
def test_never_more_than_the_hit_and_whole_blocks_only(
    given_offer: Offer, given_prices: Prices, lean: Lean
) -> None:
    decision = decide(given_offer, given_prices, lean)
    ends = [block.end for block in given_offer.hit]
    match decision:
        case Restore(tokens):
            assert ends
            assert tokens == ends[-1]
        case Partial(tokens):
            assert tokens in ends[:-1]
        case Recompute():
            assert decision.tokens == 0


@given(offers(), all_prices, st.sampled_from(Lean), st.floats(1, 50))
def test_a_dearer_tier_never_makes_the_choice_longer(
    given_offer: Offer, given_prices: Prices, lean: Lean, times: float
) -> None:
    known = {
        tier: replace(each, known=True, stale=False) for tier, each in given_prices.tiers.items()
    }
    cheap = replace(given_prices, tiers=known)
    dear = replace(
        given_prices,
        tiers={
            tier: replace(each, byte_s=each.byte_s * times, fixed_s=each.fixed_s * times)
            for tier, each in known.items()
        },
    )
    assert decide(given_offer, dear, lean).tokens <= decide(given_offer, cheap, lean).tokens


@given(offers(), all_prices, st.sampled_from(Lean))
def test_the_same_facts_give_the_same_decision_again(
    given_offer: Offer, given_prices: Prices, lean: Lean
) -> None:
    """Hysteresis does not flap: a decision, once taken, is taken again under the same prices."""
    first = decide(given_offer, given_prices, lean)
    lean = lean_after(first, given_offer, lean)
    second = decide(given_offer, given_prices, lean)
    assert lean_after(second, given_offer, lean) is lean
    assert (second.tokens > 0) == (first.tokens > 0)


def flips(waits: list[float], margin: float) -> int:
    """How often the side changes along a series of link queues."""
    lean, changes = Lean.RESTORE, 0
    settings, hit = DecisionSettings(margin=margin), offer(host=16)
    for wait_s in waits:
        decision = decide(hit, prices(price(4e9, wait_s), token_s=50e-6), lean, settings)
        after = lean_after(decision, hit, lean, settings)
        changes += after is not lean
        lean = after
    return changes


def test_hysteresis_does_not_flap_where_both_sides_are_about_equal() -> None:
    # 16 blocks take 0.134 s to bring and 0.205 s to compute: equal with 0.071 s of queue.
    waits = [0.071 + 0.006 * (-1) ** number for number in range(40)]
    assert flips(waits, margin=0.1) == 0
    assert flips(waits, margin=0.0) > 10
    assert flips([0.0] * 5 + [1.0] * 5 + [0.0] * 5, margin=0.1) == 2


@pytest.mark.parametrize("token_s", [None, 100e-6])
@pytest.mark.parametrize("lean", list(Lean))
def test_a_cold_start_restores(token_s: float | None, lean: Lean) -> None:
    unknown = TierPrice(0.0, 0.0, 1 / 2e9, known=False, idle=True)
    decision = decide(offer(nvme=4), prices(nvme=unknown, token_s=token_s), lean)
    assert decision == Restore(4 * BLOCK_TOKENS, Why.COLD)
    decision = decide(offer(host=4), prices(token_s=None), lean)
    assert decision == Restore(4 * BLOCK_TOKENS, Why.COLD)


def test_a_cold_start_brings_no_more_than_comes_soon_by_what_is_assumed() -> None:
    """0.1 s at 2 GB/s: whole hits of 8k tokens made the tail of a trace whose disk was slow."""
    unknown = TierPrice(0.0, 0.0, 1 / 2e9, known=False, idle=True)
    decision = decide(offer(nvme=32), prices(nvme=unknown), Lean.RESTORE)
    brought = decision.tokens // BLOCK_TOKENS * BLOCK_BYTES
    assert decision.why is Why.COLD
    assert 0.05 * 2e9 < brought <= 0.1 * 2e9
    slow = TierPrice(0.0, 0.0, 1 / 1e7, known=False, idle=True)
    assert decide(offer(nvme=32), prices(nvme=slow), Lean.RESTORE).tokens == 2 * BLOCK_TOKENS


def test_loads_take_turns_so_that_little_waits_for_little() -> None:
    """One load of 4 s is before it: a whole hit shares the disk with it, two blocks hardly wait."""
    one = (int(4e9),)
    wait_s = 4e9 / 1e9
    turns = TierPrice(wait_s, 0.0, 1 / 1e9, others=one)
    queue = TierPrice(wait_s, 0.0, 1 / 1e9)
    asked = offer(nvme=2)
    by_turns = decide(asked, prices(nvme=turns, token_s=400e-6), Lean.RESTORE)
    in_order = decide(asked, prices(nvme=queue, token_s=400e-6), Lean.RESTORE)
    assert kinds(by_turns, in_order) == ["Restore", "Recompute"]
    assert by_turns.ours_s < 0.3


def test_a_long_prompt_costs_an_engine_that_serves_in_order_more_than_its_length() -> None:
    """Those who come while it is computed wait as well, and the more of them, the longer it is."""
    base = prices(nvme=price(1.1e9), token_s=100e-6)
    asked = offer(nvme=64)
    assert kinds(decide(asked, base, Lean.RECOMPUTE)) == ["Recompute"]
    grown = replace(base, prefill_growth=1.0)
    assert decide(asked, grown, Lean.RECOMPUTE).tokens > 32 * BLOCK_TOKENS


def test_what_is_computed_in_the_same_step_is_no_time_to_bring_in() -> None:
    """A queue of one step: who comes after it has begun waits for the next one."""
    host = price(1e9)
    queued = prices(host, token_s=50e-6, wait_s=0.3)
    shared = replace(queued, prefill_shared_s=0.3)
    assert kinds(decide(offer(host=8), queued, Lean.RECOMPUTE)) == ["Restore"]
    assert kinds(decide(offer(host=8), shared, Lean.RECOMPUTE)) == ["Recompute"]


def test_beside_a_tier_that_is_known_another_is_what_is_assumed_of_it() -> None:
    """Else a long prompt with blocks on a disk that is not known yet is computed nearly whole."""
    long = offer(host=4, nvme=60)
    unknown = price(2e9, known=False)
    chosen = decide(long, prices(nvme=unknown), Lean.RESTORE)
    assert chosen.why is Why.CHEAPER
    assert chosen.tokens == 64 * BLOCK_TOKENS
    blind = decide(long, prices(host=price(2e9, known=False), nvme=unknown), Lean.RESTORE)
    assert blind.why is Why.COLD
    assert blind.tokens < 16 * BLOCK_TOKENS
    nobody = decide(long, prices(nvme=unknown, token_s=None), Lean.RESTORE)
    assert nobody.why is Why.COLD, "the engine is not known either"


def test_a_cold_start_does_not_pile_everything_on_an_unknown_tier() -> None:
    unknown = TierPrice(1.0, 0.0, 1 / 2e9, known=False)
    decision = decide(offer(nvme=8), prices(nvme=unknown), Lean.RESTORE)
    assert decision == Recompute(Why.COLD)


def test_no_hit_is_a_recompute() -> None:
    assert decide(offer(), prices(), Lean.RESTORE) == Recompute(Why.NOTHING)


def kinds(*decisions: Decision) -> list[str]:
    return [type(decision).__name__ for decision in decisions]


def test_a_slow_disk_is_recomputed_and_a_fast_one_restored() -> None:
    fast = decide(offer(nvme=16), prices(nvme=price(4e9)), Lean.RECOMPUTE)
    slow = decide(offer(nvme=16), prices(nvme=price(0.1e9)), Lean.RESTORE)
    assert kinds(fast, slow) == ["Restore", "Recompute"]
    assert slow.why is Why.CHEAPER
    assert slow.other_s > slow.ours_s > 0


def test_a_queue_on_the_link_turns_the_decision_and_a_queue_in_the_engine_turns_it_back() -> None:
    long_link = price(4e9, wait_s=2.0)
    alone = decide(offer(host=16), prices(long_link, token_s=50e-6), Lean.RESTORE)
    waiting = decide(offer(host=16), prices(long_link, token_s=50e-6, wait_s=3.0), Lean.RECOMPUTE)
    assert kinds(alone, waiting) == ["Recompute", "Restore"]


def test_only_the_part_in_the_fast_tier_is_brought() -> None:
    decision = decide(offer(host=8, nvme=8), prices(nvme=price(0.05e9)), Lean.RESTORE)
    assert isinstance(decision, Partial)
    assert decision.tokens == 8 * BLOCK_TOKENS


def test_what_fits_into_the_wait_for_the_engine_is_brought() -> None:
    """The disk is slower than computing, but the engine is busy with others meanwhile."""
    slow = price(0.5e9)
    idle = decide(offer(nvme=32), prices(nvme=slow, token_s=100e-6), Lean.RESTORE)
    busy = decide(offer(nvme=32), prices(nvme=slow, token_s=100e-6, wait_s=1.0), Lean.RESTORE)
    assert isinstance(idle, Recompute)
    assert isinstance(busy, Partial)
    brought_s = busy.tokens // BLOCK_TOKENS * BLOCK_BYTES / 0.5e9
    assert 0.8 < brought_s < 1.2


def test_a_tier_that_faded_and_idles_is_probed_with_a_few_blocks() -> None:
    slow = price(0.05e9, stale=True, idle=True)
    probe = decide(offer(nvme=16), prices(nvme=slow), Lean.RECOMPUTE)
    assert isinstance(probe, Partial)
    assert (probe.tokens, probe.why) == (2 * BLOCK_TOKENS, Why.PROBE)
    assert lean_after(probe, offer(nvme=16), Lean.RECOMPUTE) is Lean.RECOMPUTE
    busy = replace(slow, idle=False)
    assert isinstance(decide(offer(nvme=16), prices(nvme=busy), Lean.RECOMPUTE), Recompute)


def test_what_a_choice_costs_others_counts() -> None:
    near_equal = price(2.4e9)
    given_prices = prices(near_equal, token_s=50e-6)
    crowded_link = replace(
        given_prices, tiers={HOST: replace(near_equal, shadow=4.0), NVME: price(1e9)}
    )
    crowded_engine = replace(given_prices, prefill_shadow=4.0)
    assert kinds(
        decide(offer(host=16), crowded_link, Lean.RESTORE),
        decide(offer(host=16), crowded_engine, Lean.RECOMPUTE),
    ) == ["Recompute", "Restore"]


def test_an_offer_is_blocks_that_follow_one_another_within_the_prompt() -> None:
    with pytest.raises(ValueError, match="follow"):
        Offer(1000, (Stored(256, HOST, 1), Stored(256, HOST, 1)))
    with pytest.raises(ValueError, match="longer"):
        Offer(100, (Stored(256, HOST, 1),))


def test_a_cold_tier_is_asked_while_one_waits_for_the_engine_anyway() -> None:
    cold = price(2e9, wait_s=0.5, known=False)
    assert decide(offer(host=4), prices(host=cold), Lean.RESTORE) == Recompute(Why.COLD)
    waiting = prices(host=cold, wait_s=1.0)
    assert decide(offer(host=4), waiting, Lean.RESTORE) == Restore(4 * BLOCK_TOKENS, Why.COLD)


def test_what_is_given_up_for_others_makes_no_request_a_slow_one() -> None:
    """A hundred times the engine's price, and yet no more than half as long again."""
    slow = price(2e8)  # 0.16 s a block, against 0.026 s to compute it
    dear = replace(prices(nvme=slow), prefill_shadow=100.0)
    decision = decide(offer(nvme=16), dear, Lean.RESTORE)
    least = (16 * BLOCK_TOKENS + 256) * 100e-6
    assert decision.ours_s <= 1.5 * least
    unbound = decide(offer(nvme=16), dear, Lean.RESTORE, DecisionSettings(sacrifice=100.0))
    assert unbound.ours_s > 1.5 * least


def test_a_little_that_gains_next_to_nothing_is_not_brought() -> None:
    slow = prices(nvme=price(1e7))
    long = offer(host=1, nvme=15, rest=20_000)
    assert isinstance(decide(long, slow, Lean.RECOMPUTE), Recompute)
    greedy = decide(long, slow, Lean.RECOMPUTE, DecisionSettings(gain_min=0.0))
    assert greedy.tokens == BLOCK_TOKENS
