"""The store's NVMe settings reach the tier, and a refused write leaves blocks in host memory."""

from __future__ import annotations

from pathlib import Path

from storage.compose import open_store
from storage.tiers.limits import NvmeLimits
from storage.tiers.protocol import TierName
from tests.storage.support import context
from tests.storage.test_store import load, save, settings


async def test_a_store_over_two_folders_restores_from_both(tmp_path: Path) -> None:
    made = settings(tmp_path / "a", nvme_paths=(tmp_path / "b",))
    assert made.nvme_folders == (tmp_path / "a", tmp_path / "b")
    many = [context(number, segments=(100_000,)) for number in range(12)]
    async with open_store(made) as store:
        for one in many:
            await save(store, one)
        await store.flush()
    for folder in made.nvme_folders:
        assert (folder / "manifest.json").exists()
        assert (folder / "000000").exists()
    async with open_store(made) as store:
        for one in many:
            assert (await load(store, one)).tier is TierName.NVME


async def test_over_budget_a_block_stays_in_host_memory_and_is_served(tmp_path: Path) -> None:
    tight = settings(tmp_path / "a", nvme_limits=NvmeLimits(write_bytes_per_day=24 * 4096))
    async with open_store(tight) as store:
        for number in range(4):
            await save(store, context(number))
            await store.flush()
        nvme = next(tier for tier in store.statistics().tiers if tier.name is TierName.NVME)
        assert nvme.budget_refusals > 0
        assert nvme.io_errors == 0
        for number in range(4):
            assert (await load(store, context(number))).tier is TierName.HOST


async def test_below_the_floor_a_block_stays_in_host_memory_and_is_served(tmp_path: Path) -> None:
    full = settings(tmp_path / "a", nvme_limits=NvmeLimits(free_floor_bytes=2**62))
    async with open_store(full) as store:
        await save(store, context(1))
        await store.flush()
        nvme = next(tier for tier in store.statistics().tiers if tier.name is TierName.NVME)
        assert (nvme.floor_refusals, nvme.blocks) == (1, 0)
        assert (await load(store, context(1))).tier is TierName.HOST
