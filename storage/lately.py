"""What each tenant has had lately of something that refills, and who is ahead of its part of it.

It fades as the thing refills. A part is by weight, among all that had something lately and, where
`newcomer` asks for it, one that has not come yet: then whoever is alone is ahead too, and what is
kept from those that are ahead is there for the next one to come.
"""

from __future__ import annotations

from typing import Final

from storage.fair import Weight, equal_weights
from strongroom.identity import ComponentId

_LEAST: Final = 1e-6
"""Less than this part of what all had is forgotten."""
_EVEN: Final = 1.0 + 1e-6
"""So that rounding puts nobody ahead who is alone."""


class Lately:
    """`None` stands for whoever is not known."""

    def __init__(self, weight: Weight = equal_weights, *, newcomer: bool = False) -> None:
        self._weight = weight
        self._newcomers = float(newcomer)
        self._had: dict[ComponentId | None, float] = {}
        self._sum = 0.0

    def fade(self, part: float) -> None:
        """So much of what was had is not lately any more, from 0 to 1."""
        if part > 0.0:
            left, least = 1.0 - part, _LEAST * self._sum
            self._had = {who: had * left for who, had in self._had.items() if had > least}
            self._sum = sum(self._had.values())

    def count(self, tenant: ComponentId | None, amount: float) -> None:
        """A tenant has had so much."""
        self._had[tenant] = self._had.get(tenant, 0.0) + amount
        self._sum += amount

    def is_ahead(self, tenant: ComponentId | None) -> bool:
        """Whether it has had more than its part."""
        weights = sum(self._of(one) for one in self._had) + self._newcomers
        return self._had.get(tenant, 0.0) * weights > self._sum * self._of(tenant) * _EVEN

    def _of(self, tenant: ComponentId | None) -> float:
        return 1.0 if tenant is None else self._weight(tenant)
