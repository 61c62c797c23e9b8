"""What the tests of the NVMe tier share: its invariants, and batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from storage.block import BlockContext
from storage.faulty import Hold, Made
from storage.lifecycle import Resident
from storage.memory import aligned
from storage.retention import Retention
from storage.tiers.nvme import NvmeTier, Sealed
from strongroom.errors import StrongroomError
from tests.storage.support import sealed


def admit() -> None:
    """Let it in."""


def check_balance(tier: NvmeTier) -> None:
    """Bytes in the index, in the regions, in use and charged are the same bytes."""
    rows = list(tier._index.rows())
    total = sum(row.place.nbytes for row in rows)
    assert tier.statistics().used_bytes == total
    assert sum(tier.used().values()) == total
    by_region: dict[int, list[int]] = {}
    for row in rows:
        by_region.setdefault(tier._catalogue.where(row.place)[0].slot, []).append(row.place.nbytes)
    for region in tier._devices.regions:
        here = by_region.get(region.slot, [])
        assert (region.live, region.live_bytes) == (len(here), sum(here))
        assert region.busy == 0
    assert tier._writer.taken == 0
    assert tier.statistics().pinned == 0


def check_empties(tier: NvmeTier) -> None:
    """Once everything is dropped, nothing is in use and nothing is charged."""
    check_balance(tier)
    for row in list(tier._index.rows()):
        tier.drop(row.resident.address)
    assert tier.statistics().used_bytes == 0
    assert tier.used() == {}
    check_balance(tier)


def batch_of(
    contexts: Sequence[BlockContext], first_sequence: int = 1
) -> tuple[list[Sealed], list[bytes]]:
    """Sealed records of these blocks, and their ciphertext."""
    records = [sealed(one, sequence=first_sequence + n) for n, one in enumerate(contexts)]
    batch: list[Sealed] = [(header, record, admit) for header, record in records]
    return batch, [bytes(record[4096:]) for _, record in records]


async def put_many(
    tier: NvmeTier, contexts: Sequence[BlockContext], retentions: Sequence[Retention] = ()
) -> list[bytes]:
    """Store these blocks in one batch, each of which must be taken; their ciphertext."""
    batch, bodies = batch_of(contexts)
    answers = await tier.put_many(batch, retentions)
    assert all(isinstance(answer, Resident) for answer in answers), answers
    return bodies


async def read_all(
    tier: NvmeTier, contexts: Sequence[BlockContext]
) -> tuple[list[bytes], dict[int, StrongroomError | None], list[int]]:
    """Read in one batch: ciphertext, how each ended, and in which order they came."""
    wanted = []
    for one in contexts:
        resident = tier.resident(one.address)
        wanted.append((one.address, aligned(resident.nbytes if resident else 4096)))
    ends: dict[int, StrongroomError | None] = {}
    order: list[int] = []

    def done(number: int, error: StrongroomError | None) -> None:
        assert number not in ends
        ends[number] = error
        order.append(number)

    await tier.read_many(wanted, done)
    assert len(ends) == len(contexts)
    return [bytes(into[4096:]) for _, into in wanted], ends, order


def touching(at: int, fd: int | None = None) -> Callable[[Made], bool]:
    """Calls that the byte at `at` is part of, in one file or in any."""

    def is_one(made: Made) -> bool:
        return fd in {None, made.fd} and made.offset <= at < made.offset + made.nbytes

    return is_one


async def until(event: Callable[[], bool]) -> None:
    """Let others run until it holds."""
    async with asyncio.timeout(20):
        while not event():
            await asyncio.sleep(0)


async def entered(slow: Hold) -> None:
    """Return when a call waits there."""
    await until(slow.entered.is_set)
