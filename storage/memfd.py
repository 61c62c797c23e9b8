"""Anonymous memory files: the host arena, and staging that an engine maps.

Both are memfds of a fixed size, excluded from core dumps and locked in memory. Where the limit
on locked memory (RLIMIT_MEMLOCK) forbids it, the log says so and the pages stay swappable: for
the arena, which holds ciphertext, that costs speed; for staging it means that plaintext may
reach a swap device.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import fcntl
import logging
import mmap
import os
from typing import Final

PAGE: Final = 4096
_log = logging.getLogger(__name__)
_libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class MemoryFile:
    """A sealed memfd of `size` bytes (a multiple of 4 KiB), mapped shared."""

    def __init__(self, name: str, size: int, *, lock: bool = False) -> None:
        if size <= 0 or size % PAGE:
            raise ValueError(f"size must be a positive multiple of {PAGE}")
        self.size = size
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            self._map = mmap.mmap(self.fd, size, mmap.MAP_SHARED)
        except OSError:
            os.close(self.fd)
            raise
        self._map.madvise(mmap.MADV_DONTDUMP)
        self.view = memoryview(self._map)
        self.locked = lock and self._lock(name)

    def _lock(self, name: str) -> bool:
        # Held until the call returns, so that the mapping cannot go meanwhile.
        anchor = ctypes.c_char.from_buffer(self._map)
        address = ctypes.addressof(anchor)
        if _libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(self.size)) == 0:
            return True
        error = os.strerror(ctypes.get_errno())
        _log.warning("%s: %d bytes are not locked in memory: %s", name, self.size, error)
        return False

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
