"""Shares of a tier: who has what, who is refused, and who pays for room."""

from __future__ import annotations

import math
import random  # noqa: TID251 - a seeded generator, so that a failure repeats
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.block import BlockAddress
from storage.compose import StoreSettings, open_store
from storage.fence import Fence
from storage.retention import Retention
from storage.shares import GUARANTEED_MAX, Share, Shares
from storage.store import BlockStore
from storage.tiers.host import HostTier
from storage.tiers.protocol import TierName
from strongroom.errors import Misuse, Overloaded, QuotaExceeded
from strongroom.identity import ComponentId
from tests.storage.support import KEYS, FakeClock, component, context, plaintext, sealed

QUIET, FLOOD, THIRD = component(1), component(2), component(3)
RECORD = len(sealed(context())[1])
ROOM = 24


def shares(**kinds: Share) -> dict[ComponentId, Share]:
    names = {"quiet": QUIET, "flood": FLOOD, "third": THIRD}
    return {names[kind]: share for kind, share in kinds.items()}


class Arena:
    """A host tier of equal records, fed by several tenants."""

    def __init__(self, **kinds: Share) -> None:
        self.clock = FakeClock()
        self.dirty: set[int] = set()
        self.backed = False
        self.number = 0
        self.owner: dict[int, ComponentId] = {}
        self.tier = HostTier(
            ROOM * RECORD,
            self.clock,
            pin_ns=30 * 10**9,
            shares=shares(**kinds),
            is_dirty=lambda address: int.from_bytes(address.block, "big") in self.dirty,
            is_backed=lambda _: self.backed,
            lock_memory=False,
        )

    def save(self, tenant: ComponentId, count: int = 1) -> None:
        for _ in range(count):
            self.number += 1
            number = int(tenant, 16)
            wanted = context(self.number, tenant=number, room=number)
            header, record = sealed(wanted)
            reserved = self.tier.reserve(
                wanted.address, wanted.parent, wanted.tenant, wanted.namespace, len(record)
            )
            self.tier.publish(self.tier.seal(reserved, header), lambda: None)
            self.owner[self.number] = tenant

    def clean(self) -> None:
        """Whatever was dirty is written behind."""
        were, self.dirty = self.dirty, set()
        for number in were:
            self.tier.cleaned(context(number).address)

    def numbers(self, tenant: ComponentId) -> list[int]:
        return [
            number
            for number, owner in self.owner.items()
            if owner == tenant and context(number).address in self.tier
        ]

    def addresses(self, tenant: ComponentId) -> set[BlockAddress]:
        return {context(number).address for number in self.numbers(tenant)}

    def blocks(self, tenant: ComponentId) -> int:
        return len(self.numbers(tenant))


# Accounts


def test_a_tenant_above_its_cap_is_refused_by_name_and_counted() -> None:
    table = Shares(shares=shares(quiet=Share(cap_bytes=10)))
    table.check(QUIET, 10)
    table.charge(QUIET, 10)
    with pytest.raises(QuotaExceeded) as refusal:
        table.check(QUIET, 1)
    assert refusal.value.limit == 10
    table.check(FLOOD, 10**12)
    assert (table.refusals, table.refused()) == (1, {QUIET: 1})


def test_more_is_never_given_back_than_was_charged() -> None:
    table = Shares()
    table.charge(QUIET, 3)
    with pytest.raises(ValueError, match="more bytes"):
        table.credit(QUIET, 4)
    table.credit(QUIET, 3)
    assert table.used() == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"guaranteed_bytes": -1},
        {"weight": 0.0},
        {"weight": -1.0},
        {"weight": math.inf},
        {"weight": math.nan},
        {"cap_bytes": -1},
    ],
)
def test_a_share_that_makes_no_sense_is_misuse(wrong: dict[str, float]) -> None:
    with pytest.raises(Misuse):
        Share(**wrong)  # type: ignore[arg-type]  # that is the point


def test_a_cap_of_nothing_lets_nothing_in() -> None:
    table = Shares(default_bytes=100)
    table.set_cap(QUIET, 0)
    with pytest.raises(QuotaExceeded):
        table.check(QUIET, 1)
    table.check(FLOOD, 100)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=8), st.integers(1, 10**9))
