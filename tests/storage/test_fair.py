"""Turns are fair by tenant, whoever floods; nobody starves; no slot is lost or idle."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random  # noqa: TID251 - seeded by the test

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.block import BlockContext
from storage.buffers import ReadBuffers
from storage.crypto import Cipher
from storage.fair import COST_BYTES_MIN, Fair
from storage.header import record_bytes
from storage.memory import aligned
from storage.tiers.nvme import NvmeTier
from storage.workers import Workers, crypto_workers, disk_workers
from strongroom.errors import Overloaded
from strongroom.identity import ComponentId
from tests.storage import support

MIB = 1024 * 1024


def tenant(number: int) -> ComponentId:
    return ComponentId(f"{number:032x}")


A, B, C = tenant(1), tenant(2), tenant(3)


async def test_a_turn_that_is_lent_lets_another_in_and_comes_back_without_waiting() -> None:
    fair = Fair("test", 1, waiting_max=9)
    order: list[str] = []
    room, end = asyncio.Event(), asyncio.Event()

    async def waits_for_room() -> None:
        async with fair.turn(A, MIB):
            order.append("a")
            with fair.lent():
                await room.wait()
            order.append("a again")

    async def holds_its_turn() -> None:
        async with fair.turn(B, MIB):
            order.append("b")
            await end.wait()

    async with asyncio.TaskGroup() as group:
        group.create_task(waits_for_room())
        for _ in range(2):
            group.create_task(holds_its_turn())
        for _ in range(9):
            await asyncio.sleep(0)
        assert order == ["a", "b"], "the one slot was lent to one other"
        room.set()
        for _ in range(9):
            await asyncio.sleep(0)
        assert order == ["a", "b", "a again"]
        assert (fair.in_turn, fair.waiting) == (1, 1)
        end.set()
    assert order == ["a", "b", "a again", "b"]
    assert (fair.in_turn, fair.waiting) == (0, 0)


class Jobs:
    """Jobs that hold their turn until they are told to end; `order` is who was let in."""

    def __init__(self, fair: Fair) -> None:
        self.fair = fair
        self.order: list[ComponentId] = []
        self.served: Counter[ComponentId] = Counter()
        self.refused: Counter[ComponentId] = Counter()
        self.ended = 0
        self.inside: list[asyncio.Event] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self, group: asyncio.TaskGroup, who: ComponentId, nbytes: int) -> None:
        self.tasks.append(group.create_task(self._job(who, nbytes)))
        await asyncio.sleep(0)

    async def _job(self, who: ComponentId, nbytes: int) -> None:
        try:
            async with self.fair.turn(who, nbytes):
                self.order.append(who)
                self.served[who] += nbytes
                end = asyncio.Event()
                self.inside.append(end)
                try:
                    await end.wait()
                finally:
                    if end in self.inside:
                        self.inside.remove(end)
        except Overloaded:
            self.refused[who] += 1
        else:
            self.ended += 1

    async def end_one(self) -> None:
        self.inside.pop(0).set()
        for _ in range(4):
            await asyncio.sleep(0)

    async def end_all(self) -> None:
        while self.inside:
            await self.end_one()
        assert not self.fair.waiting


async def test_one_tenants_flood_does_not_stand_before_anothers_single_job() -> None:
    jobs = Jobs(Fair("test", 2, waiting_max=1000))
    async with asyncio.TaskGroup() as group:
        for _ in range(200):
            await jobs.start(group, A, MIB)
        await jobs.start(group, B, MIB)
        assert jobs.order == [A, A]
        await jobs.end_one()
        await jobs.end_one()
        # At the next slot but one at the latest, of two hundred that came before.
        assert B in jobs.order[:4]
        await jobs.end_all()
    assert Counter(jobs.order) == {A: 200, B: 1}


async def test_without_the_fair_queue_the_single_job_would_come_last() -> None:
    """The other half of the pair: in order of arrival, which is what one tenant alone gets."""
    jobs = Jobs(Fair("test", 2, waiting_max=1000))
    async with asyncio.TaskGroup() as group:
        for _ in range(50):
            await jobs.start(group, A, MIB)
        await jobs.start(group, A, 2 * MIB)
        await jobs.end_all()
    assert jobs.served[A] == 52 * MIB
    assert jobs.order == [A] * 51


@pytest.mark.parametrize("weight", [1.0, 2.0, 4.0])
async def test_tenants_that_both_wait_are_served_by_weight(weight: float) -> None:
    fair = Fair("test", 1, waiting_max=1000, weight=lambda who: weight if who == B else 1.0)
    jobs = Jobs(fair)
    async with asyncio.TaskGroup() as group:
        for _ in range(120):
            await jobs.start(group, A, MIB)
            await jobs.start(group, B, MIB)
        for _ in range(100):
            await jobs.end_one()
        served = Counter(jobs.order)
        assert abs(served[B] - weight * served[A]) <= weight + 1
        await jobs.end_all()


async def test_it_is_bytes_that_are_shared_not_jobs() -> None:
    jobs = Jobs(Fair("test", 1, waiting_max=1000))
    async with asyncio.TaskGroup() as group:
        for _ in range(30):
            await jobs.start(group, A, 8 * MIB)
        for _ in range(240):
            await jobs.start(group, B, MIB)
        for _ in range(90):
            await jobs.end_one()
        assert abs(jobs.served[A] - jobs.served[B]) <= 9 * MIB
        await jobs.end_all()


async def test_tiny_jobs_are_not_free() -> None:
    jobs = Jobs(Fair("test", 1, waiting_max=5000))
    async with asyncio.TaskGroup() as group:
        for _ in range(400):
            await jobs.start(group, A, 1)
        for _ in range(20):
            await jobs.start(group, B, COST_BYTES_MIN)
        for _ in range(41):
            await jobs.end_one()
        assert jobs.order.count(B) >= 19
        await jobs.end_all()


async def test_a_tenant_that_was_away_brings_no_credit() -> None:
    jobs = Jobs(Fair("test", 1, waiting_max=1000))
    async with asyncio.TaskGroup() as group:
        for _ in range(60):
            await jobs.start(group, A, MIB)
        for _ in range(40):
            await jobs.end_one()
        for _ in range(20):
            await jobs.start(group, B, MIB)
        before = len(jobs.order)
        for _ in range(20):
            await jobs.end_one()
        since = Counter(jobs.order[before:])
        assert abs(since[A] - since[B]) <= 2
        await jobs.end_all()


async def test_a_full_queue_costs_the_tenant_that_filled_it_and_nobody_else() -> None:
    jobs = Jobs(Fair("test", 1, waiting_max=10))
    async with asyncio.TaskGroup() as group:
        for _ in range(11):
            await jobs.start(group, A, MIB)
        assert jobs.fair.waiting == 10
        await jobs.start(group, A, MIB)
        assert jobs.refused == Counter({A: 1})
        await jobs.start(group, B, MIB)
        await jobs.start(group, B, MIB)
        await asyncio.sleep(0)
        assert jobs.fair.waiting == 10
        assert jobs.refused == Counter({A: 3})
        await jobs.end_all()
    assert Counter(jobs.order) == {A: 9, B: 2}
    assert jobs.fair.statistics().refused == 3


async def test_a_job_that_is_cancelled_while_it_waits_leaves_no_trace() -> None:
    jobs = Jobs(Fair("test", 1, waiting_max=10))
    async with asyncio.TaskGroup() as group:
        await jobs.start(group, A, MIB)
        await jobs.start(group, B, MIB)
        await jobs.start(group, C, MIB)
        jobs.tasks[1].cancel()
        await asyncio.sleep(0)
        assert jobs.fair.waiting == 1
        await jobs.end_all()
    assert jobs.order == [A, C]
    assert jobs.fair.in_turn == jobs.fair.waiting == 0


async def test_a_job_that_is_cancelled_in_its_turns_very_moment_hands_it_on() -> None:
    jobs = Jobs(Fair("test", 1, waiting_max=10))
    async with asyncio.TaskGroup() as group:
        await jobs.start(group, A, MIB)
        await jobs.start(group, B, MIB)
        await jobs.start(group, C, MIB)
        jobs.inside.pop(0).set()
        await asyncio.sleep(0)  # A has left, B has been let in and has not run since
        assert jobs.fair.waiting == 1
        jobs.tasks[1].cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await jobs.end_all()
    assert jobs.order == [A, C]
    assert jobs.fair.in_turn == jobs.fair.waiting == 0


async def test_a_job_that_is_pushed_out_and_cancelled_at_once_loses_no_slot() -> None:
    jobs = Jobs(Fair("test", 1, waiting_max=2))
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            await jobs.start(group, A, MIB)
        pushed_out = jobs.tasks[2]
        group.create_task(jobs._job(B, MIB))
        group.create_task(_cancel(pushed_out))
        await asyncio.sleep(0)
        await jobs.end_all()
    assert Counter(jobs.order) == {A: 2, B: 1}
    assert jobs.fair.in_turn == jobs.fair.waiting == 0


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


async def test_what_is_remembered_of_tenants_is_bounded() -> None:
    jobs = Jobs(Fair("test", 1, waiting_max=10))
    async with asyncio.TaskGroup() as group:
        await jobs.start(group, A, MIB)
        for number in range(5000):
            await jobs.start(group, tenant(100 + number), MIB)
            await jobs.end_one()
        assert len(jobs.fair._flows) < 2500
        await jobs.end_all()
    assert not jobs.fair._flows


@given(
    seed=st.integers(0, 2**32 - 1),
    slots=st.integers(1, 4),
    waiting_max=st.integers(1, 40),
)
async def test_whatever_happens_no_slot_idles_or_is_lost_and_everybody_is_answered(
    seed: int, slots: int, waiting_max: int
) -> None:
    random = Random(seed)
    jobs = Jobs(Fair("test", slots, waiting_max=waiting_max))
    fair = jobs.fair
    async with asyncio.TaskGroup() as group:
        for _ in range(80):
            match random.randrange(4):
                case 0 | 1:
                    nbytes = random.choice((1, MIB, 64 * MIB))
                    await jobs.start(group, random.choice((A, A, A, B, C)), nbytes)
                case 2 if jobs.inside:
                    jobs.inside.pop(random.randrange(len(jobs.inside))).set()
                case _ if jobs.tasks:
                    random.choice(jobs.tasks).cancel()
            if random.random() < 0.7:
                for _ in range(3):
                    await asyncio.sleep(0)
            assert fair.waiting <= waiting_max
            assert fair.in_turn <= slots
            assert not fair.waiting or fair.in_turn == slots
        while not all(task.done() for task in jobs.tasks):
            while jobs.inside:
                jobs.inside.pop().set()
            await asyncio.sleep(0)
    assert fair.in_turn == fair.waiting == 0
    cancelled = sum(task.cancelled() for task in jobs.tasks)
    assert jobs.ended + cancelled + jobs.refused.total() == len(jobs.tasks)


@given(seed=st.integers(0, 2**32 - 1), flood=st.integers(2, 6))
async def test_nobody_starves_under_an_endless_flood(seed: int, flood: int) -> None:
    """B's job comes in before more than its own cost of every flooding tenant's, and a job each."""
    random = Random(seed)
    jobs = Jobs(Fair("test", 2, waiting_max=1000))
    flooding = [tenant(10 + number) for number in range(flood)]
    async with asyncio.TaskGroup() as group:
        for _ in range(30):
            for who in flooding:
                await jobs.start(group, who, random.choice((MIB, 4 * MIB)))
        for _ in range(random.randrange(20)):
            await jobs.end_one()
        before = Counter(jobs.served)
        await jobs.start(group, B, 4 * MIB)
        while B not in jobs.served:
            await jobs.start(group, random.choice(flooding), 4 * MIB)
            await jobs.end_one()
        for who in flooding:
            assert jobs.served[who] - before[who] <= 2 * 4 * MIB
        await jobs.end_all()


# On the threads and on the disk


async def order_of(
    group: asyncio.TaskGroup,
    workers: Workers,
    jobs: Sequence[tuple[str, Callable[[], Awaitable[object]]]],
) -> list[str]:
    """Who ended in which order, when all of them have come while the one thread was held."""
    held, order = threading.Event(), list[str]()
    tasks: list[asyncio.Task[None]] = []

    def hold() -> None:
        held.wait(20)

    holding = group.create_task(workers.run(hold, always=True))

    async def one(name: str, job: Callable[[], Awaitable[object]]) -> None:
        await job()
        order.append(name)

    for name, job in jobs:
        tasks.append(group.create_task(one(name, job)))
        await asyncio.sleep(0)
    held.set()
    await holding
    await asyncio.wait(tasks)
    return order


@pytest.mark.parametrize("fair", [True, False])
async def test_a_flood_of_saves_stands_before_nobody_elses_on_the_crypto_threads(
    monkeypatch: pytest.MonkeyPatch, fair: bool
) -> None:
    if not fair:
        monkeypatch.setattr(Fair, "turn", lambda *_: contextlib.nullcontext())
    workers = crypto_workers(1, 1000)
    cipher = Cipher(workers)
    theirs = support.context(number=1)
    ours = support.context(number=2, tenant=2)

    async def seal(context: BlockContext) -> None:
        plain = memoryview(bytearray(context.plaintext_bytes))
        record = memoryview(bytearray(record_bytes(context.segment_bytes)))
        await cipher.seal(context, support.KEYS, plain, record)

    async with asyncio.TaskGroup() as group:
        jobs = [("flood", partial(seal, theirs))] * 40 + [("other", partial(seal, ours))]
        order = await order_of(group, workers, jobs)
    workers.close()
    assert len(order) == 41
    place = order.index("other")
    assert place <= 3 if fair else place == 40


@pytest.mark.parametrize("fair", [True, False])
async def test_a_flood_of_reads_stands_before_nobody_elses_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fair: bool
) -> None:
    if not fair:
        monkeypatch.setattr(Fair, "turn", lambda *_: contextlib.nullcontext())
    workers = disk_workers(1, 1000)
    nvme = await NvmeTier.open(tmp_path, 8 * MIB, MIB, workers, support.FakeClock(), pin_ns=10**9)
    theirs, ours = support.context(number=1), support.context(number=2, tenant=2)
    for number, made in enumerate((theirs, ours)):
        await nvme.put(*support.sealed(made, sequence=number + 1), lambda: None)
    nbytes = record_bytes(theirs.segment_bytes)

    async def read(context: BlockContext) -> None:
        await nvme.read_into(context.address, aligned(nbytes))

    async with asyncio.TaskGroup() as group:
        jobs = [("flood", partial(read, theirs))] * 40 + [("other", partial(read, ours))]
        order = await order_of(group, workers, jobs)
    await nvme.close()
    workers.close()
    place = order.index("other")
    assert place <= 3 if fair else place == 40


async def test_a_flood_of_reads_past_the_host_tier_stands_before_nobody_elses() -> None:
    buffers = ReadBuffers(count=2)
    order: list[int] = []
    full = asyncio.Event()

    async def borrow(number: int) -> None:
        async with buffers.borrow(tenant(number), MIB):
            await full.wait()
            order.append(number)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(40):
            tasks.create_task(borrow(1))
        await asyncio.sleep(0)
        tasks.create_task(borrow(2))
        await asyncio.sleep(0)
        full.set()
    assert order.index(2) <= 4


async def test_what_waits_for_a_read_buffer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.buffers._WAITING_MAX", 3)
    buffers = ReadBuffers(count=1)
    async with contextlib.AsyncExitStack() as held:
        await held.enter_async_context(buffers.borrow(tenant(1), MIB))
        loop = asyncio.get_running_loop()
        waiting = [loop.create_task(_borrow(buffers, 1)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await _borrow(buffers, 1)
        other = loop.create_task(_borrow(buffers, 2))  # in the place of the flood's newest
        await asyncio.sleep(0)
    ends = await asyncio.gather(*waiting, other, return_exceptions=True)
    assert [isinstance(end, Overloaded) for end in ends] == [False, False, True, False]


async def _borrow(buffers: ReadBuffers, number: int) -> None:
    async with buffers.borrow(tenant(number), MIB):
        pass
