"""Every disk fault of docs/operations.md: what happens, and what never does.

A record is damaged on the disk at every kind of place, or the device fails in every way there
is; wrong bytes are never opened, nothing else is lost, no room leaks and no block is poisoned.
"""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from storage.block import BlockContext
from storage.envelope import Opener
from storage.faulty import Call, Fail, Faulty, Flip, Hold, Injected, Made, Short, Torn
from storage.header import HEADER_BYTES, TAIL_BYTES, VERSION, read_header
from storage.memory import aligned
from storage.tiers.nvme import NvmeTier
from strongroom.errors import Corrupt, Missing, Overloaded, StrongroomError, Unavailable
from tests.storage.nvme_support import check_balance, check_empties, entered, put_many, touching
from tests.storage.support import KEYS, context, plaintext
from tests.storage.test_recovery import (
    FIRST,
    RECORD,
    REGION,
    SECOND,
    body,
    forget_dead,
    opened,
    patch,
    peek,
    put,
)

SEGMENTS = context().segment_bytes
BODY_END = HEADER_BYTES + sum(SEGMENTS) + 16 * len(SEGMENTS)
"""Where the last segment's tag ends in a record."""

TEARS = {
    "magic": 4,
    "version": 9,
    "lengths": 20,
    "tenant": 48,
    "namespace": 70,
    "block": 100,
    "parent": 130,
    "digests": 180,
    "salt": 240,
    "commitment": 260,
    "segment table": 284,
    "reserved": 3000,
    "before the checksum": 3936,
    "checksum": 3950,
    "before the placement": 3968,
    "placement": 4000,
    "placement checksum": 4070,
    "before the ciphertext": 4096,
    "first byte of ciphertext": 4097,
    "first segment": 4096 + 2000,
    "first tag": 4096 + SEGMENTS[0] + 8,
    "between segments": 4096 + SEGMENTS[0] + 16,
    "page boundary": 8192,
    "behind a page boundary": 8193,
    "last byte of ciphertext": BODY_END - 17,
    "last tag": BODY_END - 1,
    "padding": BODY_END + 1,
    "before the tail": RECORD - TAIL_BYTES,
    "tail": RECORD - TAIL_BYTES + 20,
    "last byte": RECORD - 1,
}
"""How many bytes of a record reached the disk."""

FIELDS = {
    "magic": (0, 8),
    "version": (8, 2),
    "flags": (10, 2),
    "segment count": (12, 4),
    "record bytes": (16, 8),
    "plaintext bytes": (24, 8),
    "sequence": (32, 8),
    "tenant": (40, 16),
    "namespace": (56, 32),
    "block": (88, 32),
    "parent": (120, 32),
    "position": (152, 8),
    "tokens": (160, 4),
    "rank": (164, 4),
    "format digest": (168, 32),
    "layout digest": (200, 32),
    "salt": (232, 16),
    "commitment": (248, 32),
    "segment table": (280, 2048),
    "reserved": (2328, 1608),
    "checksum": (3936, 32),
    "place magic": (3968, 8),
    "place store": (3976, 16),
    "place region": (3992, 4),
    "place priority": (3996, 4),
    "place generation": (4000, 8),
    "place offset": (4008, 8),
    "place order": (4016, 8),
    "place reserved": (4024, 40),
    "place checksum": (4064, 32),
    "tail magic": (RECORD - 64, 8),
    "tail sequence": (RECORD - 56, 8),
    "tail checksum": (RECORD - 32, 32),
}
"""Offset and length of every field of a record besides ciphertext (docs/format.md 5 and 6)."""


def is_record(made: Made) -> bool:
    return made.offset > 0


async def opens(tier: NvmeTier, wanted: BlockContext) -> bool:
    """Whether the block opens to the right plaintext; raises what its reading raises."""
    async with tier.hold(wanted.address) as record:
        opener = Opener.begin(read_header(record), wanted, KEYS.data)
        out = aligned(wanted.plaintext_bytes)[: wanted.plaintext_bytes]
        opener.segments(range(len(wanted.segment_bytes)), record, out)
        return out == plaintext(wanted)


async def three(folder: Path) -> None:
    """Three records in one region, closed in order."""
    async with opened(folder) as tier:
        await put_many(tier, [context(number) for number in (1, 2, 3)])


# What a power cut leaves