def test_guarantees_together_leave_room_for_everybody(guarantees: list[int], capacity: int) -> None:
    table = Shares(capacity_bytes=capacity)
    for number, nbytes in enumerate(guarantees):
        table.set_share(component(number), nbytes)
    bound = sum(table.guaranteed(component(number)) for number in range(len(guarantees)))
    assert bound <= max(GUARANTEED_MAX * capacity, 0)
    if sum(guarantees) <= GUARANTEED_MAX * capacity:
        assert bound == sum(guarantees), "scaled only when they have to be"


def test_the_excess_is_what_is_not_guaranteed_over_the_weight() -> None:
    table = Shares(shares=shares(quiet=Share(100, 2.0), flood=Share(0, 1.0)))
    table.charge(QUIET, 300)
    table.charge(FLOOD, 150)
    assert table.excess(QUIET) == 100
    assert table.excess(FLOOD) == 150
    table.set_cap(QUIET, 299)
    assert table.excess(QUIET) > table.excess(FLOOD), "above a cap pays before all others"


# Who makes room. In pairs: with the guarantee, and what happens without it.


def test_a_flood_displaces_its_own_blocks_and_the_guaranteed_ones_stay() -> None:
    arena = Arena(quiet=Share(8 * RECORD))
    arena.save(QUIET, 8)
    kept = arena.numbers(QUIET)
    arena.save(FLOOD, 500)
    assert arena.numbers(QUIET) == kept
    assert arena.blocks(FLOOD) == ROOM - 8


def test_without_a_guarantee_a_quiet_tenant_has_an_equal_share_and_no_more() -> None:
    arena = Arena()
    arena.save(QUIET, ROOM)
    arena.save(FLOOD, 500)
    assert arena.blocks(QUIET) == ROOM // 2
    assert arena.blocks(FLOOD) == ROOM // 2
    arena.save(QUIET, 500)
    assert arena.blocks(FLOOD) == ROOM // 2, "and the flood has its own"


def test_weights_divide_what_is_not_guaranteed() -> None:
    arena = Arena(quiet=Share(weight=3.0), flood=Share(weight=1.0))
    turns = random.Random(3)
    for _ in range(400):
        arena.save(turns.choice((QUIET, FLOOD)))
    assert arena.blocks(QUIET) == pytest.approx(3 * ROOM / 4, abs=1)


def test_the_tenant_furthest_above_its_share_pays_first() -> None:
    arena = Arena(quiet=Share(4 * RECORD), third=Share(2 * RECORD))
    arena.save(FLOOD, 10)
    arena.save(THIRD, 9)
    arena.save(QUIET, 5)
    arena.save(QUIET, 3)
    assert (arena.blocks(FLOOD), arena.blocks(THIRD)) == (7, 9)
    arena.save(QUIET, 1)
    assert (arena.blocks(FLOOD), arena.blocks(THIRD)) in {(6, 9), (7, 8)}


def test_a_flood_that_can_evict_nothing_of_its_own_is_refused_and_others_are_not() -> None:
    arena = Arena()
    arena.save(QUIET, 4)
    arena.save(FLOOD, ROOM - 4)
    kept = arena.numbers(QUIET)
    arena.dirty = set(arena.numbers(FLOOD))
    with pytest.raises(Overloaded):
        arena.save(FLOOD)
    assert arena.numbers(QUIET) == kept
    arena.clean()
    arena.save(QUIET)
    assert arena.numbers(QUIET)[:-1] == kept
    arena.save(FLOOD)


