"""The block store as the sidecar sees it: save, load, restart, evict, quota, retire, hazards."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from storage.block import BlockAddress, BlockContext
from storage.compose import StoreSettings, open_store
from storage.faulty import Call, Faulty, Hold
from storage.fence import Fence, Fenced
from storage.header import record_bytes
from storage.memory import wipe
from storage.opening import Loaded
from storage.retention import Retention
from storage.saving import Saved
from storage.stages import Unwanted, Wanted
from storage.staging import Staging
from storage.store import BlockStore
from storage.tiers.protocol import TierName, TierStatistics
from storage.tiers.regions import Region, RegionFiles
from strongroom.derivation import NamespaceKeys
from strongroom.errors import (
    Corrupt,
    Missing,
    Misuse,
    Overloaded,
    QuotaExceeded,
    StrongroomError,
)
from strongroom.identity import NamespaceId
from tests.storage.nvme_support import entered
from tests.storage.offload_rig import Judge
from tests.storage.support import (
    CANARY,
    KEYS,
    OTHER_KEYS,
    FakeClock,
    component,
    context,
    namespace,
    plaintext,
)

MIB = 1024 * 1024


def settings(path: Path | None, **changes: Any) -> StoreSettings:
    values: dict[str, Any] = {
        "host_bytes": 4 * MIB,
        "nvme_path": path,
        "nvme_bytes": 8 * MIB,
        "region_bytes": MIB,
        "crypto_threads": 2,
        "disk_threads": 2,
        "write_behind_s": 0.0,
        "lock_memory": False,
    }
    return StoreSettings(**(values | changes))


async def load(
    store: BlockStore, wanted: BlockContext, keys: NamespaceKeys = KEYS, fence: Fence | None = None
) -> Loaded:
    staging = memoryview(bytearray(wanted.plaintext_bytes))
    loaded = await store.load(wanted, keys, staging, fence or Fence())
    assert staging == plaintext(wanted)
    return loaded


async def save(
    store: BlockStore, wanted: BlockContext, keys: NamespaceKeys = KEYS, fence: Fence | None = None
) -> Saved:
    return await store.save(wanted, keys, plaintext(wanted), fence or Fence())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "nvme"


def tier(store: BlockStore, name: str) -> TierStatistics:
    return next(tier for tier in store.statistics().tiers if tier.name == name)


RECORD = record_bytes(context().segment_bytes)


# The main road


async def test_what_was_saved_is_loaded_from_the_host_tier_bit_for_bit(folder: Path) -> None:
    async with open_store(settings(folder)) as store:
        assert (await save(store, context())).stored
        assert (await load(store, context())).tier is TierName.HOST


async def test_a_second_save_of_a_block_stores_nothing(folder: Path) -> None:
    async with open_store(settings(None)) as store:
        await save(store, context())
        assert not (await save(store, context())).stored


async def test_two_savers_of_one_block_at_once_store_it_once() -> None:
    async with open_store(settings(None)) as store:
        answers = await asyncio.gather(*[save(store, context()) for _ in range(4)])
        assert sum(answer.stored for answer in answers) == 1
        await load(store, context())


async def test_a_restart_finds_what_was_saved_and_promotes_it_to_the_host_tier(
    folder: Path,
) -> None:
    async with open_store(settings(folder)) as store:
        await save(store, context(1))
        await save(store, context(2, parent=1))
    async with open_store(settings(folder)) as store:
        assert store.namespaces() == {namespace(1)}
        assert store.namespace_tenants() == {namespace(1): component(1)}
        assert store.tier_of(context(1).address) is TierName.NVME
        assert (await load(store, context(2, parent=1))).tier is TierName.NVME
        assert (await load(store, context(2, parent=1))).tier is TierName.HOST
        assert store.statistics().hits == {TierName.NVME: 1, TierName.HOST: 1}


async def test_an_orderly_stop_flushes_also_when_the_server_is_cancelled(folder: Path) -> None:
    started = asyncio.Event()

    async def serve() -> None:
        async with open_store(settings(folder, write_behind_s=3600.0)) as store:
            await save(store, context())
            started.set()
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(serve())
        await started.wait()
        task.cancel()
    async with open_store(settings(folder)) as store:
        assert (await load(store, context())).tier is TierName.NVME


async def test_flush_returns_when_everything_is_on_nvme(folder: Path) -> None:
    async with open_store(settings(folder, write_behind_s=3600.0)) as store:
        for number in range(5):
            await save(store, context(number))
        assert store.statistics().write_behind_pending == 5
        await store.flush()
        assert store.statistics().write_behind_pending == 0
        assert tier(store, "nvme").blocks == 5


async def test_a_block_is_the_same_ciphertext_in_both_tiers(folder: Path) -> None:
    async with open_store(settings(folder)) as store:
        await save(store, context())
        await store.flush()
        address = context().address
        assert store._nvme is not None
        async with store._host.hold(address) as host, store._nvme.hold(address) as disk:
            assert host[:3968] == disk[:3968]
            assert host[4096:] == disk[4096:]


async def test_a_block_that_nvme_refused_is_offered_again_when_it_is_used(folder: Path) -> None:
    judge = Judge()
    judge.answer = Unwanted("seen once")
    async with open_store(settings(folder), policy=judge) as store:
        await store.save(context(), KEYS, plaintext(context()), Fence(), Retention(60))
        await store.flush()
        assert tier(store, "nvme").blocks == 0
        judge.answer = Wanted()
        await load(store, context())
        await store.flush()
        assert tier(store, "nvme").blocks == 1
        await load(store, context())
        await store.flush()
        assert [asked.uses for asked in judge.asked] == [1, 2]
        assert [asked.retention for asked in judge.asked] == [Retention(60)] * 2


async def test_a_block_that_nvme_goes_on_refusing_is_offered_as_its_uses_double(
    folder: Path,
) -> None:
    judge = Judge()
    judge.answer = Unwanted("never")
    async with open_store(settings(folder), policy=judge) as store:
        await save(store, context())
        for _ in range(9):
            await load(store, context())
            await store.flush()
        assert [asked.uses for asked in judge.asked] == [1, 2, 4, 8]


async def test_a_large_block_is_split_over_the_crypto_threads() -> None:
    wanted = context(segments=(200_000,) * 12)
    async with open_store(settings(None, host_bytes=8 * MIB)) as store:
        await save(store, wanted)
        await load(store, wanted)


# Who may open what


async def test_the_owner_hits_and_the_holder_of_other_keys_does_not(folder: Path) -> None:
    async with open_store(settings(folder)) as store:
        await save(store, context())
        await load(store, context())
        staging = memoryview(bytearray(b"\xaa" * context().plaintext_bytes))
        with pytest.raises(Corrupt):
            await store.load(context(), OTHER_KEYS, staging, Fence())
        assert bytes(staging) == bytes(len(staging))


async def test_a_block_of_another_layout_is_a_miss_and_makes_way_for_the_next_save(
    folder: Path,
) -> None:
    other = context(layout=b"L" * 32, segments=(4000, 4000))
    async with open_store(settings(folder)) as store:
        await save(store, context())
        await store.flush()
        with pytest.raises(Missing):
            await load(store, other)
        assert (await save(store, other)).stored
        await load(store, other)
        assert store.statistics().quarantined == 0


async def test_staging_of_another_size_is_refused() -> None:
    async with open_store(settings(None)) as store:
        staging = memoryview(bytearray(10))
        with pytest.raises(Misuse):
            await store.save(context(), KEYS, staging, Fence())
        with pytest.raises(Misuse):
            await store.load(context(), KEYS, staging, Fence())


# Damage


@pytest.mark.parametrize("at", [4096, 4096 + 5000 + 15, 4096 + 5016, 4096 + 8031])
@pytest.mark.parametrize("where", ["host", "nvme"])
async def test_a_flipped_byte_is_quarantined_then_a_miss_then_saved_again(
    folder: Path, where: str, at: int
) -> None:
    async with open_store(settings(folder)) as store:
        await save(store, context())
        await store.flush()
        if where == "host":
            async with store._host.hold(context().address) as record:
                record[at] ^= 1
        else:
            store._host.drop(context().address)
            _flip(folder, 4096 + at)
        staging = memoryview(bytearray(b"\xaa" * context().plaintext_bytes))
        with pytest.raises(Corrupt):
            await store.load(context(), KEYS, staging, Fence())
        assert bytes(staging) == bytes(len(staging)), "no plaintext is left after a bad tag"
        assert store.statistics().quarantined == 1
        assert store.tier_of(context().address) is None
        with pytest.raises(Missing):
            await load(store, context())
        assert (await save(store, context())).stored
        await load(store, context())


def _flip(folder: Path, at: int) -> None:
    with (folder / "000000").open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


async def test_another_tenants_record_put_in_place_of_this_one_does_not_open(folder: Path) -> None:
    theirs = context(7, tenant=2, room=2)
    async with open_store(settings(folder)) as store:
        await save(store, context(1))
        await save(store, theirs, OTHER_KEYS)
        hold = store._host.hold
        async with hold(theirs.address) as other, hold(context(1).address) as record:
            record[:] = other
        with pytest.raises(Corrupt):
            await load(store, context(1))
        await load(store, theirs, OTHER_KEYS)


async def test_an_old_ciphertext_put_back_after_the_key_is_gone_does_not_open(folder: Path) -> None:
    """The component was destroyed and registered anew: other secrets, so another key."""
    async with open_store(settings(folder)) as store:
        await save(store, context())
    kept = (folder / "000000").read_bytes()
    async with open_store(settings(folder)) as store:
        store.retire([namespace(1)])
        await store.reclaim()
    (folder / "000000").write_bytes(kept)
    async with open_store(settings(folder)) as store:
        assert store.tier_of(context().address) is TierName.NVME, "the copy is back"
        with pytest.raises(Corrupt):
            await load(store, context(), OTHER_KEYS)


async def test_a_failing_disk_is_a_miss_and_never_poisons_a_block(folder: Path) -> None:
    errors: deque[int] = deque()

    class Faulty(RegionFiles):
        def read(self, region: Region, offset: int, into: memoryview) -> int:
            if errors and len(into) > 4096:
                code = errors.popleft()
                raise OSError(code, os.strerror(code))
            return super().read(region, offset, into)

    async with open_store(settings(folder), make_files=Faulty) as store:
        await save(store, context())
        await store.flush()
        store._host.drop(context().address)
        errors.append(errno.EIO)
        with pytest.raises(Missing):
            await load(store, context())
        assert tier(store, "nvme").io_errors == 1
        assert (await save(store, context())).stored
        await load(store, context())


async def test_a_full_disk_leaves_blocks_in_host_memory_and_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(RegionFiles):
        def write(self, region: Region, offset: int, data: Sequence[memoryview]) -> None:
            if offset:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().write(region, offset, data)

    with caplog.at_level(logging.WARNING):
        async with open_store(settings(folder), make_files=Full) as store:
            await save(store, context())
            await store.flush()
            statistics = store.statistics()
            assert (statistics.write_behind_failed, statistics.write_behind_pending) == (1, 0)
            assert (await load(store, context())).tier is TierName.HOST
    assert "stays in host memory" in caplog.text


# Fences and retirement


async def test_a_load_under_a_cut_fence_is_refused_and_its_staging_wiped(folder: Path) -> None:
    fence = Fence()
    async with open_store(settings(folder)) as store:
        await save(store, context())
        await load(store, context(), fence=fence)
        fence.cut()
        staging = memoryview(bytearray(b"\xaa" * context().plaintext_bytes))
        with pytest.raises(Fenced):
            await store.load(context(), KEYS, staging, fence)
        assert bytes(staging) == bytes(len(staging))
        with pytest.raises(Fenced):
            await save(store, context(2), fence=fence)
        assert store.tier_of(context(2).address) is None


class _Gate:
    """Holds the first crypto job until it is opened."""

    def __init__(self, store: BlockStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()
        self._run = store._cipher._workers.run
        monkeypatch.setattr(store._cipher._workers, "run", self.run)

    async def run(self, *jobs: Callable[[], None], always: bool = False) -> None:
        def held() -> None:
            self.reached.set()
            self._open.wait(10)

        await self._run(held)
        await self._run(*jobs, always=always)

    async def wait(self) -> None:
        async with asyncio.timeout(10):
            while not self.reached.is_set():
                await asyncio.sleep(0)

    def open(self) -> None:
        self._open.set()


@pytest.mark.parametrize("how", ["fence", "retire"])
@pytest.mark.parametrize("what", ["load", "save"])
async def test_an_invalidation_while_in_flight_fences_the_transfer(
    folder: Path, how: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence = Fence()
    wanted = context(1 if what == "load" else 2)
    async with open_store(settings(folder)) as store:
        await save(store, context(1))
        await store.flush()
        gate = _Gate(store, monkeypatch)
        staging = memoryview(bytearray(plaintext(wanted)))
        transfer = store.load if what == "load" else store.save

        async def go() -> None:
            with pytest.raises(Fenced):
                await transfer(wanted, KEYS, staging, fence)

        async with asyncio.TaskGroup() as group:
            group.create_task(go())
            await gate.wait()
            if how == "fence":
                fence.cut()
            else:
                store.retire([namespace(1)])
            gate.open()
        if what == "load":
            assert bytes(staging) == bytes(len(staging)), "plaintext is wiped before it is refused"
        else:
            assert store.tier_of(wanted.address) is None, "never visible"
            used = 0 if how == "retire" else RECORD
            await store.reclaim()
            assert tier(store, "host").used_bytes == used
        assert store.statistics().fenced == 1


async def test_a_cancelled_load_leaves_no_plaintext_and_no_thread_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_store(settings(None)) as store:
        await save(store, context())
        gate = _Gate(store, monkeypatch)
        staging = memoryview(bytearray(b"\xaa" * context().plaintext_bytes))
        async with asyncio.TaskGroup() as group:
            task = group.create_task(store.load(context(), KEYS, staging, Fence()))
            await gate.wait()
            task.cancel()
            await asyncio.sleep(0)
            assert not task.done()
            gate.open()
        assert task.cancelled()
        assert bytes(staging) == bytes(len(staging))
        assert tier(store, "host").pinned == 0


async def test_a_cancelled_save_is_never_visible_and_gives_its_room_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_store(settings(None)) as store:
        gate = _Gate(store, monkeypatch)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(save(store, context()))
            await gate.wait()
            assert store.tier_of(context().address) is None, "a reader never overtakes a writer"
            with pytest.raises(Missing):
                await store.load(
                    context(), KEYS, memoryview(bytearray(context().plaintext_bytes)), Fence()
                )
            task.cancel()
            gate.open()
        assert task.cancelled()
        assert store.tier_of(context().address) is None
        assert tier(store, "host").used_bytes == 0
        assert (await save(store, context())).stored


async def test_retired_namespaces_are_gone_at_once_and_for_ever_and_others_stay(
    folder: Path,
) -> None:
    async with open_store(settings(folder)) as store:
        await save(store, context(1, room=1))
        await save(store, context(2, room=2))
        await store.flush()
        assert store.retire([namespace(1)]) == 1
        assert store.retire([namespace(1)]) == 0
        assert store.tier_of(context(1).address) is None
        assert store.namespaces() == {namespace(2)}
        with pytest.raises(Fenced):
            await load(store, context(1, room=1))
        with pytest.raises(Fenced):
            await save(store, context(3, room=1))
        await load(store, context(2, room=2))


async def test_reclaim_frees_the_bytes_of_every_tier_and_says_how_many(folder: Path) -> None:
    async with open_store(settings(folder)) as store:
        for number in range(4):
            await save(store, context(number, room=1))
        await save(store, context(9, room=2))
        await store.flush()
        store.retire([namespace(1)])
        reclaimed = await store.reclaim()
        assert (reclaimed.blocks, reclaimed.bytes) == (8, 8 * RECORD)
        assert (await store.reclaim()).blocks == 0
        assert tier(store, "host").blocks == tier(store, "nvme").blocks == 1
    async with open_store(settings(folder)) as store:
        assert store.namespaces() == {namespace(2)}, "and a restart does not bring them back"


async def test_what_the_background_freed_is_in_the_next_answer(folder: Path) -> None:
    async with open_store(settings(folder)) as store:
        await save(store, context())
        await store.flush()
        store.retire([namespace(1)])
        async with asyncio.timeout(10):
            while tier(store, "nvme").blocks:
                await asyncio.sleep(0)
        assert (await store.reclaim()).blocks == 2


async def test_retiring_costs_the_same_for_any_number_of_blocks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in index steps, not in time: `retire` touches no block at all."""
    async with open_store(settings(None)) as store:
        for number in range(50):
            await save(store, context(number))
        touched: list[Collection[NamespaceId]] = []
        index = store._host._index
        walk = index.of_namespaces

        def counting(
            namespaces: Collection[NamespaceId], step: int
        ) -> Iterator[list[BlockAddress]]:
            touched.append(namespaces)
            return walk(namespaces, step)

        monkeypatch.setattr(index, "of_namespaces", counting)
        store.retire([namespace(1)])
        assert touched == []
        assert len(index) == 50


