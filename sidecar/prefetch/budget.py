"""Reservations of prefetching: how many bytes may be on their way or lie unread, and whose.

Rules:
- A reservation is made before a block is issued and given back once: when a load has read the
  block, when it is gone unread, or when it never arrived. Nothing else changes a count.
- Bytes are bounded for each tenant and overall. What does not fit is refused and counted; it is
  never waited for, since the room comes free only when somebody reads.
- The counts are kept beside the reservations and compared with them by `faults`. A reservation
  that nobody can give back any more would end all prefetching in silence: whoever owns the
  reservations names those that are still wanted, and `reconcile` takes the rest back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from strongroom.errors import Misuse
from strongroom.identity import ComponentId


class Denial(StrEnum):
    """Why a prefetch, or a block of one, was not begun."""

    BUDGET = "budget"
    TENANT_BUDGET = "tenant_budget"
    WASTE = "waste"
    PAUSED = "paused"
    PENDING = "pending"
    """Too many prefetches are planned already."""
    TENANT_PENDING = "tenant_pending"
    """Too many of this tenant are, or too many hints."""
    LATE = "late"
    """Expected to start beyond the horizon of a hint."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room for one block. Equal to no other one."""

    number: int
    tenant: ComponentId
    nbytes: int


@dataclass(frozen=True, slots=True)
class Denied:
    """Nothing was reserved."""

    reason: Denial


class Budget:
    """Counts bytes, overall and by tenant. Used on the event loop's thread."""

    def __init__(self, total_bytes: int, tenant_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.tenant_bytes = tenant_bytes
        self._open: dict[int, Reservation] = {}
        self._used_bytes = 0
        self._by_tenant: dict[ComponentId, int] = {}
        self._next = 1

    def reserve(self, tenant: ComponentId, nbytes: int) -> Reservation | Denied:
        """Room for `nbytes`, if both bounds allow it."""
        if self._by_tenant.get(tenant, 0) + nbytes > self.tenant_bytes:
            return Denied(Denial.TENANT_BUDGET)
        if self._used_bytes + nbytes > self.total_bytes:
            return Denied(Denial.BUDGET)
        made = Reservation(self._next, tenant, nbytes)
        self._next += 1
        self._open[made.number] = made
        self._used_bytes += nbytes
        self._by_tenant[tenant] = self._by_tenant.get(tenant, 0) + nbytes
        return made

    def release(self, reservation: Reservation) -> None:
        """Give it back. Raises `Misuse` when it was given back already."""
        if self._open.pop(reservation.number, None) != reservation:
            raise Misuse("a reservation is given back once", field="reservation")
        self._used_bytes -= reservation.nbytes
        left = self._by_tenant[reservation.tenant] - reservation.nbytes
        if left:
            self._by_tenant[reservation.tenant] = left
        else:
            del self._by_tenant[reservation.tenant]

    def reconcile(self, wanted: Collection[Reservation]) -> int:
        """Give back what nobody in `wanted` holds any more; returns how many those were."""
        numbers = {reservation.number for reservation in wanted}
        leaked = [found for number, found in self._open.items() if number not in numbers]
        for reservation in leaked:
            self.release(reservation)
        return len(leaked)

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def used(self) -> Mapping[ComponentId, int]:
        """Reserved bytes, by tenant; a tenant without any is not listed."""
        return dict(self._by_tenant)

    def __len__(self) -> int:
        return len(self._open)

    def faults(self) -> tuple[str, ...]:
        """What does not add up; empty is the promise."""
        found = []
        by_tenant: dict[ComponentId, int] = {}
        for reservation in self._open.values():
            tenant = reservation.tenant
            by_tenant[tenant] = by_tenant.get(tenant, 0) + reservation.nbytes
        if by_tenant != self._by_tenant:
            found.append("the tenants' counts differ from the reservations")
        if sum(by_tenant.values()) != self._used_bytes:
            found.append("the overall count differs from the reservations")
        if self._used_bytes > self.total_bytes:
            found.append("more is reserved than may be overall")
        if any(used > self.tenant_bytes for used in by_tenant.values()):
            found.append("more is reserved than a tenant may have")
        return tuple(found)
