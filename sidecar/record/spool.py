"""The durable audit spool: an access is on record before it is served.

Rules (DESIGN section 10):
- `record` returns once the event is written; it raises `Unavailable` when it cannot be, and
  then the caller serves nothing. A written event survives the death of the process. Whether it
  is also synced before `record` returns, or within a second, is a setting.
- Where it is synced later, an event that finds nothing in its way is written by the caller
  itself: a line into the page cache costs less than the way to another thread. When the disk
  makes two such writes in a row wait, others go by the thread for a while, so that the loop
  stands still twice at most. One alone says nothing: a write lets go of the interpreter, and
  threads that decrypt may keep it for as long as a slow disk. Syncs, and whatever changes the
  file, run on the spool's thread, and while the file changes nobody else writes.
- Events are counted from `FIRST_COUNT` without a gap and hash-chained: `prev` is the SHA-256 of
  the canonical JSON of the event before, `genesis(spool)` for the first.
- The spool is a row of segment files, `<first count>.jsonl`. The first line of each says which
  spool it is of and where the chain stands; each further line is one event.
- A torn last line was never served, and is cut off at start. Any other damage sets the spool
  aside whole and begins a new one under a new id, which the service raises an alarm about.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Final, TypeVar, TypeVarTuple

import aiofiles
import msgspec
from aiofiles.threadpool.binary import AsyncFileIO

from strongroom.canonical import canonical_json
from strongroom.control import SpoolEvent
from strongroom.errors import Corrupt, StrongroomError, Unavailable
from strongroom.private_files import private_directory
from strongroom.spool import FIRST_COUNT, event_hash, event_json, genesis

_logger = logging.getLogger(__name__)

QUEUE_MAX: Final = 4096
_BATCH_MAX: Final = 256
_SYNC_S: Final = 0.5
_SLOW_S: Final = 0.005
"""A write on the loop that takes longer is one that the disk made wait."""
_BY_THREAD_S: Final = 1.0
_SUFFIX: Final = ".jsonl"
_Args = TypeVarTuple("_Args")
_Result = TypeVar("_Result")


class _Header(msgspec.Struct, frozen=True):
    """First line of a segment: the state of the chain before its first event."""

    spool: str
    count: int
    prev: str


class SpoolSync(StrEnum):
    """What an access record survives before the access is served."""

    WITHIN_SECOND = "within_second"
    """The death of the process: written before serving, synced in groups within a second."""
    BEFORE_SERVING = "before_serving"
    """Loss of power: synced before serving."""


@dataclass(frozen=True, slots=True)
class SpoolSettings:
    """See `SidecarSettings`."""

    sync: SpoolSync
    bytes_max: int
    segment_bytes: int


@dataclass(frozen=True, slots=True)
class SpoolStatistics:
    """`pending` events are written and not yet taken by the service."""

    spool: str
    next_count: int
    pending: int
    bytes: int
    blocked: bool
    write_failures: int


@dataclass(slots=True)
class _Segment:
    path: Path
    first: int
    size: int


class Spool:
    """Written by one task; `opened` starts and ends it."""

    def __init__(
        self, directory: Path, settings: SpoolSettings, executor: ThreadPoolExecutor
    ) -> None:
        self._directory = directory
        self._settings = settings
        self._executor = executor
        self._queue: asyncio.Queue[tuple[SpoolEvent, asyncio.Future[None]]] = asyncio.Queue(
            QUEUE_MAX
        )
        self._segments: list[_Segment] = []
        self._file: AsyncFileIO | None = None
        self._using_file = asyncio.Lock()
        """Held to write, sync or change the file: none of them meets one that another closes."""
        self._unsynced = False
        self._syncing = False
        """A sync runs, which a write beside it does not disturb."""
        self._clock = time.monotonic
        self._by_thread_until_s = 0.0
        self._slow_writes = 0
        """In a row."""
        self._lost = False
        """The last segment holds what nobody knows: nothing is written there any more."""
        self._blocked = False
        self._failures = 0
        self.spool = ""
        self.next_count = FIRST_COUNT
        self.taken = FIRST_COUNT
        self._prev = ""
        self.news = asyncio.Event()
        """Set when there is something to ship."""

    @classmethod
    @asynccontextmanager
    async def opened(cls, directory: Path, settings: SpoolSettings) -> AsyncIterator[Spool]:
        """The spool in `directory`, writing until the block is left; then it is synced."""
        private_directory(directory)
        with ThreadPoolExecutor(1, thread_name_prefix="spool") as executor:
            spool = cls(directory, settings, executor)
            await spool._run_blocking(spool._recover)
            await spool._open_last()
            try:
                async with asyncio.TaskGroup() as tasks:
                    writer = tasks.create_task(spool._write_loop(), name="spool-writer")
                    syncer = tasks.create_task(spool._sync_loop(), name="spool-sync")
                    try:
                        yield spool
                    finally:
                        writer.cancel()
                        syncer.cancel()
            finally:
                await spool._close()

    async def record(self, event: SpoolEvent) -> None:
        """Write `event` (its count and prev are filled in here), or raise `Unavailable`."""
        written = self.put(event)
        if written is not None:
            await written

    def put(self, event: SpoolEvent) -> asyncio.Future[None] | None:
        """`record` without waiting: None when the event is written, else what to wait for."""
        if self.size_bytes >= self._settings.bytes_max:
            self._blocked = True
            raise Unavailable("the audit spool is full")
        if self._may_write_at_once():
            self._write_at_once(event)
            return None
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            self._queue.put_nowait((event, written))
        except asyncio.QueueFull as error:
            raise Unavailable("the audit spool cannot keep up") from error
        return written

    def _may_write_at_once(self) -> bool:
        return (
            self._settings.sync is SpoolSync.WITHIN_SECOND
            and self._file is not None
            and not self._lost
            and self._clock() >= self._by_thread_until_s
            and self._segments[-1].size < self._settings.segment_bytes
            and self._queue.empty()
            and (self._syncing or not self._using_file.locked())
        )

    def _write_at_once(self, event: SpoolEvent) -> None:
        """Nothing waits from the look at the file to the last byte in it."""
        assert self._file is not None
        try:
            line, chained = self._chained(event, self.next_count, self._prev)
            began_s = self._clock()
            self._append_at_once(self._file.fileno(), line)
            ended_s = self._clock()
        except (OSError, ValueError, StrongroomError) as error:
            self._failed(error)
            raise Unavailable("the audit spool cannot be written") from error
        self.next_count, self._prev = self.next_count + 1, chained
        self._slow_writes = self._slow_writes + 1 if ended_s - began_s > _SLOW_S else 0
        if self._slow_writes > 1:
            self._by_thread_until_s = ended_s + _BY_THREAD_S
        self._blocked = False
        self.news.set()

    def _append_at_once(self, descriptor: int, line: bytes) -> None:
        """All of `line` or none of it."""
        segment = self._segments[-1]
        try:
            _write_whole(descriptor, line)
        except OSError:
            try:
                os.ftruncate(descriptor, segment.size)
            except OSError:
                # What the file holds is unknown now, so nothing may follow it there. A sync may
                # be looking at it: it is closed on the spool's thread.
                self._lost = True
            raise
        segment.size += len(line)
        self._unsynced = True

    @staticmethod
    def _chained(event: SpoolEvent, count: int, prev: str) -> tuple[bytes, str]:
        """The event's line, and what the next one's `prev` must be."""
        body = event_json(event, count, prev)
        return body + b"\n", hashlib.sha256(body).hexdigest()

    def _failed(self, error: Exception) -> None:
        self._blocked = True
        self._failures += 1
        _logger.warning("the audit spool cannot be written: %s", type(error).__name__)

    @property
    def size_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size for segment in self._segments)

    @property
    def crowded(self) -> bool:
        """Whether what could be left out should be: a quarter of the queue, or half of the room,
        is taken.
        """
        return (
            self._queue.qsize() * 4 >= self._queue.maxsize
            or self.size_bytes * 2 >= self._settings.bytes_max
        )

    def statistics(self) -> SpoolStatistics:
        return SpoolStatistics(
            self.spool,
            self.next_count,
            self.next_count - self.taken,
            self.size_bytes,
            self._blocked,
            self._failures,
        )

    async def read(self, count: int, events_max: int) -> list[SpoolEvent]:
        """Up to `events_max` events from `count` on, as far as they are in one segment."""
        segment = next((s for s in reversed(self._segments) if s.first <= count), None)
        if segment is None or count >= self.next_count:
            return []
        _, events, _ = await self._run_blocking(_read_segment, segment.path, segment.size)
        wanted = [event for event in events if event.count >= count]
        return wanted[:events_max]

    async def release(self, next_count: int) -> None:
        """The service has taken everything below `next_count`: whole segments below go."""
        self.taken = max(self.taken, min(next_count, self.next_count))
        while len(self._segments) > 1 and self._segments[1].first <= self.taken:
            gone = self._segments[0]
            await self._run_blocking(partial(gone.path.unlink, missing_ok=True))
            self._segments.remove(gone)

    @property
    def first_count(self) -> int:
        """The first event that is still here."""
        return self._segments[0].first

    # Writing

    async def _write_loop(self) -> None:
        while True:
            batch = [await self._queue.get()]
            while len(batch) < _BATCH_MAX and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            try:
                async with self._using_file:
                    await self._write(batch)
            except (OSError, ValueError, StrongroomError) as error:
                self._failed(error)
                _refuse(batch)
            except asyncio.CancelledError:
                _refuse(batch)
                raise
            else:
                self._blocked = False
                for _, written in batch:
                    if not written.done():
                        written.set_result(None)
                self.news.set()

    async def _write(self, batch: list[tuple[SpoolEvent, asyncio.Future[None]]]) -> None:
        full = self._segments[-1].size >= self._settings.segment_bytes
        if full or self._lost or self._file is None:
            await self._next_segment()
        count, prev = self.next_count, self._prev
        lines: list[bytes] = []
        for event, _ in batch:
            line, prev = self._chained(event, count, prev)
            lines.append(line)
            count += 1
        await self._append(b"".join(lines))
        self.next_count, self._prev = count, prev

    async def _append(self, data: bytes) -> None:
        """All of `data` or none: after a failure the file is cut back to where it was."""
        file, segment = self._file, self._segments[-1]
        if file is None:
            raise Unavailable("the audit spool has no open segment")
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[await file.write(rest) :]
            if self._settings.sync is SpoolSync.BEFORE_SERVING:
                await self._run_blocking(os.fsync, file.fileno())
        except (OSError, ValueError):
            try:
                await file.truncate(segment.size)
            except (OSError, ValueError):
                # What the file holds is unknown now, so nothing may follow it there.
                await self._abandon_segment()
            raise
        segment.size += len(data)
        self._unsynced = self._settings.sync is not SpoolSync.BEFORE_SERVING

    async def _sync_loop(self) -> None:
        while True:
            await asyncio.sleep(_SYNC_S)
            async with self._using_file:
                await self._sync()

    async def _sync(self) -> None:
        if not self._unsynced or self._file is None:
            return
        self._unsynced = False
        try:
            await self._fsync(self._file.fileno())
        except (OSError, ValueError):
            # After a failed fsync the kernel may have dropped the pages: never trust this
            # file again, and say so by blocking until a fresh segment takes a record.
            self._failures += 1
            self._blocked = True
            _logger.warning("the audit spool could not be synced")
            await self._abandon_segment()

    async def _fsync(self, descriptor: int) -> None:
        self._syncing = True
        try:
            await self._run_blocking(os.fsync, descriptor)
        finally:
            self._syncing = False

    async def _next_segment(self) -> None:
        await self._sync()
        self._lost = False
        if self._file is not None:
            await self._file.close()
            self._file = None
        path = self._directory / f"{self.next_count:020d}{_SUFFIX}"
        header = _line(_Header(self.spool, self.next_count, self._prev))
        self._segments = [s for s in self._segments if s.path != path]
        path.unlink(missing_ok=True)  # left by an attempt that failed before its first event
        self._segments.append(_Segment(path, self.next_count, 0))
        await self._open_last()
        await self._append(header)

    async def _abandon_segment(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError, ValueError):
                await self._file.close()
        self._file = None

    async def _open_last(self) -> None:
        self._file = await aiofiles.open(
            self._segments[-1].path,
            "ab",
            buffering=0,
            executor=self._executor,
            opener=lambda path, flags: os.open(path, flags | os.O_CLOEXEC, 0o600),
        )

    async def _close(self) -> None:
        async with self._using_file:
            await self._sync()
            await self._abandon_segment()
        while not self._queue.empty():
            _, written = self._queue.get_nowait()
            if not written.done():
                written.set_exception(Unavailable("the audit spool is closed"))

    # Starting

    def _recover(self) -> None:
        paths = sorted(self._directory.glob(f"*{_SUFFIX}"))
        try:
            self._load(paths)
        except Corrupt as error:
            _logger.warning("the audit spool is damaged and was set aside: %s", error.message)
            aside = self._directory / f"damaged-{secrets.token_hex(8)}"
            aside.mkdir(mode=0o700)
            for path in paths:
                path.replace(aside / path.name)
            self._load([])

    def _load(self, paths: list[Path]) -> None:
        self._segments = []
        self.spool = ""
        for path in paths:
            is_last = path == paths[-1]
            header, events, good = _read_segment(path, path.stat().st_size)
            if header is None and is_last and self.spool:
                path.unlink()  # the process died while it began this segment
                break
            if header is None or (good != path.stat().st_size and not is_last):
                raise Corrupt(f"{path.name} is torn in the middle of the spool")
            if self.spool and (header.spool, header.count, header.prev) != (
                self.spool,
                self.next_count,
                self._prev,
            ):
                raise Corrupt(f"{path.name} does not continue the spool")
            self.spool, self.next_count, self._prev = header.spool, header.count, header.prev
            for event in events:
                if (event.count, event.prev) != (self.next_count, self._prev):
                    raise Corrupt(f"the chain breaks at {self.next_count}")
                self.next_count += 1
                self._prev = event_hash(event)
            os.truncate(path, good)
            self._segments.append(_Segment(path, header.count, good))
        if not self.spool:
            self._begin()
        self.taken = self._segments[0].first
        if self.next_count > self.taken:
            self.news.set()

    def _begin(self) -> None:
        self.spool = secrets.token_hex(16)
        self.next_count = FIRST_COUNT
        self._prev = genesis(self.spool)
        path = self._directory / f"{FIRST_COUNT:020d}{_SUFFIX}"
        header = _line(_Header(self.spool, FIRST_COUNT, self._prev))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(header)
        self._segments = [_Segment(path, FIRST_COUNT, len(header))]

    async def _run_blocking(self, work: Callable[[*_Args], _Result], *args: *_Args) -> _Result:
        """Blocking file work, on the spool's one thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *args)


