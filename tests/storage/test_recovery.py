"""Recovery: a restart finds whole records of this store, and drops and counts everything else."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from storage.block import BlockContext
from storage.faulty import Call, Faulty
from storage.header import HEADER_BYTES, VERSION, record_bytes
from storage.tiers.limits import NvmeLimits
from storage.tiers.nvme import MakeFiles, NvmeTier
from storage.tiers.regions import REGION_HEADER_BYTES, RegionFiles
from storage.workers import disk_workers
from strongroom.errors import Conflict, Unavailable
from tests.storage.support import FakeClock, component, context, namespace, sealed

REGION = 64 * 1024
RECORD = record_bytes(context().segment_bytes)
FIRST = REGION_HEADER_BYTES
SECOND = FIRST + RECORD


def admit() -> None:
    """Let it in."""


@asynccontextmanager
async def opened(
    folder: Path | Sequence[Path],
    regions: int = 4,
    quota: int | None = None,
    make: MakeFiles = RegionFiles,
    *,
    region: int = REGION,
    limits: NvmeLimits | None = None,
    clock: FakeClock | None = None,
    queue_max: int = 64,
) -> AsyncIterator[NvmeTier]:
    workers = disk_workers(4, queue_max)
    try:
        tier = await NvmeTier.open(
            folder,
            regions * region,
            region,
            workers,
            clock or FakeClock(),
            pin_ns=10**9,
            quota_bytes=quota,
            limits=limits,
            make_files=make,
        )
        try:
            yield tier
        finally:
            await tier.close()
    finally:
        workers.close()


def dead(tier: NvmeTier) -> int:
    """Dropped records whose headers are still on the device."""
    return sum(len(region.dead) for region in tier._devices.regions)


def forget_dead(tier: NvmeTier) -> None:
    """What the death of the process would lose."""
    for region in tier._devices.regions:
        region.dead.clear()


async def put(tier: NvmeTier, wanted: BlockContext, sequence: int = 1) -> bytes:
    header, record = sealed(wanted, sequence=sequence)
    await tier.put(header, record, admit)
    return bytes(record[4096:])


async def body(tier: NvmeTier, wanted: BlockContext) -> bytes:
    async with tier.hold(wanted.address) as record:
        return bytes(record[4096:])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "nvme"


@pytest.fixture
async def stored(folder: Path) -> list[bytes]:
    """Three records in one region, closed in order; their ciphertext."""
    async with opened(folder) as tier:
        return [
            await put(tier, context(number, parent=number - 1), sequence=number)
            for number in (1, 2, 3)
        ]


def patch(folder: Path, at: int, data: bytes, region: int = 0) -> None:
    with (folder / f"{region:06d}").open("r+b") as file:
        file.seek(at)
        file.write(data)


def peek(folder: Path, at: int, size: int, region: int = 0) -> bytes:
    with (folder / f"{region:06d}").open("rb") as file:
        file.seek(at)
        return file.read(size)


async def test_a_restart_finds_every_record_and_charges_its_tenant_at_once(
    folder: Path, stored: list[bytes]
) -> None:
    async with opened(folder, quota=3 * RECORD) as tier:
        for number in (1, 2, 3):
            assert await body(tier, context(number)) == stored[number - 1]
        assert tier.used() == {component(1): 3 * RECORD}
        assert tier.namespaces() == {namespace(1): 3}
        assert tier.statistics().recovered == 3
        assert tier.last_sequence == 3
        await put(tier, context(4))
        assert tier.used() == {component(1): 3 * RECORD}, "one of its own made way"
        assert tier.statistics().blocks == 3


async def test_a_restart_links_children_to_their_parents_again(
    folder: Path, stored: list[bytes]
) -> None:
    async with opened(folder) as tier:
        assert [address.block[-1] for address in tier._index.victims()] == [3]


async def test_writing_goes_on_behind_what_a_restart_found(
    folder: Path, stored: list[bytes]
) -> None:
    async with opened(folder) as tier:
        await put(tier, context(4), sequence=4)
    async with opened(folder) as tier:
        assert tier.statistics().recovered == 4
        assert {row.place.offset // REGION for row in tier._index.rows()} == {0}


async def test_a_removed_block_does_not_come_back_with_a_restart(
    folder: Path, stored: list[bytes]
) -> None:
    async with opened(folder) as tier:
        tier.drop(context(2).address)
    async with opened(folder) as tier:
        assert context(2).address not in tier
        assert context(3).address in tier
        statistics = tier.statistics()
        assert (statistics.torn, statistics.corrupt, statistics.stale) == (0, 0, 0)


@pytest.mark.parametrize(
    "at",
    [0, 8, 10, 12, 16, 24, 32, 40, 56, 88, 120, 152, 160, 164, 168, 200, 232, 248, 280, 3000,
     3936, 3968, 3976, 3992, 4000, 4008, 4016, 4064],
)  # fmt: skip
async def test_a_flipped_byte_in_a_header_costs_that_record_alone(
    folder: Path, stored: list[bytes], at: int
) -> None:
    byte = peek(folder, SECOND + at, 1)[0]
    patch(folder, SECOND + at, bytes([byte ^ 1]))
    async with opened(folder) as tier:
        assert context(2).address not in tier
        assert await body(tier, context(1)) == stored[0]
        assert await body(tier, context(3)) == stored[2]
        statistics = tier.statistics()
        assert statistics.corrupt + statistics.future == 1
        assert statistics.used_bytes == 2 * RECORD


async def test_a_record_of_a_newer_version_is_left_out_and_counted(
    folder: Path, stored: list[bytes]
) -> None:
    patch(folder, SECOND + 8, bytes([VERSION + 1]))
    async with opened(folder) as tier:
        assert tier.statistics().future == 1
        assert tier.statistics().blocks == 2


@pytest.mark.parametrize("kept", [1, 4095, 4096, 8192, RECORD - 4096, RECORD - 64, RECORD - 8])
async def test_a_write_that_stopped_half_way_is_torn(
    folder: Path, stored: list[bytes], kept: int
) -> None:
    """Only the first `kept` bytes of the third record reached the disk."""
    third = SECOND + RECORD
    patch(folder, third + kept, bytes(RECORD - kept))
    async with opened(folder) as tier:
        assert context(3).address not in tier
        assert tier.statistics().blocks == 2
        statistics = tier.statistics()
        assert statistics.torn + statistics.corrupt == 1
        await put(tier, context(4), sequence=4)
    async with opened(folder) as tier:
        assert context(4).address in tier


@pytest.mark.parametrize("cut", [1, 4095, 4096, 8192, RECORD - 1])
async def test_a_file_cut_short_loses_what_was_cut_and_no_more(
    folder: Path, stored: list[bytes], cut: int
) -> None:
    with (folder / "000000").open("r+b") as file:
        file.truncate(SECOND + RECORD + cut)
    async with opened(folder) as tier:
        assert tier.statistics().blocks == 2
        assert tier.statistics().torn == 1
        assert await body(tier, context(2)) == stored[1]
        for number in range(10, 30):
            await put(tier, context(number), sequence=number)


async def test_a_record_moved_to_another_place_is_foreign(
    folder: Path, stored: list[bytes]
) -> None:
    patch(folder, SECOND, peek(folder, FIRST, RECORD))
    async with opened(folder) as tier:
        assert context(1).address in tier
        assert context(2).address not in tier
        assert tier.statistics().foreign == 1


async def test_another_directorys_record_and_another_directorys_region_are_foreign(
    folder: Path, stored: list[bytes], tmp_path: Path
) -> None:
    async with opened(tmp_path / "other") as tier:
        await put(tier, context(7))
        await put(tier, context(8))
    patch(folder, SECOND, peek(tmp_path / "other", SECOND, RECORD))
    shutil.copy(tmp_path / "other" / "000000", folder / "000002")
    async with opened(folder) as tier:
        assert context(8).address not in tier
        assert context(7).address not in tier
        assert context(3).address in tier
        assert tier.statistics().foreign == 2


async def test_what_a_region_held_before_is_stale(folder: Path, stored: list[bytes]) -> None:
    """A renewed region's header with the old records behind it: a crash, or a copy put back."""
    old = peek(folder, FIRST, 3 * RECORD)
    async with opened(folder) as tier:
        for number in (1, 2, 3):
            tier.drop(context(number).address)
        tier._writer.region = None
        await tier.bury_dead()
        assert peek(folder, FIRST, 3 * RECORD) == bytes(3 * RECORD), "reclaimed bytes are gone"
    patch(folder, FIRST, old)
    async with opened(folder) as tier:
        assert tier.statistics().blocks == 0
        assert tier.statistics().stale == 3


