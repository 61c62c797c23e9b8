"""What the service remembers of its sidecars between two calls, in memory only."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from service.log.kick import Kick
from service.sidecars.acks import Settle
from service.sidecars.expiry import LeaseExpiry
from service.sidecars.proof import NonceCache
from strongroom.clock import Clock

STREAMS_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class SidecarDesk:
    """Nonces used, leases granted, the bell of acknowledgements, and room for streams."""

    nonces: NonceCache
    expiry: LeaseExpiry
    acks: Kick
    settle: Settle
    """What an acknowledgement does besides; `service.revocation.settle`."""
    streams: asyncio.Semaphore
    followers: dict[str, object]
    """By sidecar, its newest stream: an older one ends."""
    deadlines: dict[str, dict[str, int]]
    """By revocation, when each sidecar that has not acknowledged is out of its lease."""


def open_desk(serving_lease_s: float, clock: Clock, settle: Settle) -> SidecarDesk:
    """A desk that knows nothing yet."""
    return SidecarDesk(
        NonceCache(clock),
        LeaseExpiry(serving_lease_s, clock),
        Kick(),
        settle,
        asyncio.Semaphore(STREAMS_MAX),
        {},
        {},
    )
