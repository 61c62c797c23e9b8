"""Staging: plaintext on its way to or from the one engine that has this memfd mapped.

    free ─reserve─▶ out ─release─▶ used ─wipe─▶ free
                     ▲               │
                     └───── reuse ───┘

Rules:
- Free room is zero, always: what is filled by an engine (a save) is reserved there alone, so that
  bytes it leaves unwritten are never another request's.
- A used slot still holds what it was used for. It may be reused for a block of the same room that
  is decrypted over all of it, which needs no pass of its own, or it is wiped. What is wiped is
  taken out of the used slots first: nobody can be given room that a thread is wiping.
- Everything that is not known to be zero is wiped before the file is closed.

Slots are 4 KiB aligned. The file is locked in memory where that is allowed, so that plaintext
does not reach a swap device; where it is not allowed the log says so.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from storage.extents import Extents, rounded
from storage.memfd import DEFAULT_OPTIONS, MemoryFile, MemoryOptions
from storage.memory import wipe


@dataclass(frozen=True, slots=True)
class StagingSlot:
    """`nbytes` bytes at `offset` of a staging file."""

    offset: int
    nbytes: int


class Staging:
    """One engine's staging file and the slots in use.

    Making it touches every page (to lock it): not for the event loop when it is large.
    """

    def __init__(self, size_bytes: int, options: MemoryOptions = DEFAULT_OPTIONS) -> None:
        self._file = MemoryFile("strongroom-staging", rounded(size_bytes), options)
        self._file.settle()
        self._room = Extents(self._file.size)
        self._out: dict[int, StagingSlot] = {}
        self._used: dict[int, deque[tuple[int, float]]] = {}
        """Used slots by their room, (offset, since), the latest last: it is in the caches."""
        self._used_bytes = 0

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
    def out_bytes(self) -> int:
        """Bytes in slots that are out."""
        return sum(rounded(slot.nbytes) for slot in self._out.values())

    @property
    def unwiped_bytes(self) -> int:
        """Bytes in used slots, which nobody has and which are not zero yet."""
        return self._used_bytes

    @property
    def view(self) -> memoryview:
        """The whole file."""
        return self._file.view

    def reserve(self, nbytes: int) -> StagingSlot | None:
        """A slot of zeros, or None when there is no free room now."""
        offset = self._room.take(nbytes)
        return None if offset is None else self._hand_out(offset, nbytes)

    def reuse(self, nbytes: int) -> StagingSlot | None:
        """A used slot of the same room, or a free one: for bytes that will all be overwritten."""
        used = self._used.get(rounded(nbytes))
        if not used:
            return self.reserve(nbytes)
        offset, _ = used.pop()
        self._used_bytes -= rounded(nbytes)
        # What lies behind the new block would otherwise stay as long as the slot is in use.
        wipe(self._file.view[offset + nbytes : offset + rounded(nbytes)])
        return self._hand_out(offset, nbytes)

    def bytes_of(self, slot: StagingSlot) -> memoryview:
        """The slot's bytes; the caller releases the view before the file is closed."""
        return self._file.view[slot.offset : slot.offset + slot.nbytes]

    def release(self, slot: StagingSlot, now: float = 0.0) -> None:
        """Take the slot back as used since `now`. Releasing it twice is an error of ours."""
        if self._out.pop(slot.offset, None) != slot:
            raise ValueError("this slot is not out")
        room = rounded(slot.nbytes)
        self._used.setdefault(room, deque()).append((slot.offset, now))
        self._used_bytes += room

    def take_used(self, until: float = math.inf) -> list[StagingSlot]:
        """Every slot that has been used since `until` or before.

        They belong to the caller now, who wipes them and then says `wiped`.
        """
        taken = []
        for room, used in tuple(self._used.items()):
            while used and used[0][1] <= until:
                taken.append(StagingSlot(used.popleft()[0], room))
                self._used_bytes -= room
            if not used:
                del self._used[room]
        return taken

    def wiped(self, slots: list[StagingSlot]) -> None:
        """What `take_used` gave is zero now: it is free room."""
        for slot in slots:
            self._room.give_back(slot.offset, slot.nbytes)

    def take_all(self) -> list[StagingSlot]:
        """What is out or used, as whole rooms: for whoever wipes it and closes."""
        out = [StagingSlot(slot.offset, rounded(slot.nbytes)) for slot in self._out.values()]
        self._out.clear()
        return out + self.take_used()

    def close(self) -> None:
        """Wipe what is out or used, and unmap."""
        for slot in self.take_all():
            with self.bytes_of(slot) as view:
                wipe(view)
        self._file.close()

    def _hand_out(self, offset: int, nbytes: int) -> StagingSlot:
        slot = StagingSlot(offset, nbytes)
        self._out[offset] = slot
        return slot
