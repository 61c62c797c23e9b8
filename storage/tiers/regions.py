"""Region files: a few large preallocated files that are written front to back and reused whole.

A region starts with a 4 KiB header: magic, version, region number, store id, generation,
length, checksum (docs/format.md section 6). Records follow, each 4 KiB aligned, with the
region's number and generation in its placement: a record of another generation is what the
region held before. A region that is renewed is cut to nothing and allocated again, so that what
it held is gone from the file and the log's end reads as zeros.

Files are opened with O_DIRECT where the file system allows it; where not, the log says so once
and the page cache stands in between. File names are numbers; files are 0600.
"""

from __future__ import annotations

import array
import errno
import hashlib
import logging
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from storage.memory import PAGE_BYTES, aligned
from storage.tiers.operations import FileOperations, Posix
from strongroom.errors import Unavailable

REGION_MAGIC: Final = b"SRREGION"
REGION_VERSION: Final = 1
REGION_HEADER_BYTES: Final = 4096
REGIONS_MIN: Final = 2
_PREFIX: Final = struct.Struct("<8sHHI16sQQ")
_CHECKSUM_AT: Final = REGION_HEADER_BYTES - 32
PARTS_MAX: Final = os.sysconf("SC_IOV_MAX")
"""How many buffers one vectored call may have."""
_log = logging.getLogger(__name__)


