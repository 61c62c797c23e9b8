"""Who leaves next: priorities, ageing, recency and frequency, chains, pins, shares."""

from __future__ import annotations

import random  # noqa: TID251 - a seeded generator, so that a failure repeats
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from storage.block import BlockAddress
from storage.eviction import EvictionSettings
from storage.index import Index
from storage.lifecycle import Pin, Place, Resident
from storage.retention import PRIORITY_DEFAULT, BlockKind, Retention
from storage.shares import Shares
from strongroom.errors import Misuse
from tests.storage.support import FakeClock, component, context

SIZE = 4096
AGEING_S = 10.0


class Tier:
    """An index of equal blocks with a clock that moves when told."""

    def __init__(self, shares: Shares | None = None, high_share_max: float = 1.0) -> None:
        self.clock = FakeClock()
        self.index = Index(
            self.clock,
            shares,
            EvictionSettings(ageing_s=AGEING_S, high_share_max=high_share_max),
        )

    def add(
        self,
        number: int,
        *,
        parent: int | None = None,
        tenant: int = 1,
        priority: int = PRIORITY_DEFAULT,
        duration_s: float | None = None,
        nbytes: int = SIZE,
    ) -> Resident:
        wanted = context(number, parent=parent, tenant=tenant, room=tenant)
        return self.index.insert(
            wanted.address,
            wanted.parent,
            wanted.tenant,
            wanted.namespace,
            Place(number * SIZE, nbytes),
            Retention(priority, duration_s),
        )

    def touch(self, *numbers: int) -> None:
        for number in numbers:
            self.index.touch(context(number).address)

    def order(self, **how: object) -> list[int]:
        """Evict until nothing may leave; who left, in order."""
        gone = []
        for address in self.index.victims(**how):  # type: ignore[arg-type]
            self.index.remove(address)
            gone.append(int.from_bytes(address.block, "big"))
        return gone

    def first(self, **how: object) -> int | None:
        address = next(self.index.victims(**how), None)  # type: ignore[arg-type]
        return None if address is None else int.from_bytes(address.block, "big")


# Priority


@pytest.mark.parametrize("wrong", [-1, 101])
def test_a_priority_is_0_to_100(wrong: int) -> None:
    with pytest.raises(Misuse):
        Retention(wrong)


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("inf"), float("nan")])
def test_a_duration_is_positive_and_finite(wrong: float) -> None:
    with pytest.raises(Misuse):
        Retention(50, wrong)


def test_the_kinds_are_kept_in_their_order() -> None:
    tier = Tier()
    kinds = [BlockKind.SYSTEM, BlockKind.DOCUMENT, BlockKind.PREEMPTED, BlockKind.HISTORY]
    for number, kind in enumerate(kinds, 1):
        tier.add(number, priority=Retention.of(kind).priority)
    assert [kinds[number - 1] for number in tier.order()] == [
        BlockKind.DOCUMENT,
        BlockKind.HISTORY,
        BlockKind.SYSTEM,
        BlockKind.PREEMPTED,
    ]
    assert Retention() == Retention.of(BlockKind.DOCUMENT)


def test_the_lowest_priority_leaves_first_whatever_was_used_last() -> None:
    tier = Tier()
    for number, priority in enumerate((90, 10, 50, 10), 1):
        tier.add(number, priority=priority)
    tier.touch(2)
    assert tier.order() == [4, 2, 3, 1]


def test_within_a_priority_the_least_recently_used_leaves_first() -> None:
    tier = Tier()
    for number in range(1, 6):
        tier.add(number)
    tier.touch(1, 2, 3, 4, 5)
    tier.touch(2, 1)
    assert tier.order() == [3, 4, 5, 2, 1]


def test_a_priority_is_over_when_its_duration_is() -> None:
    tier = Tier()
    tier.add(1, priority=90, duration_s=60.0)
    tier.clock.advance_s(1)
    tier.add(2)
    assert tier.first() == 2
    tier.clock.advance_s(58)
    tier.touch(1)
    assert tier.first() == 2
    tier.touch(2)
    tier.clock.advance_s(2)
    assert tier.first() == 1, "the older of two of the default priority, and a use extends nothing"


