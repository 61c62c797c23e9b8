"""Evicting from one region what it takes to make it worth emptying, and from no other.

- The tier's coldest blocks are looked at first: the region that they empty most is tried first.
- In that region the coldest there leave, in the index's order (`storage.shortlist`), until it is
  thin enough. What a whole region has coldest is cold in the tier as well, and blocks of other
  regions would have left for nothing.
- What would leave is known before anything does. Where it is not enough in the first few
  regions, the one that is nearest to it is thinned, which makes leaves of parents elsewhere.
- Nothing here holds the loop for longer than a step of `Pace`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from storage.block import BlockAddress
from storage.tiers.catalogue import Catalogue
from storage.tiers.devices import Devices
from storage.tiers.flow import Pace
from storage.tiers.live import Live, live_in
from storage.tiers.regions import Region
from strongroom.identity import ComponentId

_LOOK_MAX = 1024
"""Candidates for eviction that are looked at to choose a region."""
_TRIES_MAX = 4
"""Regions that are read to find one that can be thinned."""


@dataclass(slots=True)
class Thinned:
    """A region, and what lives there after its thinning."""

    region: Region
    live: list[Live]


@dataclass(slots=True)
class _Plan:
    """What would leave a region, and how many bytes would be left there."""

    region: Region
    live: list[Live]
    left: int
    goes: list[Live] = field(default_factory=list)


class Thinning:
    """`quiet` gives the regions that may be emptied now."""

    def __init__(
        self, catalogue: Catalogue, devices: Devices, quiet: Callable[[], Iterable[Region]]
    ) -> None:
        self._catalogue = catalogue
        self._devices = devices
        self._quiet = quiet

    async def thinned(self, limit: int, writer: ComponentId, keep: BlockAddress) -> Thinned | None:
        """Evict from one region until `limit` bytes live in it, or as near as it gets.

        `writer` is the tenant that room is made for, `keep` its block's parent. None when
        nothing may leave.
        """
        best: _Plan | None = None
        for region in await self._coldest(limit, writer, keep):
            plan = await self._plan(region, limit, writer, keep)
            if plan.goes and (best is None or plan.left < best.left):
                best = plan
            if plan.left <= limit:
                break
        return None if best is None else await self._carry_out(best)

    async def _coldest(self, limit: int, writer: ComponentId, keep: BlockAddress) -> list[Region]:
        """Regions to try: first those that the tier's coldest blocks empty most."""
        quiet = {region.slot: region for region in self._quiet()}
        left = {slot: region.live_bytes for slot, region in quiet.items()}
        may_any = False
        pace = Pace()
        with contextlib.closing(self._catalogue.index.victims(writer=writer, keep=keep)) as victims:
            for address in itertools.islice(victims, _LOOK_MAX):
                may_any = True
                row = self._catalogue.index.get(address)
                if row is None:
                    continue
                slot = self._catalogue.where(row.place)[0].slot
                if slot in left:
                    left[slot] -= row.place.nbytes
                    if left[slot] <= limit:
                        break
                await pace.keep()
        if not may_any:
            return []
        slots = sorted(left, key=lambda slot: (left[slot], quiet[slot].filled))
        return [quiet[slot] for slot in slots[:_TRIES_MAX]]

    async def _plan(
        self, region: Region, limit: int, writer: ComponentId, keep: BlockAddress
    ) -> _Plan:
        live = await live_in(region, self._catalogue, self._devices)
        index = self._catalogue.index
        shortlist = index.shortlist(self._catalogue.shares, writer, keep)
        by_slot: dict[int, Live] = {}
        pace = Pace()
        for one in live:
            slot = index.slot_of(one.address)
            if slot is not None:
                by_slot[slot] = one
                shortlist.add(slot)
            await pace.keep()
        plan = _Plan(region, live, region.live_bytes)
        for slot in shortlist:
            plan.goes.append(by_slot[slot])
            plan.left -= by_slot[slot].place.nbytes
            if plan.left <= limit:
                break
            await pace.keep()
        return plan

    async def _carry_out(self, plan: _Plan) -> Thinned:
        pace = Pace()
        for one in plan.goes:
            if self._catalogue.is_at(one.address, one.place):
                self._catalogue.evict(one.address)
            await pace.keep()
        live = [one for one in plan.live if self._catalogue.is_at(one.address, one.place)]
        return Thinned(plan.region, live)