@pytest.mark.parametrize("reached", TEARS.values(), ids=list(TEARS))
async def test_a_torn_record_is_dropped_and_nothing_else(tmp_path: Path, reached: int) -> None:
    faulty = Faulty()
    async with opened(tmp_path, make=faulty.make_files) as tier:
        await put(tier, context(1), sequence=1)
        faulty.script(Call.WRITE, Torn(reached), where=is_record)
        with pytest.raises(Unavailable):
            await put(tier, context(2), sequence=2)
        assert context(2).address not in tier
        forget_dead(tier)  # as if the power had gone with the write
        await put(tier, context(3), sequence=3)
        check_balance(tier)
    async with opened(tmp_path) as tier:
        assert context(2).address not in tier
        assert await opens(tier, context(1))
        assert await opens(tier, context(3))
        statistics = tier.statistics()
        assert statistics.torn + statistics.corrupt + statistics.stale + statistics.foreign == 1
        await put(tier, context(2), sequence=4)
        assert await opens(tier, context(2))
        check_empties(tier)


async def test_a_write_that_was_not_torn_is_there(tmp_path: Path) -> None:
    """The other side of the pair: the same script, all bytes out."""
    faulty = Faulty()
    async with opened(tmp_path, make=faulty.make_files) as tier:
        faulty.script(Call.WRITE, Torn(RECORD), where=is_record)
        with pytest.raises(Unavailable):
            await put(tier, context(2), sequence=2)
        forget_dead(tier)
    async with opened(tmp_path) as tier:
        assert await opens(tier, context(2)), "all of it had reached the disk"


async def test_a_region_header_torn_at_renewal_costs_nobody_anything(tmp_path: Path) -> None:
    faulty = Faulty()
    async with opened(tmp_path, make=faulty.make_files) as tier:
        await put(tier, context(1), sequence=1)
        faulty.script(Call.WRITE, Torn(100), where=lambda made: made.offset == 0)
        for number in range(2, 12):
            try:
                await put(tier, context(number), sequence=number)
            except Unavailable:
                await put(tier, context(number), sequence=number)
        assert await opens(tier, context(1))
        check_balance(tier)


# Bit flips


@pytest.mark.parametrize("bit", [0, 7])
@pytest.mark.parametrize("where", ["first", "last"])
@pytest.mark.parametrize(("at", "length"), FIELDS.values(), ids=list(FIELDS))
async def test_a_bit_flip_in_any_field_is_never_opened(
    tmp_path: Path, at: int, length: int, where: str, bit: int
) -> None:
    """Found at start it costs the record; found while running it does not open."""
    await three(tmp_path)
    byte = SECOND + at + (length - 1 if where == "last" else 0)
    flipped = bytes([peek(tmp_path, byte, 1)[0] ^ (1 << bit)])
    async with opened(tmp_path) as tier:
        patch(tmp_path, byte, flipped)
        try:
            found = await opens(tier, context(2))
        except (Corrupt, Missing):
            pass
        else:
            # The tail and the placement are the disk's; what was sealed is whole.
            assert found
            assert at >= 3968
    async with opened(tmp_path) as tier:
        assert context(2).address not in tier
        for number in (1, 3):
            assert await opens(tier, context(number))
        check_empties(tier)


@pytest.mark.parametrize(
    "at", [HEADER_BYTES, HEADER_BYTES + 2500, HEADER_BYTES + SEGMENTS[0] + 3, BODY_END - 1]
)
async def test_a_bit_flip_in_ciphertext_or_tag_does_not_open(tmp_path: Path, at: int) -> None:
    await three(tmp_path)
    patch(tmp_path, SECOND + at, bytes([peek(tmp_path, SECOND + at, 1)[0] ^ 0x10]))
    async with opened(tmp_path) as tier:
        with pytest.raises(Corrupt):
            await opens(tier, context(2))
        assert await opens(tier, context(3))


@pytest.mark.parametrize("at", [5, 90, 3940, 4096 + 100, BODY_END - 3])
async def test_a_bit_flipped_on_the_way_from_the_device_does_not_open(
    tmp_path: Path, at: int
) -> None:
    faulty = Faulty()
    async with opened(tmp_path, make=faulty.make_files) as tier:
        await put(tier, context(2))
        faulty.script(Call.READ, Flip(at, 0x40))
        with pytest.raises(Corrupt):
            await opens(tier, context(2))
        assert await opens(tier, context(2)), "the record itself is whole"


