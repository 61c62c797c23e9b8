"""Component secrets: made by registration, unwrapped for a derivation, destroyed for ever.

The caller's session commits. Destroying sets the wrapped secret to nothing; on SQLite
`secure_delete` overwrites it in the database and a truncating checkpoint in the log.
"""

from __future__ import annotations

import secrets as entropy
from collections.abc import Collection, Sequence

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.base import now
from service.db.insert import insert_missing
from service.keys.models import Component, KekVersion
from service.keys.provider import INSTALLATION, Wrapped, provider_of
from strongroom.derivation import SECRET_BYTES
from strongroom.errors import Missing, Misuse, Overloaded
from strongroom.identity import ComponentId, ComponentKind, new_component_id


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
    version = await provider.newest(kek)
    if version is None:
        version = await provider.create(kek)
    secret = bytearray(entropy.token_bytes(SECRET_BYTES))
    try:
        wrapped = await provider.wrap(kek, component, secret)
    finally:
        overwrite([secret])
    moment = now()
    await insert_missing(
        session,
        KekVersion,
        [{"kek": kek, "version": wrapped.version, "created_at": moment, "destroyed_at": None}],
    )
    # A rotation holds this row while it rewraps: what is wrapped here is seen by it, or waits.
    ended = await session.scalar(
        select(KekVersion.destroyed_at)
        .where(KekVersion.kek == kek, KekVersion.version == wrapped.version)
        .with_for_update(read=True)
    )
    if ended is not None:
        raise Overloaded("the key-encryption key is being rotated: try again", field="kek")
    session.add(
        Component(
            id=component,
            kind=kind,
            tenant=tenant,
            kek=kek,
            kek_version=wrapped.version,
            wrapped=wrapped.blob,
            created_at=moment,
        )
    )
    await session.flush()
    return component


async def secrets(session: AsyncSession, ids: Sequence[ComponentId]) -> list[bytearray]:
    """The secrets of `ids`, in that order, in buffers that the caller overwrites.

    Raises `Missing` if any of them was destroyed or never registered.
    """
    columns = select(Component.id, Component.kek, Component.kek_version, Component.wrapped)
    rows = (await session.execute(columns.where(Component.id.in_(ids)))).all()
    found = {row.id: row for row in rows if row.wrapped is not None}
    provider = provider_of(session)
    opened: list[bytearray] = []
    try:
        for component in ids:
            row = found.get(component)
            if row is None:
                raise Missing("a component has no secret any more", field="component")  # noqa: TRY301
            wrapped = Wrapped(row.kek_version, row.wrapped)
            opened.append(await provider.unwrap(row.kek, component, wrapped))
    except BaseException:
        overwrite(opened)
        raise
    return opened


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
    return await living(session, ids) == set(ids)


async def living(session: AsyncSession, ids: Collection[str]) -> frozenset[ComponentId]:
    """Those of `ids` that are registered and have their secret."""
    statement = select(Component.id).where(Component.id.in_(ids), Component.wrapped.is_not(None))
    return frozenset((await session.scalars(statement)).all())


def overwrite(buffers: Sequence[bytearray]) -> None:
    """Fill buffers that held secrets with zeros."""
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))
