"""The pools of threads: named, below the event loop, bounded, and never left running."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from storage.crypto import Cipher
from storage.workers import CRYPTO_NICE, Workers, crypto_workers, disk_workers
from strongroom.errors import Overloaded
from tests.storage.support import KEYS, context, plaintext, sealed


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers("test", 2, queue_max=4)
    yield made
    made.close()


async def test_crypto_threads_run_below_the_event_loop_and_disk_threads_do_not() -> None:
    seen = {}

    def look(name: str) -> None:
        nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        seen[name] = (threading.current_thread().name, nice)

    before = os.getpriority(os.PRIO_PROCESS, 0)
    crypto, disk = crypto_workers(1, 4), disk_workers(1, 4)
    await crypto.run(lambda: look("crypto"))
    await disk.run(lambda: look("disk"))
    crypto.close()
    disk.close()
    assert seen["crypto"] == ("strongroom-crypto_0", CRYPTO_NICE)
    assert seen["disk"] == ("strongroom-disk_0", before)


async def test_the_queue_is_bounded_and_housekeeping_gets_in(workers: Workers) -> None:
    go_on = threading.Event()
    ran: list[str] = []

    def wait() -> None:
        go_on.wait(10)

    async with asyncio.TaskGroup() as group:
        group.create_task(workers.run(*[wait] * 4))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await workers.run(lambda: ran.append("refused"))
        task = group.create_task(workers.run(lambda: ran.append("always"), always=True))
        await asyncio.sleep(0)
        assert workers.depth == 5
        go_on.set()
    assert task.done()
    assert ran == ["always"]
    assert workers.depth == 0


async def test_an_error_is_raised_once_every_job_has_ended(workers: Workers) -> None:
    ended = threading.Event()

    def fail() -> None:
        raise OSError("one")

    def slow() -> None:
        ended.set()

    with pytest.raises(OSError, match="one"):
        await workers.run(fail, slow)
    assert ended.is_set()


async def test_a_cancelled_run_ends_when_its_threads_have_however_often_it_is_cancelled(
    workers: Workers,
) -> None:
    started, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def job() -> None:
        started.set()
        go_on.wait(10)
        ended.set()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(workers.run(job))
        while not started.is_set():
            await asyncio.sleep(0)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
            assert not task.done()
        go_on.set()
    assert task.cancelled()
    assert ended.is_set()


async def test_jobs_of_one_call_wake_the_loop_once(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    wake, woken = loop.call_soon_threadsafe, []

    def counting(callback: Callable[[], None]) -> object:
        woken.append(callback)
        return wake(callback)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counting)
    ran: list[int] = []
    await workers.run(*[lambda: ran.append(1)] * 4)
    monkeypatch.undo()
    assert len(ran) == 4
    assert len(woken) == 1


async def test_an_idle_thread_keeps_nothing_of_its_last_job(workers: Workers) -> None:
    buffer = bytearray(4096)
    view = memoryview(buffer)
    await workers.run(partial(len, view))  # type: ignore[arg-type]  # what it returns is dropped
    del view
    async with asyncio.timeout(10):
        while True:
            try:
                buffer.clear()  # refused while anybody has a view of it
                break
            except BufferError:
                await asyncio.sleep(0)


async def test_jobs_that_have_not_begun_are_dropped_by_a_cancellation() -> None:
    one = Workers("test", 1, queue_max=8)
    go_on, ran = threading.Event(), []
    started = threading.Event()

    def job() -> None:
        started.set()
        go_on.wait(10)
        ran.append(1)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(one.run(job, job, job))
        while not started.is_set():
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        go_on.set()
    assert task.cancelled()
    assert ran == [1]
    assert one.depth == 0
    one.close()


async def test_crypto_threads_have_a_core_each_where_there_is_one_for_each() -> None:
    allowed = sorted(os.sched_getaffinity(0))

    async def cores_of(threads: int) -> list[set[int]]:
        workers = crypto_workers(threads, queue_max=64)
        barrier = threading.Barrier(threads)
        found: list[set[int]] = []

        def job() -> None:
            barrier.wait()
            found.append(os.sched_getaffinity(threading.get_native_id()))

        try:
            await workers.run(*[job] * threads)
        finally:
            workers.close()
        return found

    spread = await cores_of(len(allowed))
    if len(allowed) > 1:
        assert sorted(core for cores in spread for core in cores) == allowed
    assert await cores_of(len(allowed) + 1) == [set(allowed)] * (len(allowed) + 1)
    assert os.sched_getaffinity(0) == set(allowed), "the process's own threads go where they will"


async def test_what_was_let_in_is_not_refused_for_its_number_of_jobs() -> None:
    """Many threads take many jobs a block: the turns bound what waits, not both of them."""
    threads = 8
    workers = crypto_workers(threads, 16)
    try:
        cipher = Cipher(workers)
        wanted = context(1, segments=(512 * 1024,) * threads)
        _, record = sealed(wanted)
        plains = [memoryview(bytearray(wanted.plaintext_bytes)) for _ in range(6)]
        await asyncio.gather(*(cipher.open(wanted, KEYS, record, plain) for plain in plains))
        assert all(plain == plaintext(wanted) for plain in plains)
    finally:
        workers.close()
