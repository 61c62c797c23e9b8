"""The key-use log: who unwrapped which component's secret, under which KEK version, what for.

Rules:
- What opens secrets notes it in a `KeyUses`; nothing derived from them leaves before that is
  recorded. A derivation that fails leaves no entry and gives nothing.
- An entry holds names and numbers: no secret, no wrapped form, no derived key.
- Entries are kept for `key_uses_kept_s`, then purged in steps.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import Select, delete, insert, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.auth.actor import Actor
from service.db.base import now
from service.keys.models import KeyUse, Purpose
from strongroom.identity import ComponentId

_PURGED_AT_ONCE: Final = 1000

Opened = tuple[ComponentId, str, int]
"""A component, the KEK that its secret was under, and the version."""


class KeyUses:
    """What one derivation has opened, until it is recorded."""

    def __init__(self, actor: Actor, purpose: Purpose, tenant: str | None) -> None:
        self._actor = actor
        self._purpose = purpose
        self._tenant = tenant
        self._opened: dict[Opened, None] = {}

    def note(self, opened: Iterable[Opened]) -> None:
        """Remember what was opened; the same component once."""
        self._opened.update(dict.fromkeys(opened))

    async def record(self, session: AsyncSession, reference: str = "") -> None:
        """Write what was noted; the caller's session commits."""
        if not self._opened:
            return
        moment = now()
        rows = [
            {
                "id": use_id(moment),
                "at": moment,
                "component": component,
                "kek": kek,
                "kek_version": version,
                "tenant": self._tenant,
                "purpose": self._purpose,
                "actor_kind": self._actor.kind.value,
                "actor": self._actor.id,
                "reference": reference,
            }
            for component, kek, version in self._opened
        ]
        self._opened.clear()
        await session.execute(insert(KeyUse), rows)


@dataclass(frozen=True, slots=True)
class UseFilter:
    """Which entries; None: whatever it is."""

    tenant: str | None = None
    component: str | None = None
    kek: str | None = None
    purpose: Purpose | None = None
    actor: str | None = None
    since: datetime | None = None
    until: datetime | None = None

    def select(self) -> Select[KeyUse]:
        """The entries that fit, to be read in pages."""
        statement = select(KeyUse)
        for column, value in (
            (KeyUse.tenant, self.tenant),
            (KeyUse.component, self.component),
            (KeyUse.kek, self.kek),
            (KeyUse.purpose, self.purpose),
            (KeyUse.actor, self.actor),
        ):
            if value is not None:
                statement = statement.where(column == value)
        # Ids grow with time, so that a span of time is a range of the primary key.
        if self.since is not None:
            statement = statement.where(KeyUse.id >= _floor(self.since))
        if self.until is not None:
            statement = statement.where(KeyUse.id < _floor(self.until))
        return statement


async def purge(session: AsyncSession, before: datetime) -> int:
    """Delete some entries from before `before`; 0 when none are left."""
    ids = (
        await session.scalars(
            select(KeyUse.id).where(KeyUse.id < _floor(before)).limit(_PURGED_AT_ONCE)
        )
    ).all()
    if ids:
        await session.execute(
            delete(KeyUse).where(KeyUse.id.in_(ids)).execution_options(synchronize_session=False)
        )
    return len(ids)


def use_id(moment: datetime) -> str:
    """A new id of that moment."""
    return _prefix(moment) + secrets.token_hex(10)


def _floor(moment: datetime) -> str:
    return _prefix(moment) + "0" * 20


def _prefix(moment: datetime) -> str:
    return f"{max(0, int(moment.timestamp() * 1000)):012x}"
