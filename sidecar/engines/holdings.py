"""How much of a bounded thing each tenant holds, so that one tenant never holds all of it.

- While there is some left, whoever asks may take.
- When it is full, a tenant may still take while it holds less than its part: the limit, split by
  weight among those that hold something and itself. So a tenant that comes last finds room, and
  one that is alone has the whole.
- Held in all are at most twice the limit, however many tenants there are.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from storage.fair import Weight, equal_weights
from strongroom.identity import ComponentId

_OVER: Final = 2


def _weight_of(weight: Weight, tenant: ComponentId | None) -> float:
    return 1.0 if tenant is None else weight(tenant)


class Holdings:
    """Used on the event loop's thread. `None` stands for whoever is not known yet."""

    def __init__(self, limit: int, weight: Weight = equal_weights) -> None:
        self._limit = limit
        self._weight = weight
        self._held: dict[ComponentId | None, int] = {}
        self._total = 0

    @property
    def total(self) -> int:
        """What all hold."""
        return self._total

    def held_by(self, tenant: ComponentId | None) -> int:
        """What one holds."""
        return self._held.get(tenant, 0)

    def take(self, tenant: ComponentId | None, amount: int = 1) -> bool:
        """Take so much; false, with nothing taken, when it is not the tenant's to take."""
        if self._total + amount > self._limit and not self._is_due(tenant, amount):
            return False
        self._total += amount
        self._held[tenant] = self._held.get(tenant, 0) + amount
        return True

    def give_back(self, tenant: ComponentId | None, amount: int = 1) -> None:
        """What was taken."""
        left = self._held[tenant] - amount
        self._total -= amount
        if left:
            self._held[tenant] = left
        else:
            del self._held[tenant]

    def _is_due(self, tenant: ComponentId | None, amount: int) -> bool:
        if self._total + amount > _OVER * self._limit:
            return False
        weights = {name: _weight_of(self._weight, name) for name in (*self._held, tenant)}
        part = self._limit * weights[tenant] / sum(weights.values())
        return self._held.get(tenant, 0) + amount <= max(part, 1)


class PerTenant:
    """At most `at_once` of each tenant's jobs run; its others wait, in order, and nobody else's do.

        async with limit.one(tenant):
            ...

    What waits is not bounded here.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._limits: dict[ComponentId | None, asyncio.Semaphore] = {}
        self._users: Counter[ComponentId | None] = Counter()

    def is_free(self, tenant: ComponentId | None) -> bool:
        """Whether one more of `tenant` would not wait."""
        return self._users[tenant] < self._at_once

    @asynccontextmanager
    async def one(self, tenant: ComponentId | None) -> AsyncIterator[None]:
        """One job of `tenant`; entering waits for its turn."""
        limit = self._limits.setdefault(tenant, asyncio.Semaphore(self._at_once))
        self._users[tenant] += 1
        try:
            async with limit:
                yield
        finally:
            self._users[tenant] -= 1
            if not self._users[tenant]:
                del self._users[tenant], self._limits[tenant]
