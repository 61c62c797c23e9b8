"""Anonymous memory files: the host arena, and staging that an engine maps.

Both are memfds of a fixed size. What is asked of the system, and what it means where the system
refuses, which the log says once a file:
- left out of core dumps, and not inherited by a forked child, which would keep the bytes alive;
- huge pages, from the system's pool (hugetlbfs) or transparent ones: without, speed is lost;
- one NUMA node: a node that is not there is an error, a refused binding costs speed;
- locked in memory (RLIMIT_MEMLOCK): for the arena, which holds ciphertext, not being locked costs
  speed; for staging it means that plaintext may reach a swap device;
- every page touched before use: first use would otherwise pay for a page fault every 4 KiB.

The last two are `settle`, which takes as long as writing the whole file once: for a thread.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import fcntl
import logging
import mmap
import os
import platform
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from strongroom.errors import Misuse, Unavailable

PAGE: Final = 4096
HUGE_PAGE: Final = 2 * 1024 * 1024
_STEP_BYTES: Final = 64 * 1024 * 1024
_MADV_POPULATE_WRITE: Final = 23
_MADV_DONTFORK: Final = 10
_MFD_HUGE_2MB: Final = 21 << 26
_MPOL_BIND: Final = 2
_MBIND_CALLS: Final = {"x86_64": 237, "aarch64": 235}
_NODES: Final = Path("/sys/devices/system/node")
_SHMEM_HUGE: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_log = logging.getLogger(__name__)
_libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """What is asked of the system for a memory file."""

    lock: bool = True
    huge_pages: bool = True
    numa_node: int | None = None


DEFAULT_OPTIONS: Final = MemoryOptions()


class MemoryFile:
    """A sealed memfd of at least `size` bytes (a multiple of 4 KiB), mapped shared.

    Raises `Misuse` for a NUMA node that this machine does not have, and `Unavailable` when the
    system refuses the memory.
    """

    def __init__(self, name: str, size: int, options: MemoryOptions = DEFAULT_OPTIONS) -> None:
        if size <= 0 or size % PAGE:
            raise ValueError(f"size must be a positive multiple of {PAGE}")
        check_numa_node(options.numa_node)
        self.name = name
        self.locked = False
        self.small_pages = ""
        """Why it has no huge pages of either kind, where some were asked for; else empty."""
        self._lock = options.lock
        self.huge = options.huge_pages and size >= HUGE_PAGE and self._open_huge(size)
        if not self.huge:
            try:
                self._open(size, 0)
            except (OSError, ValueError, OverflowError) as error:
                reason = getattr(error, "strerror", None) or "it cannot be mapped"
                raise Unavailable(f"{size} bytes for {name} cannot be had: {reason}") from error
        self._map.madvise(mmap.MADV_DONTDUMP)
        self._map.madvise(_MADV_DONTFORK)
        if options.huge_pages and not self.huge and size >= HUGE_PAGE:
            self._ask_transparent()
        self.view = memoryview(self._map)
        if options.numa_node is not None:
            self._bind(options.numa_node)

    def settle(self, stop: threading.Event | None = None) -> None:
        """Lock, or else touch, every page; `stop` ends it early. Lets other threads run."""
        locking, errors = self._lock, []
        for offset in range(0, self.size, _STEP_BYTES):
            if stop is not None and stop.is_set():
                return
            step = min(_STEP_BYTES, self.size - offset)
            if locking and self._call("mlock", offset, step):
                locking = False
                errors.append(os.strerror(ctypes.get_errno()))
            if not locking and self._call("madvise", offset, step, _MADV_POPULATE_WRITE):
                _log.info("%s: pages are not touched before use", self.name)
                break
        self.locked = locking
        for error in errors:
            _log.warning("%s: %d bytes are not locked in memory: %s", self.name, self.size, error)

    def close(self) -> None:
        """Unmap and close; the memory goes when the last mapping elsewhere goes too."""
        self.view.release()
        try:
            self._map.close()
        except BufferError:
            # A view of it is still held by a transfer that is being cancelled; the mapping
            # goes with that view.
            _log.debug("mapping still in use at close")
        os.close(self.fd)

    def _open(self, size: int, flags: int) -> None:
        fd = os.memfd_create(self.name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            self._map = mmap.mmap(fd, size, mmap.MAP_SHARED)
        except (OSError, ValueError):
            os.close(fd)
            raise
        self.fd = fd
        self.size = size

    def _open_huge(self, size: int) -> bool:
        """From the pool of huge pages; mapping it reserves them, so that no fault can fail."""
        whole = -(-size // HUGE_PAGE) * HUGE_PAGE
        try:
            self._open(whole, os.MFD_HUGETLB | _MFD_HUGE_2MB)
        except OSError as error:
            _log.info("%s: no huge pages from the pool: %s", self.name, error.strerror)
            return False
        return True

    def _ask_transparent(self) -> None:
        try:
            self._map.madvise(mmap.MADV_HUGEPAGE)
            mode = _SHMEM_HUGE.read_text()
        except OSError as error:
            self.small_pages = error.strerror or "refused"
        else:
            if "[never]" in mode or "[deny]" in mode:
                self.small_pages = f"{_SHMEM_HUGE} is off"
        if self.small_pages:
            _log.info("%s: no transparent huge pages: %s", self.name, self.small_pages)

    def _bind(self, node: int) -> None:
        number = _MBIND_CALLS.get(platform.machine())
        mask = (ctypes.c_ulong * (node // 64 + 1))()
        mask[node // 64] = 1 << (node % 64)
        bits = len(mask) * 64 + 1
        anchor = ctypes.c_char.from_buffer(self._map)
        if number is None:
            ctypes.set_errno(errno.ENOSYS)
        elif not _libc.syscall(
            ctypes.c_long(number),
            ctypes.c_void_p(ctypes.addressof(anchor)),
            ctypes.c_ulong(self.size),
            ctypes.c_int(_MPOL_BIND),
            mask,
            ctypes.c_ulong(bits),
            ctypes.c_uint(0),
        ):
            return
        error = os.strerror(ctypes.get_errno())
        _log.warning("%s: not bound to NUMA node %d: %s", self.name, node, error)

    def _call(self, call: str, offset: int, nbytes: int, *more: int) -> int:
        # Held until the call returns, so that the mapping cannot go meanwhile.
        anchor = ctypes.c_char.from_buffer(self._map)
        address = ctypes.c_void_p(ctypes.addressof(anchor) + offset)
        result: int = getattr(_libc, call)(address, ctypes.c_size_t(nbytes), *more)
        return result


def check_numa_node(node: int | None) -> None:
    """Raise `Misuse` unless this machine has the node with memory online."""
    if node is None:
        return
    try:
        online = (_NODES / "online").read_text().strip()
    except OSError as error:
        raise Misuse("this machine shows no NUMA nodes", field="numa_node") from error
    if node not in _listed(online):
        raise Misuse(f"NUMA node {node} is not there; online: {online}", field="numa_node")


def _listed(text: str) -> set[int]:
    """The numbers in a list like `0-3,6`."""
    numbers: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers
