"""What a region file holds, read from its records' headers alone.

Rules:
- A header that does not check, a length beyond the region, a tail that is not its header's, a
  placement of elsewhere: the record is dropped and counted under its fault. No key is here, so
  nothing more can be known; GCM decides later.
- After a record whose length can be believed the walk goes on behind it. Otherwise it looks at
  every page for the next record of this region and generation. Zeros count as nothing.
- Nothing that is found is trusted to be right, only to be a candidate.
- A page that the device does not give is one more fault: it costs the record whose header or
  tail it is. With too many of them the region cannot be read.
- Small records are read in long stretches; of large ones the last page and the next record's
  first are read together, one call a record. What is found goes into columns: a million
  objects would cost more than the reading.
"""

from __future__ import annotations

import array
import itertools
from collections import Counter
from collections.abc import Sequence

from storage.header import (
    HEADER_BYTES,
    TAIL_BYTES,
    BadRecord,
    Facts,
    Fault,
    Placement,
    check_tail,
    read_facts,
    read_placement,
)
from storage.memory import PAGE_BYTES, aligned
from storage.tiers.regions import REGION_HEADER_BYTES, Region, RegionFiles

_NAMES = {Fault.MAGIC: Fault.CORRUPT}
_ADDRESS_BYTES = 36
_PARENT_BYTES = 32
_STRETCH_BYTES = 1024 * 1024
_SMALL_RECORD_BYTES = 128 * 1024
"""Up to this length the bytes between two headers are read along with them."""
_NO_PRIORITY = 255
_UNREADABLE_MAX = 8
"""More bad pages in one region are not worth walking around: each may take the device seconds."""