async def test_of_two_records_of_one_block_the_later_sealing_counts(
    folder: Path, stored: list[bytes]
) -> None:
    async with opened(folder) as tier:
        newer = await put(tier, context(2), sequence=9)
        forget_dead(tier)  # as if killed before the old one's header was overwritten
    async with opened(folder) as tier:
        assert await body(tier, context(2)) == newer
        assert tier.statistics().stale == 1
        assert tier.used() == {component(1): 3 * RECORD}


async def test_a_damaged_manifest_costs_the_cache_and_not_the_start(
    folder: Path, stored: list[bytes]
) -> None:
    (folder / "manifest.json").write_bytes(b"{")
    async with opened(folder) as tier:
        assert tier.statistics().blocks == 0
        assert tier.statistics().foreign >= 1
        await put(tier, context(4))
    async with opened(folder) as tier:
        assert context(4).address in tier


async def test_a_directory_of_a_newer_version_is_refused_and_not_overwritten(
    folder: Path, stored: list[bytes]
) -> None:
    (folder / "manifest.json").write_text('{"version": 2}')
    before = peek(folder, 0, REGION)
    with pytest.raises(Unavailable, match="newer version"):
        async with opened(folder):
            pass
    assert peek(folder, 0, REGION) == before


async def test_a_directory_in_use_is_refused(folder: Path, stored: list[bytes]) -> None:
    async with opened(folder):
        with pytest.raises(Conflict, match="in use"):
            async with opened(folder):
                pass