# Room and quota


async def test_the_host_tier_gives_way_to_new_blocks_and_nvme_still_has_the_old(
    folder: Path,
) -> None:
    async with open_store(settings(folder, host_bytes=MIB)) as store:
        for number in range(100):
            await save(store, context(number))
        await store.flush()
        assert tier(store, "host").evictions > 0
        assert tier(store, "host").used_bytes <= MIB
        for number in range(100):
            await load(store, context(number))


async def test_a_host_tier_full_of_unwritten_blocks_waits_for_write_behind(folder: Path) -> None:
    async with open_store(settings(folder, host_bytes=MIB, write_behind_s=3600.0)) as store:
        for number in range(100):
            await save(store, context(number))
        await store.flush()
        assert tier(store, "nvme").blocks == 100, "nothing was evicted before it was written"


@pytest.mark.parametrize("name", list(TierName)[1:])
async def test_a_tenant_above_its_quota_is_refused_by_name_and_loses_nothing(
    folder: Path, name: TierName
) -> None:
    # Not yet on NVMe: in the host tier these two may not give way.
    async with open_store(settings(folder, write_behind_s=3600.0)) as store:
        store.set_quota(component(1), name, 2 * RECORD)
        await save(store, context(1))
        await save(store, context(2))
        if name is TierName.HOST:
            with pytest.raises(QuotaExceeded):
                await save(store, context(3))
            assert store.statistics().quota_refusals == 1
        else:
            await save(store, context(3))
            await store.flush()
            assert tier(store, "nvme").blocks == 2
            assert tier(store, "nvme").quota_refusals == 1
            await load(store, context(3))
        await save(store, context(4, tenant=2, room=2))
        await load(store, context(1))
        await load(store, context(2))


