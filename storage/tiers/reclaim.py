"""Making room in the log: regions are emptied one by one, and what is worth keeping moves on.

- One region is always kept blank: what lives in another is copied into it, and that one is
  blank then.
- A region with much dead room is emptied by moving all that lives in it, and nobody is evicted.
- Where none has, blocks of one region are evicted until it is worth emptying: the coldest there
  (`storage.tiers.thinning`). The rest of it is worth keeping and is moved.
- A move that was broken off, by an error, a cancellation or the end of the process, goes on
  before the room is taken that it needs. Where no blank region is left all the same, one is
  emptied by evicting all that lives in it: a tier without a blank region would stay full for ever.
- Which records a region holds is read from the region itself (`storage.tiers.live`), before
  another is opened for them.
- A moved record's old copy is dead like a dropped one's: if the region cannot be renewed at
  once, its header is overwritten, or a restart would find it again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial

from storage.block import BlockAddress
from storage.memory import aligned
from storage.tiers.catalogue import Catalogue
from storage.tiers.coalesce import Span
from storage.tiers.devices import Devices
from storage.tiers.flow import in_flight_at_most
from storage.tiers.limits import NvmeLimits
from storage.tiers.live import Live, live_in
from storage.tiers.regions import Region, RegionFiles
from storage.tiers.thinning import Thinning
from storage.tiers.writer import LogWriter
from strongroom.errors import Overloaded, StrongroomError, Unavailable
from strongroom.identity import ComponentId

_log = logging.getLogger(__name__)

MOVE_LIVE_MAX = 0.75
"""A fuller region is not worth copying: blocks are evicted from one until it is emptier. So at
most three bytes are copied for one that is won."""
_RENEWALS_MAX = 3
"""How often the last blank region may fail to be renewed before another is made blank."""
_MOVE_BYTES = 8 * 1024 * 1024
"""How much is read before it is written, or one record."""


class Reclaimer:
    """Makes room for a writer. All of it runs under the tier's writing lock."""

    def __init__(
        self, catalogue: Catalogue, devices: Devices, writer: LogWriter, limits: NvmeLimits
    ) -> None:
        self._catalogue = catalogue
        self._devices = devices
        self._writer = writer
        self._limits = limits
        self._thinning = Thinning(catalogue, devices, self._quiet)
        self.moved = 0
        self.reclaimed = 0
        """Regions that were emptied."""
        self._is_broken_off = True
        """Whether a move may have been; nothing is known of those before the start."""

    async def make_room(self, nbytes: int, writer: ComponentId, keep: BlockAddress) -> None:
        """Return when the open region takes `nbytes`.

        `writer` is the tenant that room is made for, `keep` its block's parent. Raises
        `Overloaded` or `Unavailable`.
        """
        if self._is_broken_off:
            await self._go_on()
        while not self._writer.fits(nbytes):
            self._writer.region = None
            await self._catalogue.forget_lost()
            blank = self._blank_regions()
            if len(blank) > 1:
                await self._turn_to_one_of(blank[:-1])
            elif await self._empty_one(nbytes, blank[0] if blank else None, writer, keep):
                continue
            elif self._writer.taken:
                # Writes under way end by themselves, and then their regions may be looked at.
                await self._writer.settled()
            else:
                raise Overloaded("no region of the NVMe tier can be emptied now")

    def _blank_regions(self) -> list[Region]:
        """Regions that may be opened, in the order in which they should be."""
        last = self._devices.regions[0].device if self._last is None else self._last.device
        blank = [
            region
            for region in self._devices.regions
            if not region.live and not region.busy and self._devices.writable(region)
        ]
        return sorted(
            blank, key=lambda region: (region.failures, region.device == last, region.slot)
        )

    @property
    def _last(self) -> Region | None:
        """The region that the log's last record is in."""
        order = self._writer.order
        return next((region for region in self._devices.regions if region.filled == order), None)

    async def _turn_to_one_of(self, regions: list[Region]) -> None:
        """Open the first of `regions` that can be; another device's may still work."""
        failure: StrongroomError | None = None
        for region in regions:
            try:
                await self._writer.turn_to(region)
            except (Overloaded, Unavailable) as error:
                failure = error
            else:
                return
        assert failure is not None
        raise failure

    async def _go_on(self) -> None:
        """Finish a move that was broken off, while the open region has the room for the rest."""
        if not self._blank_regions():
            victim = self._emptiest(self._writer.left)
            if victim is not None:
                live = await live_in(victim, self._catalogue, self._devices)
                await self._move_all(victim, live)
        self._is_broken_off = False

    async def _empty_one(
        self, nbytes: int, blank: Region | None, writer: ComponentId, keep: BlockAddress
    ) -> bool:
        """Make a region blank, if one can be: by moving what lives there into `blank`, the last
        one, which is open then; without one by evicting it.
        """
        room = min(self._devices.payload_bytes(region) for region in self._devices.regions)
        limit = min(int(MOVE_LIVE_MAX * room), room - nbytes)
        victim = self._emptiest(limit)
        if victim is not None:
            live = await live_in(victim, self._catalogue, self._devices)
        else:
            thinned = await self._thinning.thinned(limit, writer, keep)
            if thinned is None:
                return False
            victim, live = thinned.region, thinned.live
            if victim.live_bytes > limit:
                return True  # a step nearer: there are other leaves now
        if not victim.live:
            return True  # evicted whole: it is blank itself
        if blank is not None and await self._opened(blank):
            self._is_broken_off = True
            await self._move_all(victim, live)
            self._is_broken_off = False
            return True
        for one in live:
            if self._catalogue.is_at(one.address, one.place):
                self._catalogue.evict(one.address)
        return not victim.live and not victim.busy

    async def _opened(self, blank: Region) -> bool:
        """Open the last blank region; false when it failed often enough to do without it."""
        try:
            await self._writer.turn_to(blank)
        except Unavailable:
            if blank.failures < _RENEWALS_MAX:
                raise
            return False
        return True

    def _quiet(self) -> Iterator[Region]:
        """Regions that might be emptied, and could be written then."""
        for region in self._devices.regions:
            is_idle = region.live and not region.busy and region is not self._writer.region
            if is_idle and self._devices.writable(region):
                yield region

    def _emptiest(self, limit: int) -> Region | None:
        """The region with the fewest live bytes, if that is at most `limit`; the oldest of such."""
        victim = min(self._quiet(), key=lambda r: (r.live_bytes, r.filled), default=None)
        return victim if victim is not None and victim.live_bytes <= limit else None

    async def _move_all(self, victim: Region, live: list[Live]) -> None:
        """Copy what lives in `victim` to the log's end; it is blank then."""
        victim.busy += 1
        try:
            batch: list[Live] = []
            for one in live:
                if batch and sum(b.place.nbytes for b in batch) + one.place.nbytes > _MOVE_BYTES:
                    await self._move(victim, batch)
                    batch = []
                batch.append(one)
            if batch:
                await self._move(victim, batch)
        finally:
            victim.busy -= 1
        if victim.live:
            return  # a write failed: what it was to move stays where it is
        self.reclaimed += 1
        if not victim.busy:
            try:
                await self._writer.renew(victim)
            except (Overloaded, Unavailable) as error:
                _log.warning("region %d is not renewed yet: %s", victim.number, error.message)

    async def _move(self, victim: Region, batch: list[Live]) -> None:
        buffers = [aligned(one.place.nbytes) for one in batch]
        whole = await self._read(victim, batch, buffers)
        moving = []
        for one, buffer, is_whole in zip(batch, buffers, whole, strict=True):
            if not is_whole:
                self._catalogue.lost += 1
                self._catalogue.drop(one.address)
            elif not self._writer.fits(one.place.nbytes):
                self._catalogue.evict(one.address)
            else:
                moving.append((one, self._writer.take(one.place.nbytes, one.priority), buffer))
        settled = 0
        try:
            errors = await self._writer.write([(spot, buffer) for _, spot, buffer in moving])
            for (one, spot, _), error in zip(moving, errors, strict=True):
                is_live = error is None and self._catalogue.move(
                    one.address, one.place, spot.region, spot.offset
                )
                self.moved += is_live
                self._writer.settle(spot, is_live=is_live or error is None)
                settled += 1
        finally:
            for _, spot, _ in moving[settled:]:
                self._writer.settle(spot, is_live=False)
        failure = next((error for error in errors if error is not None), None)
        if failure is not None:
            raise failure

    async def _read(
        self, victim: Region, batch: list[Live], buffers: list[memoryview]
    ) -> list[bool]:
        """Read each record; false where the device does not give it."""
        files = self._devices.files_of(victim)
        whole = [True] * len(batch)
        spans = [
            Span(number, victim, one.offset, (buffer,))
            for number, (one, buffer) in enumerate(zip(batch, buffers, strict=True))
        ]

        async def one(span: Span) -> None:
            job = partial(_read_whole, files, span)
            try:
                await self._devices.run(victim, job, always=True)
            except (Overloaded, Unavailable):
                whole[span.number] = False

        await in_flight_at_most(self._limits.queue_depth, spans, one)
        return whole


def _read_whole(files: RegionFiles, span: Span) -> None:
    if files.read(span.region, span.offset, span.parts[0]) < span.nbytes:
        raise OSError(5, "the region file is cut short")
