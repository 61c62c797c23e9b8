"""When an erasure is final, and which KEKs have to be rotated to make it so.

A destroyed component's wrapped secret may still lie in a backup, under the KEK version of its
last days or under one before. Once all of these are destroyed, no copy opens.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import and_, exists, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.keys.models import Component, KekRotation, KekVersion
from strongroom.identity import ComponentId


async def final_at(session: AsyncSession, components: Sequence[ComponentId]) -> datetime | None:
    """When the last KEK version that ever wrapped these destroyed secrets was destroyed.

    None while one of them still lives: the erasure is pending.
    """
    wrapping = and_(Component.kek == KekVersion.kek, Component.kek_version >= KekVersion.version)
    found = (
        await session.execute(
            select(
                func.count().label("versions"),
                func.count(KekVersion.destroyed_at).label("destroyed"),
                func.max(KekVersion.destroyed_at, type_=KekVersion.destroyed_at.type).label("last"),
            )
            .select_from(Component)
            .join(KekVersion, wrapping)
            .where(Component.id.in_(components))
        )
    ).one()
    last: datetime | None = found.last
    return last if found.versions and found.versions == found.destroyed else None


async def due(session: AsyncSession, before: datetime, *, begun: bool = True) -> Sequence[str]:
    """The KEKs of which a living version wrapped a secret that was destroyed before `before`,
    and with `begun` those whose rotation has begun and not ended.
    """
    tombstone = exists().where(
        Component.kek == KekVersion.kek,
        Component.kek_version >= KekVersion.version,
        Component.destroyed_at <= before,
    )
    keks = select(KekVersion.kek).where(KekVersion.destroyed_at.is_(None), tombstone)
    found = set((await session.scalars(keks)).all())
    if begun:
        under_way = select(KekRotation.kek).where(KekRotation.finished_at.is_(None))
        found.update((await session.scalars(under_way)).all())
    return sorted(found)
