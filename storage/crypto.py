"""Whole records sealed and opened on the crypto threads, segment by segment.

A block's segments are split into one run of neighbours a thread, so that one large block uses
every core. The event loop only waits.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from concurrent.futures import Executor

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from storage.block import BlockContext
from storage.envelope import (
    TAG_BYTES,
    Header,
    check_header,
    encode_header,
    live_header,
    new_header,
    open_segment,
    seal_segment,
    segment_places,
    wipe,
)
from strongroom.derivation import BLOCK_SALT_BYTES, NamespaceKeys

_SPLIT_BYTES_MIN = 256 * 1024
"""Below this a second thread costs more than it brings."""


class Cipher:
    """Seals and opens records. `threads` is how many the executor has."""

    def __init__(self, executor: Executor, threads: int) -> None:
        self._executor = executor
        self._threads = threads

    async def seal(
        self, context: BlockContext, keys: NamespaceKeys, plain: memoryview, record: memoryview
    ) -> Header:
        """Encrypt `plain` into `record` under a fresh key; returns the header written."""
        header, key = new_header(context, keys.data, secrets.token_bytes(BLOCK_SALT_BYTES))
        encode_header(header, record)
        cipher = AESGCM(key.key)
        places = segment_places(context)
        end = places[-1][0] + places[-1][2] + TAG_BYTES

        def run(first: int, last: int) -> None:
            for index in range(first, last):
                sealed_at, plain_at, length = places[index]
                seal_segment(
                    cipher,
                    context,
                    index,
                    plain[plain_at : plain_at + length],
                    record[sealed_at : sealed_at + length + TAG_BYTES],
                )

        await self._split(context, run)
        record[end:] = bytes(len(record) - end)  # padding holds nothing of an earlier occupant
        return header

    async def open(
        self, context: BlockContext, keys: NamespaceKeys, record: memoryview, plain: memoryview
    ) -> None:
        """Decrypt `record` into `plain`; on any failure `plain` is wiped.

        Raises `Corrupt` when the record is damaged, another block's, or under another key.
        """
        try:
            header = live_header(record)
            key = check_header(header, context, keys.data)
            cipher = AESGCM(key.key)
            places = segment_places(context)

            def run(first: int, last: int) -> None:
                for index in range(first, last):
                    sealed_at, plain_at, length = places[index]
                    open_segment(
                        cipher,
                        context,
                        index,
                        record[sealed_at : sealed_at + length + TAG_BYTES],
                        plain[plain_at : plain_at + length],
                    )

            await self._split(context, run)
        except BaseException:
            wipe(plain)
            raise

    async def _split(self, context: BlockContext, run: Callable[[int, int], None]) -> None:
        """Run over all segments on up to `threads` threads; ends when every thread has ended."""
        loop = asyncio.get_running_loop()
        count = len(context.segment_bytes)
        parts = min(self._threads, count, max(1, context.plaintext_bytes // _SPLIT_BYTES_MIN))
        edges = [count * part // parts for part in range(parts + 1)]
        futures = [
            loop.run_in_executor(self._executor, run, edges[part], edges[part + 1])
            for part in range(parts)
        ]
        gathered = asyncio.gather(*futures, return_exceptions=True)
        try:
            results = await asyncio.shield(gathered)
        except asyncio.CancelledError:
            # The threads still write into the caller's buffers: wait for them, then go.
            await gathered
            raise
        for result in results:
            if isinstance(result, BaseException):
                raise result
