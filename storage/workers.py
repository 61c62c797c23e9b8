"""Named, bounded pools of threads: one for AES-GCM, one for disk.

Rules:
- What may wait is bounded: a job beyond `queue_max` is `Overloaded` at once, so that a caller
  turns to recomputing instead of waiting. Housekeeping, of which there is one at a time, is
  let in always.
- A thread writes into its caller's buffers. So `run` ends when every thread has ended, also
  when it is cancelled, however often: only then may the caller wipe or reuse a buffer.
- Crypto threads run at nice 10: a lookup on the event loop never waits behind a restore. (On
  Linux a nice value belongs to a thread.)
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from strongroom.errors import Overloaded

CRYPTO_NICE = 10
_log = logging.getLogger(__name__)


class Workers:
    """`threads` threads called `name`, at niceness `nice` above the process's own."""

    def __init__(self, name: str, threads: int, *, queue_max: int, nice: int = 0) -> None:
        self.name = name
        self.threads = threads
        self.queue_max = queue_max
        self._depth = 0
        initializer = (lambda: _be_nice(nice)) if nice else None
        self._pool = ThreadPoolExecutor(threads, name, initializer=initializer)

    @property
    def depth(self) -> int:
        """Jobs that run or wait."""
        return self._depth

    async def run(self, *jobs: Callable[[], None], always: bool = False) -> None:
        """Run `jobs` side by side; returns when all have ended, raising the first error.

        Raises `Overloaded`, with nothing started, when the queue is full and not `always`.
        When cancelled, jobs that have not begun are dropped and the others are waited for.
        """
        if not always and self._depth + len(jobs) > self.queue_max:
            raise Overloaded(f"{self.name}: the queue is full", limit=self.queue_max)
        loop = asyncio.get_running_loop()
        self._depth += len(jobs)
        try:
            futures = [loop.run_in_executor(self._pool, job) for job in jobs]
            await _all_ended(futures)
        finally:
            self._depth -= len(jobs)
        errors = (future.exception() for future in futures)
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """End the threads; nothing may be running."""
        self._pool.shutdown()


def crypto_workers(threads: int, queue_max: int) -> Workers:
    """Threads for encryption and decryption, below the event loop's priority."""
    return Workers("strongroom-crypto", threads, queue_max=queue_max, nice=CRYPTO_NICE)


def disk_workers(threads: int, queue_max: int) -> Workers:
    """Threads that wait for the disk."""
    return Workers("strongroom-disk", threads, queue_max=queue_max)


async def _all_ended(futures: Iterable[asyncio.Future[None]]) -> None:
    """Wait for every future. asyncio cannot stop a thread, so a cancellation waits its turn."""
    waiting = set(futures)
    cancelled: asyncio.CancelledError | None = None
    while waiting:
        try:
            _, waiting = await asyncio.wait(waiting)
        except asyncio.CancelledError as error:
            cancelled = error
            waiting = {future for future in waiting if not future.done()}
    if cancelled is not None:
        for future in futures:
            if not future.cancelled():
                future.exception()  # seen: the cancellation is what the caller hears of
        raise cancelled


def _be_nice(nice: int) -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
    except OSError as error:
        _log.warning("crypto threads keep the event loop's priority: %s", error.strerror)
