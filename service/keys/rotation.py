"""Rotation of key-encryption keys: what makes an erasure final. It touches no block.

Steps, each of which may be the last one of a process:
1. `begin`: one change makes a new version, retires the ones before (nothing new is wrapped under
   them) and records the rotation.
2. `carry_on`: in steps of `STEP` components, outside of any transaction, what lives is rewrapped;
   a short one puts each new form in the place of exactly the old one that it was made of, so
   that a component destroyed meanwhile stays destroyed. Serving goes on.
3. Nothing lives under the old versions any more: they are destroyed in the provider, then marked.
A rotation that was begun is due until it has ended, whoever's process ended in between. Two at
once do each other's work twice and no harm.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import ColumnElement, Select, bindparam, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from service.auth.actor import SYSTEM, Actor
from service.changes import Changes
from service.db.base import now
from service.db.insert import insert_missing
from service.db.session import Database
from service.keys.finality import due
from service.keys.models import Component, KekRotation, KekVersion, Purpose
from service.keys.openable import find_shut
from service.keys.provider import INSTALLATION, KeyProvider, Wrapped
from service.keys.uses import KeyUses
from strongroom.errors import Missing, StrongroomError
from strongroom.identity import ComponentId

STEP: Final = 200
"""Components rewrapped between two commits."""
_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True, repr=False)
class Living:
    """A component whose secret is under an older version."""

    id: ComponentId
    wrapped: Wrapped


@dataclass(frozen=True, slots=True)
class Standing:
    """A rotation, and how many components still wait for it."""

    rotation: KekRotation
    components_left: int


async def rotate_due(
    database: Database,
    changes: Changes,
    provider: KeyProvider,
    age: timedelta,
    *,
    clock: Callable[[], datetime] = now,
) -> Sequence[str]:
    """Rotate every KEK whose oldest destruction is at least `age` old, and end what was begun.

    Returns them. One that fails holds up no other; the first error is raised when all were tried.
    """
    async with database.readers() as session:
        keks = await due(session, clock() - age)
    failed: StrongroomError | None = None
    for kek in keks:
        try:
            await rotate(database, changes, provider, kek)
        except StrongroomError as error:
            failed = failed or error
    if failed is not None:
        raise failed
    return keks


async def rotate(
    database: Database,
    changes: Changes,
    provider: KeyProvider,
    kek: str,
    actor: Actor = SYSTEM,
) -> None:
    """Give `kek` a new version and destroy the ones before, or end the rotation that was begun.

    A tenant of which nothing lives any more gets no new version.
    """
    rotation = await begin(changes, provider, kek, actor)
    try:
        await carry_on(database, changes, provider, rotation)
    except StrongroomError as error:
        await _note_failure(database, rotation, error.code)
        raise


async def begin(changes: Changes, provider: KeyProvider, kek: str, actor: Actor) -> str:
    """The id of the rotation of `kek` that is now under way. Raises `Missing`."""
    async with changes.begin(actor) as change:
        session = change.session
        begun = await session.scalar(_open_rotation(kek))
        if begun is not None:
            return begun.id
        old = await _lock_versions(session, kek)
        if not old:
            raise Missing("there is no such key-encryption key", field="kek")
        if await find_shut(session, kek):
            raise Missing("this key does not open what lives: it is not rotated", field="kek")
        living = await _count(session, Component.kek == kek)
        moment = now()
        if living or kek == INSTALLATION:
            target = await provider.create(kek)
            row = {"kek": kek, "version": target, "created_at": moment}
            await insert_missing(
                session, KekVersion, [{**row, "retired_at": None, "destroyed_at": None}]
            )
        else:
            # Whatever was made and never recorded ends too.
            target = max(old[-1], await provider.newest(kek) or 0) + 1
        await session.execute(
            update(KekVersion)
            .where(KekVersion.kek == kek, KekVersion.version.in_(old))
            .values(retired_at=moment)
        )
        rotation = KekRotation(
            id=secrets.token_hex(16),
            kek=kek,
            target=target,
            components_total=living,
            asked_by=f"{actor.kind}:{actor.id}",
            started_at=moment,
            failure="",
        )
        session.add(rotation)
        details = {"kek": kek, "versions": list(old), "rotation": rotation.id}
        await change.audit("kek.rotation_begun", tenant=_tenant(kek), details=details)
    return rotation.id


async def carry_on(
    database: Database,
    changes: Changes,
    provider: KeyProvider,
    rotation: str,
    told: Callable[[int], None] = lambda _: None,
) -> None:
    """Bring a rotation to its end from wherever it stands. `told` gets the number of each step."""
    async with database.readers() as session:
        row = await session.get_one(KekRotation, rotation)
    if row.finished_at is not None:
        return
    while True:
        while living := await _next_step(database, row):
            told(await _rewrap(database, provider, row.kek, living))
        old = await _settled(changes, row)
        if old is not None:
            break
    for version in range(min(old, default=row.target), row.target):
        await provider.destroy(row.kek, version)
    async with changes.begin(SYSTEM) as change:
        session = change.session
        moment = now()
        await session.execute(
            update(KekVersion)
            .where(
                KekVersion.kek == row.kek,
                KekVersion.version < row.target,
                KekVersion.destroyed_at.is_(None),
            )
            .values(destroyed_at=moment)
        )
        await session.execute(
            update(KekRotation)
            .where(KekRotation.id == row.id)
            .values(finished_at=moment, failure="")
        )
        change.secrets_destroyed = True
        details = {"kek": row.kek, "versions": list(old), "rotation": row.id}
        await change.audit("kek.destroyed", tenant=_tenant(row.kek), details=details)


async def standing(session: AsyncSession, rotation: KekRotation) -> Standing:
    """Where `rotation` stands."""
    if rotation.finished_at is not None:
        return Standing(rotation, 0)
    return Standing(rotation, await _count(session, *_under_older(rotation)))


def _open_rotation(kek: str) -> Select[KekRotation]:
    return select(KekRotation).where(KekRotation.kek == kek, KekRotation.finished_at.is_(None))


def _tenant(kek: str) -> str | None:
    return None if kek == INSTALLATION else kek


def _under_older(rotation: KekRotation) -> tuple[ColumnElement[bool], ...]:
    return Component.kek == rotation.kek, Component.kek_version < rotation.target


async def _count(session: AsyncSession, *where: ColumnElement[bool]) -> int:
    counted = select(func.count()).select_from(Component)
    return await session.scalar(counted.where(Component.wrapped.is_not(None), *where)) or 0


async def _lock_versions(session: AsyncSession, kek: str) -> Sequence[int]:
    """The living versions of `kek`, locked: who wraps under one of them has committed, or waits."""
    versions = await session.scalars(
        select(KekVersion.version)
        .where(KekVersion.kek == kek, KekVersion.destroyed_at.is_(None))
        .order_by(KekVersion.version)
        .with_for_update()
    )
    return versions.all()


async def _next_step(database: Database, rotation: KekRotation) -> Sequence[Living]:
    async with database.readers() as session:
        rows = await session.execute(
            select(Component.id, Component.kek_version, Component.wrapped)
            .where(Component.wrapped.is_not(None), *_under_older(rotation))
            .limit(STEP)
        )
        return [Living(row.id, Wrapped(row.kek_version, row.wrapped or b"")) for row in rows]


async def _rewrap(
    database: Database, provider: KeyProvider, kek: str, living: Sequence[Living]
) -> int:
    """Rewrap `living`; returns how many there were. No transaction is open meanwhile."""
    forms: list[Wrapped] = []
    for start in range(0, len(living), _AT_ONCE):
        forms += await asyncio.gather(
            *(
                provider.rewrap(kek, each.id, each.wrapped)
                for each in living[start : start + _AT_ONCE]
            )
        )
    table = Component.__table__
    # Exactly the form that was rewrapped: what was destroyed since has none any more.
    statement = (
        update(Component)
        .where(table.c.id == bindparam("b_id"), table.c.wrapped == bindparam("b_old"))
        .values(kek_version=bindparam("b_version"), wrapped=bindparam("b_new"))
    )
    values = [
        {
            "b_id": each.id,
            "b_old": each.wrapped.blob,
            "b_version": form.version,
            "b_new": form.blob,
        }
        for each, form in zip(living, forms, strict=True)
    ]
    async with database.writers.begin() as session:
        connection = await session.connection()
        await connection.execute(statement, values)
    return len(living)


async def _settled(changes: Changes, rotation: KekRotation) -> Sequence[int] | None:
    """The versions that end, once nothing that lives is under them; None: there is more to do."""
    async with changes.begin(SYSTEM) as change:
        session = change.session
        versions = await _lock_versions(session, rotation.kek)
        if await _count(session, *_under_older(rotation)):
            return None
        old = [version for version in versions if version < rotation.target]
        uses = KeyUses(SYSTEM, Purpose.ROTATION, _tenant(rotation.kek))
        if rotation.components_total:
            uses.note((ComponentId(""), rotation.kek, version) for version in old)
        await uses.record(session, rotation.id)
        details = {"kek": rotation.kek, "versions": old, "rotation": rotation.id}
        await change.audit("kek.rotated", tenant=_tenant(rotation.kek), details=details)
    return old


async def _note_failure(database: Database, rotation: str, code: str) -> None:
    async with database.writers.begin() as session:
        await session.execute(
            update(KekRotation).where(KekRotation.id == rotation).values(failure=code)
        )
