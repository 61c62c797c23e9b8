"""Faults on purpose: a wrapper around the file operations that fails as it is told, and counts.

A script says which call fails and how; nothing is left to chance, so that a failure repeats.
Calls are counted with their lengths, which also shows what was joined. It is a real wrapper
around real files: what it does not spoil goes through.

    faulty = Faulty()
    faulty.script(Call.WRITE, Fail(errno.ENOSPC), skip=2)
    store = await NvmeTier.open(..., make_files=faulty.make_files)

- `Fail`: the call ends with an error, nothing done. `Short`: only so many bytes are done, and
  the call says so. `Torn`: only so many bytes reach the file, and the call ends with EIO, as
  a power cut would leave it. `Flip`: one byte of what passes is changed. `Hold`: the call waits
  in its thread until it is let go: a slow disk without a clock.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from storage.memory import PAGE_BYTES, aligned
from storage.tiers.operations import FileOperations, Posix
from storage.tiers.regions import RegionFiles


class Call(StrEnum):
    """What may be asked of the operating system."""

    READ = "read"
    WRITE = "write"
    ALLOCATE = "allocate"
    SYNC = "sync"


@dataclass(frozen=True, slots=True)
class Fail:
    """The call ends with this error."""

    code: int


@dataclass(frozen=True, slots=True)
class Short:
    """Only the first `nbytes` are read or written; the call says so."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Torn:
    """Only the first `nbytes` reach the file, to the byte; then EIO."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Flip:
    """The byte at `at`, counted from the call's first, is changed by `mask`."""

    at: int
    mask: int = 1


@dataclass(frozen=True, slots=True)
class Hold:
    """The call waits in its thread until `let_go` is set; `entered` says that it is there."""

    entered: threading.Event = field(default_factory=threading.Event)
    let_go: threading.Event = field(default_factory=threading.Event)


Injected = Fail | Short | Torn | Flip | Hold


@dataclass(frozen=True, slots=True)
class Made:
    """A call that was made."""

    call: Call
    fd: int
    offset: int
    nbytes: int
    parts: int


@dataclass(slots=True)
class _Entry:
    fault: Injected
    skip: int
    times: int | None
    applies: Callable[[Made], bool]


class Faulty:
    """File operations with a script. Safe to call from several threads."""

    def __init__(self, inner: FileOperations | None = None) -> None:
        self._inner = inner or Posix()
        self._lock = threading.Lock()
        self._entries: list[tuple[Call, _Entry]] = []
        self.calls: list[Made] = []
        self.free: int | None = None
        """Free bytes of the file system, where a test says so."""

    def script(
        self,
        call: Call,
        fault: Injected,
        *,
        skip: int = 0,
        times: int | None = 1,
        where: Callable[[Made], bool] = lambda _: True,
    ) -> None:
        """Spoil the next `times` calls that `where` holds for, after `skip` of them.

        None is until `clear`. Entries are tried in the order in which they were written.
        """
        with self._lock:
            self._entries.append((call, _Entry(fault, skip, times, where)))

    def clear(self) -> None:
        """From now on all goes well. What is held stays held until it is let go."""
        with self._lock:
            self._entries.clear()

    def count(self, call: Call) -> int:
        """How many such calls were made."""
        return sum(1 for made in self.calls if made.call is call)

    def make_files(
        self, folder: Path, store: bytes, region_bytes: int, count: int, floor_bytes: int
    ) -> RegionFiles:
        """Region files whose calls go through here."""
        return RegionFiles(folder, store, region_bytes, count, floor_bytes, self)

    # The file operations

    def preadv(self, fd: int, parts: Sequence[memoryview], offset: int, /) -> int:
        fault = self._next(Call.READ, fd, parts, offset)
        match fault:
            case Short(nbytes):
                return self._inner.preadv(fd, _first(parts, nbytes), offset)
            case Flip(at, mask):
                count = self._inner.preadv(fd, parts, offset)
                _flip(parts, at, mask)
                return count
            case Torn():
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            case _:
                return self._inner.preadv(fd, parts, offset)

    def pwritev(self, fd: int, parts: Sequence[memoryview], offset: int, /) -> int:
        fault = self._next(Call.WRITE, fd, parts, offset)
        match fault:
            case Short(nbytes):
                return self._inner.pwritev(fd, _first(parts, nbytes), offset)
            case Flip(at, mask):
                copy = _joined(parts)
                copy[at] ^= mask
                return self._inner.pwritev(fd, [copy], offset)
            case Torn(nbytes):
                self._tear(fd, parts, offset, nbytes)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            case _:
                return self._inner.pwritev(fd, parts, offset)

    def allocate(self, fd: int, nbytes: int, /) -> None:
        self._next(Call.ALLOCATE, fd, (), nbytes)
        self._inner.allocate(fd, nbytes)

    def sync(self, fd: int, /) -> None:
        self._next(Call.SYNC, fd, (), 0)
        self._inner.sync(fd)

    def free_bytes(self, folder: Path, /) -> int:
        return self._inner.free_bytes(folder) if self.free is None else self.free

    def _next(
        self, call: Call, fd: int, parts: Sequence[memoryview], offset: int
    ) -> Injected | None:
        """Count the call, and apply what holds for every kind of call."""
        made = Made(call, fd, offset, sum(len(part) for part in parts), len(parts))
        with self._lock:
            self.calls.append(made)
            fault = self._take(made)
        if isinstance(fault, Fail):
            raise OSError(fault.code, os.strerror(fault.code))
        if isinstance(fault, Hold):
            fault.entered.set()
            fault.let_go.wait()
        return fault

    def _take(self, made: Made) -> Injected | None:
        for position, (call, entry) in enumerate(self._entries):
            if call is not made.call or not entry.applies(made):
                continue
            if entry.skip:
                entry.skip -= 1
                continue
            if entry.times is not None:
                entry.times -= 1
                if not entry.times:
                    del self._entries[position]
            return entry.fault
        return None

    def _tear(self, fd: int, parts: Sequence[memoryview], offset: int, nbytes: int) -> None:
        """Write `nbytes` bytes exactly: of the last page the rest stays what it was."""
        new = _joined(parts)
        end = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        if not end:
            return
        old = aligned(end)
        self._inner.preadv(fd, [old], offset)
        old[:nbytes] = new[:nbytes]
        self._inner.pwritev(fd, [old], offset)


def _first(parts: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """Views of the first bytes of `parts`, in whole pages, as O_DIRECT has it."""
    nbytes -= nbytes % PAGE_BYTES
    views = []
    for part in parts:
        if nbytes <= 0:
            break
        views.append(part[:nbytes])
        nbytes -= len(part)
    return views


def _joined(parts: Sequence[memoryview]) -> memoryview:
    whole = aligned(sum(len(part) for part in parts))
    at = 0
    for part in parts:
        whole[at : at + len(part)] = part
        at += len(part)
    return whole


def _flip(parts: Sequence[memoryview], at: int, mask: int) -> None:
    for part in parts:
        if at < len(part):
            part[at] ^= mask
            return
        at -= len(part)
