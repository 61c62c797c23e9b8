"""When a sidecar's serving lease has certainly run out, by this process's own clock.

A sidecar's lease runs from the moment it sent its question, so it has run out once a whole
lease has passed since the question was answered. That moment is noted inside the lease's own
transaction, which nobody's revocation can overlap (`service.log.store.shared_head`), under
the number that the transaction gave to the lease.

A revocation asks under its own lock for the lease with the number that it reads there. If this
process granted that one, it knows when; else (another process did, or this one before it was
restarted) the lease was granted before now, and has run out a whole lease from now. So a
revocation always completes within one lease, and a sidecar that is long gone delays none.
"""

from __future__ import annotations

from dataclasses import dataclass

from strongroom.clock import Clock


@dataclass(frozen=True, slots=True)
class _Known:
    number: int
    expires_ns: int


class LeaseExpiry:
    """Used from the event loop only. Times are nanoseconds of the boot clock."""

    def __init__(self, lease_s: float, clock: Clock) -> None:
        self.lease_ns = int(lease_s * 1_000_000_000)
        self.clock = clock
        self._known: dict[str, _Known] = {}

    def granted(self, sidecar: str, number: int) -> None:
        """Lease `number` is being granted: inside its transaction, before its commit."""
        self._known[sidecar] = _Known(number, self.clock() + self.lease_ns)

    def expires_ns(self, sidecar: str, number: int) -> int:
        """When lease `number`, the last one, has run out: under a lock against further ones."""
        now_ns = self.clock()
        if number == 0:
            return now_ns
        known = self._known.get(sidecar)
        if known is None or known.number != number:
            known = self._known[sidecar] = _Known(number, now_ns + self.lease_ns)
        return min(known.expires_ns, now_ns + self.lease_ns)
