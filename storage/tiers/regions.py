"""Region files: a few large preallocated files that are written front to back and reused whole.

A region starts with a 4 KiB header: magic, version, generation, checksum. Records follow, each
4 KiB aligned, stamped with the region's generation: a record of another generation is what the
region held before, and reads as stale. Files are opened with O_DIRECT where the file system
allows it; where not, the log says so once and the page cache stands in between.

File names are numbers; directories are 0700 and files 0600.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from strongroom.errors import Corrupt, Unavailable

REGION_MAGIC: Final = b"SRRG"
REGION_VERSION: Final = 1
REGION_HEADER_BYTES: Final = 4096
_PREFIX: Final = struct.Struct("<4sHHQ")
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Region:
    """One region file. `tail` is where the next record goes."""

    number: int
    fd: int
    generation: int
    tail: int
    newest: int = 0
    """Highest record sequence that a scan found in it."""
    live: int = 0
    """Resident blocks in it."""
    busy: int = 0
    """Reads and writes in flight; the region is not reused meanwhile."""


class AlignedBuffer:
    """Page-aligned memory for O_DIRECT, reused for one transfer at a time."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes)
        self._map.madvise(mmap.MADV_DONTDUMP)
        self.view = memoryview(self._map)

    def close(self) -> None:
        self.view.release()
        self._map.close()


class RegionFiles:
    """Opens, preallocates, reads and writes the region files of one folder. All calls block."""

    def __init__(self, folder: Path, region_bytes: int, count: int) -> None:
        self.folder = folder
        self.region_bytes = region_bytes
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        self.direct = _direct_works(folder)
        if not self.direct:
            _log.warning("no O_DIRECT in %s: reads and writes pass the page cache", folder)
        self.regions = [self._open(number) for number in range(count)]

    def renew(self, region: Region) -> None:
        """Start a new generation: whatever the region held is stale from now on."""
        generation = region.generation + 1
        page = AlignedBuffer(REGION_HEADER_BYTES)
        try:
            page.view[:] = _region_header(generation)
            self.write(region, 0, page.view)
        finally:
            page.close()
        region.generation = generation
        region.tail = REGION_HEADER_BYTES

    def write(self, region: Region, offset: int, data: memoryview) -> None:
        """Write all of `data` at `offset`; a short write is an error of the device."""
        done = 0
        while done < len(data):
            written = os.pwrite(region.fd, data[done:], offset + done)
            if written <= 0:
                raise OSError(errno.EIO, "short write")
            done += written

    def read(self, region: Region, offset: int, into: memoryview) -> None:
        """Fill `into` from `offset`; the end of the file inside it is `Corrupt`."""
        done = 0
        while done < len(into):
            count = os.preadv(region.fd, [into[done:]], offset + done)
            if count == 0:
                raise Corrupt("the region file is cut short", field="region")
            done += count

    def close(self) -> None:
        for region in self.regions:
            os.close(region.fd)
        self.regions = []

    def _open(self, number: int) -> Region:
        path = self.folder / f"{number:06d}.region"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags | (os.O_DIRECT if self.direct else 0), 0o600)
        try:
            os.fchmod(fd, 0o600)
            region = Region(number, fd, generation=0, tail=self.region_bytes)
            fresh = os.fstat(fd).st_size != self.region_bytes
            if fresh:
                os.ftruncate(fd, 0)
                os.posix_fallocate(fd, 0, self.region_bytes)
            page = AlignedBuffer(REGION_HEADER_BYTES)
            try:
                self.read(region, 0, page.view)
                generation = _parse_region_header(bytes(page.view))
            finally:
                page.close()
            if generation is None:
                self.renew(region)
            else:
                region.generation = generation
        except OSError as error:
            os.close(fd)
            raise Unavailable(
                f"region file {path} cannot be prepared: {error.strerror}; free disk space or "
                "lower the NVMe tier's size",
                field="nvme_bytes",
                limit=self.region_bytes,
            ) from error
        return region


def _region_header(generation: int) -> bytes:
    body = _PREFIX.pack(REGION_MAGIC, REGION_VERSION, REGION_HEADER_BYTES, generation)
    body = body.ljust(REGION_HEADER_BYTES - 16, b"\0")
    return body + hashlib.blake2b(body, digest_size=16).digest()


def _parse_region_header(page: bytes) -> int | None:
    magic, version, length, generation = _PREFIX.unpack_from(page)
    if (magic, version, length) != (REGION_MAGIC, REGION_VERSION, REGION_HEADER_BYTES):
        return None
    if hashlib.blake2b(page[:-16], digest_size=16).digest() != page[-16:]:
        return None
    return int(generation)


def _direct_works(folder: Path) -> bool:
    probe = folder / ".direct"
    try:
        fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    page = AlignedBuffer(4096)
    try:
        os.pwrite(fd, page.view, 0)
        return os.preadv(fd, [page.view], 0) == 4096
    except OSError:
        return False
    finally:
        page.close()
        os.close(fd)
        probe.unlink(missing_ok=True)
