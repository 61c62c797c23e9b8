"""The log's end: room is taken in order, and bytes go out side by side.

- `take` hands out the next bytes of the open region. It is a step without an `await`; which
  region is open changes under the tier's writing lock only.
- `write` needs no lock: what was taken is its taker's alone. Neighbours go out in one system
  call, several calls at once, `queue_depth` at most.
- The tail is advanced first, so a write that fails half way leaves a torn record and never a
  shared one. What was not written whole is dead: its header is overwritten later.
- A spot keeps its region from being renewed until it is settled: not when its bytes are out,
  but when its record is in the index or dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from storage.header import HEADER_BYTES, Placement, write_placement
from storage.memory import aligned
from storage.tiers.budget import WriteBudget
from storage.tiers.coalesce import Piece, Span, coalesce
from storage.tiers.devices import Devices
from storage.tiers.flow import in_flight_at_most
from storage.tiers.limits import NvmeLimits
from storage.tiers.regions import REGION_HEADER_BYTES, Region
from strongroom.errors import StrongroomError


@dataclass(frozen=True, slots=True)
class Spot:
    """Room for one record, not visible yet. `order` tells its write from every other."""

    region: Region
    offset: int
    nbytes: int
    order: int
    priority: int | None


class LogWriter:
    """One log over all regions; one region is open at a time."""

    def __init__(self, devices: Devices, budget: WriteBudget, limits: NvmeLimits) -> None:
        self._devices = devices
        self._budget = budget
        self._limits = limits
        self._taken = 0
        self._settled = asyncio.Event()
        self.region: Region | None = None
        self.order = 0
        """The highest write order in use."""

    def fits(self, nbytes: int) -> bool:
        """Whether the open region takes `nbytes` more."""
        return nbytes <= self.left

    @property
    def left(self) -> int:
        """Bytes that the open region still takes."""
        region = self.region
        if region is None or not self._devices.writable(region):
            return 0
        return self._devices.files_of(region).region_bytes - region.tail

    async def turn_to(self, region: Region) -> None:
        """Open a region without live records, renewing it if it holds anything."""
        if not (region.clean and region.tail == REGION_HEADER_BYTES):
            await self.renew(region)
        self.region = region

    async def renew(self, region: Region) -> None:
        """Start a region's next generation. Raises `Overloaded` or `Unavailable`."""
        files = self._devices.files_of(region)
        await self._devices.run(region, partial(files.renew, region), always=True)
        self._budget.spend(REGION_HEADER_BYTES)
        region.dead.clear()

    def take(self, nbytes: int, priority: int | None = None) -> Spot:
        """The next `nbytes` of the open region, which `fits` them."""
        region = self.region
        assert region is not None
        self.order += 1
        spot = Spot(region, region.tail, nbytes, self.order, priority)
        region.tail += nbytes
        region.busy += 1
        region.filled = self.order
        self._taken += 1
        self._budget.spend(nbytes)
        return spot

    def settle(self, spot: Spot, *, is_live: bool) -> None:
        """The spot's record is in the index, or dead."""
        if not is_live:
            spot.region.dead.add(spot.offset, spot.nbytes)
        spot.region.busy -= 1
        self._taken -= 1
        self._settled.set()

    @property
    def taken(self) -> int:
        """Spots that are not settled."""
        return self._taken

    async def settled(self) -> None:
        """Return when a spot has been settled."""
        self._settled.clear()
        await self._settled.wait()

    async def write(
        self, records: Sequence[tuple[Spot, memoryview]]
    ) -> list[StrongroomError | None]:
        """Write each record, which lies in page-aligned memory and is not changed, to its spot.

        The answer has one entry a record: None, `Overloaded` or `Unavailable`.
        """
        heads = aligned(HEADER_BYTES * len(records))
        spans = []
        for number, (spot, record) in enumerate(records):
            head = heads[HEADER_BYTES * number : HEADER_BYTES * (number + 1)]
            head[:] = record[:HEADER_BYTES]
            write_placement(head, self._placement(spot))
            parts = (head, record[HEADER_BYTES:])
            spans.append(Span(number, spot.region, spot.offset, parts))
        errors: list[StrongroomError | None] = [None] * len(records)

        async def one(piece: Piece) -> None:
            try:
                await self._write(piece)
            except StrongroomError as error:
                for span in piece.spans:
                    errors[span.number] = error

        pieces = coalesce(spans, self._limits.transfer_bytes)
        await in_flight_at_most(self._limits.queue_depth, pieces, one)
        return errors

    async def _write(self, piece: Piece) -> None:
        files = self._devices.files_of(piece.region)
        job = partial(files.write, piece.region, piece.offset, piece.parts)
        await self._devices.run(piece.region, job, always=True)

    def _placement(self, spot: Spot) -> Placement:
        return Placement(
            self._devices.files_of(spot.region).store,
            spot.region.number,
            spot.region.generation,
            spot.offset,
            spot.order,
            spot.priority,
        )
