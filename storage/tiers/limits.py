"""Bounds of the NVMe tier, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class NvmeLimits:
    """Lengths in bytes, times in seconds."""

    queue_depth: int = 8
    """System calls that one batch of reads or writes keeps in flight."""
    transfer_bytes: int = 2 * MIB
    """The longest of them: neighbours are joined up to it, larger records are cut by it."""
    write_bytes_per_day: int | None = None
    free_floor_bytes: int = 0
    """Free space of a device's file system below which nothing new is written to it."""
    free_check_s: float = 1.0
    """How old a look at the free space may be."""
    errors_max: int = 3
    """Failures in a row that take a device out of service."""
    retry_s: float = 60.0
    """How long it stays out; then one more failure takes it out again."""
