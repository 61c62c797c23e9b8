"""The system calls of the NVMe tier, behind one protocol, so that a wrapper can stand in front.

`Posix` makes the calls. `storage.faulty` wraps them to count them and to put faults in their way.
All calls block: the disk executor's threads make them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class FileOperations(Protocol):
    """What the tier asks of the operating system."""

    def preadv(self, fd: int, parts: Sequence[memoryview], offset: int, /) -> int:
        """Read into `parts` in order; the number of bytes, less than asked at the end."""
        ...

    def pwritev(self, fd: int, parts: Sequence[memoryview], offset: int, /) -> int:
        """Write `parts` in order; the number of bytes that went out."""
        ...

    def allocate(self, fd: int, nbytes: int, /) -> None:
        """Give an empty file its blocks, all zeros."""
        ...

    def sync(self, fd: int, /) -> None:
        """Bring a file's bytes to the device."""
        ...

    def free_bytes(self, folder: Path, /) -> int:
        """What an ordinary user may still take of the folder's file system."""
        ...


class Posix:
    """The kernel's own calls."""

    def preadv(self, fd: int, parts: Sequence[memoryview], offset: int, /) -> int:
        return os.preadv(fd, parts, offset)

    def pwritev(self, fd: int, parts: Sequence[memoryview], offset: int, /) -> int:
        return os.pwritev(fd, parts, offset)

    def allocate(self, fd: int, nbytes: int, /) -> None:
        os.posix_fallocate(fd, 0, nbytes)

    def sync(self, fd: int, /) -> None:
        os.fdatasync(fd)

    def free_bytes(self, folder: Path, /) -> int:
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize
