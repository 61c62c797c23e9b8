"""Registrations that may be sent twice: the same `Idempotency-Key` gets the same answer.

The answer is stored in the registration's own transaction. A key belongs to its caller and its
scope; used for another request it is a `Conflict`. Keys are kept for a day.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Final

from fastapi import Header
from pydantic import BaseModel
from sqlalchemy import delete
from sqlalchemy.ext.asyncio import AsyncSession

from service.auth.actor import Actor
from service.db.base import now
from service.registry.models import IdempotentAnswer
from strongroom.errors import Conflict
from strongroom.limits import NAME_CHARS_MAX

KEPT: Final = timedelta(days=1)

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=r"^[\x21-\x7e]+$",
        max_length=NAME_CHARS_MAX,
        description="Sent again with the same body, it gets the first answer.",
    ),
]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One use of a key: by whom, in which scope, for which request."""

    scope: str
    actor: str
    key: str
    request: str

    async def earlier(self, session: AsyncSession) -> str | None:
        """The JSON answered before, or None. Raises `Conflict` for another request."""
        row = await session.get(IdempotentAnswer, (self.scope, self.actor, self.key))
        if row is None or row.created_at < now() - KEPT:
            return None
        if row.request != self.request:
            raise Conflict("this key was used for another request", field="Idempotency-Key")
        return row.answer

    async def remember(self, session: AsyncSession, answer: BaseModel) -> None:
        """Keep `answer`, and forget what is too old."""
        moment = now()
        await session.execute(
            delete(IdempotentAnswer).where(IdempotentAnswer.created_at < moment - KEPT)
        )
        session.add(
            IdempotentAnswer(
                scope=self.scope,
                actor=self.actor,
                key=self.key,
                request=self.request,
                answer=answer.model_dump_json(),
                created_at=moment,
            )
        )
        await session.flush()


def attempt(
    key: str | None, actor: Actor, scope: str, route: str, body: BaseModel
) -> Attempt | None:
    """The use of `key` that this request is, if it has one."""
    if key is None:
        return None
    request = f"{route}\n{body.model_dump_json()}"
    owner = hashlib.sha256(f"{actor.kind.value}\n{actor.tenant or ''}\n{actor.id}".encode())
    return Attempt(
        scope=scope,
        actor=owner.hexdigest(),
        key=key,
        request=hashlib.sha256(request.encode()).hexdigest(),
    )
