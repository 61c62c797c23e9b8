"""The block store: host and NVMe tiers as one, encrypted once on save, opened once on load.

Rules:
- Everything here runs on the event loop's thread; bytes move on executors. A step without an
  `await` is atomic, which is how `publish` re-checks fence and retired set "under one lock".
- `save` seals into the host arena, publishes, and writes behind to NVMe. `load` opens from the
  host arena, or reads from NVMe straight into host room, opens there, and keeps it (promotion).
- A record that does not open is quarantined: dropped, counted, never retried.
- `retire` costs the same for any number of blocks: the namespace's name goes into a set that
  every lookup, load, save and publish consults. The bytes are freed in the background.
- Every task is a child of the store's own group and ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import NoReturn, Self

from storage.block import BlockAddress, BlockContext
from storage.crypto import Cipher
from storage.dirty import DirtyBlocks
from storage.fence import Fence, Fenced
from storage.header import clear_placement, read_header, record_bytes
from storage.lifecycle import Reserved
from storage.memory import wipe
from storage.tiers.host import HostTier
from storage.tiers.nvme import NvmeTier
from storage.tiers.protocol import TierName, TierStatistics
from strongroom.derivation import NamespaceKeys
from strongroom.errors import (
    Corrupt,
    Missing,
    Misuse,
    Overloaded,
    QuotaExceeded,
    StrongroomError,
    Unavailable,
)
from strongroom.identity import ComponentId, NamespaceId

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A block was opened: from which tier, and how many plaintext bytes."""

    tier: TierName
    bytes: int


