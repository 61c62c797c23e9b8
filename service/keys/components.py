"""Component secrets: made by registration, unwrapped for a derivation, destroyed for ever.

The caller's session commits. Destroying sets the wrapped secret to nothing; on SQLite
`secure_delete` overwrites it in the database and a truncating checkpoint in the log.
"""

from __future__ import annotations

import asyncio
import secrets as entropy
from collections.abc import Collection, Sequence
from typing import Final

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.base import now
from service.db.insert import insert_missing
from service.keys.models import Component, KekVersion
from service.keys.provider import INSTALLATION, KeyProvider, Wrapped, provider_of
from service.keys.uses import KeyUses
from strongroom.derivation import SECRET_BYTES
from strongroom.errors import Missing, Misuse, Overloaded
from strongroom.identity import ComponentId, ComponentKind, new_component_id

_WRAPS_MAX: Final = 3


async def register(
    session: AsyncSession, kind: ComponentKind, tenant: ComponentId | None
) -> ComponentId:
    """Draw a new component with a fresh secret, under the KEK of `tenant` or the installation.

    A tenant's own component gets the tenant's KEK made for it: pass None as its tenant.
    """
    component = new_component_id()
    if kind is ComponentKind.TENANT:
        if tenant is not None:
            raise Misuse("a tenant belongs to no other tenant", field="tenant")
        tenant = component
    provider = provider_of(session)
    kek = INSTALLATION if tenant is None else str(tenant)
    if await provider.newest(kek) is None:
        await provider.create(kek)
    secret = bytearray(entropy.token_bytes(SECRET_BYTES))
    try:
        wrapped = await _wrap(session, provider, kek, component, secret)
    finally:
        overwrite([secret])
    session.add(
        Component(
            id=component,
            kind=kind,
            tenant=tenant,
            kek=kek,
            kek_version=wrapped.version,
            wrapped=wrapped.blob,
            created_at=now(),
        )
    )
    await session.flush()
    return component


async def _wrap(
    session: AsyncSession,
    provider: KeyProvider,
    kek: str,
    component: ComponentId,
    secret: bytearray,
) -> Wrapped:
    """Wrap under a version that stays: not under one that a rotation has retired meanwhile."""
    for _ in range(_WRAPS_MAX):
        wrapped = await provider.wrap(kek, component, secret)
        known = KekVersion.kek == kek, KekVersion.version == wrapped.version
        row = {"kek": kek, "version": wrapped.version, "created_at": now()}
        await insert_missing(
            session, KekVersion, [{**row, "retired_at": None, "destroyed_at": None}]
        )
        # A rotation takes these rows as it begins: it comes after this change, or is seen here.
        statement = select(KekVersion.retired_at, KekVersion.destroyed_at).where(*known)
        ended = (await session.execute(statement.with_for_update(read=True))).one()
        if ended.retired_at is None and ended.destroyed_at is None:
            return wrapped
    raise Overloaded("the key-encryption key is being rotated: try again", field="kek")


class KeyMoved(Missing):
    """The KEK version of a wrapped secret is gone: rotated since it was read, or lost."""

    code = "missing"


async def secrets(
    session: AsyncSession, ids: Sequence[ComponentId], uses: KeyUses
) -> list[bytearray]:
    """The secrets of `ids`, in that order, in buffers that the caller overwrites.

    What is opened is noted in `uses`, which the caller records before anything leaves. Raises
    `Missing` if any of them was destroyed or never registered; `KeyMoved` where a newer snapshot
    may know better: a rotation may have ended since this one.
    """
    try:
        return await _open(session, ids, uses)
    except KeyMoved:
        # Outside of a snapshot the rows are read as they are now.
        return await _open(session, ids, uses)


async def _open(
    session: AsyncSession, ids: Sequence[ComponentId], uses: KeyUses
) -> list[bytearray]:
    columns = select(Component.id, Component.kek, Component.kek_version, Component.wrapped)
    rows = (await session.execute(columns.where(Component.id.in_(ids)))).all()
    found = {row.id: row for row in rows if row.wrapped is not None}
    if not found.keys() >= set(ids):
        raise Missing("a component has no secret any more", field="component")
    provider = provider_of(session)
    wanted = [found[component] for component in ids]
    # All at once: each is a round trip where the keys are elsewhere.
    opened = await asyncio.gather(
        *(
            provider.unwrap(row.kek, row.id, Wrapped(row.kek_version, row.wrapped))
            for row in wanted
        ),
        return_exceptions=True,
    )
    buffers = [each for each in opened if isinstance(each, bytearray)]
    failed = next((each for each in opened if isinstance(each, BaseException)), None)
    if failed is not None:
        overwrite(buffers)
        if isinstance(failed, Missing):
            raise KeyMoved(failed.message, field=failed.field) from failed
        raise failed
    uses.note((row.id, row.kek, row.kek_version) for row in wanted)
    return buffers


async def destroy(session: AsyncSession, ids: Sequence[ComponentId]) -> list[ComponentId]:
    """Destroy the secrets of `ids` and return those that still had one. Idempotent."""
    alive_ids = (
        await session.scalars(
            select(Component.id)
            .where(Component.id.in_(ids), Component.wrapped.is_not(None))
            .with_for_update()
        )
    ).all()
    await session.execute(
        update(Component)
        .where(Component.id.in_(alive_ids))
        .values(wrapped=None, destroyed_at=now())
        .execution_options(synchronize_session="fetch")
    )
    return [component for component in ids if component in set(alive_ids)]


async def alive(session: AsyncSession, ids: Collection[ComponentId]) -> bool:
    """Whether every one of `ids` is registered and has its secret."""
    wanted = set(ids)
    found = await session.scalar(
        select(func.count())
        .select_from(Component)
        .where(Component.id.in_(wanted), Component.wrapped.is_not(None))
    )
    return found == len(wanted)


async def living(session: AsyncSession, ids: Collection[str]) -> frozenset[ComponentId]:
    """Those of `ids` that are registered and have their secret."""
    statement = select(Component.id).where(Component.id.in_(ids), Component.wrapped.is_not(None))
    return frozenset((await session.scalars(statement)).all())


def overwrite(buffers: Sequence[bytearray]) -> None:
    """Fill buffers that held secrets with zeros."""
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))
