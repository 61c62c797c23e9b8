"""Several folders, each on a device of its own, as one space of regions.

- A folder is complete in itself: manifest, lock, region files. Folders may be added, removed or
  put in another order; each keeps what it holds. Regions are striped: the log goes from device
  to device.
- A device that fails several times in a row is out of service for a while. Its regions take no
  writes and its blocks are misses at once, and no other device's. A folder that cannot be
  opened is out from the start; where none can, there is no tier.
- They share one executor, and none may have all of its threads where there are several: one that
  hangs leaves the others theirs.
- A device whose file system has less free space than the floor takes no new writes until it
  has more.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Self

from storage.header import HEADER_BYTES
from storage.tiers.limits import NvmeLimits
from storage.tiers.manifest import open_manifest, prepare_folder
from storage.tiers.regions import REGION_HEADER_BYTES, REGIONS_MIN, Region, RegionFiles
from storage.workers import Workers
from strongroom.clock import Clock
from strongroom.errors import Overloaded, Unavailable

_log = logging.getLogger(__name__)

MakeFiles = Callable[[Path, bytes, int, int, int], RegionFiles]
"""From folder, store id, region length, number of regions and free-space floor."""


class Device:
    """One folder, open. `errors_in_a_row` and `out_until_ns` say how it is."""

    def __init__(self, files: RegionFiles, lock: int) -> None:
        self.files = files
        self.free_bytes: int | None = None
        self.errors_in_a_row = 0
        self.out_until_ns: int | None = None
        self.left = False
        """Out of service with blocks that are still in the index."""
        self._lock = lock

    @classmethod
    async def open(
        cls,
        folder: Path,
        capacity_bytes: int,
        region_bytes: int,
        workers: Workers,
        make_files: MakeFiles,
        floor_bytes: int,
    ) -> Self:
        """Open or make a folder. Raises `Unavailable`, or `Conflict` when it is taken."""
        async with contextlib.AsyncExitStack() as undo:
            lock = prepare_folder(folder)
            undo.callback(os.close, lock)
            manifest = await open_manifest(folder, region_bytes)
            if manifest.region_bytes != region_bytes:
                _log.warning("%s keeps its region length, %d", folder, manifest.region_bytes)
            count = max(REGIONS_MIN, capacity_bytes // manifest.region_bytes)
            made: list[RegionFiles] = []
            make = partial(
                make_files, folder, manifest.store, manifest.region_bytes, count, floor_bytes
            )

            def close() -> None:
                for files in made:
                    files.close()

            # A job that has begun ends also when it is cancelled: what it opened is closed then.
            undo.callback(close)
            await workers.run(lambda: made.append(make()), always=True)
            undo.pop_all()
        return cls(made[0], lock)

    def close(self) -> None:
        self.files.close()
        os.close(self._lock)


class Devices:
    """The regions of every device, in the order in which the log goes through them."""

    def __init__(
        self, devices: Sequence[Device], workers: Workers, clock: Clock, limits: NvmeLimits
    ) -> None:
        self._devices = tuple(devices)
        self._workers = workers
        self._clock = clock
        self._limits = limits
        threads = workers.threads
        self.calls_max = threads if len(devices) == 1 else max(1, threads - threads // len(devices))
        """Calls that one device may have on the executor at once."""
        self._calls = [asyncio.Semaphore(self.calls_max) for _ in devices]
        self._free_seen_ns: int | None = None
        self._all_well = True
        self.absent = 0
        """Folders that were named and could not be opened."""
        self.errors = 0
        self.floor_refusals = 0
        self.region_bytes = max(device.files.region_bytes for device in devices)
        """The longest region's length: how far regions are apart in the tier's space."""
        rows = zip_longest(*(device.files.regions for device in devices))
        self.regions = [region for row in rows for region in row if region is not None]
        for slot, region in enumerate(self.regions):
            region.slot = slot
        for number, device in enumerate(devices):
            for region in device.files.regions:
                region.device = number

    @classmethod
    async def open(
        cls,
        folders: Sequence[Path],
        capacity_bytes: int,
        region_bytes: int,
        workers: Workers,
        clock: Clock,
        limits: NvmeLimits,
        make_files: MakeFiles,
    ) -> Self:
        """Open every folder that can be; raises `Unavailable` when none can, or `Conflict`."""
        region_bytes -= region_bytes % HEADER_BYTES
        share = capacity_bytes // len(folders)
        opened: list[Device] = []
        refusals: list[Unavailable] = []
        with contextlib.ExitStack() as undo:
            for folder in folders:
                try:
                    device = await Device.open(
                        folder, share, region_bytes, workers, make_files, limits.free_floor_bytes
                    )
                except Unavailable as error:
                    _log.warning("a device is left out: %s", error.message)
                    refusals.append(error)
                else:
                    undo.callback(device.close)
                    opened.append(device)
            if not opened:
                raise refusals[0]
            undo.pop_all()
        made = cls(opened, workers, clock, limits)
        made.absent = len(refusals)
        return made

    @property
    def workers(self) -> Workers:
        """The executor that all of their calls run on."""
        return self._workers

    @property
    def count(self) -> int:
        """How many devices are open."""
        return len(self._devices)

    @property
    def out(self) -> int:
        """How many devices are out of service, those included that were never opened."""
        now = self._clock()
        return self.absent + sum(1 for device in self._devices if self._is_out(device, now))

    @property
    def all_well(self) -> bool:
        """Whether no device is out of service; costs nothing."""
        return self._all_well

    def files_of(self, region: Region) -> RegionFiles:
        """The files that the region is one of."""
        return self._devices[region.device].files

    def payload_bytes(self, region: Region) -> int:
        """What a region holds besides its header."""
        return self.files_of(region).region_bytes - REGION_HEADER_BYTES

    def in_service(self, region: Region) -> bool:
        """Whether the region's device is to be asked."""
        device = self._devices[region.device]
        return device.out_until_ns is None or not self._is_out(device, self._clock())

    def writable(self, region: Region) -> bool:
        """Whether the region may take new records: in service, and above the floor."""
        return self.in_service(region) and self._above_floor(self._devices[region.device])

    def check_floor(self) -> None:
        """Raise `Overloaded`, counted, when no device has free space above the floor."""
        if not any(self._above_floor(device) for device in self._devices):
            self.floor_refusals += 1
            raise Overloaded(
                "the file system has less free space than the floor",
                field="nvme_free_floor_bytes",
                limit=self._limits.free_floor_bytes,
            )

    async def look_at_free_space(self) -> None:
        """Ask the file systems how much is free, unless that is known of just now."""
        if not self._limits.free_floor_bytes:
            return
        now = self._clock()
        seen = self._free_seen_ns
        if seen is not None and 0 <= now - seen < self._limits.free_check_s * 1e9:
            return
        self._free_seen_ns = now
        await self._workers.run(*(partial(_look, device) for device in self._devices), always=True)

    def take_left(self) -> frozenset[int]:
        """Numbers of the devices whose blocks must go from the index; each is told once."""
        now = self._clock()
        left = {number for number, device in enumerate(self._devices) if device.left}
        for number in left:
            self._devices[number].left = False
        # One that is in service again has what it had.
        return frozenset(number for number in left if self._is_out(self._devices[number], now))

    async def run(self, region: Region, *jobs: Callable[[], None], always: bool = False) -> None:
        """Run `jobs`, which touch `region`'s files, on the executor.

        Raises `Overloaded` when the queue or the device is full, `Unavailable` when the device
        fails or is out of service; both are counted.
        """
        device = self._devices[region.device]
        if not self.in_service(region):
            raise Unavailable("the NVMe device is out of service", field="nvme")
        try:
            async with self._calls[region.device]:
                await self._workers.run(*jobs, always=always)
        except OSError as error:
            raise self._failed(device, error) from error
        device.errors_in_a_row = 0
        if device.out_until_ns is not None:
            _log.warning("the NVMe device of %s is in service again", device.files.folder)
            device.out_until_ns = None
            self._all_well = all(other.out_until_ns is None for other in self._devices)

    def sync(self) -> list[Callable[[], None]]:
        """Jobs that bring each device in service to rest."""
        now = self._clock()
        return [device.files.sync for device in self._devices if not self._is_out(device, now)]

    def close(self) -> None:
        for device in self._devices:
            device.close()

    def _is_out(self, device: Device, now_ns: int) -> bool:
        return device.out_until_ns is not None and now_ns < device.out_until_ns

    def _above_floor(self, device: Device) -> bool:
        return device.free_bytes is None or device.free_bytes >= self._limits.free_floor_bytes

    def _failed(self, device: Device, error: OSError) -> Overloaded | Unavailable:
        self.errors += 1
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            return Overloaded("the NVMe device is full", field="nvme")
        device.errors_in_a_row += 1
        if device.errors_in_a_row >= self._limits.errors_max:
            device.out_until_ns = self._clock() + int(self._limits.retry_s * 1e9)
            device.left = True
            self._all_well = False
            _log.error("the NVMe device of %s is out of service", device.files.folder)
        name = errno.errorcode.get(error.errno or 0, "error")
        return Unavailable(f"the NVMe device failed: {name}")


def _look(device: Device) -> None:
    try:
        device.free_bytes = device.files.free_bytes()
    except OSError:
        device.free_bytes = 0  # nothing is known of it: nothing is written to it
