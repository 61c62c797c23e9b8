"""Recovery: what a region file holds, read from its records' headers alone.

Rules:
- Each record is read by its first and last page. A header that does not check, a length beyond
  the region, a tail that is not its header's, a placement of elsewhere: the record is dropped
  and counted under its fault. No key is here, so nothing more can be known; GCM decides later.
- After a record whose length can be believed the walk goes on behind it. Otherwise it looks at
  every page for the next record of this region and generation. Zeros count as nothing.
- Nothing that is found is trusted to be right, only to be a candidate.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from storage.header import (
    HEADER_BYTES,
    TAIL_BYTES,
    BadRecord,
    Fault,
    Header,
    check_tail,
    read_header,
    read_placement,
)
from storage.memory import PAGE_BYTES, aligned
from storage.tiers.regions import REGION_HEADER_BYTES, Region, RegionFiles

_NAMES = {Fault.MAGIC: Fault.CORRUPT}


@dataclass(frozen=True, slots=True)
class Found:
    """A candidate: a whole record of this store, where it was written."""

    region: Region
    offset: int
    header: Header
    order: int


@dataclass(slots=True)
class Survey:
    """What one region holds."""

    found: list[Found] = field(default_factory=list)
    faults: Counter[Fault] = field(default_factory=Counter)
    tail: int = REGION_HEADER_BYTES
    """Behind the last record or fault."""


def survey(files: RegionFiles, region: Region) -> Survey:
    """Walk one region. Blocks; raises `OSError` when the device fails.

    A region whose own header is not this store's is foreign as a whole, and blank when it was
    never used.
    """
    result = Survey()
    generation = files.generation_of(region)
    if generation is None:
        if files.next_data(region, 0) < files.region_bytes and not _is_blank(files, region):
            result.faults[Fault.FOREIGN] += 1
        result.tail = files.region_bytes
        return result
    region.generation = generation
    _Walk(files, region, result).run()
    return result


class _Walk:
    def __init__(self, files: RegionFiles, region: Region, result: Survey) -> None:
        self._files = files
        self._region = region
        self._result = result
        self._head = aligned(HEADER_BYTES)
        self._last = aligned(PAGE_BYTES)
        self._lost = False
        """Behind a fault of unknown length: pages are looked at until one makes sense."""

    def run(self) -> None:
        offset = REGION_HEADER_BYTES
        while offset + HEADER_BYTES <= self._files.region_bytes:
            offset = self._step(offset)

    def _step(self, offset: int) -> int:
        """Take or count what is at `offset`; returns where to look next."""
        count = self._files.read(self._region, offset, self._head)
        if count < HEADER_BYTES:
            self._result.faults[Fault.TORN] += count > 0
            return self._files.region_bytes
        length = 0
        try:
            header = read_header(self._head)
            length = header.record_bytes
            order = self._check_place(offset)
            self._check_whole(offset, length)
        except BadRecord as error:
            if error.fault is Fault.BLANK:
                return max(offset + PAGE_BYTES, self._files.next_data(self._region, offset))
            length = length or error.record_bytes
            self._count(error.fault, length)
        else:
            self._lost = False
            self._result.found.append(Found(self._region, offset, header, order))
        if not length or offset + length > self._files.region_bytes:
            length = PAGE_BYTES
        self._result.tail = offset + length
        return offset + length

    def _check_place(self, offset: int) -> int:
        placement = read_placement(self._head)
        region = self._region
        if placement.store != self._files.store:
            raise BadRecord(Fault.FOREIGN, "another store's record")
        if (placement.region, placement.offset) != (region.number, offset):
            raise BadRecord(Fault.FOREIGN, "a record that was written elsewhere")
        if placement.generation != region.generation:
            raise BadRecord(Fault.STALE, "a record of what the region held before")
        return placement.order

    def _check_whole(self, offset: int, length: int) -> None:
        end = offset + length
        if end > self._files.region_bytes:
            raise BadRecord(Fault.TORN, "the record goes beyond its region")
        if self._files.read(self._region, end - PAGE_BYTES, self._last) < PAGE_BYTES:
            raise BadRecord(Fault.TORN, "the region file is cut short")
        check_tail(self._head, self._last[-TAIL_BYTES:])

    def _count(self, fault: Fault, length: int) -> None:
        # Ciphertext behind a damaged header is page after page of the same fault: one count.
        if fault is not Fault.GONE and not (self._lost and fault is Fault.MAGIC):
            self._result.faults[_NAMES.get(fault, fault)] += 1
        self._lost = length == 0


def _is_blank(files: RegionFiles, region: Region) -> bool:
    """Whether a region without a header is all zeros where a header and a record would be."""
    pages = aligned(2 * PAGE_BYTES)
    return not any(pages[: files.read(region, 0, pages)])
