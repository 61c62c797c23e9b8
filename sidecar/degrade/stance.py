"""What is in force for one engine: from everything to nothing, as one value.

    none < stop_prefetch < limit_context < recompute < engine_only < refuse

Each step contains the ones before. Degradation (`pressure`) goes up to `engine_only`; so does a
breaker (`breaker`), and `refuse` is for a breaker alone: then not even pages that the engine still
has may be used, since they came through what is no longer trusted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self


class Action(StrEnum):
    """The step in force, in the order of their weight."""

    NONE = "none"
    STOP_PREFETCH = "stop_prefetch"
    LIMIT_CONTEXT = "limit_context"
    RECOMPUTE = "recompute"
    ENGINE_ONLY = "engine_only"
    REFUSE = "refuse"

    @property
    def weight(self) -> int:
        """0 for nothing in force; rising."""
        return _ORDER[self]


_ORDER: Final = {action: weight for weight, action in enumerate(Action)}


@dataclass(frozen=True, slots=True)
class Stance:
    """The action for one engine; `limit_tokens` is what `limit_context` lowers to."""

    action: Action
    limit_tokens: int | None = None

    @classmethod
    def of(cls, action: Action, limit_tokens: int) -> Self:
        """The stance of `action`; `limit_tokens` where it limits."""
        if action.weight < Action.LIMIT_CONTEXT.weight:
            return cls(action)
        return cls(action, limit_tokens if action is Action.LIMIT_CONTEXT else 0)

    @property
    def refuses(self) -> bool:
        """No verdict is positive."""
        return self.action is Action.REFUSE

    @property
    def saves(self) -> bool:
        """Whether what an engine computed is taken in."""
        return self.action.weight < Action.ENGINE_ONLY.weight

    @property
    def prefetches(self) -> bool:
        """Whether blocks are brought nearer ahead of their use."""
        return self.action is Action.NONE

    def allows(self, end_token: int) -> bool:
        """Whether a block that ends at `end_token` of the prompt may be restored."""
        return self.limit_tokens is None or end_token <= self.limit_tokens


UNRESTRICTED: Final = Stance(Action.NONE)


def unrestricted(_engine: str, _tenant: str) -> Stance:
    """For whoever has no watch: nothing is in force."""
    return UNRESTRICTED
