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
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from storage.block import BlockAddress, BlockContext
from storage.buffers import ReadBuffers
from storage.crypto import Cipher, Opened
from storage.fence import Fence, Fenced
from storage.header import Header, clear_placement, record_bytes
from storage.lifecycle import Reserved, Resident
from storage.residency import Copies, Residency
from storage.tiers.nvme import NvmeTier
from storage.tiers.protocol import TierName
from strongroom.derivation import NamespaceKeys
from strongroom.errors import Corrupt, Missing, Misuse, Overloaded, StrongroomError, Unavailable
from strongroom.identity import ComponentId, NamespaceId

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A block was opened: from which tier, how many plaintext bytes, and whose it is.

    `tenant` and `namespace` are what the header of the opened record says, for a caller that
    looks again; not what the caller asked for.
    """

    tier: TierName
    bytes: int
    tenant: ComponentId
    namespace: NamespaceId


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
        self._buffers = ReadBuffers(weight=residency.host.weight)
        self._hits: dict[TierName, int] = {}
        self._misses = 0
        self._quarantined = 0
        self.told: Callable[[Resident], None] = _untold
        """Called with each block that is quarantined."""
        self._fenced = 0

    async def load(
        self,
        context: BlockContext,
        keys: NamespaceKeys,
        staging: memoryview,
        fence: Fence,
        opened: Opened | None = None,
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
            tier, header = await self._load(context, keys, staging, opened)
            self._residency.check(context.namespace, fence)
        except BaseException as error:
            await self._cipher.wipe(staging)
            if isinstance(error, Fenced):
                self._fenced += 1
            raise
        self._hits[tier] = self._hits.get(tier, 0) + 1
        found = header.context
        return Loaded(tier, context.plaintext_bytes, found.tenant, found.namespace)

    def statistics(self) -> OpeningStatistics:
        """A frozen snapshot."""
        return OpeningStatistics(dict(self._hits), self._misses, self._quarantined, self._fenced)

    def failed(
        self, address: BlockAddress, copies: Copies, error: StrongroomError
    ) -> StrongroomError:
        """Count a block that did not come, and drop it where it must be; what to raise.

        `copies` is what there was of it when it was begun: a copy that was saved since is good.
        """
        match error:
            case Missing():
                # Absent, or here in another layout: that one makes way for what is saved next.
                self._misses += 1
                self._residency.drop(copies)
                return error
            case Corrupt():
                self._quarantined += 1
                block = self._residency.resident(address)
                self._residency.drop(copies)
                if block is not None:
                    self.told(block)
                _log.warning("a block did not open and was dropped (rank %d)", address.rank)
                return error
            case Unavailable():
                # The device failed, not the block's key: it may be saved again at once.
                self._misses += 1
                self._residency.drop(copies)
                return Missing("the tier that holds it failed")
            case _:
                return error

    async def _load(
        self,
        context: BlockContext,
        keys: NamespaceKeys,
        staging: memoryview,
        told: Opened | None,
    ) -> tuple[TierName, Header]:
        residency, address = self._residency, context.address
        tier = residency.tier_of(address)
        copies = residency.copies(address)
        opened: Header | None = None
        try:
            if tier is TierName.HOST and copies.host is not None:
                with residency.host.upgrade(copies.host) as record:
                    opened = await self._cipher.open(context, keys, record, staging, told)
                residency.host.touch(address)
            elif tier is TierName.NVME and residency.nvme is not None:
                opened = await self._load_from_nvme(residency.nvme, context, keys, staging, told)
                residency.nvme.touch(address)
            else:
                _refuse_absent()
        except (Missing, Corrupt, Unavailable) as error:
            cause = self.failed(address, copies, error)
            if cause is error:
                raise
            raise cause from error
        assert tier is not None
        assert opened is not None
        return tier, opened

    async def _load_from_nvme(
        self,
        nvme: NvmeTier,
        context: BlockContext,
        keys: NamespaceKeys,
        staging: memoryview,
        told: Opened | None,
    ) -> Header | None:
        residency = self._residency
        header: Header | None = None
        resident = nvme.resident(context.address)
        if resident is None:
            raise Missing("not resident")
        if resident.nbytes != record_bytes(context.segment_bytes):
            raise Missing("resident in another layout")
        async with self._promotion(nvme, context) as (record, reserved):
            header = await self._cipher.open(context, keys, record, staging, told)
            if reserved is None:
                return header
            # The disk's own stamp stays on the disk.
            clear_placement(record)
            if context.namespace in residency.retired or context.address in residency.host:
                residency.host.abandon(reserved)
            else:
                residency.host.publish(
                    residency.host.seal(reserved, header),
                    _admit_any,
                    nvme.retention_of(context.address),
                )
        return header

    @contextlib.asynccontextmanager
    async def _promotion(
        self, nvme: NvmeTier, context: BlockContext
    ) -> AsyncIterator[tuple[memoryview, Reserved | None]]:
        """The record read into host room, or into a buffer of its own when there is none."""
        host = self._residency.host
        try:
            reserved = self._residency.reserve(context)
        except Overloaded:
            nbytes = record_bytes(context.segment_bytes)
            async with self._buffers.borrow(context.tenant, nbytes) as record:
                await nvme.read_into(context.address, record)
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


def _untold(_: Resident) -> None:
    """Nobody asked to be told."""


def _admit_any() -> None:
    """Nothing awaited since the check: there is nothing to check again."""
