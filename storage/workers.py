"""Named, bounded pools of threads: one for AES-GCM, one for disk.

Rules:
- What may wait is bounded: a job beyond `queue_max` is `Overloaded` at once, so that a caller
  turns to recomputing instead of waiting. Housekeeping, of which there is one at a time, is
  let in always.
- A thread writes into its caller's buffers. So `run` ends when every thread has ended, also
  when it is cancelled, however often: only then may the caller wipe or reuse a buffer.
- Jobs that were handed in together wake the event loop once, when the last of them has ended.
- Crypto threads run at nice 10: a lookup on the event loop never waits behind a restore. (On
  Linux a nice value belongs to a thread.)
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from strongroom.errors import Overloaded

CRYPTO_NICE = 10
_log = logging.getLogger(__name__)

Job = Callable[[], None]


class Workers:
    """`threads` threads called `name`, at niceness `nice` above the process's own.

    `cores` are what the threads are spread over, one each; without them the kernel places them.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        *,
        queue_max: int,
        nice: int = 0,
        cores: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.threads = threads
        self.queue_max = queue_max
        self._depth = 0
        self._nice = nice
        self._cores = itertools.cycle(cores)
        self._queue: SimpleQueue[tuple[_Group, int, Job] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(
                target=self._work,
                args=(next(self._cores, None),),
                name=f"{name}_{number}",
                daemon=True,
            )
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def depth(self) -> int:
        """Jobs that run or wait."""
        return self._depth

    async def run(self, *jobs: Job, always: bool = False) -> None:
        """Run `jobs` side by side; returns when all have ended, raising the first error.

        Raises `Overloaded`, with nothing started, when the queue is full and not `always`.
        When cancelled, jobs that have not begun are dropped and the others are waited for.
        """
        if not always and self._depth + len(jobs) > self.queue_max:
            raise Overloaded(f"{self.name}: the queue is full", limit=self.queue_max)
        if not jobs:
            return
        group = _Group(asyncio.get_running_loop(), len(jobs))
        self._depth += len(jobs)
        try:
            for number, job in enumerate(jobs):
                self._queue.put((group, number, job))
            await group.ended()
        finally:
            self._depth -= len(jobs)
        for error in group.errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """End the threads; nothing may be running."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self, core: int | None) -> None:
        if self._nice:
            be_nice(self._nice)
        if core is not None:
            with contextlib.suppress(OSError):  # taken from us meanwhile: any core will do
                os.sched_setaffinity(threading.get_native_id(), {core})
        while (item := self._queue.get()) is not None:
            group, number, job = item
            group.do(number, job)
            # Nothing of a job is kept while waiting for the next: it holds views of buffers.
            del item, group, job


class _Group:
    """Jobs handed in by one call. `do` is the threads' side, the rest the event loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, count: int) -> None:
        self.errors: list[BaseException | None] = [None] * count
        self._loop = loop
        self._count = count
        self._ended = itertools.count(1)  # each number is given out once, to any thread
        self._dropped = False
        self._over = False
        self._news: asyncio.Future[None] = loop.create_future()

    def do(self, number: int, job: Job) -> None:
        if not self._dropped:
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - it is raised to whoever waits
                self.errors[number] = error
        if next(self._ended) == self._count:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits
                self._loop.call_soon_threadsafe(self._settle)

    async def ended(self) -> None:
        """Wait for the last job. asyncio cannot stop a thread, so a cancellation waits its turn."""
        cancelled: asyncio.CancelledError | None = None
        while not self._over:
            try:
                await self._news
            except asyncio.CancelledError as error:
                cancelled = error
                self._dropped = True
                self._news = self._loop.create_future()
        if cancelled is not None:
            raise cancelled

    def _settle(self) -> None:
        self._over = True
        if not self._news.done():
            self._news.set_result(None)


def crypto_workers(threads: int, queue_max: int) -> Workers:
    """Threads for encryption and decryption, below the event loop's priority.

    Where there is one for each core that the process may use, each gets a core of its own. Left
    to the kernel, two that are woken together are often put on one core, and stay there for as
    long as a block takes: a plain copy's speed was then missed by a third. One that has to share
    its core takes fewer of a block's segments.
    """
    return Workers(
        "strongroom-crypto",
        threads,
        queue_max=queue_max,
        nice=CRYPTO_NICE,
        cores=crypto_cores(threads),
    )


def crypto_cores(threads: int) -> Sequence[int]:
    """The core of each crypto thread; empty where the kernel places them."""
    allowed = sorted(os.sched_getaffinity(0))
    return allowed if threads == len(allowed) > 1 else ()


def disk_workers(threads: int, queue_max: int) -> Workers:
    """Threads that wait for the disk."""
    return Workers("strongroom-disk", threads, queue_max=queue_max)


def be_nice(nice: int) -> None:
    """Let the calling thread give way to others: `nice` above what its maker had."""
    thread = threading.get_native_id()
    try:
        # A new thread has its maker's niceness: the process may have been started with one.
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + nice)
    except OSError as error:
        _log.warning("crypto threads keep the event loop's priority: %s", error.strerror)
