"""Turns on a shared queue, fair by tenant: who floods it waits for itself.

    async with fair.turn(tenant, nbytes):
        await workers.run(...)

A pool of threads takes its jobs first come, first served, so that one tenant's thousand jobs
stand before another's single one. `Fair` stands before such a pool and lets in only as many
jobs as keep it busy; the others wait here, by tenant. Rules:
- Start-time fair queueing (Goyal, Vin and Cheng, 1996): a job begins at the later of the virtual
  time and the end of its tenant's job before, and ends its cost over its tenant's weight later;
  the job that begins first goes first. The virtual time is the beginning of the job let in last.
- Work-conserving: while a slot is free, nobody waits.
- Nobody starves: a job that waits keeps its place in virtual time, which every other job moves
  forward. Between two tenants that both wait, the cost served over weight differs by no more
  than the largest job of each.
- A tenant gathers no credit while it is away, and owes nothing for a job that it cancelled.
- What waits is bounded. When it is full the tenant with most waiting for its weight loses its
  newest job (`Overloaded`): a flood never takes another's place in the queue.
- A small job costs at least `COST_BYTES_MIN`: a thousand of them are not free.

All on the event loop's thread. Never enter a turn of a `Fair` inside another of the same one.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

from strongroom.errors import Overloaded
from strongroom.identity import ComponentId

COST_BYTES_MIN: Final = 64 * 1024
_WEIGHT_MIN: Final = 1e-6
_FLOWS_KEPT: Final = 1024


@dataclass(frozen=True, slots=True)
class FairStatistics:
    """Counters since start, and gauges now."""

    name: str
    slots: int
    in_turn: int
    waiting: int
    waiting_max: int
    tenants_waiting: int
    turns: int
    refused: int


def together(queues: Sequence[FairStatistics]) -> FairStatistics:
    """Several queues as one, under the first one's name; tenants as in the longest."""
    return FairStatistics(
        name=queues[0].name,
        slots=sum(queue.slots for queue in queues),
        in_turn=sum(queue.in_turn for queue in queues),
        waiting=sum(queue.waiting for queue in queues),
        waiting_max=sum(queue.waiting_max for queue in queues),
        tenants_waiting=max(queue.tenants_waiting for queue in queues),
        turns=sum(queue.turns for queue in queues),
        refused=sum(queue.refused for queue in queues),
    )


@dataclass(slots=True, eq=False)
class _Waiter:
    cost: int
    let_in: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class _Flow:
    """One tenant's jobs, oldest first. `begins` is when the first of them would begin."""

    finish: float = 0.0
    begins: float = 0.0
    ticket: int = -1
    """Of its entry in the heap; an entry with another ticket is stale."""
    waiting: OrderedDict[_Waiter, None] = field(default_factory=OrderedDict)


Weight = Callable[[ComponentId], float]


def equal_weights(_: ComponentId) -> float:
    """Every tenant counts the same."""
    return 1.0


