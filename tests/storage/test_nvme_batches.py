"""Batches: neighbours in one system call, several at once, each record with an end of its own."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from storage.faulty import Call, Fail, Faulty, Hold, Made
from storage.fence import Fenced
from storage.header import record_bytes
from storage.lifecycle import Resident
from storage.memory import aligned
from storage.tiers.coalesce import Span, coalesce
from storage.tiers.limits import NvmeLimits
from storage.tiers.regions import REGION_HEADER_BYTES, Region
from strongroom.errors import Corrupt, Missing, Overloaded, QuotaExceeded, Unavailable
from tests.storage.nvme_support import (
    batch_of,
    check_balance,
    check_empties,
    entered,
    put_many,
    read_all,
    until,
)
from tests.storage.support import component, context
from tests.storage.test_recovery import RECORD, REGION, body, opened, put

LARGE = 1024 * 1024
MANY = [context(number) for number in range(20)]


def records(faulty: Faulty, call: Call) -> list[Made]:
    """Calls that moved records."""
    return [made for made in faulty.calls if made.call is call and made.offset > 0]


async def test_a_batch_of_neighbours_is_one_write_and_one_read(tmp_path: Path) -> None:
    faulty = Faulty()
    async with opened(tmp_path, region=LARGE, make=faulty.make_files) as tier:
        faulty.calls.clear()
        bodies = await put_many(tier, MANY)
        assert [made.nbytes for made in records(faulty, Call.WRITE)] == [20 * RECORD]
        faulty.calls.clear()
        found, ends, _ = await read_all(tier, MANY)
        assert found == bodies
        assert set(ends.values()) == {None}
        assert [made.nbytes for made in records(faulty, Call.READ)] == [20 * RECORD]
        check_empties(tier)


async def test_one_at_a_time_is_a_call_each(tmp_path: Path) -> None:
    """The other side of the pair: what joins them is the batch."""
    faulty = Faulty()
    async with opened(tmp_path, region=LARGE, make=faulty.make_files) as tier:
        faulty.calls.clear()
        for number, one in enumerate(MANY):
            await put(tier, one, sequence=number)
        assert len(records(faulty, Call.WRITE)) == 20


async def test_neighbours_are_joined_wherever_they_stand_in_the_list(tmp_path: Path) -> None:
    faulty = Faulty()
    async with opened(tmp_path, region=LARGE, make=faulty.make_files) as tier:
        bodies = await put_many(tier, MANY)
        faulty.calls.clear()
        found, _, _ = await read_all(tier, MANY[::-1])
        assert found == bodies[::-1]
        assert len(records(faulty, Call.READ)) == 1


async def test_a_dropped_record_between_two_parts_the_read(tmp_path: Path) -> None:
    faulty = Faulty()
    async with opened(tmp_path, region=LARGE, make=faulty.make_files) as tier:
        bodies = await put_many(tier, MANY)
        tier.drop(MANY[10].address)
        faulty.calls.clear()
        found, ends, _ = await read_all(tier, MANY)
        assert isinstance(ends.pop(10), Missing)
        assert set(ends.values()) == {None}
        assert found[:10] + found[11:] == bodies[:10] + bodies[11:]
        assert [made.nbytes // RECORD for made in records(faulty, Call.READ)] == [10, 9]


async def test_calls_are_no_longer_than_set_and_large_records_are_cut(tmp_path: Path) -> None:
    faulty = Faulty()
    limits = NvmeLimits(transfer_bytes=64 * 1024)
    large = context(99, segments=(200_000,))
    async with opened(tmp_path, region=LARGE, make=faulty.make_files, limits=limits) as tier:
        faulty.calls.clear()
        bodies = await put_many(tier, [*MANY, large])
        found, _, _ = await read_all(tier, [*MANY, large])
        assert found == bodies
        for call in (Call.WRITE, Call.READ):
            sizes = [made.nbytes for made in records(faulty, call)]
            assert max(sizes) <= 64 * 1024
            assert sum(sizes) == 20 * RECORD + record_bytes((200_000,))
            assert sizes.count(5 * RECORD) == 4


def test_a_piece_of_a_record_never_shares_a_call_with_another_record() -> None:
    region = Region(0, -1, 0, 0)
    sizes = [8192, 4096 * 7, 4096, 4096]
    offset = 0
    spans = []
    for number, size in enumerate(sizes):
        spans.append(Span(number, region, offset, (aligned(size),)))
        offset += size
    pieces = coalesce(spans, 16384)
    assert [[span.number for span in piece.spans] for piece in pieces] == [[0], [1], [1], [2, 3]]
    assert sum(piece.nbytes for piece in pieces) == sum(sizes)


async def test_no_more_calls_are_in_flight_than_the_depth(tmp_path: Path) -> None:
    faulty = Faulty()
    limits = NvmeLimits(queue_depth=2, transfer_bytes=RECORD)
    async with opened(tmp_path, region=LARGE, make=faulty.make_files, limits=limits) as tier:
        bodies = await put_many(tier, MANY)
        first, second = Hold(), Hold()
        faulty.script(Call.READ, first)
        faulty.script(Call.READ, second)
        faulty.calls.clear()
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(read_all(tier, MANY))
            await entered(first)
            await entered(second)
            for _ in range(50):
                await asyncio.sleep(0)
            assert faulty.count(Call.READ) == 2, "the third waits, though threads are idle"
            first.let_go.set()
            second.let_go.set()
        assert reading.result()[0] == bodies


async def test_each_record_is_told_as_soon_as_it_is_there_the_first_asked_first(
    tmp_path: Path,
) -> None:
    faulty = Faulty()
    limits = NvmeLimits(queue_depth=1, transfer_bytes=RECORD)
    async with opened(tmp_path, region=LARGE, make=faulty.make_files, limits=limits) as tier:
        await put_many(tier, MANY)
        slow = Hold()
        faulty.script(Call.READ, slow, skip=3)
        told: list[int] = []
        wanted = [(one.address, aligned(RECORD)) for one in reversed(MANY)]
        async with asyncio.TaskGroup() as group:
            group.create_task(tier.read_many(wanted, lambda number, _: told.append(number)))
            await entered(slow)
            assert told == [0, 1, 2]
            slow.let_go.set()
        assert told == list(range(20))


async def test_one_bad_sector_costs_one_record_of_a_joined_read(tmp_path: Path) -> None:
    faulty = Faulty()
    async with opened(tmp_path, region=LARGE, make=faulty.make_files) as tier:
        bodies = await put_many(tier, MANY)
        bad = REGION_HEADER_BYTES + 7 * RECORD + 4096

        def touches(made: Made) -> bool:
            return made.offset <= bad < made.offset + made.nbytes

        faulty.script(Call.READ, Fail(errno.EIO), where=touches, times=None)
        found, ends, _ = await read_all(tier, MANY)
        assert isinstance(ends.pop(7), Unavailable)
        assert set(ends.values()) == {None}
        assert found[:7] + found[8:] == bodies[:7] + bodies[8:]
        check_balance(tier)


async def test_a_file_cut_short_costs_what_was_cut_of_a_joined_read(tmp_path: Path) -> None:
    async with opened(tmp_path, region=LARGE) as tier:
        bodies = await put_many(tier, MANY)
        (file,) = (path for path in tmp_path.glob("0*") if path.name == "000000")
        with file.open("r+b") as opened_file:
            opened_file.truncate(REGION_HEADER_BYTES + 12 * RECORD + 4096)
        found, ends, _ = await read_all(tier, MANY)
        assert found[:12] == bodies[:12]
        assert [type(ends[number]) for number in range(20)] == [type(None)] * 12 + [Corrupt] * 8


async def test_a_failed_piece_of_a_write_fails_its_records_alone(tmp_path: Path) -> None:
    faulty = Faulty()
    limits = NvmeLimits(transfer_bytes=5 * RECORD)
    async with opened(tmp_path, region=LARGE, make=faulty.make_files, limits=limits) as tier:
        second = REGION_HEADER_BYTES + 5 * RECORD
        faulty.script(Call.WRITE, Fail(errno.EIO), where=lambda made: made.offset == second)
        batch, bodies = batch_of(MANY)
        answers = await tier.put_many(batch)
        failed = [
            number for number, answer in enumerate(answers) if not isinstance(answer, Resident)
        ]
        assert failed == [5, 6, 7, 8, 9]
        assert all(isinstance(answers[number], Unavailable) for number in failed)
        for number in set(range(20)) - set(failed):
            assert await body(tier, MANY[number]) == bodies[number]
        check_balance(tier)
        again, bodies = batch_of([MANY[number] for number in failed], first_sequence=50)
        assert all(isinstance(answer, Resident) for answer in await tier.put_many(again))
        assert await body(tier, MANY[7]) == bodies[2]
        check_empties(tier)


async def test_a_refused_member_holds_up_no_other(tmp_path: Path) -> None:
    def refuse() -> None:
        raise Fenced("cut")

    async with opened(tmp_path, region=LARGE) as tier:
        tier.set_quota(component(2), RECORD)
        batch, bodies = batch_of(
            [context(0), context(1), context(2, tenant=2), context(3, tenant=2), context(4)]
        )
        batch[1] = (*batch[1][:2], refuse)
        answers = await tier.put_many(batch)
        assert isinstance(answers[1], Fenced)
        assert isinstance(answers[3], QuotaExceeded)
        assert [isinstance(answer, Resident) for answer in answers] == [
            True, False, True, False, True,
        ]  # fmt: skip
        assert await body(tier, context(4)) == bodies[4]
        assert context(1).address not in tier
        check_empties(tier)


async def test_a_batch_larger_than_the_tier_evicts_its_own_beginning_and_deadlocks_nothing(
    tmp_path: Path,
) -> None:
    many = [context(number, room=number) for number in range(60)]
    async with opened(tmp_path) as tier:
        batch, bodies = batch_of(many)
        answers = await tier.put_many(batch)
        assert all(isinstance(answer, Resident) for answer in answers)
        here = [number for number, one in enumerate(many) if one.address in tier]
        assert 59 in here
        assert len(here) * RECORD <= tier.statistics().capacity_bytes
        for number in here:
            assert await body(tier, many[number]) == bodies[number]
        check_empties(tier)


async def test_two_batches_at_once_fill_the_same_log(tmp_path: Path) -> None:
    faulty = Faulty()
    async with opened(tmp_path, region=LARGE, make=faulty.make_files) as tier:
        slow = Hold()
        faulty.script(Call.WRITE, slow, where=lambda made: made.offset > 0)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(put_many(tier, MANY))
            await entered(slow)
            # The first one's bytes are still on their way; nobody waits for them.
            other = [context(number) for number in range(30, 40)]
            second = await put_many(tier, other)
            assert (await read_all(tier, other))[0] == second
            assert MANY[0].address not in tier
            slow.let_go.set()
        assert (await read_all(tier, MANY))[0] == first.result()
        check_balance(tier)


async def test_writes_under_way_are_waited_for_when_no_region_is_idle(tmp_path: Path) -> None:
    faulty = Faulty()
    per_region = (REGION - REGION_HEADER_BYTES) // RECORD
    async with opened(tmp_path, regions=2, make=faulty.make_files) as tier:
        slow = Hold()
        faulty.script(Call.WRITE, slow, where=lambda made: made.offset > 0)
        many = [context(number, room=number) for number in range(per_region)]
        async with asyncio.TaskGroup() as group:
            group.create_task(put_many(tier, many))
            await entered(slow)
            late = group.create_task(put(tier, context(50), sequence=50))
            for _ in range(20):
                await asyncio.sleep(0)
            assert not late.done()
            slow.let_go.set()
        assert await body(tier, context(50)) == late.result()
        check_empties(tier)


async def test_a_cancelled_read_ends_before_its_buffers_are_used_again(tmp_path: Path) -> None:
    faulty = Faulty()
    async with opened(tmp_path, region=LARGE, make=faulty.make_files) as tier:
        await put_many(tier, MANY)
        slow = Hold()
        faulty.script(Call.READ, slow)
        told: list[int] = []
        wanted = [(one.address, aligned(RECORD)) for one in MANY]
        async with asyncio.TaskGroup() as group:
            task = group.create_task(tier.read_many(wanted, lambda number, _: told.append(number)))
            await entered(slow)
            task.cancel()
            for _ in range(20):
                await asyncio.sleep(0)
            assert not task.done(), "the thread still writes into the callers' buffers"
            slow.let_go.set()
        assert task.cancelled()
        assert told == []
        check_empties(tier)


async def test_a_cancelled_batch_leaves_nothing_behind(tmp_path: Path) -> None:
    faulty = Faulty()
    async with opened(tmp_path, region=LARGE, make=faulty.make_files) as tier:
        slow = Hold()
        faulty.script(Call.WRITE, slow, where=lambda made: made.offset > 0)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(put_many(tier, MANY))
            await entered(slow)
            task.cancel()
            slow.let_go.set()
        assert task.cancelled()
        assert not any(one.address in tier for one in MANY)
        assert tier.used() == {}
        check_balance(tier)
        bodies = await put_many(tier, MANY)
        assert (await read_all(tier, MANY))[0] == bodies
    async with opened(tmp_path, region=LARGE) as tier:
        assert tier.statistics().blocks == 20, "and a restart finds what was taken alone"
        assert (await read_all(tier, MANY))[0] == bodies


async def test_a_full_disk_queue_is_a_typed_refusal_and_not_a_wait(tmp_path: Path) -> None:
    faulty = Faulty()
    async with opened(tmp_path, region=LARGE, make=faulty.make_files, queue_max=1) as tier:
        bodies = await put_many(tier, MANY)
        slow = Hold()
        faulty.script(Call.READ, slow)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(body(tier, MANY[0]))
            await entered(slow)
            with pytest.raises(Overloaded):
                await body(tier, MANY[1])
            slow.let_go.set()
        assert first.result() == bodies[0]
        await until(lambda: tier._devices.workers.depth == 0)
        assert await body(tier, MANY[1]) == bodies[1]
        check_balance(tier)
