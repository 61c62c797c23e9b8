"""The load half of the store: open a block into staging, from whichever tier has it.

Rules:
- A block in the host arena is opened where it lies. One on NVMe is read straight into host
  room, opened there, and kept (promotion).
- A record that does not open is quarantined: dropped, counted, never retried.
- Fence and retired set are checked before and after; in between the caller's staging is wiped
  on every failure.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from storage.block import BlockContext
from storage.crypto import Cipher
from storage.fence import Fence, Fenced
from storage.header import clear_placement, record_bytes
from storage.lifecycle import Reserved
from storage.memory import wipe
from storage.residency import Residency
from storage.tiers.nvme import NvmeTier
from storage.tiers.protocol import TierName
from strongroom.derivation import NamespaceKeys
from strongroom.errors import Corrupt, Missing, Misuse, Overloaded, Unavailable

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A block was opened: from which tier, and how many plaintext bytes."""

    tier: TierName
    bytes: int


@dataclass(frozen=True, slots=True)
class OpeningStatistics:
    """Counters since start."""

    hits: Mapping[TierName, int]
    misses: int
    quarantined: int
    fenced: int


class Opening:
    """Loads of one store. `BlockStore.load` says what is promised."""

    def __init__(self, residency: Residency, cipher: Cipher) -> None:
        self._residency = residency
        self._cipher = cipher
        self._hits: dict[TierName, int] = {}
        self._misses = 0
        self._quarantined = 0
        self._fenced = 0

    async def load(
        self, context: BlockContext, keys: NamespaceKeys, staging: memoryview, fence: Fence
    ) -> Loaded:
        """Open a block into `staging`; wiped when anything is raised."""
        if len(staging) != context.plaintext_bytes:
            raise Misuse(
                "staging has another size than the block",
                field="staging",
                limit=context.plaintext_bytes,
            )
        try:
            self._residency.check(context.namespace, fence)
            tier = await self._load(context, keys, staging)
            self._residency.check(context.namespace, fence)
        except BaseException as error:
            wipe(staging)
            if isinstance(error, Fenced):
                self._fenced += 1
            raise
        self._hits[tier] = self._hits.get(tier, 0) + 1
        return Loaded(tier, context.plaintext_bytes)

    def statistics(self) -> OpeningStatistics:
        """A frozen snapshot."""
        return OpeningStatistics(dict(self._hits), self._misses, self._quarantined, self._fenced)

    async def _load(
        self, context: BlockContext, keys: NamespaceKeys, staging: memoryview
    ) -> TierName:
        residency = self._residency
        tier = residency.tier_of(context.address)
        try:
            if tier is TierName.HOST:
                async with residency.host.hold(context.address) as record:
                    await self._cipher.open(context, keys, record, staging)
                residency.host.touch(context.address)
            elif tier is TierName.NVME and residency.nvme is not None:
                await self._load_from_nvme(residency.nvme, context, keys, staging)
                residency.nvme.touch(context.address)
            else:
                _refuse_absent()
        except Missing:
            # Absent, or here in another layout: that one makes way for what is saved next.
            self._misses += 1
            residency.drop_everywhere(context.address)
            raise
        except Corrupt:
            self._quarantined += 1
            residency.drop_everywhere(context.address)
            _log.warning("a block did not open and was dropped (rank %d)", context.rank)
            raise
        except Unavailable as error:
            # The device failed, not the block's key: it may be saved again at once.
            self._misses += 1
            residency.drop_everywhere(context.address)
            raise Missing("the tier that holds it failed") from error
        assert tier is not None
        return tier

    async def _load_from_nvme(
        self, nvme: NvmeTier, context: BlockContext, keys: NamespaceKeys, staging: memoryview
    ) -> None:
        residency = self._residency
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
            if context.namespace in residency.retired or context.address in residency.host:
                residency.host.abandon(reserved)
            else:
                residency.host.publish(residency.host.seal(reserved, header), _admit_any)

    @contextlib.asynccontextmanager
    async def _promotion(
        self, nvme: NvmeTier, context: BlockContext
    ) -> AsyncIterator[tuple[memoryview, Reserved | None]]:
        """The record read into host room, or into a buffer of its own when there is none."""
        host = self._residency.host
        try:
            reserved = self._residency.reserve(context)
        except Overloaded:
            async with nvme.hold(context.address) as record:
                yield record, None
            return
        record = host.buffer(reserved)
        try:
            await nvme.read_into(context.address, record)
            yield record, reserved
        except BaseException:
            host.abandon(reserved)
            raise
        finally:
            record.release()


def _refuse_absent() -> NoReturn:
    raise Missing("not resident")


def _admit_any() -> None:
    """Nothing awaited since the check: there is nothing to check again."""
