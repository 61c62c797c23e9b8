"""What a node did and how it fared: operational events, numbered, kept a while, for operators.

Not the audit (`sidecar.record.audit`): that one is durable, chained, and written before anything is
served. An event here may be lost with the process, and no decision waits for it. Rules:
- One strictly increasing sequence a node, also over restarts: numbers are reserved in the state
  directory by the million, so a crash skips some and repeats none.
- The ring is bounded by count; who reads too late is told how many it missed.
- Ids and numbers only: no token, key, salt, prompt, path or name.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from sidecar.clocks import NS, Clocks
from strongroom.errors import Corrupt
from strongroom.private_files import read_private, replace_file

RING_MAX: Final = 65_536
RESERVED_AT_ONCE: Final = 1_000_000
_TRY_EVERY: Final = 4096
_FILE: Final = "events.next"
_NONE: Final[Mapping[str, float]] = {}


class EventKind(StrEnum):
    """What happened (DESIGN section 10)."""

    REQUEST_START = "request_start"
    PREFIX_HIT = "prefix_hit"
    PREFIX_MISS = "prefix_miss"
    SWAP_IN_START = "swap_in_start"
    SWAP_IN_DONE = "swap_in_done"
    SWAP_IN_FAILED = "swap_in_failed"
    ENGINE_ACCEPTED = "engine_accepted"
    BLOCK_RESERVED = "block_reserved"
    SWAP_OUT_START = "swap_out_start"
    SWAP_OUT_DONE = "swap_out_done"
    SWAP_OUT_REFUSED = "swap_out_refused"
    EVICTION = "eviction"
    INVALIDATION = "invalidation"
    PRESSURE = "pressure"
    ACTION = "action"
    TIER_ERROR = "tier_error"
    DETECTED = "detected"
    BREAKER_TRIPPED = "breaker_tripped"
    BREAKER_PROBATION = "breaker_probation"
    BREAKER_CLEARED = "breaker_cleared"
    ENGINE_GONE = "engine_gone"


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event. Fields that do not apply are left out of the export."""

    seq: int
    at: str
    boot_ns: int
    kind: EventKind
    subject: str = ""
    """What it is about: a gauge, a breaker, an action."""
    reason: str = ""
    engine: str = ""
    request: str = ""
    trace: str = ""
    tenant: str = ""
    model: str = ""
    tier_from: str = ""
    tier_to: str = ""
    nbytes: int = 0
    tokens: int = 0
    queue_us: int = 0
    service_us: int = 0
    numbers: Mapping[str, float] = _NONE


class Sequence:
    """Numbers of one node, never the same twice."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / _FILE
        self._next = self._stored()
        self._reserve(sync=True)

    def take(self) -> int:
        """The next number."""
        number = self._next
        self._next += 1
        left = self._end - self._next
        if left <= 0:
            self._reserve(sync=False)
        elif left <= RESERVED_AT_ONCE // 2 and left % _TRY_EVERY == 0:
            # In good time: a disk that is full now need not be when they are needed.
            with suppress(OSError):
                self._reserve(sync=False)
        return number

    def _reserve(self, *, sync: bool) -> None:
        end = self._next + RESERVED_AT_ONCE
        replace_file(self._path, str(end).encode(), sync=sync)
        self._end = end

    def _stored(self) -> int:
        if not self._path.exists():
            return 1
        raw = read_private(self._path)
        if not raw.isdigit() or len(raw) > 15:
            raise Corrupt(f"{_FILE} is damaged: write the number of the next event into it")
        return int(raw)


class Events:
    """The ring. Used on the event loop alone."""

    def __init__(
        self, take: Callable[[], int], clocks: Clocks, *, ring_max: int = RING_MAX
    ) -> None:
        self._take = take
        self._clocks = clocks
        self._ring: deque[Event] = deque(maxlen=ring_max)
        self._last = 0

    @property
    def last(self) -> int:
        """The newest event's number; 0 before the first."""
        return self._last

    def __len__(self) -> int:
        return len(self._ring)

    def emit(
        self,
        kind: EventKind,
        *,
        subject: str = "",
        reason: str = "",
        engine: str = "",
        request: str = "",
        trace: str = "",
        tenant: str = "",
        model: str = "",
        tier_from: str = "",
        tier_to: str = "",
        nbytes: int = 0,
        tokens: int = 0,
        queue_us: int = 0,
        service_us: int = 0,
        numbers: Mapping[str, float] = _NONE,
    ) -> Event:
        """Number an event and keep it."""
        event = Event(
            seq=self._take(),
            at=self._clocks.timestamp(),
            boot_ns=self._clocks.boot(),
            kind=kind,
            subject=subject,
            reason=reason,
            engine=engine,
            request=request,
            trace=trace,
            tenant=tenant,
            model=model,
            tier_from=tier_from,
            tier_to=tier_to,
            nbytes=nbytes,
            tokens=tokens,
            queue_us=queue_us,
            service_us=service_us,
            numbers=numbers,
        )
        self._ring.append(event)
        self._last = event.seq
        return event

    def after(self, seq: int, limit: int) -> tuple[Event, ...]:
        """Up to `limit` events with a number above `seq`, oldest first."""
        begin = bisect_right(self._ring, seq, key=_number)
        return tuple(islice(self._ring, begin, begin + limit))

    def lost(self, seq: int) -> bool:
        """Whether events above `seq` have left the ring already."""
        full = len(self._ring) == self._ring.maxlen
        return full and seq + 1 < self._ring[0].seq

    def window(self, seconds: float, limit: int) -> tuple[Event, ...]:
        """The newest events of the last `seconds`, oldest first: what led to something."""
        oldest_ns = self._clocks.boot() - int(seconds * NS)
        found: deque[Event] = deque()
        for event in reversed(self._ring):
            if event.boot_ns < oldest_ns or len(found) == limit:
                break
            found.appendleft(event)
        return tuple(found)


def _number(event: Event) -> int:
    return event.seq


def json_lines(events: Iterator[Event] | tuple[Event, ...]) -> bytes:
    """One JSON object a line."""
    return b"".join(msgspec.json.encode(event) + b"\n" for event in events)
