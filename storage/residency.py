"""Where a block is: the tiers of one store, and which namespaces are retired.

Rules:
- Everything here is memory only and runs on the event loop's thread; a step is atomic.
- `retired` only grows. Every lookup, load, save and publish consults it, so that retiring costs
  the same for any number of blocks.
- A block's copies are one writing: where one is damaged, every copy of that writing is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from storage.block import BlockAddress, BlockContext, pack_rank
from storage.fence import Fence, Fenced
from storage.header import record_bytes
from storage.lifecycle import Reserved, Resident, WeakReference, weaken
from storage.tiers.host import HostTier
from storage.tiers.nvme import NvmeTier
from storage.tiers.protocol import TierName
from strongroom.blocks import BlockId
from strongroom.identity import NamespaceId


@dataclass(frozen=True, slots=True)
class Copies:
    """The writing of a block that each tier had at one moment."""

    host: WeakReference | None
    nvme: WeakReference | None


class Residency:
    """The host tier, the NVMe tier if there is one, and the retired namespaces."""

    def __init__(self, host: HostTier, nvme: NvmeTier | None) -> None:
        self.host = host
        self.nvme = nvme
        self.retired: set[NamespaceId] = set()

    def tier_of(self, address: BlockAddress) -> TierName | None:
        """The fastest tier that has the block; a hint, never proof."""
        namespace = self.host.namespace_of(address)
        if namespace is not None:
            return None if namespace in self.retired else TierName.HOST
        if self.nvme is None:
            return None
        namespace = self.nvme.namespace_of(address)
        return None if namespace is None or namespace in self.retired else TierName.NVME

    def locator(self, ranks: Collection[int]) -> Callable[[Sequence[BlockId]], Sequence[TierName]]:
        """For many blocks in a row: of those in front that are resident on each of these ranks,
        the slowest tier that their shards are read from. Without a rank nothing is resident.
        """
        suffixes = [pack_rank(rank) for rank in ranks]
        host = TierName.HOST

        def locate(blocks: Sequence[BlockId]) -> Sequence[TierName]:
            if self._all_in_host(blocks, suffixes):
                return [host] * len(blocks)
            tiers: list[TierName] = []
            for block in blocks:
                tier = self._slowest(block, suffixes)
                if tier is None:
                    break
                tiers.append(tier)
            return tiers

        return locate

    def _all_in_host(self, blocks: Sequence[BlockId], suffixes: Sequence[bytes]) -> bool:
        for suffix in suffixes:
            namespaces = self.host.namespaces_of_all([block + suffix for block in blocks])
            if namespaces is None or not self.retired.isdisjoint(namespaces):
                return False
        return bool(suffixes)

    def _slowest(self, block: BlockId, suffixes: Sequence[bytes]) -> TierName | None:
        slowest = None
        for suffix in suffixes:
            packed = block + suffix
            namespace = self.host.namespace_at(packed)
            if namespace is not None:
                slowest = slowest or TierName.HOST
            else:
                namespace = None if self.nvme is None else self.nvme.namespace_at(packed)
                slowest = TierName.NVME
            if namespace is None or namespace in self.retired:
                return None
        return slowest

    def waiting_on_nvme(self, address: BlockAddress) -> Resident | None:
        """The block's metadata, where NVMe alone has it: what bringing it to host would move."""
        if self.nvme is None or address in self.host:
            return None
        resident = self.nvme.resident(address)
        return None if resident is None or resident.namespace in self.retired else resident

    def resident(self, address: BlockAddress) -> Resident | None:
        """The block's metadata, from the fastest tier that has it; touches nothing."""
        found = self.host.resident(address)
        return found if found is not None or self.nvme is None else self.nvme.resident(address)

    def check(self, namespace: NamespaceId, fence: Fence) -> None:
        """Raise `Fenced` when the fence is cut or the namespace is retired."""
        fence.check()
        if namespace in self.retired:
            raise Fenced("the namespace is retired")

    def reserve(self, context: BlockContext) -> Reserved:
        """Host room for a block's record. Raises `QuotaExceeded` or `Overloaded`."""
        return self.host.reserve(
            context.address,
            context.parent,
            context.tenant,
            context.namespace,
            record_bytes(context.segment_bytes),
        )

    def copies(self, address: BlockAddress) -> Copies:
        """What there is of a block now."""
        nvme = None if self.nvme is None else self.nvme.resident(address)
        return Copies(self.host.reference(address), None if nvme is None else weaken(nvme))

    def drop(self, copies: Copies) -> None:
        """None of these is tried again. What was stored anew meanwhile stays."""
        for tier, reference in ((self.host, copies.host), (self.nvme, copies.nvme)):
            if tier is not None and reference is not None:
                found = tier.resident(reference.address)
                if found is not None and found.stamp == reference.stamp:
                    tier.drop(reference.address)

    def drop_everywhere(self, address: BlockAddress) -> None:
        """Every copy is one writing: none is tried again."""
        self.host.drop(address)
        if self.nvme is not None:
            self.nvme.drop(address)

    def retire(self, namespaces: Collection[NamespaceId]) -> int:
        """How many of these were not retired yet."""
        before = len(self.retired)
        self.retired |= set(namespaces)
        return len(self.retired) - before
