"""Room in the host tier: what leaves for a record of another size, and whom that costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random  # noqa: TID251 - seeded by the test

import pytest

from storage.block import BlockAddress, BlockContext
from storage.compose import StoreSettings, open_store
from storage.envelope import Sealer
from storage.extents import Extents
from storage.faulty import Call, Faulty, Hold
from storage.fence import Fence
from storage.header import record_bytes
from storage.lifecycle import weaken
from storage.shares import Share
from storage.store import BlockStore
from storage.tiers.host import HostTier
from strongroom.errors import Overloaded
from tests.storage.support import KEYS, FakeClock, component, context, plaintext

KIB = 1024
MIB = 1024 * KIB
HEADER = Sealer.begin(context(), KEYS.data, 1).header


class Arena:
    """A host tier whose records are room and headers only."""

    def __init__(self, capacity: int, **shares: Share) -> None:
        self.dirty: set[BlockAddress] = set()
        self.asked = 0
        self.number = 0
        self.tier = HostTier(
            capacity,
            FakeClock(),
            pin_ns=10**9,
            shares={component(int(name[1:])): share for name, share in shares.items()},
            is_dirty=self._is_dirty,
            lock_memory=False,
        )

    def _is_dirty(self, address: BlockAddress) -> bool:
        self.asked += 1
        return address in self.dirty

    def save(
        self, nbytes: int, count: int = 1, tenant: int = 1, *, chain: bool = False
    ) -> list[BlockAddress]:
        saved: list[BlockAddress] = []
        for _ in range(count):
            self.number += 1
            parent = self.number - 1 if chain and saved else None
            wanted = context(self.number, tenant=tenant, room=tenant, parent=parent)
            reserved = self.tier.reserve(
                wanted.address, wanted.parent, wanted.tenant, wanted.namespace, nbytes
            )
            header = replace(HEADER, context=wanted)
            self.tier.publish(self.tier.seal(reserved, header), lambda: None)
            saved.append(wanted.address)
        return saved

    def fill(self, nbytes: int, tenant: int = 1, **kinds: bool) -> list[BlockAddress]:
        return self.save(nbytes, self.tier.statistics().capacity_bytes // nbytes, tenant, **kinds)

    def here(self, addresses: Sequence[BlockAddress]) -> list[BlockAddress]:
        return [address for address in addresses if address in self.tier]

    def clean(self) -> None:
        were, self.dirty = self.dirty, set()
        for address in were:
            self.tier.cleaned(address)


def use_in_any_order(arena: Arena, addresses: Sequence[BlockAddress]) -> None:
    for address in Random(1).sample(addresses, len(addresses)):
        arena.tier.touch(address)


def test_one_small_block_costs_a_full_tier_one_large_one() -> None:
    arena = Arena(64 * MIB)
    before = arena.fill(256 * KIB)
    use_in_any_order(arena, before)
    arena.save(12 * KIB, tenant=2)
    assert len(before) - len(arena.here(before)) == 1


def test_a_large_block_costs_the_small_ones_of_one_window() -> None:
    arena = Arena(16 * MIB)
    before = arena.fill(16 * KIB)
    use_in_any_order(arena, before)
    arena.save(256 * KIB, tenant=2)
    assert len(before) - len(arena.here(before)) <= 17


def test_where_no_window_comes_free_nobody_leaves() -> None:
    arena = Arena(4 * MIB)
    before = arena.fill(16 * KIB)
    with ExitStack() as held:
        for address in before[::8]:
            resident = arena.tier.resident(address)
            assert resident is not None
            held.enter_context(arena.tier.upgrade(weaken(resident)))
        with pytest.raises(Overloaded):
            arena.save(256 * KIB)
        assert arena.here(before) == before
        arena.save(64 * KIB)  # fits between two that are held
    arena.save(256 * KIB)


def test_a_window_never_takes_what_is_guaranteed_to_another() -> None:
    arena = Arena(4 * MIB, t2=Share(guaranteed_bytes=2 * MIB))
    mine, theirs = [], []
    for _ in range(128):  # side by side
        mine += arena.save(16 * KIB, tenant=1)
        theirs += arena.save(16 * KIB, tenant=2)
    with pytest.raises(Overloaded):
        arena.save(32 * KIB, tenant=1)
    assert arena.here(mine + theirs) == mine + theirs
    arena.save(16 * KIB, tenant=1)
    assert arena.here(theirs) == theirs
    arena.save(32 * KIB, tenant=2)  # its own, and what the other has beyond its share


def test_a_chain_in_a_window_leaves_children_first_or_not_at_all() -> None:
    arena = Arena(MIB)
    chain = arena.fill(32 * KIB, chain=True)
    arena.save(128 * KIB)
    left = arena.here(chain)
    assert left == chain[: len(left)]
    assert len(chain) - len(left) == 4


def test_what_is_charged_is_what_is_taken() -> None:
    arena = Arena(256 * MIB)
    for pages in range(2, 260, 4):
        arena.save(pages * 4096)
    charged = sum(arena.tier.used().values())
    assert arena.tier.statistics().used_bytes == charged
    others = 0
    while not arena.tier.statistics().evictions:
        arena.save(512 * KIB, tenant=2)
        others += 512 * KIB
    assert others + charged >= 256 * MIB - MIB


@pytest.mark.parametrize("length", [5 * MIB + 4096, 4 * MIB + 512 * KIB, 96 * KIB + 4096])
def test_records_of_one_size_fill_the_room(length: int) -> None:
    room = Extents(256 * MIB)
    count = 0
    while room.take(length) is not None:
        count += 1
    assert count == 256 * MIB // length


SIZES: dict[str, Callable[[Random], int]] = {
    "full-and-tails": lambda random: random.choice([272, 272, 272, 85, 3]) * 4096,
    "any": lambda random: int(2 ** random.uniform(1, 8)) * 4096,
}


@pytest.mark.parametrize("sizes", SIZES)
def test_the_room_stays_in_use_whatever_the_sizes(sizes: str) -> None:
    arena, random = Arena(64 * MIB), Random(1)
    saved: list[BlockAddress] = []
    came = 0
    for number in range(1200):
        nbytes = SIZES[sizes](random)
        came += nbytes
        saved += arena.save(nbytes)
        arena.tier.touch(random.choice(saved[-200:]))
        if number > 900:
            assert arena.tier.statistics().used_bytes >= 0.9 * 64 * MIB


def test_a_walk_steps_over_what_is_dirty_once_and_not_every_time() -> None:
    arena = Arena(16 * MIB)
    before = arena.fill(16 * KIB)
    arena.dirty = set(before)
    with pytest.raises(Overloaded):
        arena.save(16 * KIB)
    arena.asked = 0
    for _ in range(50):
        with pytest.raises(Overloaded):
            arena.save(16 * KIB)
    assert not arena.asked
    arena.tier.touch(before[0])
    arena.clean()
    arena.save(16 * KIB)
    assert len(arena.here(before)) == len(before) - 1
    assert before[0] in arena.tier


def test_a_tenant_at_its_cap_looks_at_a_bounded_number_of_blocks() -> None:
    arena = Arena(64 * MIB, t1=Share(cap_bytes=40 * MIB))
    arena.save(16 * KIB, 40 * 64)
    looked = 0

    def is_backed(_: BlockAddress) -> bool:
        nonlocal looked
        looked += 1
        return False

    arena.tier._is_backed = is_backed
    with pytest.raises(Exception, match="quota"):
        arena.save(16 * KIB)
    assert looked <= 600


def test_bytes_that_stay_are_bounded_by_what_is_not_guaranteed_to_others() -> None:
    arena = Arena(16 * MIB, t2=Share(guaranteed_bytes=12 * MIB))
    assert arena.tier.leave_guarantees({component(1): 4 * MIB, component(2): 12 * MIB})
    assert not arena.tier.leave_guarantees({component(1): 3 * MIB, component(3): 2 * MIB})
    assert not arena.tier.leave_guarantees({component(2): 17 * MIB})


async def test_a_guarantee_holds_while_anothers_blocks_wait_for_a_slow_disk(folder: Path) -> None:
    faulty, slow = Faulty(), Hold()
    wanted = StoreSettings(
        host_bytes=8 * MIB,
        host_shares={component(2): Share(guaranteed_bytes=6 * MIB)},
        nvme_path=folder,
        nvme_bytes=32 * MIB,
        region_bytes=8 * MIB,
        crypto_threads=1,
        lock_memory=False,
    )
    async with open_store(wanted, make_files=faulty.make_files) as store:
        faulty.script(Call.WRITE, slow, times=None, where=lambda made: made.offset > 0)
        assert store._offload is not None
        store._offload._settings = replace(store._offload._settings, room_wait_s=0.0)
        segments = (256 * KIB - 8192,)
        assert record_bytes(segments) == 256 * KIB
        try:
            for number in range(16):
                await save(store, context(number, tenant=1, room=1, segments=segments))
            for number in range(100, 123):
                await save(store, context(number, tenant=2, room=2, segments=segments))
            assert store._host.used()[component(2)] == 23 * 256 * KIB
        finally:
            slow.let_go.set()


async def save(store: BlockStore, wanted: BlockContext) -> None:
    assert (await store.save(wanted, KEYS, plaintext(wanted), Fence())).stored


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "nvme"
