"""The parts of one load that the engine has been told of, until it has answered for them.

Rules:
- A part is `said` once `Part` was sent. It is `half` said while only some of its layers were
  announced; the load goes on, or fails and takes back what it said.
- A slot returns to the free room when the engine has said `Copied`, or a grace after its deadline,
  when the engine refuses those bytes anyway. That holds for the slot of a half said part too: the
  engine may still be copying from it.
- `Copied` for a half said part frees nothing while the part is being opened: threads write into
  that slot.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from sidecar.clocks import NS
from sidecar.transfers.slots import Slots
from storage.staging import StagingSlot
from strongroom.clock import Clock


@dataclass(frozen=True, slots=True)
class Said:
    """A slot that the engine knows of."""

    slot: StagingSlot
    start: int
    deadline_ns: int


class Parts:
    """Used on the event loop's thread."""

    def __init__(self, slots: Slots, clock: Clock, grace_ns: int) -> None:
        self.news = asyncio.Event()
        """Set when the engine has answered, and by whoever wants a waiting load to look up."""
        self._slots = slots
        self._clock = clock
        self._grace_ns = grace_ns
        self._said: dict[int, Said] = {}
        self._half: dict[int, Said] = {}
        self._answered: set[int] = set()
        """Half said, and no use to the engine any more."""
        self._stopped = False

    def half(self, slot: StagingSlot, start: int, deadline_ns: int) -> None:
        """Some layers of the part were announced."""
        self._half[slot.offset] = Said(slot, start, deadline_ns)

    def say(self, slot: StagingSlot, start: int, deadline_ns: int) -> None:
        """The whole part is released."""
        self._half.pop(slot.offset, None)
        self._answered.discard(slot.offset)  # the whole part was not meant, and is answered anew
        self._said[slot.offset] = Said(slot, start, deadline_ns)

    def fail(self, slot: StagingSlot) -> None:
        """The part will not come; its slot is blank. Known to nobody, it is free at once."""
        if slot.offset not in self._half or slot.offset in self._answered:
            self._half.pop(slot.offset, None)
            self._answered.discard(slot.offset)
            self._slots.give_back(slot)

    def copied(self, offset: int) -> None:
        """The engine has no more use for the slot at `offset`."""
        said = self._said.pop(offset, None)
        if said is not None:
            self._slots.give_back(said.slot)
            self.news.set()
        elif offset in self._half:
            self._answered.add(offset)

    def stop(self) -> None:
        """Zero every slot that the engine knows of; `all_copied` waits no longer."""
        self._stopped = True
        self.blank()
        self.news.set()

    def blank(self) -> None:
        """Zero every slot that the engine knows of, and keep it."""
        for said in (*self._said.values(), *self._half.values()):
            self._slots.blank(said.slot)

    def give_up_half(self) -> None:
        """No part is being opened any more: what is half said is waited for as what was said."""
        self._said.update(self._half)
        self._half.clear()

    def next_due(self) -> int | None:
        """When the next slot returns by itself; None without any."""
        return min(
            (said.deadline_ns + self._grace_ns for said in self._said.values()), default=None
        )

    def reap(self, now_ns: int) -> None:
        """Take back what nobody may use any more."""
        for offset, said in tuple(self._said.items()):
            if said.deadline_ns + self._grace_ns <= now_ns:
                del self._said[offset]
                self._slots.give_back(said.slot)

    async def all_copied(self, before: int) -> int | None:
        """Wait until the engine has every part that starts before token `before`; else the start
        of the first that it has not.
        """
        while not self._stopped:
            waiting = [said for said in self._said.values() if said.start < before]
            if not waiting:
                return None
            due = min(said.deadline_ns for said in waiting)
            if due <= self._clock():
                return min(said.start for said in waiting)
            await self.wait_until(due)
        return None

    async def all_returned(self) -> None:
        """Wait for the engine's answers, or the deadlines, of slots that are blank by now."""
        while True:
            self.reap(self._clock())
            due = self.next_due()
            if due is None:
                return
            await self.wait_until(due)

    async def wait_until(self, until_ns: int) -> None:
        """Until there is news, or the time has come."""
        self.news.clear()
        try:
            async with asyncio.timeout((until_ns - self._clock()) / NS + 0.001):
                await self.news.wait()
        except TimeoutError:
            return
