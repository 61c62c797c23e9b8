"""The one place that builds a block store from settings."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from storage.block import BlockAddress
from storage.crypto import Cipher
from storage.dirty import DirtyBlocks
from storage.eviction import EvictionSettings
from storage.memfd import MemoryOptions
from storage.offload import OffloadPipeline
from storage.offloads import OffloadSettings
from storage.onboard import OnboardSettings
from storage.residency import Residency
from storage.shares import Share
from storage.stages import Policy, WriteAll
from storage.store import BlockStore, QueueStatistics
from storage.tiers.host import HostTier
from storage.tiers.limits import NvmeLimits
from storage.tiers.nvme import MakeFiles, NvmeTier
from storage.tiers.recovery import Progress
from storage.tiers.regions import RegionFiles
from storage.workers import Workers, crypto_workers, disk_workers
from strongroom.clock import Clock, boot_ns
from strongroom.identity import ComponentId
from strongroom.limits import PIN_S_DEFAULT

MIB = 1024 * 1024


def _cores() -> int:
    return max(1, len(os.sched_getaffinity(0)))


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Sizes in bytes, times in seconds. Without `nvme_path` there is no NVMe tier."""

    host_bytes: int = 1024 * MIB
    nvme_path: Path | None = None
    nvme_paths: tuple[Path, ...] = ()
    """Further folders, each on a device of its own; all of them are one tier."""
    nvme_bytes: int = 4096 * MIB
    """Of all folders together."""
    nvme_limits: NvmeLimits = field(default_factory=NvmeLimits)
    region_bytes: int = 256 * MIB
    host_quota_bytes: int | None = None
    """A tenant's cap in the host tier; None is none (eviction bounds it)."""
    nvme_quota_bytes: int | None = None
    host_shares: Mapping[ComponentId, Share] = field(default_factory=dict)
    """Guarantee, weight and cap in the host tier, by tenant."""
    nvme_shares: Mapping[ComponentId, Share] = field(default_factory=dict)
    eviction: EvictionSettings = field(default_factory=EvictionSettings)
    crypto_threads: int = field(default_factory=_cores)
    crypto_queue_max: int = 1024
    """Blocks that wait for a turn on the crypto threads; beyond it a transfer is `Overloaded`."""
    disk_threads: int = 8
    disk_queue_max: int = 256
    write_behind_s: float = 0.5
    """The age at which a batch is written that has not filled up."""
    offload_queue_max: int = 4096
    """Blocks on their way to NVMe."""
    offload_slots: int = 2
    pin_s: float = PIN_S_DEFAULT
    lock_memory: bool = True
    huge_pages: bool = True
    ahead_blocks: int = 8
    ahead_bytes: int = 128 * MIB
    """How far reading from NVMe runs ahead of the block that is being opened."""
    numa_node: int | None = None
    """The node whose memory the arena takes; None leaves it to the system."""

    @property
    def nvme_folders(self) -> tuple[Path, ...]:
        """Every folder of the NVMe tier."""
        return (*((self.nvme_path,) if self.nvme_path else ()), *self.nvme_paths)


@asynccontextmanager
async def open_store(
    settings: StoreSettings,
    clock: Clock = boot_ns,
    progress: Progress | None = None,
    make_files: MakeFiles = RegionFiles,
    policy: Policy | None = None,
    evicted: Callable[[BlockAddress], None] | None = None,
) -> AsyncIterator[BlockStore]:
    """An open store. `progress` follows the recovery of the NVMe regions; `evicted` hears of
    every block that leaves NVMe to make room.

    Raises `Unavailable` or `Conflict` when the NVMe directory cannot be used.
    """
    pin_ns = int(settings.pin_s * 1e9)
    async with AsyncExitStack() as stack:
        crypto = crypto_workers(settings.crypto_threads, settings.crypto_queue_max)
        stack.callback(crypto.close)
        disk = disk_workers(settings.disk_threads, settings.disk_queue_max)
        stack.callback(disk.close)
        dirty = DirtyBlocks()
        nvme = None
        if settings.nvme_folders:
            nvme = await NvmeTier.open(
                settings.nvme_folders,
                settings.nvme_bytes,
                settings.region_bytes,
                disk,
                clock,
                pin_ns=pin_ns,
                quota_bytes=settings.nvme_quota_bytes,
                shares=settings.nvme_shares,
                eviction=settings.eviction,
                limits=settings.nvme_limits,
                progress=progress,
                make_files=make_files,
            )
            stack.push_async_callback(nvme.close)
            if evicted is not None:
                nvme.tell_evicted(evicted)
        host = HostTier(
            settings.host_bytes,
            clock,
            pin_ns=pin_ns,
            quota_bytes=settings.host_quota_bytes,
            shares=settings.host_shares,
            eviction=settings.eviction,
            is_dirty=dirty.__contains__,
            is_backed=nowhere if nvme is None else nvme.__contains__,
            memory=MemoryOptions(settings.lock_memory, settings.huge_pages, settings.numa_node),
        )
        dirty.tell_cleaned(host.cleaned)
        stack.push_async_callback(host.close)
        stack.enter_context(_settling(host))
        cipher = Cipher(
            crypto,
            last_sequence=0 if nvme is None else nvme.last_sequence,
            weight=host.weight,
        )
        residency = Residency(host, nvme)
        offload = None
        if nvme is not None:
            offload = OffloadPipeline(
                residency, nvme, dirty, policy or WriteAll(), clock, _offload_settings(settings)
            )
        store = BlockStore(
            residency,
            cipher,
            offload,
            _queues(cipher, crypto, nvme, disk),
            clock=clock,
            onboard=OnboardSettings(settings.ahead_blocks, settings.ahead_bytes, pin_ns),
        )
        yield await stack.enter_async_context(store)


def _queues(
    cipher: Cipher, crypto: Workers, nvme: NvmeTier | None, disk: Workers
) -> tuple[Callable[[], QueueStatistics], ...]:
    """What waits for a turn and what waits for a thread, as one queue each."""

    def opened() -> QueueStatistics:
        turns = cipher.turns
        depth = turns.waiting + turns.in_turn
        return QueueStatistics(
            crypto.name, depth, turns.waiting_max, turns.tenants_waiting, turns.refused
        )

    def moved() -> QueueStatistics:
        if nvme is None:
            return QueueStatistics(disk.name, disk.depth, disk.queue_max)
        turns = nvme.turns
        depth = turns.waiting + disk.depth
        return QueueStatistics(
            disk.name, depth, turns.waiting_max, turns.tenants_waiting, turns.refused
        )

    return opened, moved


def _offload_settings(settings: StoreSettings) -> OffloadSettings:
    """What waits for the disk may take half of the host tier."""
    return OffloadSettings(
        queue_max=settings.offload_queue_max,
        queue_bytes_max=settings.host_bytes // 2,
        batch_age_s=settings.write_behind_s,
        slots=settings.offload_slots,
    )


@contextmanager
def _settling(host: HostTier) -> Iterator[None]:
    """The arena's pages are locked and touched beside what is done with them already."""
    stop = threading.Event()
    thread = threading.Thread(target=host.settle, args=(stop,), name="strongroom-settle")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def nowhere(_: BlockAddress) -> bool:
    """Without an NVMe tier, no block has a second copy."""
    return False