def _refuse(batch: list[tuple[SpoolEvent, asyncio.Future[None]]]) -> None:
    for _, written in batch:
        if not written.done():
            written.set_exception(Unavailable("the audit spool cannot be written"))


def _write_whole(descriptor: int, line: bytes) -> None:
    if os.write(descriptor, line) != len(line):
        raise OSError(errno.ENOSPC, "a part of a line was written")


def _line(header: _Header) -> bytes:
    return canonical_json(msgspec.to_builtins(header)) + b"\n"


def _read_segment(path: Path, size: int) -> tuple[_Header | None, list[SpoolEvent], int]:
    """Header, whole events, and how many bytes of the first `size` they make up."""
    with path.open("rb") as file:
        raw = file.read(size)
    lines = raw.split(b"\n")[:-1]  # what follows the last line feed is torn
    header: _Header | None = None
    events: list[SpoolEvent] = []
    good = 0
    for number, line in enumerate(lines):
        try:
            if number == 0:
                header = msgspec.json.decode(line, type=_Header)
            else:
                events.append(msgspec.json.decode(line, type=SpoolEvent))
        except msgspec.DecodeError as error:
            if number == len(lines) - 1:
                break
            raise Corrupt(f"{path.name} line {number + 1} cannot be read") from error
        good += len(line) + 1
    return header, events, good