@dataclass(frozen=True, slots=True)
class Saved:
    """`stored` is false when the block was resident already."""

    stored: bool
    bytes: int


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """What a reclaim freed, all tiers together."""

    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Counters since start and gauges now."""

    tiers: tuple[TierStatistics, ...]
    hits: Mapping[TierName, int]
    misses: int
    quarantined: int
    fenced: int
    quota_refusals: int
    write_behind_pending: int
    write_behind_failed: int
    retired_namespaces: int


@dataclass(slots=True)
class _Counts:
    hits: dict[TierName, int] = field(default_factory=dict)
    misses: int = 0
    quarantined: int = 0
    fenced: int = 0
    quota_refusals: int = 0
    write_behind_failed: int = 0


class BlockStore:
    """Use as an async context manager; leaving it flushes. `storage.compose` builds it."""

    def __init__(
        self, host: HostTier, nvme: NvmeTier | None, cipher: Cipher, dirty: DirtyBlocks
    ) -> None:
        self._host = host
        self._nvme = nvme
        self._cipher = cipher
        self._dirty = dirty
        self._retired: set[NamespaceId] = set()
        self._saving: set[BlockAddress] = set()
        self._counts = _Counts()
        self._tasks = asyncio.TaskGroup()
        self._retired_news = asyncio.Event()
        self._reclaiming = asyncio.Lock()
        """Held by the one walk over the indexes at a time."""
        self._reclaimed = Reclaimed(0, 0)
        self._closing = False

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        if self._nvme is not None:
            self._tasks.create_task(self._write_behind(self._nvme), name="write-behind")
        self._tasks.create_task(self._reclaim_behind(), name="reclaim")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing = True
        self._dirty.close()
        self._retired_news.set()
        # Without the error: the tasks are to come to their orderly end, also when the block
        # they served under was cancelled.
        await self._tasks.__aexit__(None, None, None)

    # Lookup: memory only

    def tier_of(self, address: BlockAddress) -> TierName | None:
        """The fastest tier that has the block; a hint, never proof."""
        namespace = self._host.namespace_of(address)
        if namespace is not None:
            return None if namespace in self._retired else TierName.HOST
        if self._nvme is None:
            return None
        namespace = self._nvme.namespace_of(address)
        return None if namespace is None or namespace in self._retired else TierName.NVME

    def slowest_tier(self, addresses: Iterable[BlockAddress]) -> TierName | None:
        """The slowest tier that these blocks would be read from; None when none is resident."""
        tiers = {self.tier_of(address) for address in addresses}
        if TierName.NVME in tiers:
            return TierName.NVME
        return TierName.HOST if TierName.HOST in tiers else None

    def match_prefix(self, addresses: Sequence[BlockAddress]) -> int:
        """How many blocks from the first on are resident; stops at the first miss.

        Takes no pin and counts no use: a lookup may be repeated at will.
        """
        for count, address in enumerate(addresses):
            if self.tier_of(address) is None:
                return count
        return len(addresses)

    # Transfers

    async def load(
        self, context: BlockContext, keys: NamespaceKeys, staging: memoryview, fence: Fence
    ) -> Loaded:
        """Open a block into `staging` (exactly `context.plaintext_bytes`).

        Raises `Missing`, `Corrupt`, `Fenced` or `Overloaded`; then staging is wiped. When
        cancelled, staging is wiped too, once no thread writes to it any more.
        """
        if len(staging) != context.plaintext_bytes:
            raise Misuse(
                "staging has another size than the block",
                field="staging",
                limit=context.plaintext_bytes,
            )
        try:
            self._check(context.namespace, fence)
            tier = await self._load(context, keys, staging)
            self._check(context.namespace, fence)
        except BaseException as error:
            wipe(staging)
            if isinstance(error, Fenced):
                self._counts.fenced += 1
            raise
        self._counts.hits[tier] = self._counts.hits.get(tier, 0) + 1
        return Loaded(tier, context.plaintext_bytes)

    async def save(
        self, context: BlockContext, keys: NamespaceKeys, staging: memoryview, fence: Fence
    ) -> Saved:
        """Seal `staging` and make the block visible; then write it behind.

        Raises `QuotaExceeded`, `Overloaded` or `Fenced`; then nothing was stored.
        """
        if len(staging) != context.plaintext_bytes:
            raise Misuse(
                "staging has another size than the block",
                field="staging",
                limit=context.plaintext_bytes,
            )
        self._check(context.namespace, fence)
        if self.tier_of(context.address) is not None or context.address in self._saving:
            return Saved(stored=False, bytes=0)
        self._saving.add(context.address)
        try:
            reserved = await self._reserve(context)
            try:
                header = await self._cipher.seal(
                    context, keys, staging, self._host.buffer(reserved)
                )
            except BaseException:
                self._host.abandon(reserved)
                raise
            self._host.publish(
                self._host.seal(reserved, header),
                lambda: self._check(context.namespace, fence),
            )
        except QuotaExceeded:
            self._counts.quota_refusals += 1
            raise
        except Fenced:
            self._counts.fenced += 1
            raise
        finally:
            self._saving.discard(context.address)
        if self._nvme is not None:
            self._dirty.add(context.address)
        return Saved(stored=True, bytes=context.plaintext_bytes)

    async def flush(self) -> None:
        """Return when everything that was dirty at the call is on NVMe, or has failed to be."""
        await self._dirty.drained()
        if self._nvme is not None:
            with contextlib.suppress(Unavailable, Overloaded):
                await self._nvme.sync()

    # Revocation

    def retire(self, namespaces: Collection[NamespaceId]) -> int:
        """From now on nothing of these namespaces is loaded, saved or published. O(namespaces)."""
        before = len(self._retired)
        self._retired |= set(namespaces)
        self._retired_news.set()
        return len(self._retired) - before

    async def reclaim(self) -> Reclaimed:
        """Free the bytes of retired namespaces.

        Returns what was freed since the last answer, here and in the background.
        """
        await self._reclaim()
        answer, self._reclaimed = self._reclaimed, Reclaimed(0, 0)
        return answer

    # What is here

    def namespaces(self) -> frozenset[NamespaceId]:
        """Namespaces with resident blocks, in any tier, but for retired ones."""
        return frozenset(self.namespace_tenants())

    def namespace_tenants(self) -> Mapping[NamespaceId, ComponentId]:
        """The tenant of each of `namespaces()`, as the records' headers say."""
        tenants = dict(self._host.tenants())
        if self._nvme is not None:
            tenants |= self._nvme.tenants()
        return {name: tenant for name, tenant in tenants.items() if name not in self._retired}

    def set_quota(self, tenant: ComponentId, tier: TierName, nbytes: int) -> None:
        """A tenant's hard cap in one tier, from now on."""
        if tier is TierName.HOST:
            self._host.set_quota(tenant, nbytes)
        elif tier is TierName.NVME and self._nvme is not None:
            self._nvme.set_quota(tenant, nbytes)
        else:
            raise Misuse(f"there is no tier {tier}", field="tier")

    def statistics(self) -> StoreStatistics:
        """A frozen snapshot."""
        tiers = [self._host.statistics()]
        if self._nvme is not None:
            tiers.append(self._nvme.statistics())
        counts = self._counts
        return StoreStatistics(
            tiers=tuple(tiers),
            hits=dict(counts.hits),
            misses=counts.misses,
            quarantined=counts.quarantined,
            fenced=counts.fenced,
            quota_refusals=counts.quota_refusals,
            write_behind_pending=len(self._dirty),
            write_behind_failed=counts.write_behind_failed,
            retired_namespaces=len(self._retired),
        )

    # Inside

    def _check(self, namespace: NamespaceId, fence: Fence) -> None:
        fence.check()
        if namespace in self._retired:
            raise Fenced("the namespace is retired")

    async def _load(
        self, context: BlockContext, keys: NamespaceKeys, staging: memoryview
    ) -> TierName:
        tier = self.tier_of(context.address)
        try:
            if tier is TierName.HOST:
                async with self._host.hold(context.address) as record:
                    await self._cipher.open(context, keys, record, staging)
                self._host.touch(context.address)
            elif tier is TierName.NVME and self._nvme is not None:
                await self._load_from_nvme(self._nvme, context, keys, staging)
                self._nvme.touch(context.address)
            else:
                _refuse_absent()
        except Missing:
            # Absent, or here in another layout: that one makes way for what is saved next.
            self._counts.misses += 1
            self._drop_everywhere(context.address)
            raise
        except Corrupt:
            self._counts.quarantined += 1
            self._drop_everywhere(context.address)
            _log.warning("a block did not open and was dropped (rank %d)", context.rank)
            raise
        except Unavailable as error:
            # The device failed, not the block's key: it may be saved again at once.
            self._counts.misses += 1
            self._drop_everywhere(context.address)
            raise Missing("the tier that holds it failed") from error
        assert tier is not None
        return tier

    async def _load_from_nvme(
        self, nvme: NvmeTier, context: BlockContext, keys: NamespaceKeys, staging: memoryview
    ) -> None:
        resident = nvme.resident(context.address)
        if resident is None:
            raise Missing("not resident")
        if resident.nbytes != record_bytes(context.segment_bytes):
            raise Missing("resident in another layout")
        async with self._promotion(nvme, context) as (record, reserved):
            header = await self._cipher.open(context, keys, record, staging)
            if reserved is None:
                return
            # The disk's own stamp stays on the disk.
            clear_placement(record)
            if context.namespace in self._retired or context.address in self._host:
                self._host.abandon(reserved)
            else:
                self._host.publish(self._host.seal(reserved, header), _admit_any)

    @contextlib.asynccontextmanager
    async def _promotion(
        self, nvme: NvmeTier, context: BlockContext
    ) -> AsyncIterator[tuple[memoryview, Reserved | None]]:
        """The record read into host room, or into a buffer of its own when there is none."""
        try:
            reserved = self._reserve_now(context)
        except Overloaded:
            async with nvme.hold(context.address) as record:
                yield record, None
            return
        record = self._host.buffer(reserved)
        try:
            await nvme.read_into(context.address, record)
            yield record, reserved
        except BaseException:
            self._host.abandon(reserved)
            raise
        finally:
            record.release()

    async def _reserve(self, context: BlockContext) -> Reserved:
        """Host room; where blocks that wait for write-behind stand in the way, wait for them."""
        try:
            return self._reserve_now(context)
        except QuotaExceeded:
            raise
        except Overloaded:
            if self._nvme is None or not len(self._dirty):
                raise
        await self._dirty.drained()
        return self._reserve_now(context)

    def _reserve_now(self, context: BlockContext) -> Reserved:
        return self._host.reserve(
            context.address,
            context.parent,
            context.tenant,
            context.namespace,
            record_bytes(context.segment_bytes),
        )

    def _drop_everywhere(self, address: BlockAddress) -> None:
        """Every copy is one writing: none is tried again."""
        self._host.drop(address)
        if self._nvme is not None:
            self._nvme.drop(address)

    async def _reclaim(self) -> None:
        async with self._reclaiming:
            self._retired_news.clear()
            tiers = (self._host, self._nvme) if self._nvme is not None else (self._host,)
            for tier in tiers:
                blocks, freed = await tier.drop_namespaces(self._retired)
                so_far = self._reclaimed
                self._reclaimed = Reclaimed(so_far.blocks + blocks, so_far.bytes + freed)
            if self._nvme is not None:
                await self._nvme.bury_dead()

    async def _reclaim_behind(self) -> None:
        while True:
            await self._retired_news.wait()
            if self._closing:
                return
            await self._reclaim()

    async def _write_behind(self, nvme: NvmeTier) -> None:
        while True:
            address = await self._dirty.next()
            if address is None:
                return
            try:
                await self._write_one(nvme, address)
            except StrongroomError as error:
                self._counts.write_behind_failed += 1
                if not isinstance(error, Missing | Fenced):
                    _log.warning("a block stays in host memory only: %s", error.code)
            finally:
                self._dirty.done(address)

    async def _write_one(self, nvme: NvmeTier, address: BlockAddress) -> None:
        resident = self._host.resident(address)
        if resident is None or address in nvme:
            return
        async with self._host.hold(address) as record:
            header = read_header(record)

            def admit() -> None:
                if self._host.resident(address) != resident:
                    raise Missing("dropped meanwhile")
                if resident.namespace in self._retired:
                    raise Fenced("the namespace is retired")

            await nvme.put(header, record, admit)


def _refuse_absent() -> NoReturn:
    raise Missing("not resident")


def _admit_any() -> None:
    """Nothing awaited since the check: there is nothing to check again."""
