"""Of some blocks, which leave first: the same order as in the whole tier, and nothing leaves."""

from __future__ import annotations

import random  # noqa: TID251 - a seeded generator, so that a failure repeats
from collections.abc import Sequence

from storage.block import BlockAddress
from storage.eviction import EvictionSettings
from storage.index import Index
from storage.lifecycle import Place
from storage.retention import Retention
from storage.shares import Share, Shares
from strongroom.blocks import ROOT_PARENT
from tests.storage.support import FakeClock, block, component, namespace

NBYTES = 100


class Tier:
    """Blocks by number, a hundred bytes each."""

    def __init__(self, shares: dict[int, Share] | None = None) -> None:
        self.clock = FakeClock()
        self.shares = Shares(
            capacity_bytes=10_000, shares={component(n): s for n, s in (shares or {}).items()}
        )
        self.index = Index(self.clock, self.shares, EvictionSettings())

    def add(
        self, number: int, parent: int | None = None, tenant: int = 1, priority: int = 35
    ) -> None:
        self.shares.charge(component(tenant), NBYTES)
        self.index.insert(
            BlockAddress(block(number), 0),
            ROOT_PARENT if parent is None else block(parent),
            component(tenant),
            namespace(tenant),
            Place(number * 4096, NBYTES),
            Retention(priority),
        )

    def among(self, numbers: Sequence[int], writer: int = 1, keep: int = 10**6) -> list[int]:
        shortlist = self.index.shortlist(
            self.shares, component(writer), BlockAddress(block(keep), 0)
        )
        names = {}
        for number in numbers:
            slot = self.index.slot_of(BlockAddress(block(number), 0))
            assert slot is not None
            names[slot] = number
            shortlist.add(slot)
        return [names[slot] for slot in shortlist]

    def victims(self, writer: int = 1) -> list[int]:
        found = self.index.victims(writer=component(writer))
        return [int.from_bytes(address.block, "big") for address in found]


def test_they_come_in_the_order_of_the_whole_tier_and_nothing_leaves() -> None:
    rng = random.Random(3)
    tier = Tier()
    for number in range(1, 61):
        tier.add(number, priority=rng.choice((20, 35, 35, 60)))
        tier.clock.advance_s(1)
    for _ in range(40):
        tier.index.touch(BlockAddress(block(rng.randrange(1, 61)), 0))
    whole = tier.victims()
    assert len(whole) == 60
    some = rng.sample(range(1, 61), 20)
    assert tier.among(some) == [number for number in whole if number in some]
    assert tier.victims() == whole


def test_children_come_before_their_parent_and_a_parent_whose_child_stays_never() -> None:
    tier = Tier()
    for number, parent in ((1, None), (2, 1), (3, 2), (10, None), (11, 10)):
        tier.add(number, parent)
    assert tier.among([1, 2, 3, 10]) == [3, 2, 1]
    assert tier.among([10, 11]) == [11, 10]


def test_what_is_held_or_needed_in_a_moment_never_comes() -> None:
    tier = Tier()
    for number in (1, 2, 3):
        tier.add(number)
    row = tier.index.get(BlockAddress(block(2), 0))
    assert row is not None
    pin = tier.index.pin(row.resident, tier.clock() + 10**9)
    assert pin is not None
    assert tier.among([1, 2, 3], keep=1) == [3]
    tier.index.unpin(pin)
    assert tier.among([1, 2, 3]) == [1, 2, 3]


def test_tenants_pay_by_their_excess_and_never_below_their_guarantee() -> None:
    tier = Tier({1: Share(guaranteed_bytes=2 * NBYTES)})
    for number in (1, 2, 3):
        tier.add(number, tenant=1)
    for number in range(10, 14):
        tier.add(number, tenant=2)
    assert tier.among([1, 2, 3, 10, 11], writer=3) == [10, 11, 1]
    assert tier.among([1, 2, 3], writer=3) == [1], "two are guaranteed"
    assert tier.among([1, 2, 3], writer=2) == [], "the writer is further above its share"
    assert tier.among([1, 2, 3], writer=1) == [1, 2, 3], "with its own it pays in any case"


def test_what_is_dropped_meanwhile_does_not_come_nor_what_took_its_slot() -> None:
    tier = Tier()
    for number in range(1, 5):
        tier.add(number)
    shortlist = tier.index.shortlist(tier.shares, component(1), BlockAddress(block(99), 0))
    slots = [tier.index.slot_of(BlockAddress(block(number), 0)) for number in range(1, 5)]
    for slot in slots:
        assert slot is not None
        shortlist.add(slot)
    tier.index.remove(BlockAddress(block(1), 0))
    tier.index.remove(BlockAddress(block(2), 0))
    tier.add(50)
    assert list(shortlist) == slots[2:]
