"""Buffers: page-aligned memory for O_DIRECT, and wiping."""

from __future__ import annotations

import mmap
from typing import Final

PAGE_BYTES: Final = 4096
_ZEROS: Final = memoryview(bytes(1024 * 1024))


def aligned(nbytes: int) -> memoryview:
    """A zeroed, page-aligned, writable buffer of `nbytes`; freed when the last view goes."""
    return memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]


def wipe(view: memoryview) -> None:
    """Overwrite `view` with zeros, without allocating its size a second time."""
    for start in range(0, len(view), len(_ZEROS)):
        part = view[start : start + len(_ZEROS)]
        part[:] = _ZEROS[: len(part)]


def pages(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages of 4096 bytes."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
