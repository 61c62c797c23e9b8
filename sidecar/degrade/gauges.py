"""The gauges of DESIGN section 8, read at once into one frozen value.

Each has an alert rule in deploy/alerts.yml that names what to do about it. Everything here is
memory, but for the file systems' free space, which costs a system call a device. What grows with
the number of namespaces and tenants (`inventory`) is read for a scrape, not for each look.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from sidecar.degrade.reports import Reported
from storage.store import BlockStore, QueueStatistics
from storage.tiers.protocol import TierName, TierStatistics
from strongroom.identity import ComponentId, NamespaceId

OTHER: Final = ComponentId("other")


@dataclass(frozen=True, slots=True)
class TenantUse:
    """One tenant in one tier; `cap_bytes` None is no cap."""

    tier: TierName
    tenant: ComponentId
    used_bytes: int
    cap_bytes: int | None


@dataclass(frozen=True, slots=True)
class Orphans:
    """Records on disk that nobody may come back for."""

    unconfirmed: int
    """Their namespace was neither leased in this life nor said to be alive by the service."""
    retired: int
    """Their namespace is retired, and they are not dropped yet."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """One look."""

    tiers: tuple[TierStatistics, ...]
    queues: tuple[QueueStatistics, ...]
    nvme_free_bytes: int | None
    """What the tier could still take; None without one."""
    file_systems_free_bytes: Mapping[int, int]
    """Of the NVMe tier's folders, by their number in the settings; without one that fails."""
    transfers_in_flight: int
    orphans: Orphans
    tenants: tuple[TenantUse, ...]
    engines: Mapping[str, Reported]

    def tier(self, name: TierName) -> TierStatistics | None:
        return next((tier for tier in self.tiers if tier.name is name), None)


def read_gauges(
    store: BlockStore,
    *,
    folders: Sequence[Path],
    alive: Callable[[], Collection[NamespaceId]],
    transfers: int,
    engines: Mapping[str, Reported],
    inventory: bool = True,
) -> Gauges:
    """Read them. `alive` tells the namespaces known to be alive; without `inventory` orphans and
    tenants are left out.
    """
    statistics = store.statistics()
    nvme = next((tier for tier in statistics.tiers if tier.name is TierName.NVME), None)
    return Gauges(
        tiers=statistics.tiers,
        queues=statistics.queues,
        nvme_free_bytes=None if nvme is None else nvme.capacity_bytes - nvme.used_bytes,
        file_systems_free_bytes={
            number: free
            for number, folder in enumerate(folders)
            if (free := _free_bytes(folder)) is not None
        },
        transfers_in_flight=transfers,
        orphans=_orphans(store, alive()) if inventory else Orphans(0, 0),
        tenants=tuple(
            TenantUse(tier.name, tenant, used, cap)
            for tier in (statistics.tiers if inventory else ())
            for tenant, (used, cap) in store.tenant_use(tier.name).items()
        ),
        engines=engines,
    )


def top_tenants(uses: Collection[TenantUse], most: int) -> list[TenantUse]:
    """The `most` largest of each tier, and one `other` with the sum of the rest: labels of
    metrics are bounded, whatever the number of tenants.
    """
    kept: list[TenantUse] = []
    for tier in dict.fromkeys(use.tier for use in uses):
        here = sorted(
            (use for use in uses if use.tier is tier),
            key=lambda use: (-use.used_bytes, use.tenant),
        )
        kept.extend(here[:most])
        rest = here[most:]
        if rest:
            total = sum(use.used_bytes for use in rest)
            kept.append(replace(rest[0], tenant=OTHER, used_bytes=total, cap_bytes=None))
    return kept


def _orphans(store: BlockStore, alive: Collection[NamespaceId]) -> Orphans:
    unconfirmed = retired = 0
    gone = store.retired
    for namespace, count in store.namespaces_on_disk().items():
        if namespace in gone:
            retired += count
        elif namespace not in alive:
            unconfirmed += count
    return Orphans(unconfirmed, retired)


def _free_bytes(path: Path) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