def test_a_guarantee_is_not_cut_by_the_block_that_reaches_beyond_it() -> None:
    arena = Arena(quiet=Share(8 * RECORD + RECORD // 2), flood=Share(13 * RECORD))
    arena.save(FLOOD, 13)
    arena.save(QUIET, 9)
    arena.save(THIRD, 2)
    arena.dirty = set(arena.numbers(THIRD))
    with pytest.raises(Overloaded):
        arena.save(component(4))
    assert (arena.blocks(QUIET), arena.blocks(FLOOD)) == (9, 13)
    arena.clean()
    arena.save(component(4))
    assert arena.blocks(THIRD) == 1


def test_victims_that_are_taken_together_stay_outside_the_guarantee_too() -> None:
    """A caller may look at several before it removes the first, as the NVMe tier does."""
    arena = Arena(quiet=Share(8 * RECORD))
    arena.save(QUIET, 12)
    arena.save(FLOOD, 10)
    together = list(arena.tier._index.victims(writer=THIRD))
    assert sum(address in arena.addresses(QUIET) for address in together) == 4
    assert sum(address in arena.addresses(FLOOD) for address in together) == 10
    assert all(address in arena.addresses(FLOOD) for address in together[:6])


def test_a_tenant_replaces_its_own_blocks_also_below_its_guarantee() -> None:
    arena = Arena(quiet=Share(12 * RECORD), flood=Share(9 * RECORD))
    arena.save(FLOOD, 9)
    arena.save(QUIET, 50)
    assert arena.blocks(FLOOD) == 9
    assert arena.blocks(QUIET) == ROOM - 9
    arena.save(FLOOD, 50)
    assert arena.blocks(QUIET) >= 12


def test_nobody_starves_where_guarantees_promise_more_than_there_is() -> None:
    arena = Arena(quiet=Share(100 * RECORD), flood=Share(100 * RECORD))
    arena.save(QUIET, 100)
    arena.save(FLOOD, 100)
    arena.save(THIRD, 1)
    assert arena.blocks(THIRD) == 1
    assert min(arena.blocks(QUIET), arena.blocks(FLOOD)) >= ROOM * GUARANTEED_MAX // 2 - 1


def test_every_tenant_that_writes_keeps_its_part_whatever_the_order() -> None:
    for seed in range(5):
        arena = Arena()
        turns = random.Random(seed)
        counts: Counter[ComponentId] = Counter()
        for _ in range(600):
            tenant = turns.choices((QUIET, FLOOD, THIRD), (1, 20, 4))[0]
            arena.save(tenant)
            counts[tenant] += 1
        assert min(arena.blocks(tenant) for tenant in counts) >= ROOM // 3 - 1


# Changes while it runs


def test_lowering_a_cap_moves_no_block() -> None:
    arena = Arena()
    arena.save(QUIET, 12)
    arena.tier.set_quota(QUIET, 2 * RECORD)
    assert arena.blocks(QUIET) == 12
    with pytest.raises(QuotaExceeded):
        arena.save(QUIET)
    assert arena.blocks(QUIET) == 12, "what no other tier holds is not given up for a write"
    assert arena.tier.refused() == {QUIET: 1}


def test_above_a_lowered_cap_a_write_displaces_a_step_and_never_all_at_once() -> None:
    arena = Arena()
    arena.backed = True
    arena.save(QUIET, 12)
    arena.tier.set_quota(QUIET, 3 * RECORD)
    counts = []
    for _ in range(12):
        before = set(arena.numbers(QUIET))
        arena.save(QUIET)
        assert len(before - set(arena.numbers(QUIET))) <= 2
        counts.append(arena.blocks(QUIET))
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 3
    assert arena.tier.refused() == {}


def test_above_a_lowered_cap_others_displace_it_first_and_one_for_one() -> None:
    arena = Arena(quiet=Share(20 * RECORD))
    arena.save(FLOOD, 10)
    arena.save(QUIET, 14)
    arena.tier.set_quota(QUIET, 4 * RECORD)
    for step in range(1, 11):
        arena.save(THIRD)
        assert arena.blocks(QUIET) == 14 - step
        assert arena.blocks(FLOOD) == 10
    arena.save(THIRD)
    assert arena.blocks(QUIET) == 4, "its cap, which is also all that is guaranteed now"


def test_a_lowered_guarantee_is_displaced_step_by_step() -> None:
    arena = Arena(quiet=Share(20 * RECORD))
    arena.save(QUIET, 20)
    arena.save(FLOOD, 20)
    assert arena.blocks(QUIET) == 20
    arena.tier.set_share(QUIET, 0, 1.0)
    assert arena.blocks(QUIET) == 20
    for step in range(1, 9):
        arena.save(FLOOD)
        assert arena.blocks(QUIET) == 20 - step
    arena.save(FLOOD, 20)
    assert arena.blocks(QUIET) == 12


def test_a_raised_guarantee_holds_from_the_next_write_on() -> None:
    arena = Arena()
    arena.save(QUIET, 20)
    arena.save(FLOOD, 6)
    present = arena.blocks(QUIET)
    arena.tier.set_share(QUIET, present * RECORD, 1.0)
    arena.save(FLOOD, 50)
    assert arena.blocks(QUIET) == present


# One large block


def test_a_large_block_takes_its_room_from_who_is_furthest_above() -> None:
    arena = Arena(quiet=Share(8 * RECORD))
    arena.save(QUIET, 8)
    arena.save(FLOOD, ROOM - 8)
    large = context(9000, tenant=3, room=3, segments=(5000, 3000, 40000))
    header, record = sealed(large)
    reserved = arena.tier.reserve(
        large.address, large.parent, large.tenant, large.namespace, len(record)
    )
    arena.tier.publish(arena.tier.seal(reserved, header), lambda: None)
    assert arena.blocks(QUIET) == 8
    assert large.address in arena.tier
    assert arena.tier.used()[THIRD] == len(record)


# Through the store's settings


def store_settings(**changes: Any) -> StoreSettings:
    values: dict[str, Any] = {
        "host_bytes": ROOM * RECORD,
        "nvme_bytes": 8 * 1024 * 1024,
        "region_bytes": 1024 * 1024,
        "crypto_threads": 1,
        "disk_threads": 1,
        "write_behind_s": 0.0,
        "lock_memory": False,
    }
    return StoreSettings(**(values | changes))


async def fill(store: BlockStore, tenant: int, first: int, count: int) -> None:
    for number in range(first, first + count):
        wanted = context(number, tenant=tenant, room=tenant)
        await store.save(wanted, KEYS, plaintext(wanted), Fence())


def in_host(store: BlockStore, numbers: range) -> int:
    return sum(store.tier_of(context(number).address) is TierName.HOST for number in numbers)


@pytest.mark.parametrize("guaranteed", [8 * RECORD, 0])
async def test_a_guarantee_from_the_settings_holds_against_a_flood(guaranteed: int) -> None:
    shares_set = shares(quiet=Share(guaranteed, 0.01))
    async with open_store(store_settings(host_shares=shares_set)) as store:
        await fill(store, 1, 1, 8)
        await fill(store, 2, 1000, 200)
        kept = in_host(store, range(1, 9))
        assert kept == 8 if guaranteed else kept < 3


async def test_shares_and_caps_change_while_the_store_runs(tmp_path: Path) -> None:
    async with open_store(store_settings(nvme_path=tmp_path / "nvme")) as store:
        store.set_share(QUIET, TierName.HOST, 8 * RECORD, 1.0)
        store.set_share(QUIET, TierName.NVME, 8 * RECORD, 1.0)
        store.set_quota(FLOOD, TierName.NVME, 4 * RECORD)
        await fill(store, 1, 1, 8)
        await fill(store, 2, 1000, 200)
        await store.flush()
        assert in_host(store, range(1, 9)) == 8
        assert store.tenant_use(TierName.NVME)[FLOOD] == (4 * RECORD, 4 * RECORD)
        before = store.quota_refused(TierName.NVME).get(FLOOD, 0)
        store.set_quota(FLOOD, TierName.NVME, RECORD - 1)
        await fill(store, 2, 2000, 1)
        await store.flush()
        assert store.tenant_use(TierName.NVME)[FLOOD] == (4 * RECORD, RECORD - 1)
        refused = store.quota_refused(TierName.NVME)
        assert refused[FLOOD] == before + 1
        assert QUIET not in refused
    async with open_store(store_settings()) as store:
        with pytest.raises(Misuse):
            store.set_share(QUIET, TierName.NVME, 1, 1.0)
        assert store.quota_refused(TierName.NVME) == {}


async def test_a_promoted_block_is_kept_as_its_copy_on_nvme_is(tmp_path: Path) -> None:
    wanted = context(1)
    host_bytes = 6 * RECORD
    async with open_store(
        store_settings(nvme_path=tmp_path / "nvme", host_bytes=host_bytes)
    ) as store:
        await store.save(wanted, KEYS, plaintext(wanted), Fence(), Retention(80))
        await store.flush()
        store._residency.host.drop(wanted.address)
        staging = memoryview(bytearray(wanted.plaintext_bytes))
        await store.load(wanted, KEYS, staging, Fence())
        assert store.tier_of(wanted.address) is TierName.HOST
        await fill(store, 1, 10, 4)
        await store.flush()
        order = list(store._residency.host._index.victims())
        assert order[-1] == wanted.address