class Found:
    """The candidates of one region, in columns; about a hundred bytes each."""

    def __init__(self) -> None:
        self._addresses = bytearray()
        self._parents = bytearray()
        self._starts = array.array("I")
        self._pages = array.array("I")
        self._owners = array.array("I")
        self._priorities = array.array("B")
        self._known: dict[tuple[bytes, bytes], int] = {}
        self.sequences = array.array("Q")
        self.orders = array.array("Q")
        self.owners: list[tuple[bytes, bytes]] = []
        """Tenant and namespace of each owner number."""

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, offset: int, facts: Facts, placement: Placement) -> None:
        owner = (facts.tenant, facts.namespace)
        number = self._known.get(owner)
        if number is None:
            number = self._known[owner] = len(self.owners)
            self.owners.append(owner)
        self._addresses += facts.address
        self._parents += facts.parent
        self._starts.append(offset // PAGE_BYTES)
        self._pages.append(facts.record_bytes // PAGE_BYTES)
        self._owners.append(number)
        priority = placement.priority
        self._priorities.append(_NO_PRIORITY if priority is None else priority)
        self.sequences.append(facts.sequence)
        self.orders.append(placement.order)

    def forget(self) -> None:
        """Give the columns' memory back: they have been gone through."""
        self.__init__()  # type: ignore[misc]

    def address(self, row: int) -> bytes:
        return bytes(self._addresses[row * _ADDRESS_BYTES : (row + 1) * _ADDRESS_BYTES])

    def parent(self, row: int) -> bytes:
        return bytes(self._parents[row * _PARENT_BYTES : (row + 1) * _PARENT_BYTES])

    def offset(self, row: int) -> int:
        return self._starts[row] * PAGE_BYTES

    def nbytes(self, row: int) -> int:
        return self._pages[row] * PAGE_BYTES

    def owner(self, row: int) -> int:
        return self._owners[row]

    def priority(self, row: int) -> int | None:
        found = self._priorities[row]
        return None if found == _NO_PRIORITY else found

    def by_sealing(self) -> Sequence[int]:
        """Row numbers in the order of sealing, then of writing."""
        rows = range(len(self))
        keys = zip(self.sequences, self.orders, strict=True)
        if all(before <= after for before, after in itertools.pairwise(keys)):
            return rows  # as in most regions: written in the order of sealing
        by_order = sorted(rows, key=self.orders.__getitem__)
        return array.array("I", sorted(by_order, key=self.sequences.__getitem__))


class Survey:
    """What one region holds; `survey` makes it."""

    def __init__(self) -> None:
        self.found = Found()
        self.faults: Counter[Fault] = Counter()
        self.generation = 0
        self.tail = REGION_HEADER_BYTES
        """Behind the last record or fault."""
        self.unreadable = 0
        """Pages that the device did not give."""

    @property
    def last_sequence(self) -> int:
        """The highest sealing number found."""
        return max(self.found.sequences, default=0)

    @property
    def last_order(self) -> int:
        """The highest write order found."""
        return max(self.found.orders, default=0)

    @property
    def is_clean(self) -> bool:
        """Whether the log may go on behind it."""
        return len(self.found) > 0 and not self.faults


def survey(
    files: RegionFiles, region: Region, end: int | None = None, generation: int | None = None
) -> Survey:
    """Walk one region up to `end`. Blocks; raises `OSError` when the device fails.

    A region whose own header is not this store's is foreign as a whole, and blank when it was
    never used. A `generation` that is known is not asked of the header.
    """
    result = Survey()
    if generation is None:
        generation = files.generation_of(region)
    if generation is None:
        if files.next_data(region, 0) < files.region_bytes and not _is_blank(files, region):
            result.faults[Fault.FOREIGN] += 1
        result.tail = files.region_bytes
        return result
    result.generation = generation
    _Walk(files, region, result, files.region_bytes if end is None else end).run()
    return result


class _Window:
    """The part of a region that was read last."""

    def __init__(self, files: RegionFiles, region: Region, end: int) -> None:
        self._files = files
        self._region = region
        self._region_end = end
        self._buffer = aligned(_STRETCH_BYTES)
        self._first = 0
        self._end = 0
        self._bad_from = 0
        self._bad_end = 0
        self.stretch_bytes = 2 * PAGE_BYTES
        """How much is read at once: as much as is likely to be looked at."""

    def page(self, offset: int) -> memoryview:
        """The page at `offset`, valid until the next call; shorter where the file ends."""
        if not self._first <= offset <= self._end - PAGE_BYTES:
            self._first = self._end = 0
            got = self._read(offset, min(self.stretch_bytes, self._region_end - offset))
            self._first, self._end = offset, offset + got
        at = offset - self._first
        return self._buffer[at : min(at + PAGE_BYTES, self._end - self._first)]

    def _read(self, offset: int, nbytes: int) -> int:
        if not self._bad_from <= offset < self._bad_end:
            try:
                return self._files.read(self._region, offset, self._buffer[:nbytes])
            except OSError:
                # Somewhere in it is a bad page. Is it this one?
                self._bad_from, self._bad_end = offset, offset + nbytes
        return self._files.read(self._region, offset, self._buffer[:PAGE_BYTES])


class _Walk:
    def __init__(self, files: RegionFiles, region: Region, result: Survey, end: int) -> None:
        self._files = files
        self._region = region
        self._result = result
        self._end = end
        self._window = _Window(files, region, end)
        self._lost = False
        """Behind a fault of unknown length: pages are looked at until one makes sense."""

    def run(self) -> None:
        offset = REGION_HEADER_BYTES
        while offset + HEADER_BYTES <= self._end:
            offset = self._step(offset)

    def _step(self, offset: int) -> int:
        """Take or count what is at `offset`; returns where to look next."""
        head = self._page(offset)
        if head is None:
            self._count(Fault.CORRUPT, 0)
            self._result.tail = offset + PAGE_BYTES
            return offset + PAGE_BYTES
        if len(head) < HEADER_BYTES:
            self._result.faults[Fault.TORN] += len(head) > 0
            return self._end
        length = 0
        try:
            facts = read_facts(head)
            length = facts.record_bytes
            placement = self._check_place(head, offset)
            self._check_whole(facts, offset)
        except BadRecord as error:
            if error.fault is Fault.BLANK:
                return max(offset + PAGE_BYTES, self._files.next_data(self._region, offset))
            length = length or error.record_bytes
            self._count(error.fault, length)
        else:
            self._lost = False
            self._result.found.add(offset, facts, placement)
        if not length or offset + length > self._end:
            length = PAGE_BYTES
        small = length <= _SMALL_RECORD_BYTES
        self._window.stretch_bytes = _STRETCH_BYTES if small else 2 * PAGE_BYTES
        self._result.tail = offset + length
        return offset + length

    def _page(self, offset: int) -> memoryview | None:
        """The page at `offset`; None when the device does not give it."""
        try:
            return self._window.page(offset)
        except OSError:
            self._result.unreadable += 1
            if self._result.unreadable > _UNREADABLE_MAX:
                raise
            return None

    def _check_place(self, head: memoryview, offset: int) -> Placement:
        placement = read_placement(head)
        if placement.store != self._files.store:
            raise BadRecord(Fault.FOREIGN, "another store's record")
        if (placement.region, placement.offset) != (self._region.number, offset):
            raise BadRecord(Fault.FOREIGN, "a record that was written elsewhere")
        if placement.generation != self._result.generation:
            raise BadRecord(Fault.STALE, "a record of what the region held before")
        return placement

    def _check_whole(self, facts: Facts, offset: int) -> None:
        end = offset + facts.record_bytes
        if end > self._end:
            raise BadRecord(Fault.TORN, "the record goes beyond its region")
        # The next record's first page comes along with this one's last.
        last = self._page(end - PAGE_BYTES)
        if last is None or len(last) < PAGE_BYTES:
            raise BadRecord(Fault.TORN, "the region file is cut short")
        check_tail(facts, last[-TAIL_BYTES:])

    def _count(self, fault: Fault, length: int) -> None:
        # Ciphertext behind a damaged header is page after page of the same fault: one count.
        if fault is not Fault.GONE and not (self._lost and fault is Fault.MAGIC):
            self._result.faults[_NAMES.get(fault, fault)] += 1
        self._lost = length == 0


def _is_blank(files: RegionFiles, region: Region) -> bool:
    """Whether a region without a header is all zeros where a header and a record would be."""
    pages = aligned(2 * PAGE_BYTES)
    return not any(pages[: files.read(region, 0, pages)])
