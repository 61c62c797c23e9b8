"""Twelve probes that a public peer was put to, put to this store: docs/probes.md has both answers.

A probe does what an insider with the disk, a full device or a crash does, and returns what was
seen as a short text. The page's row must say exactly that, so that the page cannot drift.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from storage.block import BlockContext
from storage.compose import MIB, StoreSettings, open_store
from storage.fence import Fence
from storage.header import record_bytes
from storage.keyring import KeyRing
from storage.store import BlockStore
from storage.tiers.protocol import TierName
from storage.tiers.regions import Region, RegionFiles
from strongroom.derivation import SECRET_BYTES, NamespaceKeys
from strongroom.errors import Corrupt, Missing, Overloaded
from tests.storage.support import (
    KEYS,
    OTHER_KEYS,
    FakeClock,
    component,
    context,
    namespace,
    plaintext,
)

SEGMENTS = (MIB // 2, MIB // 2)
A = context(1, segments=SEGMENTS)
B = context(2, segments=SEGMENTS)
THEIRS = context(3, tenant=2, room=2, segments=SEGMENTS)
RECORD = record_bytes(SEGMENTS)
PLACE = {A.block: 4096, B.block: 4096 + RECORD, THEIRS.block: 4096 + 2 * RECORD}
PAGE = Path(__file__).parents[2] / "docs" / "probes.md"


def settings(folder: Path) -> StoreSettings:
    return StoreSettings(
        host_bytes=16 * MIB,
        nvme_path=folder,
        nvme_bytes=32 * MIB,
        region_bytes=8 * MIB,
        crypto_threads=2,
        write_behind_s=0.0,
        lock_memory=False,
    )


async def save(store: BlockStore, wanted: BlockContext, keys: NamespaceKeys = KEYS) -> None:
    await store.save(wanted, keys, plaintext(wanted), Fence())


async def load(store: BlockStore, wanted: BlockContext, keys: NamespaceKeys = KEYS) -> str:
    """What a load answers: a hit only with the very bytes that were saved."""
    staging = memoryview(bytearray(b"\xee" * wanted.plaintext_bytes))
    try:
        await store.load(wanted, keys, staging, Fence())
    except (Missing, Corrupt):
        assert bytes(staging) == bytes(len(staging)), "a miss leaves nothing in the buffer"
        return "miss, buffer wiped"
    assert staging == plaintext(wanted), "wrong bytes were served"
    return "hit, the bytes that were saved"


async def filled(folder: Path) -> None:
    """A, B and another tenant's block on disk, in this order, by an orderly stop."""
    async with open_store(settings(folder)) as store:
        await save(store, A)
        await store.flush()
        await save(store, B)
        await store.flush()
        await save(store, THEIRS, OTHER_KEYS)


def region(folder: Path) -> Path:
    return folder / "000000"


def record_of(folder: Path, wanted: BlockContext) -> bytes:
    with region(folder).open("rb") as file:
        file.seek(PLACE[wanted.block])
        found = file.read(RECORD)
    assert bytes(wanted.block) in found[:4096], "the probe would patch another place"
    return found


def put_record(folder: Path, wanted: BlockContext, data: bytes, at: int = 0) -> None:
    with region(folder).open("r+b") as file:
        file.seek(PLACE[wanted.block] + at)
        file.write(data)


async def reopened(folder: Path, wanted: BlockContext, keys: NamespaceKeys = KEYS) -> str:
    async with open_store(settings(folder)) as store:
        return await load(store, wanted, keys)


async def patched_while_open(folder: Path, change: Callable[[], None]) -> str:
    """The disk is changed under a store that has A in its index and not in host memory."""
    async with open_store(settings(folder)) as store:
        assert store.tier_of(A.address) is TierName.NVME
        change()
        return await load(store, A)


async def baseline(folder: Path) -> str:
    await filled(folder)
    return await reopened(folder, A)


async def same_tenants_ciphertext(folder: Path) -> str:
    await filled(folder)
    other = record_of(folder, B)
    return await patched_while_open(folder, lambda: put_record(folder, A, other))


async def other_tenants_ciphertext(folder: Path) -> str:
    await filled(folder)
    other = record_of(folder, THEIRS)
    return await patched_while_open(folder, lambda: put_record(folder, A, other))


async def replay_of_a_deleted_block(folder: Path) -> str:
    await filled(folder)
    kept = region(folder).read_bytes()
    clock = FakeClock()
    ring = KeyRing(clock)
    ring.put(A.namespace, b"1" * SECRET_BYTES, (component(1),), clock.now_ns + 10**12)
    async with open_store(settings(folder)) as store:
        ring.drop_components([component(1)])
        store.retire([namespace(1)])
        await store.reclaim()
    region(folder).write_bytes(kept)
    assert ring.keys(A.namespace, A.format_digest) is None, "nobody can derive its key any more"
    # The same document registered anew has new secrets, and so other keys.
    return await reopened(folder, A, OTHER_KEYS)


