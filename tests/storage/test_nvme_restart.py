"""Rebuilding the index: in parallel, in the order of sealing, in columns, with progress."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import struct
from pathlib import Path
from random import Random  # noqa: TID251 - seeded, so that a failure repeats

import pytest

from storage.faulty import Call, Faulty, Hold, Made
from storage.header import (
    HEADER_BYTES,
    BadRecord,
    Facts,
    Placement,
    check_tail,
    read_facts,
    read_header,
)
from storage.memory import aligned
from storage.tiers.nvme import NvmeTier
from storage.tiers.recovery import RecoveryProgress
from storage.tiers.survey import Found, survey
from storage.workers import disk_workers
from tests.storage.nvme_support import check_balance, check_empties, entered, put_many
from tests.storage.support import FakeClock, context, sealed
from tests.storage.test_recovery import RECORD, REGION, body, opened, put

PER_REGION = (REGION - 4096) // RECORD


async def filled(folder: Path, count: int) -> dict[int, bytes]:
    async with opened(folder, regions=8) as tier:
        return {n: await put(tier, context(n, room=n), sequence=n + 1) for n in range(count)}


async def test_several_regions_are_read_at_once(tmp_path: Path) -> None:
    stored = await filled(tmp_path, 3 * PER_REGION)
    faulty = Faulty()
    first, second = Hold(), Hold()

    def is_record(made: Made) -> bool:
        return made.offset > 0

    faulty.script(Call.READ, first, where=is_record)
    faulty.script(Call.READ, second, where=is_record)

    async def let_both_go() -> None:
        await entered(first)
        await entered(second)  # while the first region's read is still under way
        first.let_go.set()
        second.let_go.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(let_both_go())
        async with opened(tmp_path, regions=8, make=faulty.make_files) as tier:
            held = [made.fd for made in faulty.calls if is_record(made)][:2]
            assert len(set(held)) == 2, "two regions, not one twice"
            assert tier.statistics().recovered == len(stored)
            for number, data in stored.items():
                assert await body(tier, context(number)) == data


async def test_the_loop_runs_while_a_start_reads(tmp_path: Path) -> None:
    await filled(tmp_path, PER_REGION)
    faulty = Faulty()
    slow = Hold()
    faulty.script(Call.READ, slow)
    workers = disk_workers(2, 64)
    async with asyncio.TaskGroup() as group:
        opening = group.create_task(
            NvmeTier.open(
                tmp_path,
                8 * REGION,
                REGION,
                workers,
                FakeClock(),
                pin_ns=10**9,
                make_files=faulty.make_files,
            )
        )
        await entered(slow)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not opening.done()
        slow.let_go.set()
    await opening.result().close()
    workers.close()


async def test_a_chain_over_many_regions_links_again_also_after_moves(tmp_path: Path) -> None:
    length = 3 * PER_REGION

    async with opened(tmp_path, regions=6) as tier:
        for number in range(length):
            parent = number - 1 if number else None
            await put(tier, context(number, parent=parent), sequence=number + 1)
            await put(tier, context(1000 + number, room=9), sequence=500 + number)
            if number % 5:
                tier.drop(context(1000 + number).address)
        for number in range(2 * length):  # turn the log until the chain's records have moved
            await put(tier, context(2000 + number, room=9), sequence=900 + number)
            tier.drop(context(2000 + number).address)
        assert tier.statistics().moved > 0
    async with opened(tmp_path, regions=6) as tier:
        chain = {context(number).address for number in range(length)}
        assert [a for a in tier._index.victims() if a in chain] == [context(length - 1).address]
        check_balance(tier)


async def test_of_two_records_in_two_regions_the_later_sealing_counts(tmp_path: Path) -> None:
    async with opened(tmp_path, regions=8) as tier:
        await put(tier, context(1), sequence=10)
        tier._writer.region = None
        newer = await put(tier, context(1), sequence=11)
        for region in tier._devices.regions:
            region.dead.clear()  # as if killed before the old one's header was overwritten
    for _ in range(2):
        async with opened(tmp_path, regions=8) as tier:
            assert await body(tier, context(1)) == newer
            assert tier.used() == {"00000000000000000000000000000001": RECORD}
    async with opened(tmp_path, regions=8) as tier:
        assert tier.statistics().stale == 0, "the older one was overwritten after it was found"
        check_empties(tier)


async def test_progress_goes_from_nothing_to_all(tmp_path: Path) -> None:
    stored = await filled(tmp_path, 4 * PER_REGION)
    told: list[RecoveryProgress] = []
    workers = disk_workers(2, 64)
    tier = await NvmeTier.open(
        tmp_path, 8 * REGION, REGION, workers, FakeClock(), pin_ns=10**9, progress=told.append
    )
    await tier.close()
    workers.close()
    reading = [at for at in told if at.total_bytes]
    assert [at.read_bytes for at in reading] == [n * REGION for n in range(1, 9)]
    assert {at.total_bytes for at in reading} == {8 * REGION}
    assert reading[-1].total_blocks == len(stored)
    assert told[-1] == RecoveryProgress(indexed_blocks=len(stored), total_blocks=len(stored))


async def test_what_is_found_is_kept_in_about_a_hundred_bytes_a_record() -> None:
    found = Found()
    header, record = sealed(context())
    facts = read_facts(record)
    for number in range(10_000):
        found.add(number * RECORD, facts, Placement(b"s" * 16, 0, 1, number * RECORD, number))
    columns = [getattr(found, name) for name in vars(found)]
    total = sum(column.__sizeof__() for column in columns)
    assert total / 10_000 < 125
    assert found.address(9_999) == header.context.address.pack()
    assert found.nbytes(5) == RECORD
    assert found.by_sealing() == range(10_000)


def test_rows_written_out_of_order_are_told_in_the_order_of_sealing() -> None:
    found = Found()
    sequences = [5, 3, 9, 3, 1]
    orders = [1, 2, 3, 4, 5]
    for sequence, order in zip(sequences, orders, strict=True):
        facts = Facts(bytes(36), bytes(32), bytes(16), bytes(32), RECORD, sequence, bytes(32))
        found.add(order * RECORD, facts, Placement(b"s" * 16, 0, 1, order * RECORD, order))
    assert list(found.by_sealing()) == [4, 1, 3, 0, 2]


# The two ways to read a header are one


def repaired(record: memoryview) -> None:
    """Make the header's checksum right again, as somebody who means harm would."""
    record[3936:3968] = hashlib.sha256(record[:3936]).digest()


