"""What the catalogue knows: how much lies where, of a tenant or of what depends on components.

Every answer is what live sidecars said last, each at its own time: a hint for people who are
about to invalidate something, never proof that it is there or gone. What was stored since a
sidecar's last report is not in it, and what it dropped since is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import ColumnElement, distinct, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.grants.models import Namespace, NamespaceComponent
from service.residency.models import ResidencyReport, ResidencyRow, Tier
from service.sidecars.models import Sidecar
from strongroom.errors import Misuse
from strongroom.identity import ComponentId

COMPONENTS_MAX: Final = 8192


@dataclass(frozen=True, slots=True)
class Place:
    """One tier of one node, and what it holds."""

    sidecar: str
    tier: Tier
    namespaces: int
    blocks: int
    bytes: int
    reported_at: datetime
    """When that sidecar reported last."""


@dataclass(frozen=True, slots=True)
class Resident:
    """What lies where, the places in the order of their sidecars' ids."""

    namespaces: int
    """Different ones: one that lies in two places counts once."""
    blocks: int
    bytes: int
    places: tuple[Place, ...]

    @property
    def oldest_report_at(self) -> datetime | None:
        """When the oldest part of the answer was said; None: nothing is resident."""
        return min((place.reported_at for place in self.places), default=None)


async def of_tenant(session: AsyncSession, tenant: ComponentId) -> Resident:
    """What lies where of one tenant."""
    return await _resident(session, _namespaces(tenant))


async def of_components(
    session: AsyncSession, components: Collection[ComponentId], tenant: ComponentId | None
) -> Resident:
    """What an invalidation of `components` would take: the namespaces that depend on one of them.

    `tenant` None counts every tenant's, which is for operators: a model has many. Raises `Misuse`
    for more than `COMPONENTS_MAX`.
    """
    if len(components) > COMPONENTS_MAX:
        raise Misuse("too many components at once", field="components", limit=COMPONENTS_MAX)
    if not components:
        return Resident(0, 0, 0, ())
    dependent = select(NamespaceComponent.namespace).where(
        NamespaceComponent.component.in_(sorted(components))
    )
    conditions: list[ColumnElement[bool]] = [ResidencyRow.namespace.in_(dependent)]
    if tenant is not None:
        conditions += _namespaces(tenant)
    return await _resident(session, conditions)


async def is_kept(session: AsyncSession) -> bool:
    """Whether a live sidecar ever reported. If none did, "no bytes" says nothing at all."""
    found = await session.scalar(
        select(ResidencyReport.sidecar)
        .join(Sidecar, Sidecar.id == ResidencyReport.sidecar)
        .where(Sidecar.revoked_at.is_(None))
        .limit(1)
    )
    return found is not None


def _namespaces(tenant: ComponentId) -> list[ColumnElement[bool]]:
    theirs = select(Namespace.id).where(Namespace.tenant == tenant)
    return [ResidencyRow.namespace.in_(theirs)]


async def _resident(session: AsyncSession, which: Collection[ColumnElement[bool]]) -> Resident:
    live = select(Sidecar.id).where(Sidecar.revoked_at.is_(None))
    conditions: list[Any] = [*which, ResidencyRow.sidecar.in_(live)]
    rows = await session.execute(
        select(
            ResidencyRow.sidecar,
            ResidencyRow.tier,
            func.count(),
            func.sum(ResidencyRow.blocks),
            func.sum(ResidencyRow.bytes),
            ResidencyReport.at,
        )
        .join(ResidencyReport, ResidencyReport.sidecar == ResidencyRow.sidecar)
        .where(*conditions)
        .group_by(ResidencyRow.sidecar, ResidencyRow.tier, ResidencyReport.at)
        .order_by(ResidencyRow.sidecar, ResidencyRow.tier)
    )
    places = tuple(
        Place(sidecar, tier, namespaces, int(blocks), int(nbytes), at)
        for sidecar, tier, namespaces, blocks, nbytes, at in rows
    )
    different = await session.scalar(
        select(func.count(distinct(ResidencyRow.namespace))).where(*conditions)
    )
    return Resident(
        int(different or 0),
        sum(place.blocks for place in places),
        sum(place.bytes for place in places),
        places,
    )
