"""Acknowledgements are taken many at once: one transaction for all that wait.

A revocation is acknowledged by every sidecar at the same moment. Each acknowledgement is judged for
itself, and answered once the transaction that has it is committed; rows are locked in the order of
the sidecars' ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from sqlalchemy import select
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

from policy.signing import encode_base64url
from service.auth.errors import Unauthenticated
from service.db.session import Database
from service.log import store as log_store
from service.log.together import Together
from service.sidecars.acks import Settle, acknowledge, check
from service.sidecars.models import Sidecar
from service.sidecars.store import Enrolled
from strongroom.control import AckRequest
from strongroom.errors import StrongroomError, Unavailable

AT_ONCE_MAX: Final = 128


class _Waiting:
    """An acknowledgement, and what became of it."""

    def __init__(self, caller: Enrolled, ack: AckRequest) -> None:
        self.caller = caller
        self.ack = ack
        self.done = False
        self.refusal: StrongroomError | None = None


class AckBatches:
    """Used from the event loop only. `told` is called after each commit."""

    def __init__(self, database: Database, settle: Settle, told: Callable[[], None]) -> None:
        self._database = database
        self._settle = settle
        self._told = told
        self._waiting: list[_Waiting] = []
        self._together: Together[None] = Together(self._write)

    async def take(self, caller: Enrolled, ack: AckRequest) -> None:
        """Record `ack`, or raise why it is not one."""
        check(ack)
        mine = _Waiting(caller, ack)
        self._waiting.append(mine)
        while not mine.done:
            await self._together.get()
        if mine.refusal is not None:
            raise mine.refusal

    async def _write(self) -> None:
        batch, self._waiting = self._waiting[:AT_ONCE_MAX], self._waiting[AT_ONCE_MAX:]
        batch.sort(key=lambda each: (each.caller.id, each.ack.seq))
        try:
            refusals = await self._transaction(batch)
        except (DBAPIError, OperationalError, InterfaceError, OSError):
            refusals = [Unavailable("the database did not take the acknowledgement")] * len(batch)
        except asyncio.CancelledError:
            # Whoever ran this is gone; the others' turn comes again.
            self._waiting = batch + self._waiting
            raise
        except Exception:
            # Put back, one that can never be taken would keep all others from ever being taken.
            for each in batch:
                each.refusal = Unavailable("the acknowledgement was not taken")
                each.done = True
            raise
        for each, refusal in zip(batch, refusals, strict=True):
            each.refusal, each.done = refusal, True
        self._told()

    async def _transaction(self, batch: list[_Waiting]) -> list[StrongroomError | None]:
        refusals: list[StrongroomError | None] = []
        async with self._database.writers() as session, session.begin():
            head = await log_store.head(session)
            rows = await session.execute(
                select(Sidecar.id, Sidecar.signing_key).where(
                    Sidecar.id.in_({each.caller.id for each in batch}),
                    Sidecar.revoked_at.is_(None),
                )
            )
            keys = {row.id: row.signing_key for row in rows}
            for each in batch:
                refusal: StrongroomError | None = None
                if keys.get(each.caller.id) != encode_base64url(each.caller.signing_key):
                    refusal = Unauthenticated("the proof is not valid")
                else:
                    try:
                        await acknowledge(session, head, each.caller.id, each.ack, self._settle)
                    except StrongroomError as error:
                        refusal = error
                refusals.append(refusal)
        return refusals
