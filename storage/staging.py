"""Staging: plaintext on its way to or from the one engine that has this memfd mapped.

Slots are 4 KiB aligned. A released slot is zeroed before it can be handed out again, and so is
everything at close: nothing that one request left is seen by the next. The file is locked in
memory where that is allowed, so that plaintext does not reach a swap device; where it is not
allowed the log says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from storage.extents import Extents, rounded
from storage.memfd import MemoryFile


@dataclass(frozen=True, slots=True)
class StagingSlot:
    """`nbytes` bytes at `offset` of a staging file."""

    offset: int
    nbytes: int


class Staging:
    """One engine's staging file and the slots in use.

    Making it touches every page (to lock it): not for the event loop when it is large.
    """

    def __init__(self, size_bytes: int) -> None:
        self._file = MemoryFile("strongroom-staging", rounded(size_bytes), lock=True)
        self._room = Extents(self._file.size)
        self._slots: dict[int, StagingSlot] = {}

    @property
    def fd(self) -> int:
        """The descriptor to pass to the engine."""
        return self._file.fd

    @property
    def size_bytes(self) -> int:
        return self._file.size

    @property
    def locked(self) -> bool:
        """Whether the system let it be locked in memory."""
        return self._file.locked

    @property
    def used_bytes(self) -> int:
        """Bytes in slots that are out."""
        return self._room.used_bytes

    @property
    def view(self) -> memoryview:
        """The whole file."""
        return self._file.view

    def reserve(self, nbytes: int) -> StagingSlot | None:
        """A slot of `nbytes`, or None when there is no room now."""
        offset = self._room.take(nbytes)
        if offset is None:
            return None
        slot = StagingSlot(offset, nbytes)
        self._slots[offset] = slot
        return slot

    def bytes_of(self, slot: StagingSlot) -> memoryview:
        """The slot's bytes; the caller releases the view before the file is closed."""
        return self._file.view[slot.offset : slot.offset + slot.nbytes]

    def release(self, slot: StagingSlot) -> None:
        """Zero the slot and take it back. Releasing it twice is an error of ours."""
        if self._slots.pop(slot.offset, None) != slot:
            raise ValueError("this slot is not out")
        self._file.view[slot.offset : slot.offset + slot.nbytes] = bytes(slot.nbytes)
        self._room.give_back(slot.offset, slot.nbytes)

    def close(self) -> None:
        """Zero what is out and unmap."""
        for slot in list(self._slots.values()):
            self.release(slot)
        self._file.close()
