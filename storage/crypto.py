"""Whole records sealed and opened on the crypto threads, segment by segment.

A block's segments are split into one run of neighbours a thread, so that one large block uses
every core. The event loop only waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from storage.block import BlockContext
from storage.envelope import Opener, Sealer
from storage.header import HEADER_BYTES, Header, read_header
from storage.memory import wipe
from storage.workers import Workers
from strongroom.derivation import NamespaceKeys

_SPLIT_BYTES_MIN = 256 * 1024
"""Below this a second thread costs more than it brings."""


class Cipher:
    """Seals and opens records. `sequence` numbers sealings from one above what a scan found."""

    def __init__(self, workers: Workers, last_sequence: int = 0) -> None:
        self._workers = workers
        self._sequence = itertools.count(last_sequence + 1)

    async def seal(
        self, context: BlockContext, keys: NamespaceKeys, plain: memoryview, record: memoryview
    ) -> Header:
        """Encrypt `plain` into `record` under a fresh key; returns the header written."""
        sealer = Sealer.begin(context, keys.data, next(self._sequence))
        await self._split(context, lambda run: sealer.segments(run, plain, record))
        sealer.finish(record)
        return sealer.header

    async def open(
        self, context: BlockContext, keys: NamespaceKeys, record: memoryview, plain: memoryview
    ) -> Header:
        """Decrypt `record` into `plain`; on any failure, or when cancelled, `plain` is wiped.

        Raises `Corrupt` when the record is damaged, another block's, or under another key, and
        `Missing` when it is this block in another layout.
        """
        try:
            # A copy: what was checked is what is used, whatever happens to the bytes below.
            header = read_header(memoryview(bytes(record[:HEADER_BYTES])))
            opener = Opener.begin(header, context, keys.data)
            await self._split(context, lambda run: opener.segments(run, record, plain))
        except BaseException:
            wipe(plain)
            raise
        return header

    async def _split(self, context: BlockContext, work: Callable[[Sequence[int]], None]) -> None:
        """Call `work` with every segment index once, in one run of neighbours a thread."""
        count = len(context.segment_bytes)
        parts = min(self._workers.threads, count, context.plaintext_bytes // _SPLIT_BYTES_MIN)
        edges = [count * part // max(parts, 1) for part in range(max(parts, 1) + 1)]
        runs = [range(first, last) for first, last in itertools.pairwise(edges)]
        await self._workers.run(*(_job(work, run) for run in runs))


def _job(work: Callable[[Sequence[int]], None], run: Sequence[int]) -> Callable[[], None]:
    return lambda: work(run)
