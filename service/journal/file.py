"""The journal: every signed log entry, one JWS a line, in a file outside the database.

Rules:
- Append only (O_APPEND), 0600; wider permissions are refused. Each append is synced before it
  returns. A failed append is cut back, so that a half line never stands in the middle. If that
  fails as well, nothing is appended until the file has been opened again.
- What follows the last line feed is a torn write: the entry was committed, so start-up writes
  it again from the database.
- Entries stand in the order of the log. Blocking work runs on the journal's one thread.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from strongroom.errors import Conflict, Misuse, Unavailable
from strongroom.private_files import sync_directory

_Args = TypeVarTuple("_Args")
_Result = TypeVar("_Result")


class Journal:
    """One file, opened by `open` and closed by `close`; one process at a time has it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._broken = False
        """What a failed append wrote could not be cut back."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="journal")

    async def open(self) -> None:
        """Open or create the file, cutting off a torn last line."""
        await self._run(self._open)

    async def append(self, lines: Sequence[str]) -> None:
        """Write and sync `lines`; all of them or, raising `Unavailable`, none."""
        await self._run(self._append, [line.encode() + b"\n" for line in lines])

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
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise Conflict("another process uses this journal", field="journal") from error
        self._descriptor, self._broken = descriptor, False
        whole = self.path.read_bytes().rfind(b"\n") + 1
        if whole != os.fstat(descriptor).st_size:
            os.ftruncate(descriptor, whole)
            os.fsync(descriptor)
        sync_directory(self.path.parent)

    def _append(self, lines: list[bytes]) -> None:
        if self._descriptor is None:
            raise Unavailable("the journal is not open", field="journal")
        if self._broken:
            raise Unavailable("the journal has to be opened again: restart", field="journal")
        before = os.fstat(self._descriptor).st_size
        try:
            rest = memoryview(b"".join(lines))
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            os.fsync(self._descriptor)
        except OSError as error:
            self._cut_back(self._descriptor, before)
            raise Unavailable("the journal cannot be written", field="journal") from error

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