async def test_a_tenant_at_its_host_quota_replaces_what_nvme_holds_too(folder: Path) -> None:
    async with open_store(settings(folder)) as store:
        store.set_quota(component(1), TierName.HOST, 2 * RECORD)
        for number in range(6):
            await save(store, context(number))
            await store.flush()
        assert tier(store, "host").blocks == 2
        for number in range(6):
            await load(store, context(number))
        assert store.statistics().quota_refusals == 0


async def test_usage_that_a_restart_found_counts_toward_the_quota_at_once(folder: Path) -> None:
    async with open_store(settings(folder)) as store:
        for number in range(3):
            await save(store, context(number))
    async with open_store(settings(folder, nvme_quota_bytes=3 * RECORD)) as store:
        await save(store, context(9))
        await store.flush()
        assert tier(store, "nvme").used_bytes == 3 * RECORD
        assert tier(store, "nvme").evictions == 1, "its own block made way for the new one"
        assert tier(store, "nvme").blocks == 3


async def test_a_block_larger_than_the_arena_is_overloaded() -> None:
    async with open_store(settings(None, host_bytes=MIB)) as store:
        await save(store, context(1))
        with pytest.raises(Overloaded):
            await save(store, context(2, segments=(MIB,)))
        await load(store, context(1))


async def test_a_full_crypto_queue_is_overloaded_and_leaves_everything_as_it_was() -> None:
    async with open_store(settings(None, crypto_threads=1, crypto_queue_max=1)) as store:
        # Two have their turn, one waits, and the rest have no place.
        saves = (save(store, context(number)) for number in range(5))
        ends = await asyncio.gather(*saves, return_exceptions=True)
        assert [isinstance(end, Overloaded) for end in ends] == [False] * 3 + [True] * 2
        assert tier(store, "host").used_bytes == 3 * RECORD


