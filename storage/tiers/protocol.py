"""What every tier promises.

- `put` copies a whole record in. The block is invisible until the last byte is there and
  `admit()` has returned; then it is visible at once. A `put` that fails leaves nothing behind,
  no bytes charged and no address taken, and may be repeated.
- `hold` pins a block and gives its record bytes; a reader sees one writing, whole.
- `evict` frees the room of a block that nobody holds; `drop` frees it also when somebody does
  (the holder's bytes stay until it lets go).
- Record bytes are the same in every tier, but for the placement area of the header.
- A failing device is `Unavailable`, a full one `Overloaded`; both are counted, and neither
  makes an address unusable.
- All calls are made on the event loop's thread; bytes move on executors.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from storage.block import BlockAddress
from storage.header import Header
from storage.index import Footprint, Index
from storage.lifecycle import Admit, Resident
from strongroom.identity import ComponentId, NamespaceId


class TierName(StrEnum):
    """The tiers there are."""

    MEMORY = "memory"
    HOST = "host"
    NVME = "nvme"


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """Counters since start, and gauges now. Bytes are record bytes."""

    name: TierName
    blocks: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    pinned: int = 0
    pinned_bytes: int = 0
    stored: int = 0
    evictions: int = 0
    quota_refusals: int = 0
    overloads: int = 0
    io_errors: int = 0
    recovered: int = 0
    torn: int = 0
    foreign: int = 0
    stale: int = 0
    corrupt: int = 0
    future: int = 0
    # Of a tier on disks alone:
    unburied: int = 0
    """Dropped records whose headers are not overwritten yet."""
    written_bytes: int = 0
    moved: int = 0
    """Records that were kept when their region was reclaimed."""
    reclaimed_regions: int = 0
    budget_refusals: int = 0
    floor_refusals: int = 0
    devices_out: int = 0
    lost: int = 0
    """Blocks that went with a failing device or a damaged region."""


class Tier(Protocol):
    """One place for ciphertext."""

    @property
    def name(self) -> TierName: ...

    def __contains__(self, address: BlockAddress, /) -> bool: ...

    def resident(self, address: BlockAddress) -> Resident | None:
        """The block's metadata, without touching its recency."""
        ...

    def namespace_of(self, address: BlockAddress) -> NamespaceId | None:
        """The block's namespace, or None when it is not here; memory only."""
        ...

    def touch(self, address: BlockAddress) -> None:
        """Count a use."""
        ...

    async def put(self, header: Header, record: memoryview, admit: Admit) -> Resident:
        """Store a sealed record. Raises `QuotaExceeded`, `Overloaded`, or what `admit` raises."""
        ...

    def hold(self, address: BlockAddress) -> AbstractAsyncContextManager[memoryview]:
        """The record's bytes while the context lasts. Raises `Missing` or `Unavailable`."""
        ...

    def evict(self, address: BlockAddress) -> int:
        """Bytes freed; 0 if the block is absent or pinned."""
        ...

    def drop(self, address: BlockAddress) -> int:
        """Make the block gone now; bytes freed, 0 if it is absent."""
        ...

    async def drop_namespaces(self, namespaces: Collection[NamespaceId]) -> tuple[int, int]:
        """Drop every block of these namespaces: blocks and bytes. Others run in between."""
        ...

    def namespaces(self) -> Mapping[NamespaceId, int]:
        """Namespaces that have blocks here, and how many."""
        ...

    def footprints(self, step: int) -> Iterator[list[Footprint]]:
        """What each namespace has here, a list for at most `step` of them."""
        ...

    def tenants(self) -> Mapping[NamespaceId, ComponentId]:
        """The tenant of each namespace that has blocks here."""
        ...

    def set_quota(self, tenant: ComponentId, nbytes: int) -> None:
        """A tenant's hard cap in this tier."""
        ...

    def set_share(self, tenant: ComponentId, guaranteed_bytes: int, weight: float) -> None:
        """What nobody takes from a tenant in this tier, and its weight in the rest."""
        ...

    def cap(self, tenant: ComponentId) -> int | None:
        """A tenant's hard cap in this tier; None is none."""
        ...

    def used(self) -> Mapping[ComponentId, int]:
        """Bytes charged, by tenant."""
        ...

    def statistics(self) -> TierStatistics: ...

    async def close(self) -> None:
        """Finish what runs and give everything back."""
        ...


_DROP_STEP = 1024
"""Rows looked at in a row: some tens of microseconds where none of them is dropped."""
_DROP_LOOK = 8
"""Drops between two looks at the time."""
_DROP_TURN_S = 0.0005
_DROP_PAUSE_S = 0.001
"""A pause in which others get many turns: an answer to a revocation takes a few dozen."""


async def drop_in_steps(
    index: Index, namespaces: Collection[NamespaceId], drop: Callable[[BlockAddress], int]
) -> tuple[int, int]:
    """Drop every block of `namespaces` from a tier's index.

    It never holds the loop for much longer than half a millisecond, and is idle twice as long.
    """
    blocks = freed = 0
    since = time.perf_counter()
    for addresses in index.of_namespaces(namespaces, _DROP_STEP):
        for number, address in enumerate(addresses):
            size = drop(address)
            blocks += 1 if size else 0
            freed += size
            if number % _DROP_LOOK == 0 and time.perf_counter() - since > _DROP_TURN_S:
                await asyncio.sleep(_DROP_PAUSE_S)
                since = time.perf_counter()
        if time.perf_counter() - since > _DROP_TURN_S:
            await asyncio.sleep(_DROP_PAUSE_S)
            since = time.perf_counter()
    return blocks, freed
