"""The references: the same bytes with nothing around them.

A bare set lies in memory files of its own, as the store's staging and arena do, and every page is
touched before a clock starts. `decrypt` and `encrypt` are one thread in one loop; `copy` uses the
given number of threads and lets go of the interpreter while it copies.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Self

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

TAG_BYTES: Final = 16


def memory_file(nbytes: int) -> mmap.mmap:
    """Shared memory of `nbytes`, every page touched."""
    descriptor = os.memfd_create("bench", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
        mapped = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED)
    finally:
        os.close(descriptor)
    noise = secrets.token_bytes(min(nbytes, 1024 * 1024))
    for start in range(0, nbytes, len(noise)):
        mapped[start : start + len(noise)] = noise[: nbytes - start]
    return mapped


class BareSet:
    """`set_bytes` of plaintext in segments, and room for it sealed."""

    def __init__(self, set_bytes: int, segment_bytes: int, threads: int) -> None:
        self._set_bytes = set_bytes
        self._segment = segment_bytes
        self._count = set_bytes // segment_bytes
        self._threads = threads
        self._plain = memory_file(set_bytes)
        self._sealed = memory_file(set_bytes + self._count * TAG_BYTES)
        self._cipher = AESGCM(secrets.token_bytes(32))
        self._pool = ThreadPoolExecutor(threads)
        self.encrypt()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        self._plain.close()
        self._sealed.close()

    def encrypt(self) -> float:
        """GB/s of `encrypt_into`, one thread."""
        return self._timed(lambda: self._encrypt(range(self._count)))

    def decrypt(self, threads: int = 1, passes: int = 1) -> float:
        """GB/s of `decrypt_into`; each thread goes `passes` times over its part of the set."""

        def work(run: range) -> None:
            for _ in range(passes):
                self._decrypt(run)

        return passes * self._timed(lambda: self._spread(work, threads))

    def copy(self) -> float:
        """GB/s of a plain copy of the plaintext's length, with every thread."""
        source = ctypes.addressof(ctypes.c_char.from_buffer(self._sealed))
        target = ctypes.addressof(ctypes.c_char.from_buffer(self._plain))

        def copy(run: range) -> None:
            for index in run:
                at = index * self._segment
                ctypes.memmove(target + at, source + at, self._segment)

        speed = self._timed(lambda: self._spread(copy, self._threads))
        self._encrypt(range(self._count))  # what was copied over is sealed anew
        return speed

    def _spread(self, work: Callable[[range], None], threads: int) -> None:
        if threads == 1:
            work(range(self._count))
            return
        edges = [self._count * part // threads for part in range(threads + 1)]
        runs = [range(edges[part], edges[part + 1]) for part in range(threads)]
        for done in [self._pool.submit(work, run) for run in runs]:
            done.result()

    def _encrypt(self, run: range) -> None:
        with memoryview(self._plain) as plain, memoryview(self._sealed) as sealed:
            for index in run:
                at = index * self._segment
                to = index * (self._segment + TAG_BYTES)
                self._cipher.encrypt_into(
                    index.to_bytes(12, "big"),
                    plain[at : at + self._segment],
                    b"",
                    sealed[to : to + self._segment + TAG_BYTES],
                )

    def _decrypt(self, run: range) -> None:
        with memoryview(self._plain) as plain, memoryview(self._sealed) as sealed:
            for index in run:
                at = index * self._segment
                to = index * (self._segment + TAG_BYTES)
                self._cipher.decrypt_into(
                    index.to_bytes(12, "big"),
                    sealed[to : to + self._segment + TAG_BYTES],
                    b"",
                    plain[at : at + self._segment],
                )

    def _timed(self, work: Callable[[], None]) -> float:
        started = time.perf_counter()
        work()
        return self._set_bytes / (time.perf_counter() - started) / 1e9