def test_a_low_priority_with_a_duration_becomes_the_default_too() -> None:
    tier = Tier()
    tier.add(1, priority=5, duration_s=60.0)
    tier.add(2, priority=20)
    assert tier.first() == 1
    tier.clock.advance_s(61)
    assert tier.order() == [2, 1]


def test_a_duration_that_ends_after_its_block_has_left_touches_no_later_block() -> None:
    tier = Tier()
    tier.add(1, priority=90, duration_s=60.0)
    tier.index.remove(context(1).address)
    tier.add(2, priority=90)  # takes the slot
    tier.add(3, priority=60)
    tier.clock.advance_s(61)
    assert tier.order() == [3, 2]


# Ageing and the cap on high priorities


def test_a_priority_without_uses_ages_to_the_default() -> None:
    tier = Tier()
    tier.add(1, priority=100)
    tier.clock.advance_s(AGEING_S * 30)
    tier.add(2, priority=80)
    assert tier.first() == 1, "70 by now"
    tier.touch(1)
    assert tier.first() == 2, "a use makes it as good as new"
    tier.clock.advance_s(AGEING_S * 1000)
    tier.add(3)
    tier.touch(3)
    assert tier.order() == [2, 1, 3], "no lower than the default"


def test_a_low_priority_does_not_age_into_anything_better_or_worse() -> None:
    tier = Tier()
    tier.add(1, priority=10)
    tier.clock.advance_s(AGEING_S * 1000)
    tier.add(2, priority=9)
    assert tier.order() == [2, 1]


def test_everlasting_hundreds_starve_nobody() -> None:
    """A working set of default blocks in use, and stale hundreds that fill the tier."""

    def remaining(high_share_max: float, idle_s: float) -> int:
        tier = Tier(high_share_max=high_share_max)
        for number in range(1, 61):
            tier.add(number, priority=100)
        tier.clock.advance_s(idle_s)
        for number in range(100, 200):
            if len(tier.index) == 64:
                first = tier.first()
                assert first is not None
                tier.index.remove(context(first).address)
            tier.add(number)
            tier.touch(number)
        return sum(context(number).address in tier.index for number in range(1, 61))

    assert remaining(1.0, 0) == 60, "with neither defence they hold the tier for ever"
    assert remaining(0.5, 0) in {31, 32, 33}
    assert remaining(1.0, AGEING_S * 100) == 0


def test_a_clock_that_jumps_back_makes_nothing_younger_or_older() -> None:
    tier = Tier()
    tier.clock.advance_s(10_000)
    tier.add(1, priority=60)
    tier.clock.now_ns -= 5_000 * 10**9
    tier.add(2, priority=50)
    assert tier.order() == [2, 1]


# Recency and frequency


def test_what_was_not_used_since_it_was_stored_leaves_before_what_was() -> None:
    tier = Tier()
    for number in range(1, 11):
        tier.add(number)
    tier.touch(*range(1, 9))
    assert tier.order()[:2] == [9, 10]


def hit_rate(capacity: int, requests: list[int]) -> float:
    tier = Tier()
    hits = 0
    for request in requests:
        number = request + 1
        if context(number).address in tier.index:
            hits += 1
            tier.touch(number)
            continue
        if len(tier.index) >= capacity:
            first = tier.first()
            assert first is not None
            tier.index.remove(context(first).address)
        tier.add(number)
    return hits / len(requests)


def lru_hit_rate(capacity: int, requests: list[int]) -> float:
    kept: dict[int, None] = {}
    hits = 0
    for number in requests:
        hits += number in kept
        kept.pop(number, None)
        if len(kept) >= capacity:
            del kept[next(iter(kept))]
        kept[number] = None
    return hits / len(requests)


def zipf(seed: int, count: int, of: int) -> list[int]:
    weights = [1 / (rank + 1) for rank in range(of)]
    return random.Random(seed).choices(range(of), weights, k=count)


