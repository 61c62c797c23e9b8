"""How much a block is worth keeping: a priority from 0 to 100, for a time or for good."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

from strongroom.errors import Misuse

PRIORITY_DEFAULT: Final = 35


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
    BlockKind.DOCUMENT: 35,
}


@dataclass(frozen=True, slots=True)
class Retention:
    """`priority` holds for `duration_s` from the saving on; None is for good."""

    priority: int = PRIORITY_DEFAULT
    duration_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.priority <= 100:
            raise Misuse("a priority is 0 to 100", field="priority", limit=100)

    @classmethod
    def of(cls, kind: BlockKind) -> Self:
        """The default of a kind."""
        return cls(_PRIORITIES[kind])
