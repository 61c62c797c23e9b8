"""Whether prefetching is worth its reads, for each tenant and for the node above them.

Rules:
- Every tenant has a gate of its own (`sidecar.prefetch.waste`): who wastes stops its own alone.
- The node's gate stops all. It needs `NODE_TIMES` as many blocks to judge, and hears only of
  tenants whose own gate is open. One tenant's waste counts as half of the limit at most, however
  large its blocks are: so neither one tenant nor two can trip it, and many that waste a little
  each still do.
- The node's probe is shared: a tenant has a `NODE_TIMES`th of its blocks out at a time, and its
  waste counts there as above. So no tenant alone can keep the node stopped.
- A tenant of which nothing is under way and nothing has settled lately is forgotten while its gate
  is open. Others are as many as the blocks that are on their way, and those that cool down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from sidecar.prefetch.waste import (
    Admitted,
    CoolingDown,
    Flowing,
    Parts,
    Probing,
    WasteGate,
    WasteSettings,
    WasteState,
)
from strongroom.clock import Clock
from strongroom.identity import ComponentId

NODE_TIMES: Final = 4
_KEPT_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class Passed:
    """Goes with a block until it has settled."""

    tenant: ComponentId
    own: Admitted
    node: Admitted


@dataclass(slots=True)
class _Tenant:
    gate: WasteGate
    out: int = 0
    """Blocks that have not settled."""


def _tell_nobody(_: ComponentId | None) -> None:
    """Nothing runs that would have to stop."""


class WasteGates:
    """Admits blocks and hears what became of them. Used on the event loop's thread."""

    def __init__(
        self,
        settings: WasteSettings,
        clock: Clock,
        tripped: Callable[[ComponentId | None], None] = _tell_nobody,
    ) -> None:
        """`tripped` hears whose gate has closed; None is the node's."""
        self._settings = settings
        self._clock = clock
        self._tripped = tripped
        self._trips_gone = 0
        self._tenants: dict[ComponentId, _Tenant] = {}
        blocks_min = NODE_TIMES * settings.blocks_min
        node = replace(settings, blocks_min=blocks_min)
        parts = Parts(settings.limit / 2, max(1, settings.probe_blocks // NODE_TIMES))
        self._node = WasteGate(node, clock, partial(tripped, None), parts)

    def stopped(self, tenant: ComponentId) -> bool:
        """Whether nothing of this tenant is admitted now."""
        mine = self._tenants.get(tenant)
        gates = [self._node] if mine is None else [self._node, mine.gate]
        return any(isinstance(gate.state, CoolingDown) for gate in gates)

    def admit(self, tenant: ComponentId) -> Passed | None:
        """Whether one more block of this tenant may be issued now."""
        mine = self._tenants.get(tenant) or self._new(tenant)
        own = mine.gate.admit()
        if own is None:
            return None
        node = self._node.admit(tenant)
        if node is None:
            mine.gate.withdrawn(own)
            return None
        mine.out += 1
        return Passed(tenant, own, node)

    def used(self, passed: Passed, nbytes: int) -> None:
        """A load has read the block."""
        if self._is_heard(passed):
            self._node.used(passed.node, nbytes)
        self._settled(passed).used(passed.own, nbytes)

    def wasted(self, passed: Passed, nbytes: int) -> None:
        """The block is gone, or was given up, unread."""
        if self._is_heard(passed):
            self._node.wasted(passed.node, nbytes)
        self._settled(passed).wasted(passed.own, nbytes)

    def withdrawn(self, passed: Passed) -> None:
        """The block never arrived: it says nothing about waste."""
        self._node.withdrawn(passed.node)
        self._settled(passed).withdrawn(passed.own)

    @property
    def ratio(self) -> float:
        """Wasted over settled bytes of all that the node's gate has heard of lately."""
        return self._node.ratio

    @property
    def trips(self) -> int:
        """Of any gate, since start."""
        own = sum(one.gate.trips for one in self._tenants.values())
        return self._node.trips + own + self._trips_gone

    @property
    def tenants_stopped(self) -> int:
        """Whose own gate admits nothing, or no more than a probe."""
        return sum(not isinstance(one.gate.state, Flowing) for one in self._tenants.values())

    @property
    def state(self) -> WasteState:
        """The node's; while that is open, the worst of any tenant's."""
        states = [one.gate.state for one in self._tenants.values()]
        for kind in (CoolingDown, Probing):
            for state in (self._node.state, *states):
                if isinstance(state, kind):
                    return state
        return Flowing()

    def _is_heard(self, passed: Passed) -> bool:
        """Whether it says something about the node, of which a probe always does."""
        own = self._tenants[passed.tenant].gate
        return bool(passed.node.probe) or isinstance(own.state, Flowing)

    def _settled(self, passed: Passed) -> WasteGate:
        mine = self._tenants[passed.tenant]
        mine.out -= 1
        return mine.gate

    def _new(self, tenant: ComponentId) -> _Tenant:
        if len(self._tenants) >= _KEPT_MAX:
            self._forget()
        gate = WasteGate(self._settings, self._clock, partial(self._tripped, tenant))
        mine = self._tenants[tenant] = _Tenant(gate)
        return mine

    def _forget(self) -> None:
        for tenant, one in tuple(self._tenants.items()):
            if not one.out and isinstance(one.gate.state, Flowing) and not one.gate.ratio:
                self._trips_gone += one.gate.trips
                del self._tenants[tenant]