@pytest.mark.parametrize("at", [5, 90, 3940, 4096 + 100, BODY_END - 3])
async def test_a_bit_flipped_on_the_way_to_the_device_does_not_open(
    tmp_path: Path, at: int
) -> None:
    faulty = Faulty()
    async with opened(tmp_path, make=faulty.make_files) as tier:
        faulty.script(Call.WRITE, Flip(at, 0x40), where=is_record)
        await put(tier, context(2))
        with pytest.raises(Corrupt):
            await opens(tier, context(2))


# Records of elsewhere


async def test_swapped_records_do_not_open_and_a_start_drops_them(tmp_path: Path) -> None:
    await three(tmp_path)
    first, second = (peek(tmp_path, at, RECORD) for at in (FIRST, SECOND))
    async with opened(tmp_path) as tier:
        patch(tmp_path, FIRST, second)
        patch(tmp_path, SECOND, first)
        for number in (1, 2):
            with pytest.raises(Corrupt, match="another block's"):
                await opens(tier, context(number))
        assert await opens(tier, context(3))
    async with opened(tmp_path) as tier:
        assert context(1).address not in tier
        assert context(2).address not in tier
        assert tier.statistics().foreign == 2
        check_empties(tier)


async def test_a_deleted_record_put_back_into_its_renewed_region_is_stale(tmp_path: Path) -> None:
    await three(tmp_path)
    old = peek(tmp_path, FIRST, 3 * RECORD)
    async with opened(tmp_path) as tier:
        for number in (1, 2, 3):
            tier.drop(context(number).address)
        tier._writer.region = None
        await tier.bury_dead()
        patch(tmp_path, FIRST, old)
        for number in (1, 2, 3):
            with pytest.raises(Missing):
                await opens(tier, context(number))
    async with opened(tmp_path) as tier:
        assert tier.statistics().blocks == 0
        assert tier.statistics().stale == 3


async def test_an_older_writing_replayed_over_the_newer_one_is_never_wrong_bytes(
    tmp_path: Path,
) -> None:
    """In its old place it is a candidate as before; in the new one's place it is foreign."""
    async with opened(tmp_path) as tier:
        await put(tier, context(1), sequence=1)
        old = peek(tmp_path, FIRST, RECORD)
        await put(tier, context(1), sequence=2)
        await tier.bury_dead()
    patch(tmp_path, SECOND, old)
    async with opened(tmp_path) as tier:
        assert context(1).address not in tier
        assert tier.statistics().foreign == 1


async def test_a_record_of_another_store_is_foreign(tmp_path: Path) -> None:
    await three(tmp_path / "ours")
    await three(tmp_path / "theirs")
    patch(tmp_path / "ours", SECOND, peek(tmp_path / "theirs", SECOND, RECORD))
    async with opened(tmp_path / "ours") as tier:
        assert context(2).address not in tier
        assert tier.statistics().foreign == 1
        assert await opens(tier, context(3))


async def test_a_record_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    await three(tmp_path)
    patch(tmp_path, SECOND + 8, bytes([VERSION + 1]))
    async with opened(tmp_path) as tier:
        assert tier.statistics().future == 1
        assert context(2).address not in tier
        assert await opens(tier, context(3))
    assert peek(tmp_path, SECOND + 8, 1) == bytes([VERSION + 1])


# The device


DEVICE_FAULTS: dict[str, tuple[Injected, type[StrongroomError]]] = {
    "ENOSPC": (Fail(errno.ENOSPC), Overloaded),
    "EDQUOT": (Fail(errno.EDQUOT), Overloaded),
    "EIO": (Fail(errno.EIO), Unavailable),
    "EROFS": (Fail(errno.EROFS), Unavailable),
    "nothing written": (Short(0), Unavailable),
}


