"""A tenant's bytes in one tier, and the most that it may have there.

A block is charged when its room is reserved and credited when its room is given back, so that
no path forgets. What a restart finds on disk is charged at once: a cold table would let a
tenant take everything, or evict everybody.
"""

from __future__ import annotations

from collections.abc import Mapping

from strongroom.errors import QuotaExceeded
from strongroom.identity import ComponentId


class Quota:
    """Bytes in use and hard caps, by tenant. Without a cap the tier's eviction is the bound."""

    def __init__(self, default_bytes: int | None = None) -> None:
        self._default_bytes = default_bytes
        self._caps: dict[ComponentId, int] = {}
        self._used: dict[ComponentId, int] = {}
        self.refusals = 0

    def set_cap(self, tenant: ComponentId, nbytes: int) -> None:
        """Change a tenant's cap. What is above it stays, and nothing more comes in."""
        self._caps[tenant] = nbytes

    def cap(self, tenant: ComponentId) -> int | None:
        """The tenant's cap in bytes; None is none."""
        return self._caps.get(tenant, self._default_bytes)

    def check(self, tenant: ComponentId, nbytes: int) -> None:
        """Raise `QuotaExceeded`, counted, if `nbytes` more would be above the cap."""
        cap = self.cap(tenant)
        if cap is not None and self._used.get(tenant, 0) + nbytes > cap:
            self.refusals += 1
            raise QuotaExceeded("the tenant's quota in this tier is used up", limit=cap)

    def charge(self, tenant: ComponentId, nbytes: int) -> None:
        """Count bytes as used, whatever the cap says (recovery charges what it finds)."""
        self._used[tenant] = self._used.get(tenant, 0) + nbytes

    def credit(self, tenant: ComponentId, nbytes: int) -> None:
        """Count bytes as free again."""
        left = self._used[tenant] - nbytes
        if left < 0:
            raise ValueError("more bytes were given back than were charged")
        if left:
            self._used[tenant] = left
        else:
            del self._used[tenant]

    def used_by(self, tenant: ComponentId) -> int:
        """Bytes in use by one tenant."""
        return self._used.get(tenant, 0)

    def used(self) -> Mapping[ComponentId, int]:
        """Bytes in use, by tenant."""
        return dict(self._used)
