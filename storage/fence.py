"""A fence: once cut, what was begun under it may not be released or published any more.

The invalidation follower cuts it; loads and saves check it again at the last moment. It is
never mended: a request that goes on does so under a new fence.
"""

from __future__ import annotations

import threading

from strongroom.errors import Refused


class Fenced(Refused):
    """Something that the transfer depends on was invalidated; nothing was released or kept."""

    code = "fenced"


class Fence:
    """One flag with one direction. Every method may be called from any thread."""

    __slots__ = ("_cut",)

    def __init__(self) -> None:
        self._cut = threading.Event()

    def cut(self) -> None:
        """Invalidate all that is in flight under this fence; a second cut changes nothing."""
        self._cut.set()

    @property
    def is_cut(self) -> bool:
        return self._cut.is_set()

    def check(self) -> None:
        """Raise `Fenced` if the fence has been cut."""
        if self._cut.is_set():
            raise Fenced("invalidated while in flight")
