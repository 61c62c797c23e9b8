"""Simulated time, what happens when, noise, and servers with queues."""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

_NS: Final = 1e9


class Clock:
    """The simulated time, for everything that is handed a clock."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> int:
        return int(self.now_s * _NS)


class Agenda:
    """What happens when."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._heap, (when_s, self._number, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self._clock.now_s + delay_s, action)

    @property
    def next_s(self) -> float:
        return self._heap[0][0] if self._heap else math.inf

    def run(self, until: Callable[[], bool]) -> None:
        while self._heap and not until():
            self._clock.now_s, _, action = heapq.heappop(self._heap)
            action()


class Noise:
    """The same draw for the same thing, whatever the order."""

    def __init__(self, seed: int) -> None:
        self._key = seed.to_bytes(8, "little")

    def uniform(self, *what: int) -> float:
        raw = b"".join(each.to_bytes(8, "little", signed=True) for each in what)
        digest = hashlib.blake2b(raw, digest_size=8, key=self._key).digest()
        return (int.from_bytes(digest, "little") + 0.5) / 2**64

    def factor(self, sigma: float, *what: int) -> float:
        """Log-normal with mean 1."""
        if not sigma:
            return 1.0
        u, v = self.uniform(*what, 1), self.uniform(*what, 2)
        normal = math.sqrt(-2 * math.log(u)) * math.cos(2 * math.pi * v)
        return math.exp(sigma * normal - sigma * sigma / 2)


class Server:
    """One at a time; jobs of the foreground take turns by owner, the background gets the rest."""

    def __init__(self, agenda: Agenda, clock: Clock) -> None:
        self._agenda = agenda
        self._clock = clock
        self._turns: OrderedDict[int, deque[tuple[float, float, Callable[[float, float], None]]]]
        self._turns = OrderedDict()
        self._background: deque[tuple[float, Callable[[], None]]] = deque()
        self._busy = False

    @property
    def waiting_background(self) -> int:
        return len(self._background)

    def ask(self, owner: int, takes_s: float, done: Callable[[float, float], None]) -> None:
        """`done(queue_s, service_s)` when it was served."""
        self._turns.setdefault(owner, deque()).append((self._clock.now_s, takes_s, done))
        self._next()

    def ask_behind(self, takes_s: float, done: Callable[[], None]) -> None:
        self._background.append((takes_s, done))
        self._next()

    def _next(self) -> None:
        if self._busy:
            return
        if self._turns:
            owner, jobs = next(iter(self._turns.items()))
            asked_s, takes_s, done = jobs.popleft()
            self._turns.move_to_end(owner)
            if not jobs:
                del self._turns[owner]
            queue_s = self._clock.now_s - asked_s
            self._start(takes_s, lambda: done(queue_s, takes_s))
        elif self._background:
            takes_s, behind = self._background.popleft()
            self._start(takes_s, behind)

    def _start(self, takes_s: float, then: Callable[[], None]) -> None:
        self._busy = True

        def end() -> None:
            self._busy = False
            then()
            self._next()

        self._agenda.after(takes_s, end)
