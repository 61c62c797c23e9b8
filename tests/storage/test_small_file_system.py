"""A file system of a few megabytes, which really fills up."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.compose import StoreSettings, open_store
from storage.fence import Fence
from storage.store import BlockStore
from storage.tiers.protocol import TierName
from tests.storage.support import KEYS, context, plaintext

MIB = 1024 * 1024
SEGMENTS = (60 * 1024,) * 2


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 8 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(path)]
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"no mount here: {error}")
    if made.returncode:
        pytest.skip(f"a tmpfs may not be mounted here: {made.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def settings(path: Path) -> StoreSettings:
    return StoreSettings(
        host_bytes=8 * MIB, nvme_path=path / "nvme", nvme_bytes=64 * MIB, region_bytes=MIB,
        crypto_threads=1, write_behind_s=0.0, lock_memory=False, huge_pages=False,
    )  # fmt: skip


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(64 * 1024))


async def save(store: BlockStore, first: int, last: int) -> None:
    for number in range(first, last):
        block = context(number, segments=SEGMENTS)
        await store.save(block, KEYS, plaintext(block), Fence())
        await store.flush()


async def right(store: BlockStore, number: int) -> bool:
    block = context(number, segments=SEGMENTS)
    if store.tier_of(block.address) is None:
        return False
    staging = memoryview(bytearray(block.plaintext_bytes))
    await store.load(block, KEYS, staging, Fence())
    return staging == plaintext(block)


async def test_a_store_on_a_file_system_that_is_full_serves_from_host_memory_and_starts_again(
    small: Path,
) -> None:
    async with open_store(settings(small)) as store:
        (nvme,) = (t for t in store.statistics().tiers if t.name is TierName.NVME)
        assert nvme.capacity_bytes < 8 * MIB, "no more than the file system holds"
        await save(store, 0, 4)
        taken = small / "taken"
        with pytest.raises(OSError, match="No space"):
            fill(taken)
        await save(store, 4, 80)
        assert await right(store, 79), "what was saved last is there, on disk or not"
        assert not [n for n in range(80) if store.tier_of(context(n, segments=SEGMENTS).address)
                    and not await right(store, n)]  # fmt: skip
        taken.unlink()
        await save(store, 80, 84)
        assert await right(store, 83)
    async with open_store(settings(small)) as store:
        assert any([await right(store, number) for number in range(84)])
