"""Making room in the log: regions are emptied one by one, and what is worth keeping moves on.

- One region is always kept blank: what lives in another is copied into it, and that one is
  blank then.
- A region with much dead room is emptied by moving all that lives in it, and nobody is evicted.
- Where none has, blocks are evicted in the index's order (retention, recency, frequency, shares;
  children before parents) until they make one region worth emptying. Only what lies in that
  region is evicted; the rest of it is worth keeping and is moved.
- A move that was broken off, by an error, a cancellation or the end of the process, goes on
  before the room is taken that it needs. Where no blank region is left all the same, one is
  emptied by evicting all that lives in it: a tier without a blank region would stay full for ever.
- Which records a region holds is read from the region itself, before another is opened for them,
  so that memory holds nothing for a block but its row in the index. What the file does not tell
  any more is dropped; so is all of a region that cannot be read.
- A moved record's old copy is dead like a dropped one's: if the region cannot be renewed at
  once, its header is overwritten, or a restart would find it again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from storage.block import BlockAddress
from storage.lifecycle import Place
from storage.memory import aligned
from storage.tiers.catalogue import Catalogue
from storage.tiers.coalesce import Span
from storage.tiers.devices import Devices
from storage.tiers.flow import in_flight_at_most
from storage.tiers.limits import NvmeLimits
from storage.tiers.regions import Region, RegionFiles
from storage.tiers.survey import Survey, survey
from storage.tiers.writer import LogWriter
from strongroom.errors import Overloaded, StrongroomError, Unavailable
from strongroom.identity import ComponentId

_log = logging.getLogger(__name__)

MOVE_LIVE_MAX = 0.75
"""A fuller region is not worth copying: blocks are evicted from one until it is emptier. So at
most three bytes are copied for one that is won."""
_LOOK_MAX = 1024
"""Candidates for eviction that are looked at in one step."""
_RENEWALS_MAX = 3
"""How often the last blank region may fail to be renewed before another is made blank."""
_MOVE_BYTES = 8 * 1024 * 1024
"""How much is read before it is written, or one record."""


@dataclass(frozen=True, slots=True)
class _Live:
    """A record that lives in the region that is being emptied."""

    address: BlockAddress
    place: Place
    offset: int
    priority: int | None


class Reclaimer:
    """Makes room for a writer. All of it runs under the tier's writing lock."""

    def __init__(
        self, catalogue: Catalogue, devices: Devices, writer: LogWriter, limits: NvmeLimits
    ) -> None:
        self._catalogue = catalogue
        self._devices = devices
        self._writer = writer
        self._limits = limits
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
                await self._move_all(victim, await self._live_records(victim))
        self._is_broken_off = False

    async def _empty_one(
        self, nbytes: int, blank: Region | None, writer: ComponentId, keep: BlockAddress
    ) -> bool:
        """Make a region blank, if one can be: by moving what lives there into `blank`, the last
        one, which is open then; without one by evicting it.
        """
        room = min(self._devices.payload_bytes(region) for region in self._devices.regions)
        limit = min(int(MOVE_LIVE_MAX * room), room - nbytes)
        victim = self._emptiest(limit) or await self._thinned(limit, writer, keep)
        if victim is None:
            return False
        if not victim.live:
            return True  # evicted whole: it is blank itself
        live = await self._live_records(victim)
        if blank is not None and victim.live and await self._opened(blank):
            self._is_broken_off = True
            await self._move_all(victim, live)
            self._is_broken_off = False
            return True
        for one in live:
            row = self._catalogue.index.get(one.address)
            if row is not None and row.place == one.place:
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

    async def _thinned(self, limit: int, writer: ComponentId, keep: BlockAddress) -> Region | None:
        """Evict from one region what the index gives up first, until `limit` bytes live in it.

        None when nothing in any quiet region may be evicted.
        """
        chosen: Region | None = None
        while True:
            if chosen is not None and chosen.live_bytes <= limit:
                return chosen
            among = [region for region in self._quiet() if chosen in {None, region}]
            slot, goes = self._next_to_go(among, limit, writer, keep)
            if goes:
                chosen = self._devices.regions[slot]
                for address in goes:
                    self._catalogue.evict(address)
            elif chosen is None:
                return None
            else:
                chosen = None  # what is left of it is worth more, or somebody reads from it
            await asyncio.sleep(0)

    def _next_to_go(
        self, among: list[Region], limit: int, writer: ComponentId, keep: BlockAddress
    ) -> tuple[int, list[BlockAddress]]:
        """Of the first candidates for eviction those of the region that they empty most."""
        goes: dict[int, list[BlockAddress]] = {region.slot: [] for region in among}
        left = {region.slot: region.live_bytes for region in among}
        victims = self._catalogue.index.victims(writer=writer, keep=keep)
        for address in itertools.islice(victims, _LOOK_MAX):
            row = self._catalogue.index.get(address)
            assert row is not None
            slot = self._catalogue.where(row.place)[0].slot
            if slot in left:
                goes[slot].append(address)
                left[slot] -= row.place.nbytes
                if left[slot] <= limit:
                    break
        best = min((slot for slot in goes if goes[slot]), key=left.__getitem__, default=-1)
        return best, goes.get(best, [])

    async def _move_all(self, victim: Region, live: list[_Live]) -> None:
        """Copy what lives in `victim` to the log's end; it is blank then."""
        victim.busy += 1
        try:
            batch: list[_Live] = []
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

    async def _live_records(self, victim: Region) -> list[_Live]:
        """What lives in a region; what cannot be read there does not any more."""
        files = self._devices.files_of(victim)
        made: list[Survey] = []
        job = partial(_survey_into, files, victim, made)
        try:
            await self._devices.run(victim, job, always=True)
        except (Overloaded, Unavailable) as error:
            # It would be chosen again with every write otherwise, for ever.
            _log.warning("region %d is given up: %s", victim.number, error.message)
            victim.failures += 1
            await self._catalogue.forget_region(victim, ())
            return []
        self._devices.errors += made[0].unreadable
        found = made[0].found
        live: list[_Live] = []
        for number in range(len(found)):
            address = BlockAddress.unpack(found.address(number))
            place = self._catalogue.place(victim, found.offset(number), found.nbytes(number))
            row = self._catalogue.index.get(address)
            if row is not None and row.place == place:
                live.append(_Live(address, place, found.offset(number), found.priority(number)))
            if number % 1024 == 0:
                await asyncio.sleep(0)
        told = {one.address for one in live}
        if len(told) < victim.live:
            await self._catalogue.forget_region(victim, told)
        return live

    async def _move(self, victim: Region, batch: list[_Live]) -> None:
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
        self, victim: Region, batch: list[_Live], buffers: list[memoryview]
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


def _survey_into(files: RegionFiles, region: Region, results: list[Survey]) -> None:
    results.append(survey(files, region, region.tail, region.generation))


def _read_whole(files: RegionFiles, span: Span) -> None:
    if files.read(span.region, span.offset, span.parts[0]) < span.nbytes:
        raise OSError(5, "the region file is cut short")
