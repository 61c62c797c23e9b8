"""Freeing what was retired: in steps that others can live with, and never before they were told."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from storage.block import BlockAddress
from storage.compose import StoreSettings, open_store
from storage.fence import Fence
from storage.index import Index
from storage.lifecycle import Place
from storage.tiers.protocol import drop_in_steps
from strongroom.blocks import ROOT_PARENT
from tests.storage.support import KEYS, block, component, context, namespace, plaintext

MIB = 1024 * 1024


async def test_a_walk_gives_way_after_half_a_millisecond_of_drops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted in drops of a tenth of a millisecond each, on a clock of the test's own."""
    now_s, since_turn, most = 0.0, 0, 0
    monkeypatch.setattr("storage.tiers.protocol.time.perf_counter", lambda: now_s)
    index = Index(lambda: 0)
    for number in range(1, 401):
        address = BlockAddress(block(number), 0)
        index.insert(address, ROOT_PARENT, component(1), namespace(1 + number % 2), Place(0, 4096))

    def drop(address: BlockAddress) -> int:
        nonlocal now_s, since_turn, most
        now_s += 0.0001
        since_turn += 1
        most = max(most, since_turn)
        return index.remove(address).place.nbytes

    async def others() -> None:
        nonlocal since_turn
        while True:
            since_turn = 0
            await asyncio.sleep(0)

    beside = asyncio.get_running_loop().create_task(others())
    assert await drop_in_steps(index, [namespace(1)], drop) == (200, 200 * 4096)
    beside.cancel()
    assert len(index) == 200
    assert 1 < most <= 16


async def test_the_walk_begins_after_whoever_retired_has_had_a_moment(tmp_path: Path) -> None:
    settings = StoreSettings(
        host_bytes=4 * MIB, nvme_path=tmp_path / "nvme", nvme_bytes=4 * MIB, region_bytes=MIB,
        lock_memory=False,
    )  # fmt: skip
    async with open_store(settings) as store:
        await store.save(context(), KEYS, plaintext(context()), Fence())
        begun = time.monotonic()
        store.retire([namespace(1)])
        assert store.tier_of(context().address) is None, "out of reach at once all the same"
        async with asyncio.timeout(20):
            while store.statistics().tiers[0].blocks:
                await asyncio.sleep(0)
        assert time.monotonic() - begun >= 0.05
        other = context(2, room=2)
        await store.save(other, KEYS, plaintext(other), Fence())
        store.retire([namespace(2)])
        await store.reclaim()
        assert store.statistics().tiers[0].blocks == 0, "asked for, it does not wait"
