"""Reading records: neighbours in one system call, several calls at once, the first asked first.

- A record's region is held from the moment it is asked for until its bytes are in the caller's
  buffer, so that it may be moved, dropped or evicted meanwhile and the bytes are still its own.
- Records that lie back to back are read in one vectored call straight into their buffers. Where
  such a call fails, each record is read by itself: one bad sector costs one record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from storage.block import BlockAddress
from storage.fair import Fair, FairStatistics, together
from storage.lifecycle import Pin
from storage.tiers.catalogue import Catalogue
from storage.tiers.coalesce import Piece, Span, coalesce
from storage.tiers.devices import Devices
from storage.tiers.flow import in_flight_at_most
from storage.tiers.limits import NvmeLimits
from storage.tiers.regions import Region
from strongroom.clock import Clock
from strongroom.errors import Corrupt, Missing, Overloaded, StrongroomError, Unavailable
from strongroom.identity import ComponentId

Done = Callable[[int, StrongroomError | None], None]
"""Called on the loop with the record's number when it is there, or with why it is not."""


@dataclass(slots=True)
class _Reading:
    """One record on its way."""

    region: Region
    tenant: ComponentId
    pin: Pin | None
    pieces: int = 0
    error: StrongroomError | None = None


class Reader:
    """Reads of one tier. `wanted` pairs an address with aligned memory of its exact size."""

    def __init__(
        self,
        catalogue: Catalogue,
        devices: Devices,
        clock: Clock,
        limits: NvmeLimits,
        *,
        pin_ns: int,
    ) -> None:
        workers = devices.workers
        self._turns = [
            Fair(
                f"{workers.name}-reads",
                devices.calls_max,
                waiting_max=workers.queue_max,
                weight=catalogue.shares.weight,
            )
            for _ in range(devices.count)
        ]
        """By device: one tenant's flood of reads stands before nobody else's, and a device that
        hangs before no other."""
        self._catalogue = catalogue
        self._devices = devices
        self._clock = clock
        self._limits = limits
        self._pin_ns = pin_ns

    @property
    def turns(self) -> FairStatistics:
        """Who waits for a turn to read."""
        return together([turns.statistics() for turns in self._turns])

    async def read_many(
        self, wanted: Sequence[tuple[BlockAddress, memoryview]], done: Done
    ) -> None:
        """Read every record; returns when `done` was called for each.

        Errors are `Missing`, `Corrupt` when a file is cut short, `Unavailable` when the device
        fails, `Overloaded` when the disk queue is full. When cancelled, no thread writes into
        any buffer any more.
        """
        readings: dict[int, _Reading] = {}
        try:
            spans = []
            for number, (address, into) in enumerate(wanted):
                span = self._begin(number, address, into, readings)
                if span is None:
                    done(number, Missing("not resident"))
                else:
                    spans.append(span)
            pieces = self._plan(spans)
            for piece in pieces:
                for span in piece.spans:
                    readings[span.number].pieces += 1

            async def one(piece: Piece) -> None:
                tenant = readings[piece.spans[0].number].tenant
                try:
                    async with self._turns[piece.region.device].turn(tenant, piece.nbytes):
                        await self._read(piece, readings)
                except Overloaded as error:
                    for span in piece.spans:
                        readings[span.number].error = error
                for span in piece.spans:
                    reading = readings[span.number]
                    reading.pieces -= 1
                    if not reading.pieces:
                        self._let_go(readings.pop(span.number))
                        done(span.number, reading.error)

            await in_flight_at_most(self._limits.queue_depth, pieces, one)
        finally:
            for reading in readings.values():
                self._let_go(reading)

    def _begin(
        self, number: int, address: BlockAddress, into: memoryview, readings: dict[int, _Reading]
    ) -> Span | None:
        row = self._catalogue.row(address)
        if row is None or row.place.nbytes != len(into):
            return None
        pin = self._catalogue.index.pin(row.resident, self._clock() + self._pin_ns)
        region, offset = self._catalogue.where(row.place)
        region.busy += 1
        readings[number] = _Reading(region, row.resident.tenant, pin)
        return Span(number, region, offset, (into,))

    def _let_go(self, reading: _Reading) -> None:
        reading.region.busy -= 1
        if reading.pin is not None:
            self._catalogue.index.unpin(reading.pin)

    def _plan(self, spans: list[Span]) -> list[Piece]:
        """Neighbours joined wherever they stand in the list; the first asked for come first."""
        by_place = sorted(spans, key=lambda span: (span.region.slot, span.offset))
        pieces = coalesce(by_place, self._limits.transfer_bytes)
        return sorted(pieces, key=lambda piece: min(span.number for span in piece.spans))

    async def _read(self, piece: Piece, readings: dict[int, _Reading]) -> None:
        """Read a piece; what fails is noted with each record that it fails."""
        try:
            count = await self._call(piece.region, piece.offset, piece.parts)
        except Unavailable as error:
            if len(piece.spans) == 1:
                readings[piece.spans[0].number].error = error
                return
            for span in piece.spans:
                alone = Piece(span.region, span.offset, span.nbytes, list(span.parts), [span])
                await self._read(alone, readings)
        except StrongroomError as error:
            for span in piece.spans:
                readings[span.number].error = error
        else:
            self._check_length(piece, count, readings)

    def _check_length(self, piece: Piece, count: int, readings: dict[int, _Reading]) -> None:
        end = 0
        for span in piece.spans:
            end = piece.nbytes if piece.is_cut else end + span.nbytes
            if count < end:
                readings[span.number].error = Corrupt("the region file is cut short")

    async def _call(self, region: Region, offset: int, parts: list[memoryview]) -> int:
        files = self._devices.files_of(region)
        counts: list[int] = []
        read = (
            partial(files.read, region, offset, parts[0])
            if len(parts) == 1
            else partial(files.read_parts, region, offset, parts)
        )
        await self._devices.run(region, lambda: counts.append(read()))
        return counts[0]
