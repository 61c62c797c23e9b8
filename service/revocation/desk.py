"""Revoking, from the ask to its being in force."""

from __future__ import annotations

from dataclasses import dataclass

from service.auth.actor import Actor
from service.changes import Changes
from service.db.session import Database
from service.revocation import force, store
from service.revocation.ask import Ask
from service.revocation.carry_out import carry_out
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
                caller = store.caller_of(change)
                known = await store.find_repeated(change.session, caller, idempotency_key, ask)
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

    async def wait(self, revocation: str) -> None:
        """Return once `revocation` is in force: within one lease of its commit."""
        await force.wait_in_force(self.database, self.changes, self.sidecars, revocation)

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
