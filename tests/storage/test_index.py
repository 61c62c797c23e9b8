"""The index: what it knows of a block, and what a block costs it."""

from __future__ import annotations

import gc
import hashlib
import statistics
import time
import tracemalloc
from collections.abc import Callable

import pytest

from storage.block import BlockAddress
from storage.index import Index
from storage.lifecycle import Place
from storage.retention import Retention
from storage.shares import Shares
from strongroom.blocks import ROOT_PARENT, BlockId
from strongroom.errors import Missing
from tests.storage.support import FakeClock, component, context, namespace

MANY = 100_000
BYTES_A_BLOCK = 300
"""Of the 400 that a tier may take in all."""


def address(number: int) -> BlockAddress:
    return BlockAddress(
        BlockId(hashlib.blake2b(number.to_bytes(8, "big"), digest_size=32).digest()), number % 2
    )


def filled(count: int, shares: Shares | None = None) -> Index:
    """Chains of 16 blocks, of 7 tenants with 7 rooms each, at several priorities."""
    index = Index(FakeClock(), shares)
    for number in range(count):
        parent = address(number - 2).block if number % 32 > 1 else ROOT_PARENT
        tenant = number // 32 % 7
        index.insert(
            address(number),
            parent,
            component(tenant),
            namespace(7 * tenant + number // 32 % 49),
            Place(number * 4096, 4096),
            Retention((35, 40, 60)[number % 3]),
        )
        if shares is not None:
            shares.charge(component(tenant), 4096)
    return index


@pytest.fixture(scope="module")
def large() -> Index:
    return filled(MANY, Shares())


# What it knows


def test_a_row_is_what_was_put_in() -> None:
    index = Index(FakeClock())
    wanted = context(3, tenant=2, room=5)
    resident = index.insert(
        wanted.address,
        wanted.parent,
        wanted.tenant,
        wanted.namespace,
        Place(12345, 2**33),
        Retention(80),
    )
    row = index.get(wanted.address)
    assert row is not None
    assert row.resident == resident
    assert (resident.tenant, resident.namespace) == (component(2), namespace(5))
    assert row.place == Place(12345, 2**33)
    assert index.retention_of(wanted.address) == Retention(80)
    assert [found.resident for found in index.rows()] == [resident]
    with pytest.raises(ValueError, match="resident already"):
        index.insert(wanted.address, wanted.parent, wanted.tenant, wanted.namespace, Place(0, 1))
    assert index.remove(wanted.address) == row
    assert index.get(wanted.address) is None
    with pytest.raises(Missing):
        index.remove(wanted.address)
    assert len(index) == 0


def test_a_priority_that_runs_out_is_not_handed_to_a_copy() -> None:
    index = Index(FakeClock())
    wanted = context(3)
    index.insert(
        wanted.address,
        wanted.parent,
        wanted.tenant,
        wanted.namespace,
        Place(0, 1),
        Retention(80, 60.0),
    )
    assert index.retention_of(wanted.address) == Retention()
    assert index.retention_of(context(4).address) == Retention()


def test_a_block_moves_only_from_where_it_is() -> None:
    index = filled(4)
    old, new = Place(4096, 4096), Place(999 * 4096, 4096)
    assert not index.relocate(address(1), Place(0, 4096), new)
    assert index.relocate(address(1), old, new)
    row = index.get(address(1))
    assert row is not None
    assert row.place == new
    assert not index.relocate(address(99), old, new)


def test_a_namespaces_blocks_are_found_while_others_come_and_go() -> None:
    index = filled(2000)
    wanted = {namespace(1), namespace(8)}
    expected = {row.resident.address for row in index.rows() if row.resident.namespace in wanted}
    assert len(expected) > 50
    found: set[BlockAddress] = set()
    dropped = set()
    for number, addresses in enumerate(index.of_namespaces(wanted, 100)):
        found |= set(addresses)
        for gone in (address(1999 - number), address(number)):
            if gone in index:
                index.remove(gone)
                dropped.add(gone)
        fresh = address(10_000 + number)
        index.insert(fresh, ROOT_PARENT, component(9), namespace(99), Place(0, 1))
    assert found - dropped == expected - dropped, "each that stayed is found, and no other"


def test_a_walk_copies_nothing_that_grows_with_the_index(large: Index) -> None:
    tracemalloc.start()
    try:
        steps = sum(1 for _ in large.of_namespaces([namespace(8)], 4096))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert steps == -(-MANY // 4096)
    assert peak < 1024 * 1024


def test_a_walk_for_a_namespace_that_is_not_here_looks_at_nothing(large: Index) -> None:
    assert list(large.of_namespaces([namespace(1000)], 4096)) == []


# What it costs


def test_a_block_costs_a_bounded_number_of_bytes_and_no_object() -> None:
    shares = Shares()
    filled(100, shares)  # what there is once, whatever the number of blocks
    gc.collect()
    objects = len(gc.get_objects())
    tracemalloc.start()
    try:
        index = filled(MANY, Shares())
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken / MANY < BYTES_A_BLOCK
    gc.collect()
    assert len(gc.get_objects()) - objects < 500, "nothing that the collector visits, by block"
    assert not gc.is_tracked(index._slots), "nor does it look into the map"


def test_each_pin_is_its_own_and_is_released_once() -> None:
    index = filled(2)
    reference = index.reference(address(0))
    assert reference is not None
    pins = [index.pin(reference, 10**18), index.pin(reference, 10**18)]
    assert pins[0] is not None
    assert pins[1] is not None
    index.unpin(pins[0])
    index.unpin(pins[0])
    assert index.is_pinned(address(0)), "the other one's is not released by repeating"
    index.unpin(pins[1])
    assert not index.is_pinned(address(0))


def test_a_pin_of_a_writing_that_is_gone_is_refused_and_releases_nothing_of_the_next() -> None:
    index = filled(1)
    old = index.reference(address(0))
    assert old is not None
    stale = index.pin(old, 10**18)
    assert stale is not None
    index.remove(address(0))
    assert index.reference(address(0)) is None
    index.insert(address(0), ROOT_PARENT, component(0), namespace(0), Place(0, 4096))
    new = index.reference(address(0))
    assert new is not None
    assert index.pin(old, 10**18) is None
    held = index.pin(new, 10**18)
    index.unpin(stale)
    assert held is not None
    assert index.is_pinned(address(0))
    assert index.place_of(held) == Place(0, 4096)


def test_uses_pins_and_victims_leave_nothing_behind(large: Index) -> None:
    gc.collect()
    objects = len(gc.get_objects())
    for number in range(0, MANY, 7):
        large.touch(address(number))
    row = large.get(address(5))
    assert row is not None
    pin = large.pin(row.resident, 10**18)
    assert pin is not None
    large.unpin(pin)
    for victim, _ in zip(large.victims(), range(1000), strict=False):
        assert victim in large
    del row, pin
    gc.collect()
    assert len(gc.get_objects()) - objects < 100


def seconds(job: Callable[[], object]) -> float:
    """The best of some runs: what it takes when nobody is in the way."""
    times = []
    for _ in range(7):
        before = time.perf_counter()
        job()
        times.append(time.perf_counter() - before)
    return min(times)


def test_lookups_and_uses_cost_the_same_in_a_large_index(large: Index) -> None:
    small = filled(1000)
    here = [address(number) for number in range(0, 1000, 2)]
    there = [address(number) for number in range(0, MANY, MANY // 500)]

    def look(index: Index, addresses: list[BlockAddress]) -> Callable[[], object]:
        return lambda: [index.namespace_of(one) for one in addresses]

    def use(index: Index, addresses: list[BlockAddress]) -> Callable[[], object]:
        return lambda: [index.touch(one) for one in addresses]  # type: ignore[func-returns-value]

    for job in (look, use):
        ratios = [seconds(job(large, there)) / seconds(job(small, here)) for _ in range(3)]
        assert statistics.median(ratios) < 3, "caches, and no more; a scan would be 100"


class Counted(Index):
    """Counts how many blocks are asked whether somebody holds them: the steps of a search."""

    steps = 0

    def _is_held(self, slot: int) -> bool:
        self.steps += 1
        return super()._is_held(slot)


def test_a_victim_costs_no_scan_past_parents_or_other_tenants() -> None:
    """Long chains, whose parents are the coldest: each is stepped over once, and not each time."""
    shares = Shares()
    index = Counted(FakeClock(), shares)
    depth, chains = 500, 8
    for number in range(depth * chains):
        parent = address(number - 2 * chains).block if number >= 2 * chains else ROOT_PARENT
        tenant = component(number % 2)
        index.insert(address(number), parent, tenant, namespace(1), Place(0, 4096))
        shares.charge(tenant, 4096)
    gone = 0
    for victim in index.victims():
        row = index.remove(victim)
        shares.credit(row.resident.tenant, 4096)
        gone += 1
    assert gone == depth * chains
    assert index.steps <= 3 * gone