async def test_a_directory_keeps_its_region_length_and_shrinks_by_whole_regions(
    folder: Path, stored: list[bytes]
) -> None:
    async with opened(folder, regions=2) as tier:
        assert tier.statistics().blocks == 3
    assert not (folder / "000003").exists()


async def test_directories_are_0700_and_files_0600_and_names_reveal_nothing(
    folder: Path, stored: list[bytes]
) -> None:
    assert folder.stat().st_mode & 0o777 == 0o700
    names = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert set(names.values()) == {0o600}
    assert names.keys() == {"lock", "manifest.json", "000000", "000001", "000002", "000003"}


async def test_wide_permissions_of_an_existing_directory_are_tightened(
    folder: Path, stored: list[bytes]
) -> None:
    folder.chmod(0o755)
    (folder / "000000").chmod(0o644)
    async with opened(folder):
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / "000000").stat().st_mode & 0o777 == 0o600


async def test_of_large_records_two_pages_are_read_at_start_in_one_call(folder: Path) -> None:
    """However large the blocks are, recovery reads where one ends and the next begins."""
    async with opened(folder, region=1024 * 1024) as tier:
        for number in range(5):
            await put(tier, context(number, segments=(150_000,)), sequence=number)
    faulty = Faulty()
    async with opened(folder, region=1024 * 1024, make=faulty.make_files) as tier:
        assert tier.statistics().blocks == 5
        reads = [made for made in faulty.calls if made.call is Call.READ and made.offset]
        # The first record's head, and the end of each record with the head behind it.
        assert len(reads) == 6
        assert max(made.nbytes for made in reads) == 2 * HEADER_BYTES


async def test_small_records_are_read_in_long_stretches_at_start(folder: Path) -> None:
    async with opened(folder, region=1024 * 1024) as tier:
        for number in range(60):
            await put(tier, context(number), sequence=number)
    faulty = Faulty()
    async with opened(folder, region=1024 * 1024, make=faulty.make_files) as tier:
        assert tier.statistics().blocks == 60
        assert sum(1 for made in faulty.calls if made.call is Call.READ and made.offset) <= 4
