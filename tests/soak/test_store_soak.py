"""`make soak`: the block store under thousands of random steps, held against a dictionary.

Saves, loads, revocations, reclaims and restarts in a seeded order. What the model knows must be
read back bit for bit or be missing; what was retired must never come back; and at the end no
room, pin or charge is left behind.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from random import Random  # noqa: TID251 - a seeded order of steps, no secret

import pytest

from storage.block import BlockContext
from storage.compose import MIB, StoreSettings, open_store
from storage.fence import Fence, Fenced
from storage.store import BlockStore
from strongroom.blocks import BlockId
from strongroom.derivation import namespace_keys
from strongroom.errors import Missing, Overloaded
from strongroom.identity import ComponentId, NamespaceId

LIVES = 40
STEPS = 400
NAMESPACES = 12
SEGMENTS = (8192, 12288, 4096)

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


class World:
    """What was saved, by address, and what was retired."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.saved: dict[BlockContext, bytes] = {}
        self.order: list[BlockContext] = []
        self.retired: set[NamespaceId] = set()
        self.generation = 0

    def namespace(self) -> NamespaceId:
        number = self.random.randrange(NAMESPACES) + NAMESPACES * self.generation
        return NamespaceId(hashlib.sha256(str(number).encode()).hexdigest())

    def context(self) -> BlockContext:
        namespace = self.namespace()
        number = self.random.randrange(200)
        block = hashlib.sha256(f"{namespace}{number}".encode()).digest()
        return BlockContext(
            tenant=ComponentId(namespace[:31] + str(number % 3)),
            namespace=namespace,
            block=BlockId(block),
            parent=BlockId(bytes(32)),
            position=number * 256,
            tokens=256,
            format_digest=bytes(32),
            layout_digest=bytes(32),
            rank=0,
            segment_bytes=SEGMENTS,
        )

    async def step(self, store: BlockStore) -> None:
        kind = self.random.random()
        if kind < 0.45:
            await self.save(store)
        elif kind < 0.97:
            await self.load(store)
        elif kind < 0.99:
            retired = self.namespace()
            self.retired.add(retired)
            store.retire([retired])
        else:
            await store.reclaim()

    async def save(self, store: BlockStore) -> None:
        context = self.context()
        plain = self.random.randbytes(sum(SEGMENTS))
        keys = namespace_keys(hashlib.sha256(context.namespace.encode()).digest(), bytes(32))
        try:
            saved = await store.save(context, keys, memoryview(bytearray(plain)), Fence())
        except Fenced:
            assert context.namespace in self.retired
            return
        except Overloaded:
            return
        assert context.namespace not in self.retired
        if saved.stored:
            self.saved[context] = plain
            self.order.append(context)

    async def load(self, store: BlockStore) -> None:
        known = self.random.random() < 0.8 and self.order
        context = self.random.choice(self.order) if known else self.context()
        keys = namespace_keys(hashlib.sha256(context.namespace.encode()).digest(), bytes(32))
        out = bytearray(sum(SEGMENTS))
        try:
            await store.load(context, keys, memoryview(out), Fence())
        except (Missing, Fenced, Overloaded) as error:
            assert not any(out)
            if isinstance(error, Fenced):
                assert context.namespace in self.retired
            return
        assert context.namespace not in self.retired
        assert bytes(out) == self.saved[context]


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_random_lives_of_a_store_lose_and_leak_nothing(tmp_path: Path, seed: int) -> None:
    world = World(seed)
    settings = StoreSettings(
        host_bytes=4 * MIB,
        nvme_path=tmp_path / "nvme",
        nvme_bytes=16 * MIB,
        region_bytes=2 * MIB,
        write_behind_s=0.01,
        lock_memory=False,
    )
    for life in range(LIVES):
        world.generation = life // 5
        async with open_store(settings) as store:
            store.retire(world.retired)
            for _ in range(STEPS):
                await world.step(store)
            await store.flush()
            statistics = store.statistics()
            assert statistics.write_behind_pending == 0
            for tier in statistics.tiers:
                assert tier.pinned == 0
                assert tier.corrupt == 0
                assert tier.used_bytes <= tier.capacity_bytes
            await store.reclaim()
            assert not store.namespaces() & world.retired
