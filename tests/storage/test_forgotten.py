"""What was in a tier once costs nothing later: tenants, names and retired namespaces."""

from __future__ import annotations

from storage.block import BlockAddress
from storage.index import Index
from storage.lifecycle import Place
from storage.retention import Retention
from storage.shares import Shares
from storage.tiers.protocol import drop_in_steps
from strongroom.blocks import ROOT_PARENT
from tests.storage.support import FakeClock, block, component, namespace


class Rows:
    """An index and its shares."""

    def __init__(self) -> None:
        self.shares = Shares(capacity_bytes=1 << 30)
        self.index = Index(FakeClock(), self.shares)

    def add(self, number: int, *, tenant: int = 1, room: int = 1, priority: int = 35) -> None:
        self.shares.charge(component(tenant), 4096)
        self.index.insert(
            BlockAddress(block(number), 0),
            ROOT_PARENT,
            component(tenant),
            namespace(room),
            Place(number * 4096, 4096),
            Retention(priority),
        )

    def drop(self, address: BlockAddress) -> int:
        row = self.index.remove(address)
        self.shares.credit(row.resident.tenant, row.place.nbytes)
        return row.place.nbytes

    def remove(self, number: int) -> None:
        self.drop(BlockAddress(block(number), 0))


def test_tenants_that_have_no_block_any_more_are_forgotten() -> None:
    rows = Rows()
    for number in range(300):
        rows.add(number, tenant=number, room=number, priority=number % 100)
        rows.add(1000 + number, tenant=number, room=number)
        rows.remove(number)
        rows.remove(1000 + number)
    rows.add(5000, tenant=7)
    eviction = rows.index._eviction
    assert len(eviction._tenants) == 1
    assert len(eviction._queues) <= 2
    assert [victim.block for victim in rows.index.victims()] == [block(5000)]


def test_a_queue_that_is_used_again_is_the_new_tenants() -> None:
    rows = Rows()
    rows.add(1, tenant=1)
    rows.remove(1)
    rows.add(2, tenant=2)
    rows.add(3, tenant=1)
    found = [rows.index.get(BlockAddress(block(number), 0)) for number in (2, 3)]
    assert [row.resident.tenant for row in found if row] == [component(2), component(1)]
    assert [one.block for one in rows.index.victims(component(1))] == [block(3)]


def test_names_that_have_no_row_any_more_are_forgotten() -> None:
    rows = Rows()
    for number in range(300):
        rows.add(number, room=number)
        rows.remove(number)
    assert len(rows.index._names) == 1
    assert not rows.index._numbers
    assert not rows.index.namespaces()


async def test_a_walk_drops_the_retired_and_never_a_namespace_that_took_their_number() -> None:
    rows = Rows()
    rows.add(1, room=1)
    rows.add(2, room=2)
    rows.add(3, room=3)
    walk = rows.index.of_namespaces([namespace(1), namespace(2), namespace(9)], 1)
    found = [next(walk), next(walk)]  # looked for, in two steps
    rows.remove(2)
    rows.add(4, room=4)  # in the number of namespace 2, and in its slot
    found += list(walk)
    assert [one.block for step in found for one in step] == [block(1)]
    assert await drop_in_steps(rows.index, {namespace(3), namespace(4)}, rows.drop) == (2, 8192)
    assert set(rows.index.namespaces()) == {namespace(1)}


def test_a_walk_for_what_was_retired_long_ago_looks_at_no_row() -> None:
    rows = Rows()
    for number in range(2000):
        rows.add(number)
    walk = rows.index.of_namespaces({namespace(number) for number in range(10, 3000)}, 1000)
    assert list(walk) == [[], []]
