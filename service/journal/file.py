"""The journal: every signed log entry, one JWS a line, in a file outside the database.

Rules:
- Append only (O_APPEND), 0600; wider permissions are refused. Each append is synced before it
  returns. A failed append is cut back, so that a half line never stands in the middle. If that
  fails as well, nothing is appended until the file has been opened again.
- What follows the last line feed is a torn write: the entry was committed, so start-up writes
  it again from the database.
- Entries stand in the order of the log: line N is the log's position N. Whoever appends says after
  which position; lines that another replica has written already are compared, and not repeated.
- One process has the journal, or, where it is shared, all replicas of one database: each holds a
  shared lock on the file, and an exclusive one on `log.lock` while it appends. Replicas share the
  one journal, so that it reaches as far as what any of them has told anybody.
- Blocking work runs on the journal's one thread.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import stat
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from strongroom.errors import Conflict, Corrupt, Misuse, Unavailable
from strongroom.private_files import replace_file, sync_directory

_IDENTITY_BYTES = 16
_RECENT_LINES = 1000
_Args = TypeVarTuple("_Args")
_Result = TypeVar("_Result")


class Journal:
    """One file, opened by `open` and closed by `close`.

    One process at a time has it, or, `shared`, any number of those that share it.
    """

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        self.path = path
        self.shared = shared
        self._descriptor: int | None = None
        self._size = 0
        """Bytes of the file that this process has counted the lines of."""
        self._count = 0
        self._recent: deque[bytes] = deque(maxlen=_RECENT_LINES)
        self._broken = False
        """What a failed append wrote could not be cut back."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="journal")

    async def open(self) -> None:
        """Open or create the file, cutting off a torn last line."""
        await self._run(self._open)

    async def append(self, lines: Sequence[str], after: int | None = None) -> int:
        """Write and sync `lines`; all of them or, raising `Unavailable`, none.

        `after`: the lines that stand before them; what others have written since is not written
        again, and raises `Corrupt` if it is something else. Returns how many lines there are.
        """
        return await self._run(self._append, [line.encode() + b"\n" for line in lines], after)

    async def count(self) -> int:
        """How many lines there are, whoever wrote them."""
        return await self._run(self._counted)

    async def identity(self) -> str:
        """A name that this journal's folder has kept since it was made: for telling two apart."""
        return await self._run(self._identity)

    async def lines(self) -> list[str]:
        """Every whole line."""
        return await self._run(lambda: list(self._lines()))

    async def close(self) -> None:
        """Close the file. Idempotent."""
        await self._run(self._close)
        self._executor.shutdown(wait=False)

    def _open(self) -> None:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise Unavailable("the journal cannot be opened", field="journal") from error
        if stat.S_IMODE(os.fstat(descriptor).st_mode) & 0o077:
            os.close(descriptor)
            raise Misuse("the journal has wide permissions", field="journal", limit="0600")
        try:
            kind = fcntl.LOCK_SH if self.shared else fcntl.LOCK_EX
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise Conflict("another process uses this journal", field="journal") from error
        self._descriptor, self._broken = descriptor, False
        self._size = self._count = 0
        self._recent.clear()
        with self._alone():
            self._count_on(descriptor)
        sync_directory(self.path.parent)

    def _append(self, lines: list[bytes], after: int | None) -> int:
        if self._descriptor is None:
            raise Unavailable("the journal is not open", field="journal")
        if self._broken:
            raise Unavailable("the journal has to be opened again: restart", field="journal")
        with self._alone():
            self._count_on(self._descriptor)
            known = 0 if after is None else self._count - after
            if known < 0:
                raise Corrupt("the journal has lost lines", field="journal")
            if known:
                there = list(self._recent)
                if known > len(there):
                    there = self.path.read_bytes().splitlines(keepends=True)
                if there[-known:][: len(lines)] != lines[:known]:
                    raise Corrupt("the journal has other entries here", field="journal")
            self._write(self._descriptor, lines[known:])
        return self._count

    def _write(self, descriptor: int, lines: list[bytes]) -> None:
        before = self._size
        try:
            rest = memoryview(b"".join(lines))
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        except OSError as error:
            self._cut_back(descriptor, before)
            raise Unavailable("the journal cannot be written", field="journal") from error
        self._take(lines)

    def _take(self, lines: list[bytes]) -> None:
        self._size += sum(map(len, lines))
        self._count += len(lines)
        self._recent.extend(lines)

    def _count_on(self, descriptor: int) -> None:
        """Count the lines that were not counted before; what is torn is cut off."""
        news = os.pread(descriptor, os.fstat(descriptor).st_size - self._size, self._size)
        whole = news.rfind(b"\n") + 1
        if whole != len(news):
            os.ftruncate(descriptor, self._size + whole)
            os.fsync(descriptor)
        self._take(news[:whole].splitlines(keepends=True))

    def _counted(self) -> int:
        if self._descriptor is None:
            raise Unavailable("the journal is not open", field="journal")
        with self._alone():
            self._count_on(self._descriptor)
        return self._count

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else who shares the journal appends meanwhile."""
        if not self.shared:
            yield
            return
        lock = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _identity(self) -> str:
        path = self.path.with_suffix(".id")
        with self._alone():
            if not path.exists():
                replace_file(path, secrets.token_hex(_IDENTITY_BYTES).encode())
            return path.read_text()

    def _cut_back(self, descriptor: int, size: int) -> None:
        try:
            os.ftruncate(descriptor, size)
        except OSError:
            # The next line would follow a half one. Opening cuts off what is torn.
            self._broken = True

    def _lines(self) -> Iterator[str]:
        with self.path.open("rb") as file:
            for raw in file:
                if raw.endswith(b"\n"):
                    yield raw[:-1].decode("utf-8", "replace")

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    async def _run(self, work: Callable[[*_Args], _Result], *args: *_Args) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *args)