class Fair:
    """Lets in `slots` jobs at a time; up to `waiting_max` wait."""

    def __init__(
        self,
        name: str,
        slots: int,
        *,
        waiting_max: int,
        weight: Weight = equal_weights,
    ) -> None:
        self.name = name
        self._slots = slots
        self._waiting_max = waiting_max
        self._weight = weight
        self._flows: dict[ComponentId, _Flow] = {}
        self._heap: list[tuple[float, int, ComponentId]] = []
        self._tickets = itertools.count()
        self._sweep_at = _FLOWS_KEPT
        self._virtual = 0.0
        self._in_turn = 0
        self._waiting = 0
        self._turns = 0
        self._refused = 0

    def turn(self, tenant: ComponentId, nbytes: int) -> AbstractAsyncContextManager[None]:
        """A turn for one job of `tenant` that moves `nbytes`.

        Entering raises `Overloaded` when the queue is full on this tenant's account. A turn that
        is cancelled while it waits leaves everything as it was.
        """
        return _Turn(self, tenant, max(nbytes, COST_BYTES_MIN))

    async def begin(self, tenant: ComponentId, nbytes: int) -> None:
        """Enter a turn that `end` ends: for whoever ends it elsewhere than where it began."""
        await self._enter(tenant, max(nbytes, COST_BYTES_MIN))

    def begin_now(self, tenant: ComponentId, nbytes: int) -> bool:
        """`begin` where that does not wait; false, with nothing begun, where it would."""
        if self._in_turn >= self._slots or self._waiting:
            return False
        flow = self._flow(tenant)
        self._let_in(tenant, flow, max(self._virtual, flow.finish), max(nbytes, COST_BYTES_MIN))
        return True

    def end(self) -> None:
        """A turn that was begun is over."""
        self._leave()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Within a turn whose job waits for something else: its slot is another's meanwhile.

        Afterwards it has it back without waiting, where need be beyond `slots`.
        """
        self._leave()
        try:
            yield
        finally:
            self._in_turn += 1

    @property
    def waiting(self) -> int:
        """Jobs that wait for their turn."""
        return self._waiting

    @property
    def in_turn(self) -> int:
        """Jobs that have it."""
        return self._in_turn

    def statistics(self) -> FairStatistics:
        """A frozen snapshot."""
        return FairStatistics(
            name=self.name,
            slots=self._slots,
            in_turn=self._in_turn,
            waiting=self._waiting,
            waiting_max=self._waiting_max,
            tenants_waiting=sum(1 for flow in self._flows.values() if flow.waiting),
            turns=self._turns,
            refused=self._refused,
        )

    async def _enter(self, tenant: ComponentId, cost: int) -> None:
        if self.begin_now(tenant, cost):
            return
        flow = self._flow(tenant)
        if self._waiting >= self._waiting_max:
            self._push_out(tenant, flow)
        waiter = _Waiter(cost, asyncio.get_running_loop().create_future())
        flow.waiting[waiter] = None
        self._waiting += 1
        if len(flow.waiting) == 1:
            self._line_up(tenant, flow, max(self._virtual, flow.finish))
        try:
            await waiter.let_in
        except asyncio.CancelledError:
            if waiter in flow.waiting:
                del flow.waiting[waiter]
                self._waiting -= 1
            elif not waiter.let_in.cancelled() and waiter.let_in.exception() is None:
                self._leave()  # it got its turn in the very moment: the next one has it
            raise

    def _leave(self) -> None:
        self._in_turn -= 1
        while self._in_turn < self._slots and self._waiting:
            begins, ticket, tenant = heapq.heappop(self._heap)
            flow = self._flows.get(tenant)
            if flow is None or flow.ticket != ticket or not flow.waiting:
                continue  # stale: whoever waited there was cancelled or pushed out
            waiter, _ = flow.waiting.popitem(last=False)
            self._waiting -= 1
            cancelled = waiter.let_in.cancelled()  # and has not run since
            if not cancelled:
                self._let_in(tenant, flow, begins, waiter.cost)
                waiter.let_in.set_result(None)
            if flow.waiting:
                self._line_up(tenant, flow, begins if cancelled else flow.finish)
        if not self._in_turn:
            # Nobody is here, so nobody is owed anything.
            self._flows.clear()
            self._heap.clear()
            self._virtual = 0.0

    def _let_in(self, tenant: ComponentId, flow: _Flow, begins: float, cost: int) -> None:
        self._in_turn += 1
        self._turns += 1
        self._virtual = max(self._virtual, begins)
        flow.finish = begins + cost / max(self._weight(tenant), _WEIGHT_MIN)

    def _line_up(self, tenant: ComponentId, flow: _Flow, begins: float) -> None:
        flow.begins = begins
        flow.ticket = next(self._tickets)
        heapq.heappush(self._heap, (begins, flow.ticket, tenant))

    def _push_out(self, tenant: ComponentId, flow: _Flow) -> None:
        """Make room for one of `tenant`'s, or raise `Overloaded` when it waits most itself."""
        error = Overloaded(f"{self.name}: the queue is full", limit=self._waiting_max)
        longest = max(self._flows, key=lambda name: self._length(name, self._flows[name], 0))
        if self._length(tenant, flow, 1) >= self._length(longest, self._flows[longest], 0):
            self._refused += 1
            raise error
        waiter, _ = self._flows[longest].waiting.popitem(last=True)
        self._waiting -= 1
        if not waiter.let_in.cancelled():
            self._refused += 1
            waiter.let_in.set_exception(error)

    def _length(self, tenant: ComponentId, flow: _Flow, more: int) -> float:
        return (len(flow.waiting) + more) / max(self._weight(tenant), _WEIGHT_MIN)

    def _flow(self, tenant: ComponentId) -> _Flow:
        flow = self._flows.get(tenant)
        if flow is None:
            if len(self._flows) >= self._sweep_at:
                self._sweep()
            flow = self._flows[tenant] = _Flow()
        return flow

    def _sweep(self) -> None:
        """Forget tenants of which nothing waits. Those ahead of the virtual time are forgiven the
        rest of one job, which among so many tenants is little.
        """
        self._flows = {tenant: flow for tenant, flow in self._flows.items() if flow.waiting}
        self._sweep_at = max(_FLOWS_KEPT, 2 * len(self._flows))


class _Turn(AbstractAsyncContextManager[None]):
    """A class, and not a generator: this is entered for every job."""

    __slots__ = ("_cost", "_fair", "_tenant")

    def __init__(self, fair: Fair, tenant: ComponentId, cost: int) -> None:
        self._fair = fair
        self._tenant = tenant
        self._cost = cost

    async def __aenter__(self) -> None:
        await self._fair._enter(self._tenant, self._cost)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._fair._leave()
