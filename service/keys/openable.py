"""Whether the key directory opens what the database says is alive.

A database that is older than the last rotation of a key-encryption key names versions that were
destroyed since; one that was brought together with another key directory names versions that
are other keys here. Nothing can be derived from what they wrapped. One component of each
version is opened, which tells both.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.auth.actor import SYSTEM
from service.db.session import Database
from service.keys.components import overwrite
from service.keys.models import Component, Purpose
from service.keys.provider import Wrapped, provider_of
from service.keys.uses import KeyUses
from strongroom.errors import Corrupt, Missing, Unavailable

_log = logging.getLogger("strongroom.service")
_IN_MAX = 500


@dataclass(frozen=True, slots=True)
class Shut:
    """A version of a KEK that does not open the `components` that it wrapped and that live."""

    kek: str
    version: int
    components: int


async def find_shut(
    session: AsyncSession, kek: str | None = None, uses: KeyUses | None = None
) -> Sequence[Shut]:
    """Every version, of `kek` or of all, that does not open what lives.

    What was opened to see that is noted in `uses`.
    """
    statement = (
        select(
            Component.kek,
            Component.kek_version,
            func.count().label("components"),
            func.min(Component.id).label("sample"),
        )
        .where(Component.wrapped.is_not(None))
        .group_by(Component.kek, Component.kek_version)
        .order_by(Component.kek, Component.kek_version)
    )
    if kek is not None:
        statement = statement.where(Component.kek == kek)
    groups = (await session.execute(statement)).all()
    found = []
    for start in range(0, len(groups), _IN_MAX):
        part = groups[start : start + _IN_MAX]
        rows = await session.execute(
            select(Component.id, Component.wrapped).where(
                Component.id.in_([group.sample for group in part])
            )
        )
        blobs = {row.id: row.wrapped for row in rows}
        for group in part:
            wrapped = Wrapped(group.kek_version, blobs[group.sample] or b"")
            try:
                opened = await provider_of(session).unwrap(group.kek, group.sample, wrapped)
            except (Missing, Corrupt):
                found.append(Shut(group.kek, group.kek_version, group.components))
            else:
                overwrite([opened])
                if uses is not None:
                    uses.note([(group.sample, group.kek, group.kek_version)])
    return found


class KeyCheck:
    """What a start found; asked again for as long as something was shut."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._shut: Sequence[Shut] = ()

    async def look(self) -> Sequence[Shut]:
        """Look, and log which versions are missing."""
        uses = KeyUses(SYSTEM, Purpose.CHECK, None)
        async with self._database.readers() as session:
            self._shut = await find_shut(session, uses=uses)
        async with self._database.writers.begin() as session:
            await uses.record(session)
        for shut in self._shut:
            _log.error(
                "version %d of key-encryption key %s does not open %d living components",
                shut.version,
                shut.kek,
                shut.components,
            )
        return self._shut

    async def require_open(self) -> None:
        """Raise `Unavailable`, saying what to do, while something that lives cannot be opened."""
        if self._shut and await self.look():
            count = sum(shut.components for shut in self._shut)
            raise Unavailable(
                f"{count} living components do not open with the key directory's keys: put back "
                f"the {len(self._shut)} key-encryption key versions that the service's log names, "
                "or revoke these components and register them again",
                field="key_directory",
            )
