"""A frozen picture of the sidecar: counters since start and gauges now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sidecar.control.gate import GateState
from sidecar.cost.restores import CostRow
from sidecar.degrade.watch import WatchStatistics
from sidecar.prefetch.statistics import PrefetchStatistics
from sidecar.record.spool import SpoolStatistics
from sidecar.transfers.saves import SaveStatistics
from storage.store import StoreStatistics
from strongroom.log import LogHead


@dataclass(frozen=True, slots=True)
class FollowerStatistics:
    """See `sidecar.revocation.follower.FollowerCounts`."""

    entries: int
    streams: int
    refused: int
    loads_fenced: int
    saves_fenced: int
    namespaces_dropped: int
    bytes_reclaimed: int
    acknowledged_fenced: int
    acknowledged_reclaimed: int
    retired_at_start: int
    afresh: int
    """How often it dropped everything and began at a signed head."""


@dataclass(frozen=True, slots=True)
class HintStatistics:
    """See `sidecar.engines.hints.HintCounts`."""

    taken: int
    dropped: int
    denied: int
    begun: int


@dataclass(frozen=True, slots=True)
class SidecarStatistics:
    """`events` counts what was put on record, by (kind, outcome, reason)."""

    sidecar: str
    gate: GateState
    log: LogHead | None
    log_broken: str
    follower: FollowerStatistics
    serving_leases_renewed: int
    serving_leases_failed: int
    key_leases: int
    key_leases_refused: int
    key_leases_dropped: int
    namespaces_leased: int
    connections: int
    connections_refused: int
    protocol_violations: int
    connections_crashed: int
    engines: int
    requests: int
    requests_refused: int
    """Beyond their tenant's part of an engine's open requests or of their prompts' bytes."""
    saves_in_flight: int
    saves: SaveStatistics
    prefetch: PrefetchStatistics
    hints: HintStatistics
    staging_used_bytes: int
    spool: SpoolStatistics
    events_shipped: int
    ship_failures: int
    events: Mapping[tuple[str, str, str], int]
    store: StoreStatistics
    watch: WatchStatistics
    costs: tuple[CostRow, ...]
    """What restores cost lately, by tier and size."""
