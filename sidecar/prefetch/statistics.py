"""A frozen picture of prefetching, for metrics and for the degradation steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from sidecar.prefetch.budget import Budget, Denial
from sidecar.prefetch.ledger import Ledger
from sidecar.prefetch.waste import CoolingDown, Flowing, Probing
from sidecar.prefetch.waste_gates import WasteGates
from strongroom.identity import ComponentId


class PrefetchState(StrEnum):
    """Whether prefetches are admitted."""

    FLOWING = "flowing"
    COOLING_DOWN = "cooling_down"
    """Too much of what was brought was wasted."""
    PROBING = "probing"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True)
class PrefetchStatistics:
    """Blocks, and bytes of their records, since start; `pending` and `_bytes` gauges are now."""

    issued: int
    issued_bytes: int
    completed: int
    completed_bytes: int
    used: int
    used_bytes: int
    wasted: int
    wasted_bytes: int
    deadline_missed: int
    deadline_missed_bytes: int
    cancelled: int
    cancelled_bytes: int
    failed: int
    failed_bytes: int
    refused: Mapping[Denial, int]
    pending: int
    """Prefetches planned or under way."""
    pending_bytes: int
    """Reserved: on their way, or brought and unread."""
    on_its_way_bytes: int
    by_tenant: Mapping[ComponentId, int]
    bandwidth_bytes_s: float
    waste_ratio: float
    state: PrefetchState
    paused: tuple[str, ...]
    trips: int
    """Of the node's waste limit and of any tenant's."""
    tenants_stopped: int
    """That wasted too much of what was brought for them, and are stopped or probing."""
    leaked: int
    """Reservations that nobody could have given back any more, and that were taken back."""
    crashed: int
    """Prefetches that ended by a fault of ours."""


def picture(
    ledger: Ledger,
    budget: Budget,
    waste: WasteGates,
    *,
    pending: int,
    bandwidth_bytes_s: float,
    paused: tuple[str, ...],
) -> PrefetchStatistics:
    """What the parts say at this moment."""
    counts = ledger.counts
    return PrefetchStatistics(
        issued=counts.issued.blocks,
        issued_bytes=counts.issued.bytes,
        completed=counts.completed.blocks,
        completed_bytes=counts.completed.bytes,
        used=counts.used.blocks,
        used_bytes=counts.used.bytes,
        wasted=counts.wasted.blocks,
        wasted_bytes=counts.wasted.bytes,
        deadline_missed=counts.deadline_missed.blocks,
        deadline_missed_bytes=counts.deadline_missed.bytes,
        cancelled=counts.cancelled.blocks,
        cancelled_bytes=counts.cancelled.bytes,
        failed=counts.failed.blocks,
        failed_bytes=counts.failed.bytes,
        refused={reason: moved.blocks for reason, moved in counts.refused.items()},
        pending=pending,
        pending_bytes=budget.used_bytes,
        on_its_way_bytes=ledger.on_its_way_bytes,
        by_tenant=budget.used(),
        bandwidth_bytes_s=bandwidth_bytes_s,
        waste_ratio=waste.ratio,
        state=PrefetchState.PAUSED if paused else _state(waste),
        paused=paused,
        trips=waste.trips,
        tenants_stopped=waste.tenants_stopped,
        leaked=counts.leaked,
        crashed=counts.crashed,
    )


def _state(waste: WasteGates) -> PrefetchState:
    match waste.state:
        case Flowing():
            return PrefetchState.FLOWING
        case CoolingDown():
            return PrefetchState.COOLING_DOWN
        case Probing():
            return PrefetchState.PROBING
