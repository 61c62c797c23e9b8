"""Revocation at every point at which a save or an offload gives way to others."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from storage.compose import StoreSettings, open_store
from storage.fence import Fence, Fenced
from storage.header import record_bytes
from storage.store import BlockStore
from storage.tiers.protocol import TierName
from tests.steps import Steps
from tests.storage.support import KEYS, OTHER_KEYS, context, namespace, plaintext

MIB = 1024 * 1024
OURS, THEIRS = context(1, room=1), context(2, tenant=2, room=2)
RECORD = record_bytes(OURS.segment_bytes)
WORDS = ("BlockStore", "OffloadPipeline", "_save")


def settings(path: Path) -> StoreSettings:
    return StoreSettings(
        host_bytes=4 * MIB, nvme_path=path, nvme_bytes=4 * MIB, region_bytes=MIB,
        crypto_threads=2, disk_threads=1, write_behind_s=0.0, lock_memory=False,
    )  # fmt: skip


async def _save(store: BlockStore, fence: Fence) -> bool:
    try:
        await store.save(OURS, KEYS, plaintext(OURS), fence)
    except Fenced:
        return False
    return True


@pytest.mark.parametrize("how", ["fence", "retire"])
async def test_what_is_revoked_at_any_await_is_never_visible_afterwards(
    tmp_path: Path, how: str
) -> None:
    reached = 0
    for at in itertools.count():
        if not await _scenario(tmp_path / str(at), how, at):
            break
        reached += 1
    assert reached > 30, "a save and its way down give way more often than this"


async def _scenario(folder: Path, how: str, at: int) -> bool:
    """One save and its offload, revoked at suspension `at`; false when there was none."""
    fence = Fence()
    seen: dict[str, bool] = {}

    def act() -> None:
        assert store._nvme is not None
        seen["host"] = OURS.address in store._host
        seen["nvme"] = OURS.address in store._nvme
        if how == "fence":
            fence.cut()
        else:
            store.retire([namespace(1)])

    def watch() -> None:
        """What was not visible at the revocation does not become so."""
        assert store._nvme is not None
        assert seen["host"] or OURS.address not in store._host
        assert how == "fence" or seen["nvme"] or OURS.address not in store._nvme

    steps = Steps(WORDS, at, act, watch)
    with steps.installed():
        async with open_store(settings(folder)) as store:
            nvme, pipeline = store._nvme, store._offload
            assert nvme is not None
            assert pipeline is not None
            async with asyncio.TaskGroup() as tasks:
                steps.arm()
                saving = tasks.create_task(_save(store, fence))
            await store.save(THEIRS, OTHER_KEYS, plaintext(THEIRS), Fence())
            async with asyncio.timeout(20):
                await store.flush()
            acted = steps.acted
            steps._armed = False
            if acted and how == "retire":
                assert store.tier_of(OURS.address) is None
                await store.reclaim()
            pipeline.verify()
            kept = saving.result() and not (acted and how == "retire")
            assert (OURS.address in store._host) is (OURS.address in nvme) is kept
            # The other tenant's block came through, and nothing else is charged for.
            staging = memoryview(bytearray(THEIRS.plaintext_bytes))
            loaded = await store.load(THEIRS, OTHER_KEYS, staging, Fence())
            assert (loaded.tier, staging) == (TierName.HOST, plaintext(THEIRS))
            for tier in store.statistics().tiers:
                assert (tier.used_bytes, tier.pinned) == (RECORD * (1 + kept), 0)
            if kept:
                staging = memoryview(bytearray(OURS.plaintext_bytes))
                await store.load(OURS, KEYS, staging, Fence())
    return acted
