"""Calling a key service whose client blocks: a few named threads, and each call timed out.

A cancelled caller leaves the call to end in its thread; what it returns is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

CALLS_MAX: Final = 4
"""Calls under way at once; more wait their turn."""

_T = TypeVar("_T")


class Calls:
    """Runs blocking calls, at most `CALLS_MAX` at once."""

    def __init__(self, name: str) -> None:
        self._threads = ThreadPoolExecutor(CALLS_MAX, thread_name_prefix=name)

    async def run(self, work: Callable[[], _T]) -> _T:
        """What `work` returns or raises."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """End the threads once their calls have ended."""
        self._threads.shutdown(wait=True, cancel_futures=True)
