"""Rotation of key-encryption keys: what makes an erasure final.

A destroyed component's wrapped secret may still lie in a backup. Once the KEK version that
wrapped it is destroyed, no copy opens. Rotating adds a version, rewraps what lives, commits,
then destroys the versions before. It touches no block. Stopped half way, it is due again.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import and_, exists, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from service.auth.actor import SYSTEM
from service.changes import Changes
from service.db.base import now
from service.db.insert import insert_missing
from service.db.session import Database
from service.keys.components import overwrite
from service.keys.models import Component, KekVersion
from service.keys.openable import find_shut
from service.keys.provider import INSTALLATION, KeyProvider, Wrapped
from strongroom.errors import Missing, StrongroomError
from strongroom.identity import ComponentId


async def final_at(session: AsyncSession, components: Sequence[ComponentId]) -> datetime | None:
    """When the last KEK version that ever wrapped these destroyed secrets was destroyed.

    None while one of them still lives: the erasure is pending.
    """
    moments = (
        await session.scalars(
            select(KekVersion.destroyed_at)
            .join(
                Component,
                and_(Component.kek == KekVersion.kek, Component.kek_version == KekVersion.version),
            )
            .where(Component.id.in_(components))
        )
    ).all()
    ended = [moment for moment in moments if moment is not None]
    return max(ended) if ended and len(ended) == len(moments) else None


async def due(session: AsyncSession, before: datetime) -> Sequence[str]:
    """The KEKs of which a living version wrapped a secret that was destroyed before `before`."""
    tombstone = exists().where(
        Component.kek == KekVersion.kek,
        Component.kek_version == KekVersion.version,
        Component.destroyed_at <= before,
    )
    keks = await session.scalars(
        select(KekVersion.kek)
        .where(KekVersion.destroyed_at.is_(None), tombstone)
        .distinct()
        .order_by(KekVersion.kek)
    )
    return keks.all()


async def rotate_due(
    database: Database, changes: Changes, provider: KeyProvider, age: timedelta
) -> Sequence[str]:
    """Rotate every KEK whose oldest destruction is at least `age` old; returns them.

    One that fails holds up no other; the first error is raised when all were tried.
    """
    async with database.readers() as session:
        keks = await due(session, now() - age)
    failed: StrongroomError | None = None
    for kek in keks:
        try:
            await rotate(changes, provider, kek)
        except StrongroomError as error:
            failed = failed or error
    if failed is not None:
        raise failed
    return keks


async def rotate(changes: Changes, provider: KeyProvider, kek: str) -> None:
    """Give `kek` a new version and destroy the ones before.

    A tenant of which nothing lives any more gets no new version.
    """
    async with changes.begin(SYSTEM) as change:
        session = change.session
        old = await _lock_versions(session, kek)
        living = (
            await session.execute(
                select(Component.id, Component.kek_version, Component.wrapped).where(
                    Component.kek == kek, Component.wrapped.is_not(None)
                )
            )
        ).all()
        if await find_shut(session, kek):
            raise Missing("this key does not open what lives: it is not rotated", field="kek")
        if living or kek == INSTALLATION:
            fresh = await provider.create(kek)
            await insert_missing(
                session,
                KekVersion,
                [{"kek": kek, "version": fresh, "created_at": now(), "destroyed_at": None}],
            )
        for row in living:
            assert row.wrapped is not None
            await _rewrap(session, provider, kek, row.id, Wrapped(row.kek_version, row.wrapped))
        change.secrets_destroyed = True
        await change.audit("kek.rotated", details={"kek": kek, "versions": list(old)})
    for version in old:
        await provider.destroy(kek, version)
    async with changes.begin(SYSTEM) as change:
        await change.session.execute(
            update(KekVersion)
            .where(KekVersion.kek == kek, KekVersion.version.in_(old))
            .values(destroyed_at=now())
        )
        await change.audit("kek.destroyed", details={"kek": kek, "versions": list(old)})


async def _lock_versions(session: AsyncSession, kek: str) -> Sequence[int]:
    """The living versions of `kek`, locked, so that no registration wraps under one of them."""
    versions = await session.scalars(
        select(KekVersion.version)
        .where(KekVersion.kek == kek, KekVersion.destroyed_at.is_(None))
        .order_by(KekVersion.version)
        .with_for_update()
    )
    return versions.all()


async def _rewrap(
    session: AsyncSession,
    provider: KeyProvider,
    kek: str,
    component: ComponentId,
    wrapped: Wrapped,
) -> None:
    secret = await provider.unwrap(kek, component, wrapped)
    try:
        again = await provider.wrap(kek, component, secret)
    finally:
        overwrite([secret])
    await session.execute(
        update(Component)
        .where(Component.id == component)
        .values(kek_version=again.version, wrapped=again.blob)
        .execution_options(synchronize_session=False)
    )
