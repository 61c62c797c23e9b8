"""Where a block is: the tiers of one store, and which namespaces are retired.

Rules:
- Everything here is memory only and runs on the event loop's thread; a step is atomic.
- `retired` only grows. Every lookup, load, save and publish consults it, so that retiring costs
  the same for any number of blocks.
- A block's copies are one writing: where one is damaged, every copy is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from storage.block import BlockAddress, BlockContext, pack_rank
from storage.fence import Fence, Fenced
from storage.header import record_bytes
from storage.lifecycle import Reserved, Resident
from storage.tiers.host import HostTier
from storage.tiers.nvme import NvmeTier
from storage.tiers.protocol import TierName
from strongroom.blocks import BlockId
from strongroom.identity import NamespaceId


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

    def locator(self, ranks: Collection[int]) -> Callable[[BlockId], TierName | None]:
        """For many blocks in a row: the slowest tier that the shards of these ranks are read
        from, None where one of them is nowhere. Without a rank nothing is anywhere.
        """
        suffixes = [pack_rank(rank) for rank in ranks]
        in_host, nvme, retired = self.host.namespace_at, self.nvme, self.retired
        if not suffixes:
            return lambda _: None

        def locate(block: BlockId) -> TierName | None:
            slowest = TierName.HOST
            for suffix in suffixes:
                packed = block + suffix
                namespace = in_host(packed)
                if namespace is None:
                    namespace = None if nvme is None else nvme.namespace_at(packed)
                    slowest = TierName.NVME
                if namespace is None or namespace in retired:
                    return None
            return slowest

        return locate

    def waiting_on_nvme(self, address: BlockAddress) -> Resident | None:
        """The block's metadata, where NVMe alone has it: what bringing it to host would move."""
        if self.nvme is None or address in self.host:
            return None
        resident = self.nvme.resident(address)
        return None if resident is None or resident.namespace in self.retired else resident

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
