"""Can two questions be told apart by how long their answers take?

Rules:
- The two are asked in pairs, in random order, so that whatever else the machine does falls on both.
- What counts is in how many pairs the second took longer: a rank, which no outlier moves. It is
  the area under the curve of somebody who sees both and has to say which is which; 0.5 is a guess.
- An ordinary scheduler is fair to both. So a busy machine brings the figure nearer to 0.5 and
  never further from it, and on a quiet one it is sharpest.
"""

from __future__ import annotations

import gc
import math
import random  # noqa: TID251 - a seeded generator, so that a failure repeats
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

PAIRS: Final = 2000
SECONDS_MAX: Final = 8.0
"""Where the machine is too busy for all pairs in this time, there are fewer."""
_WARM: Final = 20

Ask = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Told:
    """How well two questions are told apart by the clock: 0.5 not at all, 1.0 always."""

    auc: float
    pairs: int

    @property
    def is_a_guess(self) -> bool:
        """At most 0.55, or, of few pairs, what fair coins show in one test of two thousand."""
        return self.auc <= 0.5 + max(0.05, 3.5 * 0.5 / math.sqrt(self.pairs))


async def told_apart(
    one: Ask, other: Ask, *, pairs: int = PAIRS, seconds_max: float = SECONDS_MAX
) -> Told:
    """Ask both, again and again."""
    order = random.Random(20261130)
    later, asked = 0.0, 0
    with _without_collector():
        for _ in range(_WARM):
            await one()
            await other()
        ends = time.monotonic() + seconds_max
        while asked < pairs and time.monotonic() < ends:
            took = [0, 0]
            for which in order.sample((0, 1), 2):
                took[which] = await _time_of((one, other)[which])
            later += 0.5 if took[0] == took[1] else float(took[1] > took[0])
            asked += 1
            if asked % 100 == 0:
                gc.collect()
    assert asked >= 30, "the machine is too busy to see anything"
    share = later / asked
    return Told(max(share, 1 - share), asked)


async def _time_of(ask: Ask) -> int:
    began = time.perf_counter_ns()
    await ask()
    return time.perf_counter_ns() - began


@contextmanager
def _without_collector() -> Iterator[None]:
    """The collector of garbage runs between pairs: it would fall on whoever allocates more."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
