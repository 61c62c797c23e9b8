"""A queue that is left in start-time fair order by tenant; nothing in it waits by itself.

`storage.fair` stands before threads. This stands before whoever takes the next one: the same
order (Goyal, Vin and Cheng, 1996), where the queue's owner bounds it and asks for what is first.
Rules:
- Of one tenant's items the first that came is first. Between tenants the one goes first that would
  begin first in virtual time; in a tie, the one whose item came first.
- Between two tenants that both wait, what has left over weight differs by no more than the largest
  item of each.
- A tenant gathers no credit while nothing of it waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from storage.fair import Weight, equal_weights
from strongroom.identity import ComponentId

T = TypeVar("T")
_WEIGHT_MIN: Final = 1e-6
_FINISHED_KEPT: Final = 1024


@dataclass(slots=True)
class _Flow(Generic[T]):
    """One tenant's items with what they cost, and when the first of them begins."""

    begins: float
    came: int
    """Number of the first item, among all that ever came."""
    items: dict[T, tuple[int, int]] = field(default_factory=dict)
    """Cost and number of each."""


class FairQueue(Generic[T]):
    """Items are hashable, and in it once."""

    def __init__(self, weight: Weight = equal_weights) -> None:
        self._weight = weight
        self._flows: dict[ComponentId, _Flow[T]] = {}
        self._finished: dict[ComponentId, float] = {}
        """When what has left of a tenant ends; forgotten once that is over."""
        self._tenants: dict[T, ComponentId] = {}
        self._virtual = 0.0
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._tenants)

    def __contains__(self, item: T) -> bool:
        return item in self._tenants

    def __iter__(self) -> Iterator[T]:
        """In no promised order."""
        return iter(self._tenants)

    def add(self, item: T, tenant: ComponentId, cost: int) -> None:
        """It waits."""
        flow, number = self._flows.get(tenant), next(self._numbers)
        if flow is None:
            begins = max(self._virtual, self._finished.get(tenant, 0.0))
            flow = self._flows[tenant] = _Flow(begins, number)
        flow.items[item] = (cost, number)
        self._tenants[item] = tenant

    def first(self) -> T:
        """Whose turn it is. There must be one."""
        return next(iter(self._next()[1].items))

    def oldest(self) -> Iterator[T]:
        """What came first of each tenant: the item that came first of all is among them."""
        return (next(iter(flow.items)) for flow in self._flows.values())

    def take(self) -> T:
        """Whose turn it is leaves, and has had its turn. There must be one."""
        tenant, flow = self._next()
        item = next(iter(flow.items))
        cost, _ = flow.items[item]
        self._virtual = flow.begins
        flow.begins += cost / max(self._weight(tenant), _WEIGHT_MIN)
        self._finished[tenant] = flow.begins
        if len(self._finished) > _FINISHED_KEPT + len(self._flows):
            self._finished = {
                name: ends for name, ends in self._finished.items() if ends > self._virtual
            }
        self.discard(item)
        return item

    def discard(self, item: T) -> None:
        """It leaves without a turn, where it is here."""
        tenant = self._tenants.pop(item, None)
        if tenant is None:
            return
        flow = self._flows[tenant]
        del flow.items[item]
        if flow.items:
            flow.came = next(iter(flow.items.values()))[1]
            return
        del self._flows[tenant]
        if not self._flows:
            # Nobody waits, so nobody is owed anything.
            self._virtual = 0.0
            self._finished.clear()

    def _next(self) -> tuple[ComponentId, _Flow[T]]:
        return min(self._flows.items(), key=lambda pair: (pair[1].begins, pair[1].came))
