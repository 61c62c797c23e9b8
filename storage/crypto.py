"""Whole records sealed and opened on the crypto threads, segment by segment.

The threads of one block take its segments from one iterator, each the next that is left: they
are opened nearly in order, so that the first layers can be used while the last are still
closed, and no thread is idle before the block is done. The event loop only waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Final

from storage.block import BlockContext
from storage.envelope import Opener, Sealer
from storage.fair import Fair, FairStatistics, Weight, equal_weights
from storage.header import HEADER_BYTES, Header, read_header
from storage.memory import wipe
from storage.progress import Progress
from storage.workers import Workers
from strongroom.derivation import NamespaceKeys

Opened = Callable[[int, Header], None]
"""Called on the event loop: so many of the block's first segments are verified plaintext, and what
its header says that it is."""

_SPLIT_BYTES_MIN: Final = 512 * 1024
"""Below this a second thread costs more than it brings."""
_SPLIT_SEGMENT_BYTES_MIN: Final = 16 * 1024
"""Of smaller segments the interpreter's lock is held for most of the time."""
_WIPED_HERE_BYTES_MAX: Final = 256 * 1024
"""Some 25 microseconds: less than a thread's turn."""
_TELL_BYTES_MIN: Final = 1024 * 1024
_TELLS_MAX: Final = 8
"""A block tells its progress every `_TELL_BYTES_MIN`, and at most so many times."""


class Cipher:
    """Seals and opens records. `sequence` numbers sealings from one above what a scan found."""

    def __init__(
        self, workers: Workers, last_sequence: int = 0, weight: Weight = equal_weights
    ) -> None:
        """`weight` of a tenant is its part of the threads while others want them too."""
        self._workers = workers
        # One block more than there are threads: none idles while the next one is let in.
        self._turns = Fair(
            workers.name, workers.threads + 1, waiting_max=workers.queue_max, weight=weight
        )
        self._sequence = itertools.count(last_sequence + 1)

    async def seal(
        self, context: BlockContext, keys: NamespaceKeys, plain: memoryview, record: memoryview
    ) -> Header:
        """Encrypt `plain` into `record` under a fresh key; returns the header written."""
        sealer = Sealer.begin(context, keys.data, next(self._sequence))
        await self._share(context, lambda left: sealer.segments(left, plain, record))
        sealer.finish(record)
        return sealer.header

    async def open(
        self,
        context: BlockContext,
        keys: NamespaceKeys,
        record: memoryview,
        plain: memoryview,
        opened: Opened | None = None,
    ) -> Header:
        """Decrypt `record` into `plain`; on any failure, or when cancelled, `plain` is wiped.

        `opened(n, header)` is called on the event loop while it runs, with n rising: the first n
        segments are good. After a failure has been seen it is not called any more. Raises
        `Corrupt` when the record is damaged, another block's, or under another key, and `Missing`
        when it is this block in another layout.
        """
        progress: Progress | None = None
        try:
            # A copy: what was checked is what is used, whatever happens to the bytes below.
            header = read_header(memoryview(bytes(record[:HEADER_BYTES])))
            opener = Opener.begin(header, context, keys.data)
            progress = _follow(header, opened)
            mark = None if progress is None else progress.mark
            await self._share(context, lambda left: opener.segments(left, record, plain, mark))
        except BaseException:
            if progress is not None:
                progress.close()
            await self.wipe(plain)
            raise
        return header

    @property
    def busy(self) -> bool:
        """Whether a thread works, or soon will: they take the interpreter between segments."""
        return self._workers.depth > 0

    @property
    def turns(self) -> FairStatistics:
        """Who waits for a turn on the threads."""
        return self._turns.statistics()

    async def wipe(self, view: memoryview) -> None:
        """Zero `view` on a thread; here, when it is small, or cancelled before its turn."""
        if len(view) <= _WIPED_HERE_BYTES_MAX:
            wipe(view)
            return
        wiped = False

        def job() -> None:
            nonlocal wiped
            wipe(view)
            wiped = True

        try:
            await self._workers.run(job, always=True)
        finally:
            if not wiped:
                wipe(view)

    async def _share(self, context: BlockContext, work: Callable[[Iterator[int]], None]) -> None:
        """Call `work` on one or more threads, with one iterator over the segments for them all."""
        count = len(context.segment_bytes)
        total = context.plaintext_bytes
        parts = min(self._workers.threads, count, total // _SPLIT_BYTES_MIN)
        if total < count * _SPLIT_SEGMENT_BYTES_MIN:
            parts = 1
        # One step of this iterator is one step of the interpreter: no index is given out twice.
        left = iter(range(count))
        async with self._turns.turn(context.tenant, total):
            # The turns are the bound: what was let in is not refused for its number of jobs.
            await self._workers.run(*[lambda: work(left)] * max(parts, 1), always=True)


def _follow(header: Header, opened: Opened | None) -> Progress | None:
    if opened is None:
        return None
    count = len(header.context.segment_bytes)
    tells = min(_TELLS_MAX, header.context.plaintext_bytes // _TELL_BYTES_MIN)
    if tells < 2:
        return None
    return Progress(count, -(-count // tells), lambda good: opened(good, header))
