"""The block store as the sidecar sees it: save, load, restart, evict, retire."""

from __future__ import annotations

from pathlib import Path

from storage.compose import StoreSettings, open_store
from storage.fence import Fence
from storage.tiers.protocol import TierName
from tests.storage.support import (
    KEYS,
    component,
    context,
    namespace,
    plaintext,
)

MIB = 1024 * 1024


def settings(path: Path | None, **changes) -> StoreSettings:
    values = {
        "host_bytes": 4 * MIB,
        "nvme_path": path,
        "nvme_bytes": 8 * MIB,
        "region_bytes": MIB,
        "crypto_threads": 2,
        "disk_threads": 2,
        "lock_memory": False,
    }
    return StoreSettings(**(values | changes))


async def load(store, wanted, keys=KEYS, fence=None):
    staging = memoryview(bytearray(wanted.plaintext_bytes))
    loaded = await store.load(wanted, keys, staging, fence or Fence())
    assert staging == plaintext(wanted)
    return loaded


async def save(store, wanted, keys=KEYS, fence=None):
    return await store.save(wanted, keys, plaintext(wanted), fence or Fence())


async def test_what_was_saved_is_loaded_from_the_host_tier_bit_for_bit(tmp_path):
    async with open_store(settings(tmp_path / "nvme")) as store:
        saved = await save(store, context())
        loaded = await load(store, context())
    assert saved.stored
    assert loaded.tier is TierName.HOST


async def test_a_second_save_of_a_block_stores_nothing(tmp_path):
    async with open_store(settings(None)) as store:
        await save(store, context())
        assert not (await save(store, context())).stored


async def test_a_restart_finds_what_was_saved_and_promotes_it_to_the_host_tier(tmp_path):
    async with open_store(settings(tmp_path / "nvme")) as store:
        await save(store, context(1))
        await save(store, context(2, parent=1))
    async with open_store(settings(tmp_path / "nvme")) as store:
        assert store.namespaces() == {namespace(1)}
        assert store.namespace_tenants() == {namespace(1): component(1)}
        assert store.match_prefix([context(1).address, context(2).address]) == 2
        assert (await load(store, context(2, parent=1))).tier is TierName.NVME
        assert (await load(store, context(2, parent=1))).tier is TierName.HOST