@pytest.mark.parametrize(("fault", "error"), DEVICE_FAULTS.values(), ids=list(DEVICE_FAULTS))
async def test_a_failing_write_is_typed_counted_and_poisons_nothing(
    tmp_path: Path, fault: Injected, error: type[StrongroomError]
) -> None:
    faulty = Faulty()
    async with opened(tmp_path, make=faulty.make_files) as tier:
        await put(tier, context(1), sequence=1)
        faulty.script(Call.WRITE, fault, where=is_record)
        with pytest.raises(error):
            await put(tier, context(2), sequence=2)
        assert context(2).address not in tier
        assert tier.statistics().io_errors == 1
        check_balance(tier)
        await put(tier, context(2), sequence=3)
        assert await opens(tier, context(2))
    async with opened(tmp_path) as tier:
        assert await opens(tier, context(1))
        assert await opens(tier, context(2))
        check_empties(tier)


async def test_a_short_write_goes_on_where_it_stopped(tmp_path: Path) -> None:
    faulty = Faulty()
    async with opened(tmp_path, make=faulty.make_files) as tier:
        faulty.script(Call.WRITE, Short(4096 + 100), where=is_record, times=2)
        await put(tier, context(2))
        assert tier.statistics().io_errors == 0
        assert await opens(tier, context(2))
    async with opened(tmp_path) as tier:
        assert await opens(tier, context(2))


@pytest.mark.parametrize("nbytes", [4096, 8192 + 17])
async def test_a_short_read_goes_on_where_it_stopped(tmp_path: Path, nbytes: int) -> None:
    faulty = Faulty()
    async with opened(tmp_path, make=faulty.make_files) as tier:
        await put(tier, context(2))
        faulty.script(Call.READ, Short(nbytes))
        assert await opens(tier, context(2))


async def test_a_read_that_gives_nothing_is_corrupt_and_not_old_memory(tmp_path: Path) -> None:
    faulty = Faulty()
    async with opened(tmp_path, make=faulty.make_files) as tier:
        await put(tier, context(2))
        faulty.script(Call.READ, Short(0))
        with pytest.raises(Corrupt, match="cut short"):
            await opens(tier, context(2))
        check_empties(tier)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENODEV])
async def test_a_failing_read_is_typed_and_counted_and_may_be_tried_again(
    tmp_path: Path, code: int
) -> None:
    faulty = Faulty()
    async with opened(tmp_path, make=faulty.make_files) as tier:
        await put(tier, context(2))
        faulty.script(Call.READ, Fail(code))
        with pytest.raises(Unavailable):
            await opens(tier, context(2))
        assert tier.statistics().io_errors == 1
        assert await opens(tier, context(2))
        check_empties(tier)


@pytest.mark.parametrize("at", [SECOND, SECOND + RECORD - 4096], ids=["header", "tail"])
async def test_a_bad_page_at_start_costs_the_record_that_it_is_of(tmp_path: Path, at: int) -> None:
    await three(tmp_path)
    faulty = Faulty()
    faulty.script(Call.READ, Fail(errno.EIO), times=None, where=touching(at))
    async with opened(tmp_path, make=faulty.make_files) as tier:
        assert tier.statistics().blocks == 2
        assert tier.statistics().io_errors == 1
        faulty.clear()
        assert [number for number in (1, 2, 3) if context(number).address in tier] == [1, 3]
        check_empties(tier)


async def test_one_read_that_fails_at_start_costs_nothing(tmp_path: Path) -> None:
    await three(tmp_path)
    faulty = Faulty()
    faulty.script(Call.READ, Fail(errno.EIO), where=is_record)
    async with opened(tmp_path, make=faulty.make_files) as tier:
        assert tier.statistics().blocks == 3
        check_empties(tier)


async def test_a_device_that_cannot_be_read_at_start_costs_its_blocks_and_not_the_start(
    tmp_path: Path,
) -> None:
    await three(tmp_path)
    faulty = Faulty()
    faulty.script(Call.READ, Fail(errno.EIO), times=None, where=is_record)
    async with opened(tmp_path, make=faulty.make_files) as tier:
        faulty.clear()
        assert tier.statistics().blocks == 0
        assert tier.statistics().io_errors == 1
        for number in range(30):
            await put(tier, context(number), sequence=number)
            assert await opens(tier, context(number))
        check_empties(tier)


