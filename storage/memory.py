"""Buffers: page-aligned memory for O_DIRECT, and wiping.

`wipe` allocates nothing and gives the interpreter's lock away while it writes, so that a thread
that wipes does not hold up the event loop.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Final

PAGE_BYTES: Final = 4096
_SMALL_BYTES: Final = 16 * 1024
_ZEROS: Final = bytes(_SMALL_BYTES)


def aligned(nbytes: int) -> memoryview:
    """A zeroed, page-aligned, writable buffer of `nbytes`; freed when the last view goes."""
    return memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]


def wipe(view: memoryview) -> None:
    """Overwrite `view` with zeros, at the speed of memory and without allocating anything."""
    size = len(view)
    if size <= _SMALL_BYTES:
        view[:] = _ZEROS[:size]
    else:
        # `anchor` keeps the memory mapped until the call returns.
        anchor = ctypes.c_char.from_buffer(view)
        ctypes.memset(ctypes.addressof(anchor), 0, size)


def pages(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages of 4096 bytes."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