def test_blocks_that_are_used_once_do_not_drive_out_those_that_are_used_often() -> None:
    often = zipf(1, 4000, 400)
    scan = iter(range(10_000, 50_000))
    requests = []
    for number in often:
        requests += [number, next(scan), next(scan)]
    ours, lru = hit_rate(100, requests), lru_hit_rate(100, requests)
    assert ours > 1.2 * lru


def test_what_comes_back_teaches_how_much_room_new_blocks_deserve() -> None:
    requests = zipf(1, 8000, 2000)
    assert hit_rate(100, requests) > 1.04 * lru_hit_rate(100, requests)


def test_where_recency_is_all_there_is_it_is_not_much_worse_than_lru() -> None:
    """A working set that moves on: each block is used for a while, and never again."""
    draw = random.Random(2)
    requests = [now // 20 + draw.randrange(80) for now in range(12_000)]
    ours, lru = hit_rate(100, requests), lru_hit_rate(100, requests)
    assert ours > 0.95 * lru


# Chains


def test_a_chain_leaves_from_its_end() -> None:
    tier = Tier()
    for number in range(1, 7):
        tier.add(number, parent=number - 1 if number > 1 else None)
    assert tier.order() == [6, 5, 4, 3, 2, 1]


def test_a_parent_of_low_priority_outlives_its_children() -> None:
    tier = Tier()
    tier.add(1, priority=0)
    tier.add(2, parent=1, priority=100)
    tier.add(3, priority=50)
    assert tier.order() == [3, 2, 1]


def test_a_parent_that_became_a_leaf_is_as_old_as_its_last_use() -> None:
    tier = Tier()
    tier.add(1)
    tier.add(2, parent=1)
    tier.add(3)
    assert tier.first() in {2, 3}
    tier.touch(1, 3)
    tier.index.remove(context(2).address)
    assert tier.order() == [1, 3]


def test_a_child_whose_parent_was_dropped_still_leaves_and_frees_the_slot() -> None:
    tier = Tier()
    tier.add(1)
    tier.add(2, parent=1)
    tier.index.remove(context(1).address)
    tier.add(3)
    assert sorted(tier.order()) == [2, 3]
    slots = tier.index._eviction.slots
    for number in range(10, 10 + slots):
        tier.add(number)
    assert tier.index._eviction.slots == slots, "no slot is lost"


def test_what_room_is_made_for_keeps_its_parent() -> None:
    tier = Tier()
    tier.add(1)
    tier.add(2)
    assert tier.order(keep=context(1).address) == [2]
    assert tier.order() == [1]


# Pins and one iteration


def test_a_pinned_block_is_passed_over_and_keeps_its_place() -> None:
    tier = Tier()
    for number in range(1, 4):
        resident = tier.add(number)
        if number == 1:
            tier.index.pin(resident, tier.clock() + 30 * 10**9)
    assert tier.first() == 2
    tier.clock.advance_s(30)
    assert tier.order() == [1, 2, 3]


def test_a_victim_that_stays_is_not_given_again_and_keeps_its_place() -> None:
    tier = Tier()
    for number in range(1, 5):
        tier.add(number)
    given = [int.from_bytes(address.block, "big") for address in tier.index.victims()]
    assert given == [1, 2, 3, 4]
    assert tier.order() == [1, 2, 3, 4]


def test_an_iteration_that_is_left_half_way_loses_nothing() -> None:
    tier = Tier()
    for number in range(1, 7):
        tier.add(number)
    walk = tier.index.victims()
    next(walk)
    second = next(walk)
    tier.index.remove(second)
    tier.add(9, parent=1)  # meanwhile: who was passed over has a child now
    del walk
    assert tier.order() == [3, 4, 5, 6, 9, 1]


def test_only_one_tenants_blocks_are_given_when_asked() -> None:
    tier = Tier()
    for number in range(6):
        tier.add(number, tenant=number % 2)
    assert tier.order(tenant=component(1)) == [1, 3, 5]
    assert tier.order(tenant=component(7)) == []


# Against a model


@dataclass
class _Block:
    tenant: int
    parent: int | None
    priority: int
    until_ns: int | None
    used_ns: int


TENANTS = (0, 1, 2)
NUMBERS = st.integers(1, 24)
GUARANTEED = {0: 3 * SIZE + 1, 1: 0, 2: 0}
WEIGHTS = {0: 1.0, 1: 2.0, 2: 1.0}


class AgainstAModel(RuleBasedStateMachine):
    """An index with shares against lists that are searched as a whole."""

    shared = True

    @initialize()
    def start(self) -> None:
        self.shares = Shares()
        for tenant in TENANTS:
            self.shares.set_share(component(tenant), GUARANTEED[tenant], WEIGHTS[tenant])
        self.tier = Tier(self.shares if self.shared else None)
        self.blocks: dict[int, _Block] = {}
        self.pins: list[tuple[int, Pin]] = []

    @rule(
        number=NUMBERS,
        parent=st.none() | NUMBERS,
        tenant=st.sampled_from(TENANTS),
        priority=st.sampled_from((0, 35, 40, 80, 100)),
        duration_s=st.none() | st.sampled_from((5.0, 50.0)),
    )
    def insert(
        self, number: int, parent: int | None, tenant: int, priority: int, duration_s: float | None
    ) -> None:
        if number in self.blocks or parent == number:
            return
        if parent in self.blocks and self.blocks[parent].tenant != tenant:
            return  # ids are keyed by tenant: no chain reaches into another's
        self.tier.add(
            number, parent=parent, tenant=tenant, priority=priority, duration_s=duration_s
        )
        self.shares.charge(component(tenant), SIZE)
        now = self.tier.clock()
        until = None if duration_s is None else now + int(duration_s * 1e9)
        linked = parent if parent in self.blocks else None
        self.blocks[number] = _Block(tenant, linked, priority, until, now)

    @rule(number=NUMBERS)
    def touch(self, number: int) -> None:
        self.tier.touch(number)
        if number in self.blocks:
            self.blocks[number].used_ns = self.tier.clock()

    @rule(number=NUMBERS)
    def drop(self, number: int) -> None:
        if number in self.blocks:
            self.tier.index.remove(context(number).address)
            self._forget(number)

    @rule(number=NUMBERS, pin_s=st.sampled_from((1, 20)))
    def pin(self, number: int, pin_s: int) -> None:
        row = self.tier.index.get(context(number).address)
        assert (row is not None) == (number in self.blocks)
        if row is not None:
            pin = self.tier.index.pin(row.resident, self.tier.clock() + pin_s * 10**9)
            assert pin is not None
            self.pins.append((number, pin))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.pins))
        self.pins.remove(held)
        self.tier.index.unpin(held[1])

    @rule(seconds=st.sampled_from((0.5, 7.0, 60.0)))
    def time_passes(self, seconds: float) -> None:
        self.tier.clock.advance_s(seconds)

    @rule(
        writer=st.none() | st.sampled_from(TENANTS),
        keep=st.none() | NUMBERS,
        count=st.integers(1, 30),
        left=st.sets(NUMBERS),
        unwilling=st.sets(NUMBERS),
    )
    def make_room(
        self,
        writer: int | None,
        keep: int | None,
        count: int,
        left: set[int],
        unwilling: set[int],
    ) -> None:
        """Evict up to `count`, but for those left for later; each must be a right one."""
        who = None if writer is None else component(writer)
        kept = None if keep is None else context(keep).address
        spared = unwilling if keep is None else unwilling | {keep}
        given: set[int] = set()
        victims = self.tier.index.victims(
            writer=who, keep=kept, may_leave=lambda found: _number(found) not in unwilling
        )
        for address in victims:
            number = _number(address)
            self._check_choice(number, writer, spared, given)
            if number in left:
                given.add(number)
            else:
                self.tier.index.remove(address)
                self._forget(number)
                count -= 1
                if not count:
                    return
        assert self._choices(writer, spared, given) == set(), "it ended early"

    @invariant()
    def what_is_here_is_what_was_put_here(self) -> None:
        if not hasattr(self, "tier"):
            return
        index = self.tier.index
        assert {_number(row.resident.address) for row in index.rows()} == set(self.blocks)
        assert len(index) == len(self.blocks)
        pinned = {number for number in self.blocks if self._pinned(number)}
        assert index.pinned == len(pinned)
        assert index.pinned_bytes == SIZE * len(pinned)

    def _check_choice(
        self, number: int, writer: int | None, spared: set[int], given: set[int]
    ) -> None:
        choices = self._choices(writer, spared, given)
        assert number in choices
        mine = self.blocks[number]
        others: dict[int, list[float]] = {}
        for other in choices:
            if self.blocks[other].tenant == mine.tenant or not self.shared:
                others.setdefault(self._level(other), []).append(self._aged(other))
        rounding = 1  # times are kept in ticks
        for priorities in others.values():
            assert self._aged(number) <= max(priorities) + rounding

    def _choices(self, writer: int | None, spared: set[int], given: set[int]) -> set[int]:
        """Who may be the next, by the tenants' shares. What was given is given up."""
        parents = {block.parent for block in self.blocks.values()}
        leaves = {
            number
            for number in self.blocks
            if number not in parents | spared | given and not self._pinned(number)
        }
        if not self.shared:
            return leaves
        given_up = {
            tenant: SIZE * sum(self.blocks[number].tenant == tenant for number in given)
            for tenant in TENANTS
        }
        left = {tenant: self.shares.used_by(component(tenant)) for tenant in TENANTS}
        left = {tenant: left[tenant] - given_up[tenant] for tenant in TENANTS}
        excess = {
            tenant: (left[tenant] - GUARANTEED[tenant]) / WEIGHTS[tenant] for tenant in TENANTS
        }
        payers = {
            tenant
            for tenant in TENANTS
            if any(self.blocks[number].tenant == tenant for number in leaves)
            and (tenant == writer or self._pays(tenant, writer, left, excess))
        }
        if not payers:
            return set()
        most = max(excess[tenant] for tenant in payers)
        first = {tenant for tenant in payers if excess[tenant] == most}
        if writer in first:
            first = {writer}
        return {number for number in leaves if self.blocks[number].tenant in first}

    def _pays(
        self, tenant: int, writer: int | None, left: dict[int, int], excess: dict[int, float]
    ) -> bool:
        return (
            excess[tenant] > 0
            and left[tenant] - SIZE >= GUARANTEED[tenant]
            and (writer is None or excess[tenant] > excess[writer])
        )

    def _level(self, number: int) -> int:
        block = self.blocks[number]
        over = block.until_ns is not None and self.tier.clock() > block.until_ns
        return PRIORITY_DEFAULT if over else block.priority

    def _aged(self, number: int) -> float:
        level = self._level(number)
        if level <= PRIORITY_DEFAULT:
            return level
        idle_s = (self.tier.clock() - self.blocks[number].used_ns) / 1e9
        return max(PRIORITY_DEFAULT, level - idle_s / AGEING_S)

    def _pinned(self, number: int) -> bool:
        now = self.tier.clock()
        return any(held == number and pin.deadline_ns > now for held, pin in self.pins)

    def _forget(self, number: int) -> None:
        block = self.blocks.pop(number)
        self.pins = [held for held in self.pins if held[0] != number]
        for other in self.blocks.values():
            if other.parent == number:
                other.parent = None
        self.shares.credit(component(block.tenant), SIZE)


class AgainstAModelWithoutShares(AgainstAModel):
    shared = False


def _number(address: BlockAddress) -> int:
    return int.from_bytes(address.block, "big")


TestAgainstAModel = AgainstAModel.TestCase
TestAgainstAModel.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestWithoutShares = AgainstAModelWithoutShares.TestCase
TestWithoutShares.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
