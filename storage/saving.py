"""The save half of the store: seal staging into the host arena and make the block visible.

Rules:
- Nothing is visible before `publish`, which checks fence and retired set with no `await` in
  between. A save that fails, or is cancelled, gives its room back.
- Of several savers of one block, the first one stores it.
- Where blocks that wait for write-behind stand in the way of host room, a save waits for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from storage.block import BlockAddress, BlockContext
from storage.crypto import Cipher
from storage.dirty import DirtyBlocks
from storage.fence import Fence, Fenced
from storage.lifecycle import Reserved
from storage.residency import Residency
from strongroom.derivation import NamespaceKeys
from strongroom.errors import Misuse, Overloaded, QuotaExceeded


@dataclass(frozen=True, slots=True)
class Saved:
    """`stored` is false when the block was resident already."""

    stored: bool
    bytes: int


@dataclass(frozen=True, slots=True)
class SavingStatistics:
    """Counters since start."""

    quota_refusals: int
    fenced: int


class Saving:
    """Saves of one store. `BlockStore.save` says what is promised."""

    def __init__(self, residency: Residency, cipher: Cipher, dirty: DirtyBlocks) -> None:
        self._residency = residency
        self._cipher = cipher
        self._dirty = dirty
        self._saving: set[BlockAddress] = set()
        self._quota_refusals = 0
        self._fenced = 0

    async def save(
        self, context: BlockContext, keys: NamespaceKeys, staging: memoryview, fence: Fence
    ) -> Saved:
        """Seal `staging` and make the block visible; then it is dirty."""
        if len(staging) != context.plaintext_bytes:
            raise Misuse(
                "staging has another size than the block",
                field="staging",
                limit=context.plaintext_bytes,
            )
        residency = self._residency
        residency.check(context.namespace, fence)
        if residency.tier_of(context.address) is not None or context.address in self._saving:
            return Saved(stored=False, bytes=0)
        self._saving.add(context.address)
        try:
            await self._seal(context, keys, staging, fence)
        except QuotaExceeded:
            self._quota_refusals += 1
            raise
        except Fenced:
            self._fenced += 1
            raise
        finally:
            self._saving.discard(context.address)
        if residency.nvme is not None:
            self._dirty.add(context.address)
        return Saved(stored=True, bytes=context.plaintext_bytes)

    def statistics(self) -> SavingStatistics:
        """A frozen snapshot."""
        return SavingStatistics(self._quota_refusals, self._fenced)

    async def _seal(
        self, context: BlockContext, keys: NamespaceKeys, staging: memoryview, fence: Fence
    ) -> None:
        host = self._residency.host
        reserved = await self._reserve(context)
        try:
            header = await self._cipher.seal(context, keys, staging, host.buffer(reserved))
        except BaseException:
            host.abandon(reserved)
            raise
        host.publish(
            host.seal(reserved, header),
            lambda: self._residency.check(context.namespace, fence),
        )

    async def _reserve(self, context: BlockContext) -> Reserved:
        """Host room; where blocks that wait for write-behind stand in the way, wait for them."""
        try:
            return self._residency.reserve(context)
        except QuotaExceeded:
            raise
        except Overloaded:
            if self._residency.nvme is None or not len(self._dirty):
                raise
        await self._dirty.drained()
        return self._residency.reserve(context)