async def flipped_bit_of_ciphertext(folder: Path) -> str:
    await filled(folder)
    byte = record_of(folder, A)[5000]
    return await patched_while_open(
        folder, lambda: put_record(folder, A, bytes([byte ^ 1]), at=5000)
    )


async def file_cut_short(folder: Path) -> str:
    await filled(folder)
    cut = PLACE[A.block] + RECORD // 4
    return await patched_while_open(folder, lambda: os.truncate(region(folder), cut))


async def flipped_byte_before_a_restart(folder: Path) -> str:
    await filled(folder)
    byte = record_of(folder, A)[4096 + 7]
    put_record(folder, A, bytes([byte ^ 255]), at=4096 + 7)
    return await reopened(folder, A)


async def file_cut_short_after_others_used_the_memory(folder: Path) -> str:
    await filled(folder)
    async with open_store(settings(folder)) as store:
        # Host room is full of other requests' ciphertext, then free again.
        for number in range(10, 18):
            await save(store, context(number, room=3, segments=SEGMENTS))
        store.retire([namespace(3)])
        await store.reclaim()
        os.truncate(region(folder), PLACE[A.block] + RECORD // 4)
        return await load(store, A)


async def removal(folder: Path) -> str:
    await filled(folder)
    async with open_store(settings(folder)) as store:
        before = {tier.name: tier.used_bytes for tier in store.statistics().tiers}
        store.retire([namespace(1), namespace(2)])
        await store.reclaim()
        after = {tier.name: tier.used_bytes for tier in store.statistics().tiers}
        assert before[TierName.NVME] > 0
        assert set(after.values()) == {0}
    left = b"".join(path.read_bytes() for path in sorted(folder.glob("[0-9]*")))
    assert b"SRBLOCK" not in left
    return "capacity is free at once, no record left"


async def restart(folder: Path) -> str:
    await filled(folder)
    async with open_store(settings(folder)) as store:
        nvme = next(tier for tier in store.statistics().tiers if tier.name is TierName.NVME)
        assert (nvme.blocks, nvme.recovered) == (3, 3)
        assert nvme.used_bytes == 3 * RECORD
        assert store.tier_of(A.address) is TierName.NVME
    return "3 of 3 blocks found, 3 of 3 charged"


class FullOnce(RegionFiles):
    """The device is full for one write of records."""

    full = False

    def write(self, region: Region, offset: int, data: Sequence[memoryview]) -> None:
        if FullOnce.full and offset:
            FullOnce.full = False
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(region, offset, data)


async def write_error(folder: Path) -> str:
    async with open_store(settings(folder), make_files=FullOnce) as store:
        FullOnce.full = True
        await save(store, A)
        await store.flush()
        assert not FullOnce.full, "the error was met"
        nvme = next(tier for tier in store.statistics().tiers if tier.name is TierName.NVME)
        assert (nvme.blocks, nvme.used_bytes, store.statistics().write_behind_pending) == (0, 0, 0)
        store.retire([namespace(1)])
        await store.reclaim()
        again = context(1, room=4, segments=SEGMENTS)
        await save(store, again)
        await store.flush()
    return await reopened(folder, again) + "; nothing charged for the failure"


async def no_room_to_read_into(folder: Path) -> str:
    await filled(folder)
    small = StoreSettings(
        host_bytes=2 * RECORD,
        nvme_path=folder,
        nvme_bytes=32 * MIB,
        region_bytes=8 * MIB,
        crypto_threads=1,
        crypto_queue_max=1,
        write_behind_s=0.0,
        lock_memory=False,
    )
    async with open_store(small) as store:
        loads = (load(store, A) for _ in range(12))
        ends = await asyncio.gather(*loads, return_exceptions=True)
        if not any(isinstance(end, Overloaded) for end in ends):
            pytest.fail("the probe did not exhaust anything")
    return await reopened(folder, A) + " at the next try; nothing stays locked"


Probe = Callable[[Path], Awaitable[str]]
PROBES: dict[str, Probe] = {
    "1": baseline,
    "2": same_tenants_ciphertext,
    "3": other_tenants_ciphertext,
    "4": replay_of_a_deleted_block,
    "5": flipped_bit_of_ciphertext,
    "6": file_cut_short,
    "7": flipped_byte_before_a_restart,
    "8": file_cut_short_after_others_used_the_memory,
    "9": removal,
    "10": restart,
    "11": write_error,
    "12": no_room_to_read_into,
}


def told() -> dict[str, str]:
    """The page's last column, by the probe's number."""
    rows = [line.strip("|").split("|") for line in PAGE.read_text().splitlines()]
    return {cells[0].strip(): cells[-1].strip() for cells in rows if cells[0].strip() in PROBES}


@pytest.mark.parametrize("number", PROBES)
async def test_a_probe_of_the_peer_has_the_outcome_that_the_page_tells(
    number: str, tmp_path: Path
) -> None:
    assert await PROBES[number](tmp_path / "nvme") == told()[number]


def test_the_page_lists_the_twelve_probes_and_no_other() -> None:
    assert list(told()) == list(PROBES)
