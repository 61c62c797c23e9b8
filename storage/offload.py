"""Host -> NVMe: blocks that were saved are written behind, ciphertext unchanged."""

from __future__ import annotations

import logging

from storage.block import BlockAddress
from storage.dirty import DirtyBlocks
from storage.fence import Fenced
from storage.header import read_header
from storage.residency import Residency
from storage.tiers.nvme import NvmeTier
from strongroom.errors import Missing, StrongroomError

_log = logging.getLogger(__name__)


class WriteBehind:
    """The one consumer of the dirty blocks."""

    def __init__(self, residency: Residency, nvme: NvmeTier, dirty: DirtyBlocks) -> None:
        self._residency = residency
        self._nvme = nvme
        self._dirty = dirty
        self.failed = 0

    async def run(self) -> None:
        """Write what is dirty until the queue is closed and empty."""
        while True:
            address = await self._dirty.next()
            if address is None:
                return
            try:
                await self._write_one(address)
            except StrongroomError as error:
                self.failed += 1
                if not isinstance(error, Missing | Fenced):
                    _log.warning("a block stays in host memory only: %s", error.code)
            finally:
                self._dirty.done(address)

    async def _write_one(self, address: BlockAddress) -> None:
        host, retired = self._residency.host, self._residency.retired
        resident = host.resident(address)
        if resident is None or address in self._nvme:
            return
        async with host.hold(address) as record:
            header = read_header(record)

            def admit() -> None:
                if host.resident(address) != resident:
                    raise Missing("dropped meanwhile")
                if resident.namespace in retired:
                    raise Fenced("the namespace is retired")

            await self._nvme.put(header, record, admit)
