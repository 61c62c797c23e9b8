"""The references: the same bytes with nothing around them.

A bare set lies in a memory file made as the store's staging and arena are, and every page is
touched before a clock starts. What works on it are threads as the store's crypto threads are, as
nice and on the same cores; `decrypt` and `encrypt` are one loop a thread, and `copy` lets go of
the interpreter while it copies.

Where the two halves of a set lie matters. At a distance of 256 or 512 MiB and one page the bare
loop falls from 10 to 6.5 GB/s, and with the same pages mapped 1 or 2 MiB further apart it does not;
the likely cause is a first-level cache that tells lines by a hash of their linear address. Two
files of 256 MiB that are mapped one after the other lie just so. Here both halves are in one file,
at a distance that is far from a multiple of 256 MiB.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Self

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from storage.memfd import HUGE_PAGE, MemoryFile
from storage.workers import CRYPTO_NICE, be_nice, crypto_cores

TAG_BYTES: Final = 16
_ALIAS_BYTES: Final = 256 * 1024 * 1024
_APART_BYTES: Final = 16 * 1024 * 1024


def memory_file(nbytes: int) -> MemoryFile:
    """Shared memory of at least `nbytes`, as the store has it: every page touched, and noise."""
    file = MemoryFile("bench", -(-nbytes // HUGE_PAGE) * HUGE_PAGE)
    file.settle()
    noise = secrets.token_bytes(min(nbytes, 1024 * 1024))
    for start in range(0, nbytes, len(noise)):
        file.view[start : start + len(noise)] = noise[: nbytes - start]
    return file


def apart(nbytes: int) -> int:
    """A distance of at least `nbytes` at which two streams do not push each other out."""
    distance = -(-nbytes // HUGE_PAGE) * HUGE_PAGE
    while not _APART_BYTES <= distance % _ALIAS_BYTES <= _ALIAS_BYTES - _APART_BYTES:
        distance += HUGE_PAGE
    return distance


class BareSet:
    """`set_bytes` of plaintext in segments, and room for it sealed."""

    def __init__(self, set_bytes: int, segment_bytes: int, threads: int) -> None:
        self._set_bytes = set_bytes
        self._segment = segment_bytes
        self._count = set_bytes // segment_bytes
        self._threads = threads
        sealed_bytes = set_bytes + self._count * TAG_BYTES
        distance = apart(sealed_bytes)
        self._file = memory_file(distance + set_bytes)
        self._sealed = self._file.view[:sealed_bytes]
        self._plain = self._file.view[distance : distance + set_bytes]
        self._cipher = AESGCM(secrets.token_bytes(32))
        self._pools = {count: _pool(count) for count in {1, threads}}
        self.encrypt()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.shutdown()
        self._sealed.release()
        self._plain.release()
        self._file.close()

    def encrypt(self) -> float:
        """GB/s of `encrypt_into`, one thread."""
        return self._timed(lambda: self._spread(self._encrypt, 1))

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

        return self._timed(lambda: self._spread(copy, self._threads))

    def _spread(self, work: Callable[[range], None], threads: int) -> None:
        edges = [self._count * part // threads for part in range(threads + 1)]
        runs = [range(edges[part], edges[part + 1]) for part in range(threads)]
        for done in [self._pools[threads].submit(work, run) for run in runs]:
            done.result()

    def _encrypt(self, run: range) -> None:
        for index in run:
            at = index * self._segment
            to = index * (self._segment + TAG_BYTES)
            self._cipher.encrypt_into(
                index.to_bytes(12, "big"),
                self._plain[at : at + self._segment],
                b"",
                self._sealed[to : to + self._segment + TAG_BYTES],
            )

    def _decrypt(self, run: range) -> None:
        for index in run:
            at = index * self._segment
            to = index * (self._segment + TAG_BYTES)
            self._cipher.decrypt_into(
                index.to_bytes(12, "big"),
                self._sealed[to : to + self._segment + TAG_BYTES],
                b"",
                self._plain[at : at + self._segment],
            )

    def _timed(self, work: Callable[[], None]) -> float:
        started = time.perf_counter()
        work()
        return self._set_bytes / (time.perf_counter() - started) / 1e9


def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads as `crypto_workers` makes them."""
    cores = iter(crypto_cores(threads))

    def begin() -> None:
        be_nice(CRYPTO_NICE)
        core = next(cores, None)
        if core is not None:
            os.sched_setaffinity(0, {core})

    return ThreadPoolExecutor(threads, initializer=begin)