def verdict(read: object, head: memoryview) -> object:
    try:
        assert callable(read)
        answer = read(head)
    except BadRecord as error:
        return error.fault, error.record_bytes
    if isinstance(answer, Facts):
        return answer[:6]
    context_ = answer.context
    return (
        context_.address.pack(),
        context_.parent,
        bytes.fromhex(context_.tenant),
        bytes.fromhex(context_.namespace),
        answer.record_bytes,
        answer.sequence,
    )


FIELDS = list(itertools.accumulate([8, 2, 2, 4, 8, 8, 8, 16, 32, 32, 32, 8, 4, 4, 32, 32, 16, 32]))


@pytest.mark.parametrize("seed", range(6))
def test_facts_are_the_headers_and_so_are_the_refusals(seed: int) -> None:
    random = Random(seed)
    for _ in range(200):
        sizes = tuple(random.randrange(1, 5000) for _ in range(random.randrange(1, 9)))
        _, record = sealed(
            context(random.randrange(99), segments=sizes), sequence=random.randrange(9)
        )
        head = record[:HEADER_BYTES]
        if random.random() < 0.8:
            at = random.choice([0, *FIELDS, random.randrange(280, 400), random.randrange(3936)])
            head[at : at + 4] = struct.pack(
                "<I", random.choice([0, 1, 255, 513, 2**30 + 1, 2**32 - 1])
            )
        if random.random() < 0.8:
            repaired(head)
        assert verdict(read_facts, head) == verdict(read_header, head)


def test_a_tail_of_another_record_is_torn() -> None:
    _, one = sealed(context(1), sequence=1)
    _, other = sealed(context(1), sequence=2)
    check_tail(read_facts(one), one[-64:])
    with pytest.raises(BadRecord, match="tail"):
        check_tail(read_facts(one), other[-64:])
    with pytest.raises(BadRecord, match="tail"):
        check_tail(read_facts(one), memoryview(bytes(64)))


async def test_a_survey_up_to_the_tail_sees_what_was_written_and_no_more(tmp_path: Path) -> None:
    async with opened(tmp_path, regions=4) as tier:
        await put_many(tier, [context(number) for number in range(3)])
        region = tier._writer.region
        assert region is not None
        files = tier._devices.files_of(region)
        assert len(survey(files, region, region.tail).found) == 3
        assert len(survey(files, region, region.tail - RECORD).found) == 2
        assert len(survey(files, region).found) == 3
        page = aligned(4096)
        assert files.read(region, region.tail, page) == 4096
        assert not any(page)