async def test_a_pin_that_ran_out_lets_a_block_go_and_its_reader_still_reads_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock()
    async with open_store(settings(None, pin_s=1.0), clock) as store:
        await save(store, context())
        gate = _Gate(store, monkeypatch)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(load(store, context()))
            await gate.wait()
            assert store._host.evict(context().address) == 0
            clock.advance_s(2)
            assert store._host.evict(context().address) == RECORD
            gate.open()
        assert task.result().tier is TierName.HOST


# Leaks


async def test_no_plaintext_is_in_any_file_nor_in_the_arena(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    staging = Staging(MIB)
    with caplog.at_level(logging.DEBUG):
        async with open_store(settings(folder)) as store:
            for number in range(20):
                wanted = context(number)
                slot = staging.reserve(wanted.plaintext_bytes)
                assert slot is not None
                view = staging.bytes_of(slot)
                view[:] = plaintext(wanted)
                await store.save(wanted, KEYS, view, Fence())
                view.release()
                staging.release(slot)
            used = staging.take_used()
            for room in used:
                wipe(staging.bytes_of(room))
            staging.wiped(used)
            await store.flush()
            assert CANARY not in bytes(store._host._arena.view)
        async with open_store(settings(folder)) as store:
            for number in range(20):
                await load(store, context(number))
    assert CANARY not in bytes(staging.view)
    staging.close()
    names = [path for path in folder.rglob("*") if path.is_file()]
    assert len(names) > 2
    for path in names:
        assert CANARY not in path.read_bytes()
        assert context().tenant not in path.name
    for secret in (CANARY.decode(), KEYS.data.hex(), component(1), namespace(1)):
        assert secret not in caplog.text


@pytest.mark.parametrize("saved_anew", [True, False])
async def test_a_damaged_copy_takes_no_good_one_with_it_that_was_saved_meanwhile(
    folder: Path, *, saved_anew: bool
) -> None:
    faulty, hold, wanted = Faulty(), Hold(), context()
    async with open_store(settings(folder), make_files=faulty.make_files) as store:
        await save(store, wanted)
        await store.flush()
        nvme = store._nvme
        assert nvme is not None
        store._host.drop(wanted.address)
        row = nvme._index.get(wanted.address)
        assert row is not None
        region, offset = nvme._catalogue.where(row.place)
        faulty.script(Call.READ, hold, where=lambda made: made.nbytes > 4096)
        async with asyncio.TaskGroup() as tasks:
            loading = tasks.create_task(_fails(store, wanted))
            await entered(hold)
            try:
                with (folder / f"{region.number:06d}").open("r+b") as file:
                    file.seek(offset + 4096)
                    file.write(b"x" * 64)
                if saved_anew:
                    nvme.drop(wanted.address)
                    await save(store, wanted)
            finally:
                hold.let_go.set()
        assert loading.result()
        assert (store.tier_of(wanted.address) is not None) is saved_anew


async def _fails(store: BlockStore, wanted: BlockContext) -> bool:
    try:
        await load(store, wanted)
    except StrongroomError:
        return True
    return False
