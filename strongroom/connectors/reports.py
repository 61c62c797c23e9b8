"""What the scheduler's side can say of its engine: pages, queues, and where the time goes.

The scheduling thread calls the meter once a step, which costs a few additions. The IO thread sends
what was last published, about ten times a second, also while the engine rests; nothing ever waits.

How time is counted: what passes from one call of the scheduler to the next belongs to the step that
the first one planned. A step with tokens is busy time; one with prompt tokens is prefill time too;
an empty one, while a request waits for a load, is idle time. When the last request ends, its step
ends. Tokens are counted where the step is planned, so a step that the engine then drops is
counted all the same: these are rates to judge by, not an account.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from strongroom.clock import Clock, boot_ns
from strongroom.wire.frames import EngineFrame, Report

REPORT_NS: Final = 100_000_000
"""A step takes some 10 to 100 ms: what was said a second ago knows nothing of the queue now."""
_NS_PER_US: Final = 1000
_log = logging.getLogger(__name__)

PagesNow = Callable[[], tuple[int, int]]
"""All pages and free ones (also those that hold a prefix nobody uses)."""


def unknown_pages() -> tuple[int, int]:
    """The engine does not say."""
    return 0, 0


class EngineMeter:
    """Counters since the engine's start. `stepped` and `emptied` on the scheduling thread;
    `report` on any, since what it reads is replaced whole.
    """

    def __init__(self, clock: Clock = boot_ns) -> None:
        self._clock = clock
        self._pages: PagesNow = unknown_pages
        self._began_ns = 0
        """When the step that runs now was planned; 0 while none does."""
        self._tokens = 0
        self._prompt_tokens = 0
        self._loading = False
        self._counters = (0, 0, 0, 0, 0)
        """Prefill tokens, microseconds and steps, busy and idle microseconds."""
        self._load = (0, 0)
        """Running and waiting."""

    def pages_from(self, pages: PagesNow) -> None:
        """Ask `pages` from now on."""
        self._pages = pages

    def stepped(
        self, *, tokens: int, prompt_tokens: int, running: int, waiting: int, loading: bool
    ) -> None:
        """The scheduler planned a step of so many tokens; the one before has ended.

        `loading`: some request waits for a load.
        """
        now = self._clock()
        self._close(now)
        self._began_ns = now
        self._tokens, self._prompt_tokens, self._loading = tokens, prompt_tokens, loading
        self._load = (running, waiting)

    def emptied(self) -> None:
        """The last request ended: no step runs until another comes."""
        self._close(self._clock())
        self._load = (0, 0)

    def report(self) -> Report:
        """The frame to send now."""
        try:
            pages, free_pages = self._pages()
        except Exception:  # noqa: BLE001 - the engine's own object: what it does is not ours
            _log.exception("the engine's pages could not be counted")
            self._pages = unknown_pages
            pages = free_pages = 0
        prefill_tokens, prefill_us, prefill_steps, busy_us, idle_us = self._counters
        running, waiting = self._load
        return Report(
            pages=pages,
            free_pages=max(0, min(free_pages, pages)),
            running=running,
            waiting=waiting,
            prefill_tokens=prefill_tokens,
            prefill_us=prefill_us,
            busy_us=busy_us,
            idle_us=idle_us,
            prefill_steps=prefill_steps,
        )

    def _close(self, now_ns: int) -> None:
        if not self._began_ns:
            return
        passed_us = max(0, now_ns - self._began_ns) // _NS_PER_US
        self._began_ns = 0
        prefill_tokens, prefill_us, prefill_steps, busy_us, idle_us = self._counters
        if self._tokens:
            busy_us += passed_us
            if self._prompt_tokens:
                prefill_tokens += self._prompt_tokens
                prefill_us += passed_us
                prefill_steps += 1
        elif self._loading:
            idle_us += passed_us
        self._counters = (prefill_tokens, prefill_us, prefill_steps, busy_us, idle_us)


class ReportBeat:
    """Sends a meter's report about ten times a second; called by the IO thread, often."""

    def __init__(self, meter: EngineMeter, send: Callable[[EngineFrame], bool]) -> None:
        self._meter = meter
        self._send = send
        self._next_ns = 0

    def __call__(self, now_ns: int) -> int:
        """Send, if it is time; returns when it is next. What cannot be sent is not sent later: the
        next one says more.
        """
        if now_ns >= self._next_ns:
            self._next_ns = now_ns + REPORT_NS
            self._send(self._meter.report())
        return self._next_ns
