"""What a process that serves asks of its interpreter. For an entry point, not for a library.

What a sidecar has made by the time that it serves (modules, settings, columns, connections of its
own) stays until it ends. The collector of garbage would walk all of it again and again, and a
lookup would wait meanwhile.

The prompts of requests come and go, 128 KiB each for 32k tokens. What is freed of them would go
back to the kernel, and come again page by page, each zeroed first: 35 faults a lookup.
"""

from __future__ import annotations

import ctypes
import gc
from typing import Final

from strongroom.limits import FRAME_BYTES_MAX

FREED_BYTES_MAX: Final = 256 * 1024 * 1024
"""So much freed memory is kept at the heap's end."""
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
"""Names of glibc's `malloc.h`."""


def keep_what_is_here() -> None:
    """Collect once, and let no later collection look at what is left."""
    gc.collect()
    gc.freeze()


def keep_freed_memory() -> bool:
    """Keep what is freed, up to `FREED_BYTES_MAX`, for what comes next; False where the C library
    has no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # A frame is the largest thing that comes and goes all the time.
    return bool(
        mallopt(_MMAP_THRESHOLD, FRAME_BYTES_MAX) and mallopt(_TRIM_THRESHOLD, FREED_BYTES_MAX)
    )
