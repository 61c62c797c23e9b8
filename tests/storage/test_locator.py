"""What a lookup asks of a store: where the blocks in front lie, on every rank, as of now."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.compose import open_store
from storage.store import BlockStore
from storage.tiers.protocol import TierName
from tests.storage.support import context, namespace
from tests.storage.test_store import save, settings

HOST, NVME = TierName.HOST, TierName.NVME
IDS = [context(number).block for number in range(4)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def tiers(store: BlockStore, *ranks: int) -> list[TierName]:
    """Also by the definition: block by block, rank by rank."""
    found = list(store.locator(ranks)(IDS))
    for number, tier in enumerate(found):
        each = {store.tier_of(context(number, rank=rank).address) for rank in ranks}
        assert tier is (NVME if NVME in each else HOST)
        assert None not in each
    return found


async def test_blocks_in_front_are_found_up_to_the_first_that_is_nowhere(folder: Path) -> None:
    async with open_store(settings(folder)) as store:
        assert tiers(store, 0) == []
        for number in (0, 1, 3):
            await save(store, context(number))
        assert tiers(store, 0) == [HOST, HOST]
        assert tiers(store) == [], "without a rank nothing is resident"


async def test_a_block_counts_where_every_rank_has_it(folder: Path) -> None:
    async with open_store(settings(folder)) as store:
        for number, rank in ((0, 0), (0, 1), (1, 0), (2, 0), (2, 1)):
            await save(store, context(number, rank=rank))
        assert tiers(store, 0) == [HOST] * 3
        assert tiers(store, 0, 1) == [HOST]


async def test_the_slowest_tier_of_its_shards_counts(folder: Path) -> None:
    async with open_store(settings(folder)) as store:
        for number in range(3):
            await save(store, context(number))
        await store.flush()
        assert store._host.evict(context(1).address)
        assert tiers(store, 0) == [HOST, NVME, HOST]


@pytest.mark.parametrize("on_disk", [False, True])
async def test_what_was_retired_is_nowhere_at_once(folder: Path, on_disk: bool) -> None:
    async with open_store(settings(folder)) as store:
        for number, room in ((0, 1), (1, 2), (2, 1)):
            await save(store, context(number, room=room))
        await store.flush()
        if on_disk:
            assert store._host.evict(context(1, room=2).address)
        before = store.locator((0,))
        here = IDS[:3]  # all of them: no miss makes it look closer
        assert len(before(here)) == 3
        store.retire([namespace(2)])
        assert len(before(here)) == len(tiers(store, 0)) == 1, "a locator of before sees it too"
