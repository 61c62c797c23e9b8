"""How many bytes may be written to flash in a day: a token bucket that refills continuously.

The bucket holds one hour's share, so that any 24 hours see at most 25/24 of the budget. Whoever
finds it above zero may write, whatever the length, and what is written is taken out: a record
longer than an hour's share waits for its turn like any other and is not refused for ever.
While the bucket is more than half empty, a tenant that has lately written more than its part by
weight is refused: the rest is for the others, so that a flood does not take all of it. What is
refilled goes on to whoever asks, so nothing is lost by that.
Moving records inside the tier takes from it too, and is never refused: it makes room.
"""

from __future__ import annotations

from collections.abc import Callable

from storage.lately import Lately
from strongroom.clock import Clock
from strongroom.errors import Overloaded
from strongroom.identity import ComponentId

_DAY_NS = 24 * 3600 * 10**9
_BURSTS_A_DAY = 24


class WriteBudget:
    """`bytes_per_day`; None is no limit."""

    def __init__(
        self,
        clock: Clock,
        bytes_per_day: int | None,
        weight: Callable[[ComponentId], float],
    ) -> None:
        self._clock = clock
        self._bytes_per_day = bytes_per_day
        self._left = 0.0 if bytes_per_day is None else bytes_per_day / _BURSTS_A_DAY
        self._filled_ns = clock()
        self._lately = Lately(weight)
        """Bytes that each tenant wrote, fading as the bucket fills."""
        self.refusals = 0
        self.written_bytes = 0

    def check(self, tenant: ComponentId) -> None:
        """Raise `Overloaded`, counted, while the budget is used up."""
        if self._bytes_per_day is None:
            return
        now = self._clock()
        # A clock that steps back fills nothing, and goes on from where it is.
        passed_ns = max(0, now - self._filled_ns)
        self._filled_ns = now
        full = self._bytes_per_day / _BURSTS_A_DAY
        filled = passed_ns * self._bytes_per_day / _DAY_NS
        self._left = min(full, self._left + filled)
        self._lately.fade(min(1.0, filled / full))
        if self._left <= 0 or (self._left < full / 2 and self._lately.is_ahead(tenant)):
            self.refusals += 1
            raise Overloaded(
                "the NVMe tier's write budget is used up for now",
                field="nvme_write_bytes_per_day",
                limit=self._bytes_per_day,
            )

    def count(self, tenant: ComponentId, nbytes: int) -> None:
        """These bytes, which are spent when they go out, are this tenant's."""
        if self._bytes_per_day is not None:
            self._lately.count(tenant, nbytes)

    def spend(self, nbytes: int) -> None:
        """Count bytes that go out."""
        self.written_bytes += nbytes
        self._left -= nbytes
