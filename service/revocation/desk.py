"""Revoking, from the ask to its being in force."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from service.auth.actor import Actor
from service.changes import Changes
from service.db.session import Database
from service.revocation import force, schedule, store
from service.revocation.ask import Ask
from service.revocation.carry_out import carry_out
from service.revocation.models import ScheduledRevocation, ScheduleState
from service.revocation.survey import Survey, survey
from service.sidecars.desk import SidecarDesk
from strongroom.errors import Conflict, Missing


@dataclass(frozen=True, slots=True)
class RevocationDesk:
    """What revoking needs."""

    database: Database
    changes: Changes
    sidecars: SidecarDesk
    erasure_final_s: float

    async def revoke(self, actor: Actor, ask: Ask, idempotency_key: str | None) -> str:
        """Commit and journal `ask`; returns the revocation's id. It is not yet in force.

        The same ask under the same key is carried out once.
        """
        try:
            async with self.changes.begin(actor) as change:
                known = await store.find_repeated(change.session, actor, idempotency_key, ask)
                if known is not None:
                    return known.id
                done = await carry_out(change, ask)
                revocation = await store.record(
                    change, ask, done, idempotency_key, self.erasure_final_s
                )
                await force.set_deadlines(change, self.sidecars, revocation)
        except (Missing, Conflict) as error:
            await self._record_refusal(actor, ask, error.code)
            raise
        return revocation.id

    async def schedule(
        self, actor: Actor, ask: Ask, due_at: datetime, idempotency_key: str | None
    ) -> ScheduledRevocation:
        """Have `ask` carried out at `due_at`. The same ask under the same key is one."""
        try:
            async with self.changes.begin(actor) as change:
                return await schedule.create(change, ask, due_at, idempotency_key)
        except (Missing, Conflict) as error:
            await self._record_refusal(actor, ask, error.code)
            raise

    async def carry_out_scheduled(self, scheduled: str) -> bool:
        """Carry out a scheduled revocation whose time has come; False if somebody else has.

        Its row is read under the log's lock and marked in the same change: of any number of
        processes one carries it out, and one that dies before the commit has done nothing.
        """
        async with self.database.readers() as session:
            actor = schedule.actor_of(await schedule.get(session, scheduled, None))
        try:
            async with self.changes.begin(actor) as change:
                row = await schedule.waiting(change.session, scheduled)
                if row is None:
                    return False
                ask = schedule.ask_of(row)
                done = await carry_out(change, ask)
                revocation = await store.record(
                    change, ask, done, None, self.erasure_final_s, scheduled=row.id
                )
                await schedule.end(change, row, ScheduleState.CARRIED_OUT)
                await force.set_deadlines(change, self.sidecars, revocation)
        except (Missing, Conflict) as error:
            async with self.changes.begin(actor) as change:
                row = await schedule.waiting(change.session, scheduled)
                if row is not None:
                    await schedule.end(change, row, ScheduleState.FAILED, error.code)
            return False
        return True

    async def preview(self, actor: Actor, ask: Ask) -> Survey:
        """What `ask` would take now. Raises what `revoke` would raise."""
        async with self.database.readers() as session:
            return await survey(session, actor, ask)

    async def wait(self, revocation: str, deadline_s: float | None = None) -> bool:
        """Whether `revocation` is in force: within one lease of its commit, if nobody waits less.

        Returns at `deadline_s` at the latest.
        """
        return await force.wait_in_force(
            self.database, self.changes, self.sidecars, revocation, deadline_s
        )

    async def settle(self, revocation: str) -> bool:
        """Whether it is in force now."""
        return await force.settle(self.database, self.changes, self.sidecars, revocation)

    async def _record_refusal(self, actor: Actor, ask: Ask, reason: str) -> None:
        async with self.changes.begin(actor) as change:
            await change.audit(
                "revocation.refused",
                tenant=actor.tenant,
                outcome="refused",
                reason=reason,
                details={"axis": str(ask.axis), "target": ask.describe()},
            )
