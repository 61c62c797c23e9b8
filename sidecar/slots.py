"""Staging slots of one worker connection.

A slot is `live` while its bytes may be used. `blank` zeroes it at once but keeps it out of the
free room: the engine may still be copying from it or into it, and must never meet another
request's bytes there. Only the engine's answer, a deadline with grace, or the end of the
connection gives a slot back.
"""

from __future__ import annotations

import asyncio

from storage.staging import Staging, StagingSlot


class Slots:
    """The staging of one connection. Used on the event loop's thread."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._room = asyncio.Event()
        self._out: dict[int, StagingSlot] = {}
        self._closed = False

    @property
    def fd(self) -> int:
        """The descriptor to pass to the engine."""
        return self._staging.fd

    @property
    def size_bytes(self) -> int:
        return self._staging.size_bytes

    def take(self, nbytes: int) -> StagingSlot | None:
        """A slot, or None when there is no room now."""
        if self._closed:
            return None
        slot = self._staging.reserve(nbytes)
        if slot is not None:
            self._out[slot.offset] = slot
        return slot

    async def wait_take(self, nbytes: int) -> StagingSlot:
        """A slot as soon as there is room; the caller bounds the wait."""
        while True:
            slot = self.take(nbytes)
            if slot is not None:
                return slot
            self._room.clear()
            await self._room.wait()

    def bytes_of(self, slot: StagingSlot) -> memoryview:
        """The slot's bytes. Release the view before the connection ends."""
        return self._staging.bytes_of(slot)

    def blank(self, slot: StagingSlot) -> None:
        """Zero the slot and keep it."""
        if self._out.get(slot.offset) == slot:
            with self._staging.bytes_of(slot) as view:
                view[:] = bytes(slot.nbytes)

    def give_back(self, slot: StagingSlot) -> None:
        """Zero the slot and free it; repeating changes nothing."""
        if self._out.get(slot.offset) == slot:
            del self._out[slot.offset]
            self._staging.release(slot)
            self._room.set()

    def close(self) -> None:
        """Zero everything and unmap. No thread may work on a slot any more."""
        if not self._closed:
            self._closed = True
            self._out.clear()
            self._staging.close()

    @property
    def used_bytes(self) -> int:
        return 0 if self._closed else self._staging.used_bytes
