"""What prefetching needs of a block store, and no more: where blocks are, and how they are brought.

It cannot open a block, make one visible that is not, or learn a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from storage.block import BlockAddress
from storage.fence import Fence
from storage.lifecycle import Resident
from storage.tiers.protocol import TierName


class Onboarding(Protocol):
    """`storage.onboard.Onboarding`, as far as it is needed here."""

    async def ready(self, index: int) -> object:
        """Return once the block is in host memory. Raises what keeps it from getting there."""


class Shelf(Protocol):
    """`storage.store.BlockStore`, as far as it is needed here."""

    def tier_of(self, address: BlockAddress) -> TierName | None: ...

    def waiting_on_nvme(self, address: BlockAddress) -> Resident | None: ...

    def onboard(
        self, addresses: Sequence[BlockAddress], fence: Fence
    ) -> AbstractAsyncContextManager[Onboarding]: ...
