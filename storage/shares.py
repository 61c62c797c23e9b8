"""What each tenant has of a tier: bytes in use, a guaranteed share, a weight and a hard cap.

Rules:
- A block is charged when its room is reserved and credited when its room is given back, so that
  no path forgets. What a restart finds on disk is charged at once: a cold table would let a
  tenant take everything, or evict everybody.
- Where room is needed, the tenant furthest above its share pays first: `excess` is what it has
  beyond its guarantee, over its weight. One that is above its cap comes before all others.
- A tenant at or below its guarantee loses nothing to another (`may_lose`). Guarantees that add
  up to more than `GUARANTEED_MAX` of the tier are scaled down together: what is left is for
  everybody by weight, so that nobody starves.
- A change of cap, guarantee or weight moves no block. What is above stays and is displaced step
  by step, as room is needed. Nothing more comes in above a cap: `QuotaExceeded`, counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from strongroom.errors import Misuse, QuotaExceeded
from strongroom.identity import ComponentId

GUARANTEED_MAX: Final = 0.9
"""Of a tier's bytes, the most that all guarantees together may bind."""

_ABOVE_CAP: Final = 2.0**62
"""Added to the excess of a tenant above its cap: more than any tier has bytes."""


@dataclass(frozen=True, slots=True)
class Share:
    """One tenant's part of a tier. Without a cap the tier's eviction is the bound."""

    guaranteed_bytes: int = 0
    weight: float = 1.0
    cap_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.guaranteed_bytes < 0:
            raise Misuse("a guarantee is not negative", field="guaranteed_bytes")
        if not 0 < self.weight < math.inf:
            raise Misuse("a weight is positive and finite", field="weight")
        if self.cap_bytes is not None and self.cap_bytes < 0:
            raise Misuse("a cap is not negative", field="cap_bytes")


_EQUAL: Final = Share()


class Shares:
    """Bytes in use and shares, by tenant, of one tier of `capacity_bytes` (None: not known)."""

    def __init__(
        self,
        default_bytes: int | None = None,
        *,
        capacity_bytes: int | None = None,
        shares: Mapping[ComponentId, Share] | None = None,
    ) -> None:
        self._default_bytes = default_bytes
        self._capacity_bytes = capacity_bytes
        self._caps: dict[ComponentId, int] = {}
        self._guaranteed: dict[ComponentId, int] = {}
        self._weights: dict[ComponentId, float] = {}
        self._scale = 1.0
        self._used: dict[ComponentId, int] = {}
        self._refusals: Counter[ComponentId] = Counter()
        self.refusals = 0
        for tenant, share in (shares or {}).items():
            self.set_share(tenant, share.guaranteed_bytes, share.weight)
            if share.cap_bytes is not None:
                self.set_cap(tenant, share.cap_bytes)

    # Settings, which may change at any time

    def set_cap(self, tenant: ComponentId, nbytes: int) -> None:
        """Change a tenant's cap. What is above it stays, and nothing more comes in."""
        self._caps[tenant] = Share(cap_bytes=nbytes).cap_bytes or 0

    def set_share(self, tenant: ComponentId, guaranteed_bytes: int, weight: float = 1.0) -> None:
        """Change a tenant's guarantee and weight. No block moves by that."""
        share = Share(guaranteed_bytes, weight)
        self._guaranteed[tenant] = share.guaranteed_bytes
        self._weights[tenant] = share.weight
        bound = sum(self._guaranteed.values())
        most = math.inf if self._capacity_bytes is None else GUARANTEED_MAX * self._capacity_bytes
        self._scale = min(1.0, most / bound) if bound else 1.0

    def cap(self, tenant: ComponentId) -> int | None:
        """The tenant's cap in bytes; None is none."""
        return self._caps.get(tenant, self._default_bytes)

    def guaranteed(self, tenant: ComponentId) -> int:
        """The bytes that nobody else takes from it: scaled, and never above its cap."""
        nbytes = int(self._guaranteed.get(tenant, 0) * self._scale)
        cap = self.cap(tenant)
        return nbytes if cap is None else min(nbytes, cap)

    def leave_guarantees(self, stuck: Mapping[ComponentId, int]) -> bool:
        """Whether every guarantee could still be kept if these bytes stayed for long."""
        if self._capacity_bytes is None or not self._guaranteed:
            return True
        bound = sum(self.guaranteed(name) for name in self._guaranteed)
        beyond = sum(max(0, nbytes - self.guaranteed(name)) for name, nbytes in stuck.items())
        return beyond <= self._capacity_bytes - bound

    def weight(self, tenant: ComponentId) -> float:
        """Its part of what is not guaranteed, against the others' weights."""
        return self._weights.get(tenant, _EQUAL.weight)

    # Accounts

    def check(self, tenant: ComponentId, nbytes: int, *, given_up: int = 0) -> None:
        """Raise `QuotaExceeded`, counted, if `nbytes` more would be above the cap.

        `given_up` bytes of its own made way for these: a tenant that is above a cap which was
        lowered goes on like that, and never has more than before.
        """
        cap = self.cap(tenant)
        if cap is None or self._used.get(tenant, 0) + nbytes <= cap:
            return
        if nbytes > cap or given_up < nbytes:
            self.refusals += 1
            self._refusals[tenant] += 1
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

    def refused(self) -> Mapping[ComponentId, int]:
        """How often each tenant was refused above its cap."""
        return dict(self._refusals)

    # Who pays

    def excess(self, tenant: ComponentId, given_up: int = 0) -> float:
        """How far above its share a tenant is: the highest pays first, one at 0 or below never.

        `given_up` bytes of what it has are spoken for already.
        """
        used = self._used.get(tenant, 0) - given_up
        above = (used - self.guaranteed(tenant)) / self.weight(tenant)
        cap = self.cap(tenant)
        return above if cap is None or used <= cap else above + _ABOVE_CAP

    def may_lose(self, tenant: ComponentId, nbytes: int) -> bool:
        """Whether another may take so much from it: its guarantee is still whole after that."""
        return self._used.get(tenant, 0) - nbytes >= self.guaranteed(tenant)
