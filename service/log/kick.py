"""Waking those who wait for news, in this process. News from another process is polled for."""

from __future__ import annotations

import asyncio


class Kick:
    """A bell that can be rung any number of times; whoever waits hears the next ring."""

    def __init__(self) -> None:
        self._bell = asyncio.Event()

    def ring(self) -> None:
        """Wake everyone who waits now."""
        bell, self._bell = self._bell, asyncio.Event()
        bell.set()

    def listen(self) -> asyncio.Event:
        """An event that the next ring sets. Take it before looking, so that no ring is lost."""
        return self._bell