class Dead:
    """Records that were dropped and whose headers are still there, eight bytes each."""

    __slots__ = ("_lengths", "_starts")

    def __init__(self) -> None:
        self._starts = array.array("I")
        self._lengths = array.array("I")

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Offset and length of each."""
        for start, length in zip(self._starts, self._lengths, strict=True):
            yield start * PAGE_BYTES, length * PAGE_BYTES

    def add(self, offset: int, nbytes: int) -> None:
        """A record's bytes are nobody's any more."""
        self._starts.append(offset // PAGE_BYTES)
        self._lengths.append(nbytes // PAGE_BYTES)

    def pop(self) -> tuple[int, int]:
        """Take one off: offset and length."""
        return self._starts.pop() * PAGE_BYTES, self._lengths.pop() * PAGE_BYTES

    def clear(self) -> None:
        """The region was renewed."""
        self.__init__()  # type: ignore[misc]  # also gives the columns' memory back


@dataclass(slots=True, eq=False)
class Region:
    """One region file. `tail` is where the next record goes.

    Which records live in it is told by the index and by the file alone: nothing is kept here
    for a block, but for eight bytes of a dropped one until its header is overwritten.
    """

    number: int
    """Its number in its folder, as its file is named."""
    fd: int
    generation: int
    tail: int
    slot: int = 0
    """Its number in the whole tier, over all devices."""
    device: int = 0
    """The number of the device that it is on."""
    live: int = 0
    live_bytes: int = 0
    dead: Dead = field(default_factory=Dead)
    busy: int = 0
    """Reads and writes in flight, and records that are written and not admitted yet; the region
    is not renewed meanwhile."""
    filled: int = 0
    """The write order of its last record: regions that were filled long ago are reclaimed first."""
    fresh: bool = False
    """Just allocated: all zeros, so that renewing it allocates nothing."""
    failures: int = 0
    """How often renewing it failed in a row; others are tried first."""
    clean: bool = False
    """Written by this store to its tail and blank behind it: may be appended to."""


class RegionFiles:
    """Opens, preallocates, reads and writes the region files of one folder. All calls block.

    Fewer files than asked for are used where the disk has no room for all above `floor_bytes`,
    which the log says; with less than two there is no tier, and `Unavailable` is raised. Files
    that are there are used wherever one is missing among them: a disk that is full when a region
    is renewed costs that region and no other.
    """

    def __init__(
        self,
        folder: Path,
        store: bytes,
        region_bytes: int,
        count: int,
        floor_bytes: int = 0,
        operations: FileOperations | None = None,
    ) -> None:
        self._operations = operations or Posix()
        self.folder = folder
        self.store = store
        self.region_bytes = region_bytes
        self._floor_bytes = floor_bytes
        self.regions: list[Region] = []
        self.direct = _direct_works(folder)
        if not self.direct:
            _log.warning("no O_DIRECT in %s: reads and writes pass the page cache", folder)
        try:
            self._open_all(max(count, REGIONS_MIN))
        except BaseException:
            self.close()
            raise

    def renew(self, region: Region) -> None:
        """Start a new generation: what the region held is gone."""
        generation = region.generation + 1
        region.failures += 1
        if not region.fresh:
            self._allocate(region.fd)
        region.fresh = False
        page = aligned(REGION_HEADER_BYTES)
        page[:] = self._header(region.number, generation)
        self.write(region, 0, [page])
        region.generation = generation
        region.tail = REGION_HEADER_BYTES
        region.clean = True
        region.failures = 0

    def write(self, region: Region, offset: int, data: Sequence[memoryview]) -> None:
        """Write all of `data` at `offset`; each part is page-aligned memory, whole pages."""
        parts = list(data)
        while parts:
            written = self._operations.pwritev(region.fd, parts[:PARTS_MAX], offset)
            # O_DIRECT goes on at whole pages only: what is left of a page is written again.
            whole = written - written % PAGE_BYTES
            if whole <= 0:
                raise OSError(errno.EIO, "short write")
            offset += whole
            parts = _behind(parts, whole)

    def read(self, region: Region, offset: int, into: memoryview) -> int:
        """Fill `into` from `offset`; fewer bytes are read only at the end of the file."""
        return self.read_parts(region, offset, [into])

    def read_parts(self, region: Region, offset: int, parts: Sequence[memoryview]) -> int:
        """Fill `parts` from `offset`, in order, as `read` does."""
        left = list(parts)
        done = 0
        stuck = False
        while left:
            count = self._operations.preadv(region.fd, left[:PARTS_MAX], offset + done)
            whole = count - count % PAGE_BYTES
            if whole:
                stuck = False
                done += whole
                left = _behind(left, whole)
            elif stuck or not count:
                return done + count
            else:
                stuck = True  # less than a page: the end of the file, unless it was an accident
        return done

    def next_data(self, region: Region, offset: int) -> int:
        """The first page from `offset` on that may hold anything but zeros."""
        try:
            return os.lseek(region.fd, offset, os.SEEK_DATA) // PAGE_BYTES * PAGE_BYTES
        except OSError as error:
            return self.region_bytes if error.errno == errno.ENXIO else offset

    def free_bytes(self) -> int:
        """What is free on the folder's file system."""
        return self._operations.free_bytes(self.folder)

    def sync(self) -> None:
        """Bring everything to the device: at an orderly stop, so that a power cut finds it."""
        for region in self.regions:
            self._operations.sync(region.fd)

    def generation_of(self, region: Region) -> int | None:
        """The generation that the region's header tells; None when it is not this store's."""
        page = aligned(REGION_HEADER_BYTES)
        if self.read(region, 0, page) < REGION_HEADER_BYTES:
            return None
        if hashlib.sha256(page[:_CHECKSUM_AT]).digest() != page[_CHECKSUM_AT:]:
            return None
        magic, version, flags, number, store, generation, length = _PREFIX.unpack_from(page)
        told = (magic, version, flags, number, store, length)
        ours = (REGION_MAGIC, REGION_VERSION, 0, region.number, self.store, self.region_bytes)
        return int(generation) if told == ours else None

    def close(self) -> None:
        for region in self.regions:
            os.close(region.fd)
        self.regions = []

    def _open_all(self, count: int) -> None:
        full: OSError | None = None
        for number in range(count):
            path = self.folder / f"{number:06d}"
            if full is not None and not path.exists():
                continue
            try:
                self.regions.append(self._open(path, number))
            except OSError as error:
                if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
                    raise Unavailable(
                        f"region file {path} cannot be prepared: {error.strerror}",
                        field="nvme_path",
                    ) from error
                full = error
        if len(self.regions) < REGIONS_MIN:
            raise Unavailable(
                f"no room for {REGIONS_MIN} region files in {self.folder}: free disk space or "
                "lower the NVMe tier's size",
                field="nvme_bytes",
                limit=self.region_bytes,
            ) from full
        if full is not None:
            _log.warning(
                "room for %d of %d region files in %s: the NVMe tier is smaller than set",
                len(self.regions),
                count,
                self.folder,
            )
        self._remove_surplus(count)

    def _open(self, path: Path, number: int) -> Region:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags | (os.O_DIRECT if self.direct else 0), 0o600)
        try:
            os.fchmod(fd, 0o600)
            fresh = os.fstat(fd).st_size == 0
            if fresh:
                self._check_floor(number)
                self._allocate(fd)
        except OSError:
            if os.fstat(fd).st_size == 0:
                path.unlink()  # no half-made file is left behind on a full disk
            os.close(fd)
            raise
        return Region(number, fd, generation=0, tail=self.region_bytes, fresh=fresh)

    def _check_floor(self, number: int) -> None:
        """What is laid out below the floor would never be written to; the fewest that there
        must be wait until there is more space.
        """
        if not self._floor_bytes or number < REGIONS_MIN:
            return
        if self.free_bytes() < self._floor_bytes + self.region_bytes:
            raise OSError(errno.ENOSPC, "below the free-space floor")

    def _allocate(self, fd: int) -> None:
        os.ftruncate(fd, 0)
        try:
            self._operations.allocate(fd, self.region_bytes)
        except OSError:
            os.ftruncate(fd, 0)
            raise

    def _remove_surplus(self, count: int) -> None:
        """Files beyond the tier's present size would keep room for nothing."""
        for path in self.folder.glob("[0-9]" * 6):
            if int(path.name) >= count:
                _log.warning("region file %s is beyond the tier's size and is removed", path)
                path.unlink()

    def _header(self, number: int, generation: int) -> bytes:
        body = _PREFIX.pack(
            REGION_MAGIC, REGION_VERSION, 0, number, self.store, generation, self.region_bytes
        ).ljust(_CHECKSUM_AT, b"\0")
        return body + hashlib.sha256(body).digest()


def _behind(parts: list[memoryview], nbytes: int) -> list[memoryview]:
    """`parts` without their first `nbytes` bytes."""
    for index, part in enumerate(parts):
        if nbytes < len(part):
            return [part[nbytes:], *parts[index + 1 :]]
        nbytes -= len(part)
    return []


def _direct_works(folder: Path) -> bool:
    probe = folder / "probe"
    try:
        fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    try:
        page = aligned(PAGE_BYTES)
        os.pwrite(fd, page, 0)
        return os.preadv(fd, [page], 0) == PAGE_BYTES
    except OSError:
        return False
    finally:
        os.close(fd)
        probe.unlink(missing_ok=True)
