"""The block store: host and NVMe tiers as one, encrypted once on save, opened once on load.

Rules:
- Everything here runs on the event loop's thread; bytes move on executors. A step without an
  `await` is atomic, which is how `publish` re-checks fence and retired set "under one lock".
- This is the front: saving is in `storage.saving`, writing behind in `storage.offload`, loading
  in `storage.opening`, freeing in `storage.reclaim`.
- `retire` costs the same for any number of blocks: the namespace's name goes into a set that
  every lookup, load, save and publish consults. The bytes are freed in the background.
- Every task is a child of the store's own group and ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from storage.block import BlockAddress, BlockContext
from storage.crypto import Cipher, Opened
from storage.fence import Fence
from storage.index import Footprint
from storage.lifecycle import Resident
from storage.offload import OffloadPipeline
from storage.offloads import OffloadStatistics
from storage.onboard import Onboard, Onboarding, OnboardSettings, OnboardStatistics
from storage.opening import Loaded, Opening
from storage.reclaim import Reclaim, Reclaimed
from storage.residency import Residency
from storage.retention import Retention
from storage.saving import Aside, InTurn, Saved, Saving, at_once
from storage.tiers.protocol import TierName, TierStatistics
from strongroom.blocks import BlockId
from strongroom.clock import Clock, boot_ns
from strongroom.derivation import NamespaceKeys
from strongroom.errors import Misuse, Overloaded, Unavailable
from strongroom.identity import ComponentId, NamespaceId

_KEPT_AS_USUAL = Retention()


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """A bounded queue: what runs or waits, and how much may."""

    name: str
    depth: int
    limit: int
    tenants: int = 0
    """That have something waiting for its turn."""
    refused: int = 0
    """Jobs since start that found their tenant's part of the queue full."""


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Counters since start and gauges now."""

    tiers: tuple[TierStatistics, ...]
    hits: Mapping[TierName, int]
    misses: int
    quarantined: int
    fenced: int
    quota_refusals: int
    retired_namespaces: int
    onboard: OnboardStatistics
    offload: OffloadStatistics | None
    """None without an NVMe tier."""
    queues: tuple[QueueStatistics, ...] = ()

    @property
    def write_behind_pending(self) -> int:
        """Blocks on their way to NVMe."""
        return 0 if self.offload is None else self.offload.pending

    @property
    def write_behind_failed(self) -> int:
        """Blocks that did not get there, whatever the cause."""
        return 0 if self.offload is None else sum(self.offload.failed.values())


class BlockStore:
    """Use as an async context manager; leaving it flushes. `storage.compose` builds it."""

    def __init__(
        self,
        residency: Residency,
        cipher: Cipher,
        offload: OffloadPipeline | None,
        queues: Sequence[Callable[[], QueueStatistics]] = (),
        *,
        clock: Clock = boot_ns,
        onboard: OnboardSettings | None = None,
    ) -> None:
        """`queues` are those that `statistics` shows."""
        self._queues = tuple(queues)
        self._host = residency.host
        self._nvme = residency.nvme
        self._cipher = cipher
        self._residency = residency
        self._opening = Opening(residency, cipher)
        self._onboard = Onboard(residency, clock, self._opening.failed, onboard)
        self._saving = Saving(residency, cipher, offload)
        self._offload = offload
        self._reclaim = Reclaim(residency)
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        if self._offload is not None:
            self._tasks.create_task(self._offload.run(), name="offload")
        self._tasks.create_task(self._reclaim.run(), name="reclaim")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._offload is not None:
            self._offload.close()
        self._reclaim.close()
        # Without the error: the tasks are to come to their orderly end, also when the block
        # they served under was cancelled.
        await self._tasks.__aexit__(None, None, None)

    def tell_quarantined(self, told: Callable[[Resident], None]) -> None:
        """Call `told` with each block whose record did not open, whoever wanted it."""
        self._opening.told = told

    # Lookup: memory only

    def tier_of(self, address: BlockAddress) -> TierName | None:
        """The fastest tier that has the block; a hint, never proof."""
        return self._residency.tier_of(address)

    def locator(self, ranks: Collection[int]) -> Callable[[Sequence[BlockId]], Sequence[TierName]]:
        """For many blocks in a row, within one step: see `Residency.locator`."""
        return self._residency.locator(ranks)

    @property
    def crypto_busy(self) -> bool:
        """Whether something is being sealed or opened now."""
        return self._cipher.busy

    def waiting_on_nvme(self, address: BlockAddress) -> Resident | None:
        """The block's metadata, where NVMe alone has it; touches nothing."""
        return self._residency.waiting_on_nvme(address)

    def slowest_tier(self, addresses: Iterable[BlockAddress]) -> TierName | None:
        """The slowest tier that these blocks would be read from; None when none is resident."""
        tiers = {self.tier_of(address) for address in addresses}
        if TierName.NVME in tiers:
            return TierName.NVME
        return TierName.HOST if TierName.HOST in tiers else None

    # Transfers

    async def load(
        self,
        context: BlockContext,
        keys: NamespaceKeys,
        staging: memoryview,
        fence: Fence,
        opened: Opened | None = None,
    ) -> Loaded:
        """Open a block into `staging` (exactly `context.plaintext_bytes`).

        `opened(n, header)` is called while it runs, with n rising: the first n segments in
        staging are verified plaintext; that all are is said by returning. Raises `Missing`,
        `Corrupt`, `Fenced` or `Overloaded`; then staging is wiped. When cancelled, staging is
        wiped too, once no thread writes to it any more.
        """
        loaded = await self._opening.load(context, keys, staging, fence, opened)
        self._saving.used(context.address)
        return loaded

    def onboard(self, addresses: Sequence[BlockAddress], fence: Fence) -> Onboarding:
        """Bring blocks of one chain from NVMe into host memory, reading ahead; see `Onboarding`."""
        return self._onboard.begin(addresses, fence)

    async def save(
        self,
        context: BlockContext,
        keys: NamespaceKeys,
        staging: memoryview,
        fence: Fence,
        retention: Retention = _KEPT_AS_USUAL,
        in_turn: InTurn = at_once,
        aside: Aside = contextlib.nullcontext,
    ) -> Saved:
        """Seal `staging` and make the block visible; then write it behind.

        `in_turn` is awaited between the two, so that a block can wait for its parent while its
        own bytes are sealed already; what it raises is raised here. `aside()` is entered while
        the save waits for the disk. Raises `QuotaExceeded`,
        `Overloaded` or `Fenced` too; whatever is raised, nothing was stored.
        """
        return await self._saving.save(context, keys, staging, fence, retention, in_turn, aside)

    def request_ended(self) -> None:
        """No more blocks of one request come: what was saved need not wait to be written."""
        if self._offload is not None:
            self._offload.request_ended()

    def set_disk_admission(self, factor: float) -> None:
        """Let less onto NVMe: 1 is normal, at 0 nothing new is written there."""
        if self._offload is not None:
            self._offload.set_admission(factor)

    def pending_write_bytes(self) -> int:
        """Bytes in host memory on their way to NVMe: they cannot be evicted."""
        return 0 if self._offload is None else self._offload.statistics().pending_bytes

    async def flush(self) -> None:
        """Return when everything that was dirty at the call is on NVMe, or has failed to be."""
        if self._offload is not None:
            await self._offload.drained()
        if self._nvme is not None:
            with contextlib.suppress(Unavailable, Overloaded):
                await self._nvme.sync()

    # Revocation

    def retire(self, namespaces: Collection[NamespaceId]) -> int:
        """From now on nothing of these namespaces is loaded, saved or published. O(namespaces)."""
        retired = self._residency.retire(namespaces)
        self._reclaim.wake()
        return retired

    async def reclaim(self) -> Reclaimed:
        """Free the bytes of retired namespaces.

        Returns what was freed since the last answer, here and in the background.
        """
        return await self._reclaim.reclaim()

    # What is here

    def namespaces(self) -> frozenset[NamespaceId]:
        """Namespaces with resident blocks, in any tier, but for retired ones."""
        return frozenset(self.namespace_tenants())

    def namespace_tenants(self) -> Mapping[NamespaceId, ComponentId]:
        """The tenant of each of `namespaces()`, as the records' headers say."""
        tenants = dict(self._host.tenants())
        if self._nvme is not None:
            tenants |= self._nvme.tenants()
        retired = self._residency.retired
        return {name: tenant for name, tenant in tenants.items() if name not in retired}

    @property
    def retired(self) -> Collection[NamespaceId]:
        """The namespaces that were retired."""
        return self._residency.retired

    def namespaces_on_disk(self) -> Mapping[NamespaceId, int]:
        """Namespaces with records on NVMe, retired ones included, and how many."""
        return {} if self._nvme is None else self._nvme.namespaces()

    def footprints(self, step: int) -> Iterator[tuple[TierName, list[Footprint]]]:
        """What each namespace has in each tier, at most `step` at once, but for retired ones.

        The caller may let others run between two: what comes or goes meanwhile may be left out.
        """
        for tier in (self._host, self._nvme):
            if tier is None:
                continue
            for found in tier.footprints(step):
                retired = self._residency.retired
                yield tier.name, [each for each in found if each.namespace not in retired]

    def tenant_use(self, tier: TierName) -> Mapping[ComponentId, tuple[int, int | None]]:
        """Bytes charged to each tenant in one tier, and its cap there; None is none."""
        found = self._host if tier is TierName.HOST else self._nvme
        if found is None or found.name is not tier:
            return {}
        return {tenant: (used, found.cap(tenant)) for tenant, used in found.used().items()}

    def set_quota(self, tenant: ComponentId, tier: TierName, nbytes: int) -> None:
        """A tenant's hard cap in one tier, from now on."""
        if tier is TierName.HOST:
            self._host.set_quota(tenant, nbytes)
        elif tier is TierName.NVME and self._nvme is not None:
            self._nvme.set_quota(tenant, nbytes)
        else:
            raise Misuse(f"there is no tier {tier}", field="tier")

    def weight(self, tenant: ComponentId) -> float:
        """What a tenant's turns count against others': its weight in the host tier."""
        return self._host.weight(tenant)

    def set_share(
        self, tenant: ComponentId, tier: TierName, guaranteed_bytes: int, weight: float = 1.0
    ) -> None:
        """A tenant's guaranteed bytes and weight in one tier, from now on."""
        if tier is TierName.HOST:
            self._host.set_share(tenant, guaranteed_bytes, weight)
        elif tier is TierName.NVME and self._nvme is not None:
            self._nvme.set_share(tenant, guaranteed_bytes, weight)
        else:
            raise Misuse(f"there is no tier {tier}", field="tier")

    def quota_refused(self, tier: TierName) -> Mapping[ComponentId, int]:
        """How often each tenant was refused above its cap in one tier."""
        found = self._host if tier is TierName.HOST else self._nvme
        return {} if found is None or found.name is not tier else found.refused()

    def statistics(self) -> StoreStatistics:
        """A frozen snapshot."""
        tiers = [self._host.statistics()]
        if self._nvme is not None:
            tiers.append(self._nvme.statistics())
        opening, saving = self._opening.statistics(), self._saving.statistics()
        return StoreStatistics(
            tiers=tuple(tiers),
            hits=opening.hits,
            misses=opening.misses,
            quarantined=opening.quarantined,
            fenced=opening.fenced + saving.fenced,
            quota_refusals=saving.quota_refusals,
            onboard=self._onboard.statistics(),
            offload=None if self._offload is None else self._offload.statistics(),
            retired_namespaces=len(self._residency.retired),
            queues=tuple(queue() for queue in self._queues),
        )
