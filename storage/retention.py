"""How much a block is worth keeping: a priority from 0 to 100, for a time or for good.

The lowest priority leaves first. A priority with a duration holds for that long from the
storing on, and is the default after it. `storage.eviction` says how priorities age.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

from strongroom.errors import Misuse

PRIORITY_DEFAULT: Final = 35
PRIORITY_MAX: Final = 100


class BlockKind(StrEnum):
    """What a block holds, from the most to the least worth keeping."""

    PREEMPTED = "preempted"
    SYSTEM = "system"
    HISTORY = "history"
    DOCUMENT = "document"


_PRIORITIES: Final = {
    BlockKind.PREEMPTED: 80,
    BlockKind.SYSTEM: 60,
    BlockKind.HISTORY: 40,
    BlockKind.DOCUMENT: PRIORITY_DEFAULT,
}


@dataclass(frozen=True, slots=True)
class Retention:
    """`priority` holds for `duration_s` from the storing on; None is for good."""

    priority: int = PRIORITY_DEFAULT
    duration_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.priority <= PRIORITY_MAX:
            raise Misuse("a priority is 0 to 100", field="priority", limit=PRIORITY_MAX)
        if self.duration_s is not None and not 0 < self.duration_s < math.inf:
            raise Misuse("a duration is positive and finite", field="duration_s")

    @classmethod
    def of(cls, kind: BlockKind) -> Self:
        """The default of a kind."""
        return cls(_PRIORITIES[kind])
