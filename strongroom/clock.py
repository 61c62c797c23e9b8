"""The host's boot clock: one time for every process of a node, which nobody sets back.

Unlike the monotonic clock it counts while the machine sleeps, so that a lease cannot be
stretched by suspending it. It means nothing on another host.
"""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], int]
"""Nanoseconds since boot."""


def boot_ns() -> int:
    """Nanoseconds of CLOCK_BOOTTIME."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
