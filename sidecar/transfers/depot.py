"""What the loads and saves of a sidecar share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sidecar.clocks import Clocks
from sidecar.control.gate import Gate
from sidecar.control.leases import KeyLeases
from sidecar.cost.appraisal import Appraiser
from sidecar.degrade.watch import Watch
from sidecar.prefetch.prefetcher import Prefetcher
from sidecar.record.audit import Audit
from storage.block import BlockAddress
from storage.keyring import KeyRing
from storage.store import BlockStore
from strongroom.kvformat import Layout


@dataclass(frozen=True, slots=True)
class TransferTimes:
    """Nanoseconds; see `SidecarSettings`."""

    load_deadline_ns: int
    fill_deadline_ns: int
    grace_ns: int


@dataclass(frozen=True, slots=True)
class Depot:
    """What every transfer of a sidecar needs."""

    store: BlockStore
    ring: KeyRing
    leases: KeyLeases
    gate: Gate
    audit: Audit
    prefetcher: Prefetcher
    clocks: Clocks
    times: TransferTimes
    watch: Watch
    appraiser: Appraiser
    used: Callable[[BlockAddress], None]
    """Hears of every block that was restored."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Whose bytes a worker connection moves: its rank of one engine."""

    engine: str
    format_digest: bytes
    layout: Layout
    layout_digest: bytes