async def test_no_room_to_renew_a_region_is_overloaded_until_there_is(tmp_path: Path) -> None:
    faulty = Faulty()
    async with opened(tmp_path, make=faulty.make_files) as tier:
        for number in range(10):
            await put(tier, context(number), sequence=number)
        kept = [number for number in range(10) if context(number).address in tier]
        faulty.script(Call.ALLOCATE, Fail(errno.ENOSPC), times=None)
        refused = 0
        for number in range(10, 40):
            try:
                await put(tier, context(number), sequence=number)
            except Overloaded:
                refused += 1
        assert refused
        check_balance(tier)
        for number in range(40):
            if context(number).address in tier:
                assert await opens(tier, context(number))
        assert kept
        faulty.clear()
        for number in range(40, 60):
            await put(tier, context(number), sequence=number)
            assert await opens(tier, context(number))
        check_empties(tier)


async def test_a_slow_disk_holds_up_neither_the_loop_nor_other_reads(tmp_path: Path) -> None:
    faulty = Faulty()
    async with opened(tmp_path, make=faulty.make_files) as tier:
        await put_many(tier, [context(number) for number in range(8)])
        slow = Hold()
        faulty.script(Call.READ, slow)
        async with asyncio.TaskGroup() as group:
            held = group.create_task(opens(tier, context(0)))
            await entered(slow)
            for number in range(1, 8):
                assert await opens(tier, context(number))
            await put(tier, context(9), sequence=9)
            assert not held.done()
            slow.let_go.set()
        assert held.result()
        check_empties(tier)


async def test_a_sync_that_fails_at_the_end_is_said_and_ends_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = Faulty()
    async with opened(tmp_path, make=faulty.make_files) as tier:
        await put(tier, context(1))
        faulty.script(Call.SYNC, Fail(errno.EIO))
    assert "closed without a sync" in caplog.text
    async with opened(tmp_path) as tier:
        assert await opens(tier, context(1))


# Hazards seen in the field


async def test_a_write_error_does_not_poison_the_key(tmp_path: Path) -> None:
    """LMCache LocalDisk: the key was taken for ever."""
    faulty = Faulty()
    async with opened(tmp_path, make=faulty.make_files) as tier:
        for attempt in range(5):
            faulty.script(Call.WRITE, Fail(errno.EIO), where=is_record)
            with pytest.raises(Unavailable):
                await put(tier, context(1), sequence=attempt)
            assert await tier.bury_dead() >= 0
        await put(tier, context(1), sequence=9)
        assert await opens(tier, context(1))
        check_empties(tier)


async def test_removing_gives_the_room_back(tmp_path: Path) -> None:
    """LMCache LocalDisk: remove freed no capacity."""
    async with opened(tmp_path) as tier:
        for number in range(200):
            await put(tier, context(number), sequence=number)
            assert tier.drop(context(number).address) == RECORD
            check_balance(tier)
        assert tier.statistics().evictions == 0
        assert tier.statistics().overloads == 0
        assert tier.statistics().used_bytes == 0


async def test_a_reader_and_a_writer_never_wait_for_each_other(tmp_path: Path) -> None:
    """LMCache LocalDisk: out of staging while holding a lock was a deadlock."""
    faulty = Faulty()
    async with opened(tmp_path, regions=2, make=faulty.make_files) as tier:
        await put_many(tier, [context(number, room=number) for number in range(4)])
        slow = Hold()
        faulty.script(Call.READ, slow)
        async with asyncio.TaskGroup() as group, asyncio.timeout(20):
            reading = group.create_task(opens(tier, context(0, room=0)))
            await entered(slow)
            refused = 0
            for number in range(10, 30):
                try:
                    await put(tier, context(number, room=number), sequence=number)
                except Overloaded:
                    refused += 1
            assert refused, "a held region is not waited for: the writer is refused and goes on"
            slow.let_go.set()
        assert reading.result()
        await put(tier, context(50, room=50), sequence=50)
        assert await opens(tier, context(50, room=50))
        check_empties(tier)


async def test_whatever_a_region_file_holds_at_start_nothing_breaks(tmp_path: Path) -> None:
    await three(tmp_path)
    noise = bytes((7 * n * n + n // 3) % 251 for n in range(REGION))
    (tmp_path / "000001").write_bytes(noise)
    (tmp_path / "000002").write_bytes(b"")
    (tmp_path / "000003").write_bytes(noise[:5000])
    async with opened(tmp_path) as tier:
        assert tier.statistics().blocks == 3
        for number in range(10, 40):
            await put(tier, context(number), sequence=number)
        assert await body(tier, context(39))
        check_empties(tier)
