"""What the service is made of, once it is composed: one frozen value that routes are handed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, cast

from fastapi import Depends, Request

from policy.signing import Signer, Verifier
from service.auth.identities import Identities
from service.auth.issuer import Issuer
from service.changes import Changes
from service.db.session import Database, Sessions
from service.journal.file import Journal
from service.keys.openable import KeyCheck
from service.keys.provider import KeyProvider
from service.keys.schedule import KeySchedule
from service.log.kick import Kick
from service.log.tail import Tail
from service.log.wakes import Wakes
from service.policies.enforcers import Enforcers
from service.rates import Rates
from service.revocation.rounds import RevocationRounds
from service.settings import ServiceSettings
from service.sidecars.ack_batches import AckBatches
from service.sidecars.desk import SidecarDesk
from service.sidecars.roster import Roster
from strongroom.clock import Clock


@dataclass(frozen=True, slots=True)
class Runtime:
    """Built by `service.app.create_app`, found on `app.state.runtime`."""

    settings: ServiceSettings
    database: Database
    key_provider: KeyProvider
    key_check: KeyCheck
    key_schedule: KeySchedule
    signer: Signer
    """The service's own key: grants, leases, log entries, certificates."""
    verifier: Verifier
    """Verifies what `signer` signed."""
    issuer: Issuer
    """Mints bearer tokens."""
    token_verifier: Verifier
    """Verifies what `issuer` minted."""
    identities: Identities
    """Reads every bearer token."""
    cursor_key: bytes = field(repr=False)
    """Under which cursors carry their MAC."""
    changes: Changes
    journal: Journal
    kick: Kick
    wakes: Wakes
    tail: Tail
    roster: Roster
    ack_batches: AckBatches
    enforcers: Enforcers
    desk: SidecarDesk
    revocations: RevocationRounds
    rates: Rates
    clock: Clock
    """Nanoseconds since boot."""

    @property
    def sessions(self) -> Sessions:
        """Read transactions."""
        return self.database.readers


def runtime_of(request: Request) -> Runtime:
    """The runtime of the application that answers this request."""
    return cast("Runtime", request.app.state.runtime)


RuntimeDep = Annotated[Runtime, Depends(runtime_of)]
