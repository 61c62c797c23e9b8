"""The one place that builds a block store from settings."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from storage.crypto import Cipher
from storage.dirty import DirtyBlocks
from storage.store import BlockStore
from storage.tiers.host import HostTier
from storage.tiers.nvme import NvmeTier
from storage.workers import crypto_executor, disk_executor
from strongroom.clock import Clock, boot_ns
from strongroom.limits import PIN_S_DEFAULT

MIB = 1024 * 1024


def _cores() -> int:
    return max(1, len(os.sched_getaffinity(0)))


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Sizes in bytes, times in seconds. Without `nvme_path` there is no NVMe tier."""

    host_bytes: int = 1024 * MIB
    nvme_path: Path | None = None
    nvme_bytes: int = 4096 * MIB
    region_bytes: int = 256 * MIB
    host_quota_bytes: int | None = None
    """A tenant's cap in the host tier; None is none (eviction bounds it)."""
    nvme_quota_bytes: int | None = None
    crypto_threads: int = field(default_factory=_cores)
    disk_threads: int = 4
    pin_s: float = PIN_S_DEFAULT
    lock_memory: bool = True


@asynccontextmanager
async def open_store(
    settings: StoreSettings,
    clock: Clock = boot_ns,
    progress: Callable[[int, int], None] | None = None,
) -> AsyncIterator[BlockStore]:
    """An open store. `progress(done, all)` follows the scan of the NVMe regions."""
    pin_ns = int(settings.pin_s * 1e9)
    crypto = crypto_executor(settings.crypto_threads)
    disk = disk_executor(settings.disk_threads)
    dirty = DirtyBlocks()
    try:
        nvme = None
        if settings.nvme_path is not None:
            nvme = await NvmeTier.open(
                settings.nvme_path,
                settings.nvme_bytes,
                settings.region_bytes,
                disk,
                clock,
                pin_ns=pin_ns,
                quota_bytes=settings.nvme_quota_bytes,
                progress=progress,
            )
        host = HostTier(
            settings.host_bytes,
            clock,
            pin_ns=pin_ns,
            quota_bytes=settings.host_quota_bytes,
            is_dirty=dirty.__contains__,
            lock_memory=settings.lock_memory,
        )
        cipher = Cipher(crypto, settings.crypto_threads)
        async with BlockStore(host, nvme, cipher, dirty) as store:
            yield store
    finally:
        crypto.shutdown()
        disk.shutdown()
