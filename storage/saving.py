"""The save half of the store: seal staging into the host arena and make the block visible.

Rules:
- Nothing is visible before `publish`, which checks fence and retired set with no `await` in
  between. A save that fails, or is cancelled, gives its room back.
- Of several savers of one block, the first one stores it.
- A block that NVMe refused, or had no room for, is offered to it again as its uses double: a
  disk that fails is not tried at every use.
- Whoever waits for the disk holds nothing that another save needs (`Aside`).
- Backpressure: a save waits, a bounded time, until the way to NVMe would take its block, and
  for host room where blocks on that way stand in it. After that the block is in host memory
  only, or there is no room and the engine is told so by `Overloaded`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

from storage.block import BlockAddress, BlockContext
from storage.crypto import Cipher
from storage.fence import Fence, Fenced
from storage.frequency import Frequency
from storage.header import record_bytes
from storage.lifecycle import Reserved, Resident
from storage.offload import OffloadPipeline
from storage.residency import Residency
from storage.retention import Retention
from storage.stages import Candidate
from strongroom.derivation import NamespaceKeys
from strongroom.errors import Misuse, Overloaded, QuotaExceeded


@dataclass(frozen=True, slots=True)
class Saved:
    """`stored` is false when the block was resident already."""

    stored: bool
    bytes: int


_FREQUENCY_WIDTH: Final = 1 << 17
"""Counters a row, 256 KiB in all; halved after 1.3 million savings."""

InTurn = Callable[[], Awaitable[None]]
"""Awaited between sealing and publishing; raises to leave the block unpublished."""


Aside = Callable[[], AbstractContextManager[None]]
"""Entered while a save waits for the disk: whoever calls may let others go on meanwhile."""


async def at_once() -> None:
    """No block has to be published before this one."""


@dataclass(frozen=True, slots=True)
class SavingStatistics:
    """Counters since start."""

    quota_refusals: int
    fenced: int


class Saving:
    """Saves of one store. `BlockStore.save` says what is promised."""

    def __init__(
        self, residency: Residency, cipher: Cipher, offload: OffloadPipeline | None
    ) -> None:
        self._residency = residency
        self._cipher = cipher
        self._offload = offload
        self._saving: set[BlockAddress] = set()
        self._frequency = Frequency(_FREQUENCY_WIDTH)
        self._quota_refusals = 0
        self._fenced = 0

    async def save(
        self,
        context: BlockContext,
        keys: NamespaceKeys,
        staging: memoryview,
        fence: Fence,
        retention: Retention,
        in_turn: InTurn,
        aside: Aside = nullcontext,
    ) -> Saved:
        """Seal `staging` and make the block visible; then offer it to NVMe."""
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
            # Candidates are counted here: a lookup stops at the first miss and sees no others.
            uses = self._frequency.count(context.address.pack())
            nbytes = record_bytes(context.segment_bytes)
            candidate = Candidate(context.address, context.tenant, nbytes, retention, uses)
            reserved = await self._reserve(context, candidate, aside)
            resident = await self._store(
                context, keys, staging, fence, retention, reserved, in_turn
            )
        except QuotaExceeded:
            self._quota_refusals += 1
            raise
        except Fenced:
            self._fenced += 1
            raise
        finally:
            self._saving.discard(context.address)
        if self._offload is not None:
            self._offload.offer(resident, retention, uses)
        return Saved(stored=True, bytes=context.plaintext_bytes)

    def used(self, address: BlockAddress) -> None:
        """A block was loaded: where host memory alone has it, NVMe may think better of it now."""
        host, nvme = self._residency.host, self._residency.nvme
        if self._offload is None or nvme is None or address in nvme:
            return
        resident = host.resident(address)
        if resident is not None and resident.namespace not in self._residency.retired:
            uses = self._frequency.count(address.pack())
            if uses & (uses - 1) == 0:
                self._offload.offer(resident, host.retention_of(address), uses)

    def statistics(self) -> SavingStatistics:
        """A frozen snapshot."""
        return SavingStatistics(self._quota_refusals, self._fenced)

    async def _store(
        self,
        context: BlockContext,
        keys: NamespaceKeys,
        staging: memoryview,
        fence: Fence,
        retention: Retention,
        reserved: Reserved,
        in_turn: InTurn,
    ) -> Resident:
        host = self._residency.host
        try:
            header = await self._cipher.seal(context, keys, staging, host.buffer(reserved))
            await in_turn()
        except BaseException:
            host.abandon(reserved)
            raise
        return host.publish(
            host.seal(reserved, header),
            lambda: self._residency.check(context.namespace, fence),
            retention,
        )

    async def _reserve(self, context: BlockContext, candidate: Candidate, aside: Aside) -> Reserved:
        """Host room, once the way to NVMe would take the block; where blocks on that way stand in
        the room, wait for what they free.
        """
        await self._patience(lambda offload: offload.admits(candidate), aside)
        refused: Overloaded | None = None
        found: Reserved | None = None

        def tried() -> bool:
            nonlocal refused, found
            try:
                found = self._residency.reserve(context)
            except QuotaExceeded:
                raise
            except Overloaded as error:
                refused = error
                return False
            return True

        if self._offload is None:
            tried()
        await self._patience(lambda _: found is not None or tried(), aside)
        if found is None:
            assert refused is not None
            raise refused
        return found

    async def _patience(self, ready: Callable[[OffloadPipeline], bool], aside: Aside) -> None:
        """Wait a bounded time until `ready`; without a way to NVMe there is nothing to wait for."""
        offload = self._offload
        if offload is not None and not ready(offload):
            with aside():
                await offload.patience(lambda: ready(offload))
