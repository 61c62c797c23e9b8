"""What can trip a breaker, whom it is about, and the three states that it is in.

Armed ─condition met─▶ Tripped ─cooldown over─▶ Probation ─clean─▶ Armed
                          ▲                         └─ met again ─▶ Tripped, twice as long
                          └───────── an operator's clear leads to Armed ──────────▶
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from sidecar.degrade.measures import Count, Ratio, Rise, Rule, Streak
from sidecar.record.events import Event


class Condition(StrEnum):
    """What can trip."""

    RESTORE_SLOW = "restore_slow"
    """Restores that took longer than queueing for and computing the same tokens would have, of
    those decided for as the faster way. That more than one in twenty does is the same as: the
    restore's P95 is above recompute."""
    THRASH = "thrash"
    """Blocks stored again right after they were evicted, of those stored."""
    PREFETCH_WASTE = "prefetch_waste"
    ENGINE_IDLE = "engine_idle"
    """Time without a step while requests waited for a load, beyond what the loads saved of
    computing: its rise."""
    ERROR_STREAK = "error_streak"
    """Transfers that failed for no reason of policy, in a row."""
    CHECKSUM = "checksum_mismatch"
    CROSS_TENANT = "cross_tenant_hit"
    READABLE = "readable_after_deletion"


class Scope(StrEnum):
    """Whom a condition is about."""

    NODE = "node"
    ENGINE = "engine"
    TENANT = "tenant"


SCOPES: Final[Mapping[Condition, Scope]] = {
    Condition.RESTORE_SLOW: Scope.ENGINE,
    Condition.THRASH: Scope.TENANT,
    Condition.PREFETCH_WASTE: Scope.TENANT,
    Condition.ENGINE_IDLE: Scope.ENGINE,
    Condition.ERROR_STREAK: Scope.ENGINE,
    Condition.CHECKSUM: Scope.NODE,
    Condition.CROSS_TENANT: Scope.NODE,
    Condition.READABLE: Scope.NODE,
}
SECURITY: Final = frozenset({Condition.CHECKSUM, Condition.CROSS_TENANT, Condition.READABLE})
REFUSING: Final = frozenset({Condition.CROSS_TENANT, Condition.READABLE})

RULES: Final[Mapping[Condition, Rule]] = {
    Condition.RESTORE_SLOW: Ratio(threshold=0.05, minimum=100, window_s=60.0),
    Condition.THRASH: Ratio(threshold=0.5, minimum=200, window_s=60.0),
    Condition.PREFETCH_WASTE: Ratio(threshold=0.8, minimum=100, window_s=300.0),
    Condition.ENGINE_IDLE: Rise(threshold=0.2, minimum=5_000_000, window_s=30.0),
    Condition.ERROR_STREAK: Streak(threshold=20, window_s=60.0),
    Condition.CHECKSUM: Count(threshold=3, window_s=300.0),
    Condition.CROSS_TENANT: Count(threshold=1, window_s=3600.0),
    Condition.READABLE: Count(threshold=1, window_s=3600.0),
}


class Trip(msgspec.Struct, frozen=True):
    """Why and when a breaker tripped, and what led to it."""

    condition: Condition
    at: str
    reading: float
    threshold: float
    evidence: tuple[Event, ...] = ()
    about: str = ""
    """The engine or the tenant; empty where it is the node."""


@dataclass(frozen=True, slots=True)
class Armed:
    """In order; watching."""


@dataclass(frozen=True, slots=True)
class Tripped:
    """Caching is off because of this."""

    trip: Trip
    since_ns: int
    cooldown_s: float


@dataclass(frozen=True, slots=True)
class Probation:
    """Caching is on again, on trial."""

    trip: Trip
    since_ns: int
    cooldown_s: float


BreakerState = Armed | Tripped | Probation
