"""Staging slots of one worker connection, and the wiping of what they were used for.

Rules:
- A slot is `live` while its bytes may be used. `blank` zeroes it at once but keeps it out of the
  free room: the engine may still be copying from it or into it, and must never meet another
  request's bytes there. Only the engine's answer, a deadline with grace, or the end of the
  connection gives a slot back.
- A slot that was given back is wiped on a thread within `wipe_after_s`, unless a block was
  decrypted over it before that; without delay if it had been blanked, and by a fence (`wiped`),
  which is acknowledged only then, and at the end of the connection.
- What an engine fills is handed out as zeros (`take_to_fill`), unless a load waits for room: loads
  come first. Slots to fill take three quarters of the room at most, and one tenant's no more of it
  than they leave free, so that whoever comes next finds some. A first slot is given in any case.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from storage.memory import wipe
from storage.staging import Staging, StagingSlot
from storage.workers import CRYPTO_NICE, Workers
from strongroom.identity import ComponentId

WIPE_AFTER_S_DEFAULT: Final = 1.0
FILLING_SHARE_MAX: Final = 0.75


def wiping_workers() -> Workers:
    """The one thread that wipes, beside the crypto threads: a fence never waits for a restore."""
    return Workers("strongroom-wipe", 1, queue_max=1024, nice=CRYPTO_NICE)


class Slots:
    """The staging of one connection. Used on the event loop's thread."""

    def __init__(
        self,
        staging: Staging,
        workers: Workers,
        *,
        wipe_after_s: float = WIPE_AFTER_S_DEFAULT,
        now: Callable[[], float] | None = None,
    ) -> None:
        self._staging = staging
        self._workers = workers
        self._wipe_after_s = wipe_after_s
        self._loop = asyncio.get_running_loop()
        self._now = now or self._loop.time
        self._room = asyncio.Event()
        self._out: dict[int, StagingSlot] = {}
        self._blanked: set[int] = set()
        self._filling: dict[int, ComponentId] = {}
        self._filling_bytes: Counter[ComponentId] = Counter()
        self._waiting = 0
        """Loads that wait for room."""
        self._wiping: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def fd(self) -> int:
        """The descriptor to pass to the engine."""
        return self._staging.fd

    @property
    def size_bytes(self) -> int:
        return self._staging.size_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes in slots that are out."""
        return 0 if self._closed else self._staging.out_bytes

    @property
    def unwiped_bytes(self) -> int:
        """Bytes of slots that were given back and still hold what they were used for."""
        return 0 if self._closed else self._staging.unwiped_bytes

    def take(self, nbytes: int) -> StagingSlot | None:
        """A slot for bytes that will all be overwritten, or None when there is no room now."""
        return None if self._closed else self._handed(self._staging.reuse(nbytes))

    def take_zeroed(self, nbytes: int) -> StagingSlot | None:
        """A slot of zeros, for the engine to fill, or None when there is none now."""
        return None if self._closed else self._handed(self._staging.reserve(nbytes))

    def take_to_fill(self, tenant: ComponentId, nbytes: int) -> StagingSlot | None:
        """A slot of zeros for a save of `tenant`; None too when it is not its to take now."""
        filling = self._filling_bytes.total()
        left = int(FILLING_SHARE_MAX * self.size_bytes) - filling
        mine = self._filling_bytes[tenant]
        if filling and (self._waiting or nbytes > left or (mine and mine + nbytes > left)):
            return None
        slot = self.take_zeroed(nbytes)
        if slot is not None:
            self._filling[slot.offset] = tenant
            self._filling_bytes[tenant] += nbytes
        return slot

    async def wait_take(self, nbytes: int) -> StagingSlot:
        """A slot as soon as there is room; the caller bounds the wait."""
        self._waiting += 1
        try:
            while True:
                slot = self.take(nbytes)
                if slot is not None:
                    return slot
                self._room.clear()
                # Room of other sizes may be all there is: wiped, it is room for any.
                self.wipe_soon()
                await self._room.wait()
        finally:
            self._waiting -= 1

    def bytes_of(self, slot: StagingSlot) -> memoryview:
        """The slot's bytes. Release the view before the connection ends."""
        return self._staging.bytes_of(slot)

    def blank(self, slot: StagingSlot) -> None:
        """Zero the slot here and now, and keep it: about 0.1 ms a MiB."""
        if self._out.get(slot.offset) == slot:
            self._blanked.add(slot.offset)
            with self._staging.bytes_of(slot) as view:
                wipe(view)

    def give_back(self, slot: StagingSlot) -> None:
        """The slot's bytes are used no more; repeating changes nothing."""
        if self._out.get(slot.offset) == slot:
            del self._out[slot.offset]
            filler = self._filling.pop(slot.offset, None)
            if filler is not None:
                self._filling_bytes[filler] -= slot.nbytes
            self._staging.release(slot, self._now())
            self._room.set()
            if slot.offset in self._blanked:
                # An engine that had not heard yet may have written into it since.
                self._blanked.discard(slot.offset)
                self.wipe_soon()
            else:
                self._wipe_later()

    def wipe_soon(self) -> None:
        """Begin to wipe everything that was given back."""
        if not self._closed:
            self._begin(self._staging.take_used())

    async def wiped(self) -> None:
        """Return when everything that was given back by now is zero."""
        self.wipe_soon()
        # These, and none that begin later: on a busy connection one always has.
        wiping = tuple(self._wiping)
        if wiping:
            await asyncio.wait(wiping)

    def age(self) -> None:
        """Wipe what was given back `wipe_after_s` ago or earlier."""
        if not self._closed:
            self._begin(self._staging.take_used(self._now() - self._wipe_after_s))

    async def close(self) -> None:
        """Zero everything and unmap. No thread may work on a slot any more."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._out.clear()
        self._begin(self._staging.take_all())
        cancelled: asyncio.CancelledError | None = None
        while self._wiping:
            try:
                await asyncio.wait(tuple(self._wiping))
            except asyncio.CancelledError as error:
                cancelled = error  # the threads are waited for all the same
        self._staging.close()
        if cancelled is not None:
            raise cancelled

    def _handed(self, slot: StagingSlot | None) -> StagingSlot | None:
        if slot is not None:
            self._out[slot.offset] = slot
        return slot

    def _begin(self, slots: list[StagingSlot]) -> None:
        if slots:
            task = self._loop.create_task(self._wipe(slots), name="wipe-staging")
            self._wiping.add(task)
            task.add_done_callback(self._wiping.discard)

    async def _wipe(self, slots: list[StagingSlot]) -> None:
        try:
            await self._workers.run(partial(_wipe_all, self._staging, slots), always=True)
        except asyncio.CancelledError:
            _wipe_all(self._staging, slots)
            raise
        finally:
            self._staging.wiped(slots)
            self._room.set()

    def _wipe_later(self) -> None:
        if self._timer is None and not self._closed:
            self._timer = self._loop.call_later(self._wipe_after_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.age()
        if self.unwiped_bytes:
            self._wipe_later()


class Rooms:
    """The staging of every connection: what a fence has wiped."""

    def __init__(self) -> None:
        self._all: set[Slots] = set()

    def __iter__(self) -> Iterator[Slots]:
        return iter(tuple(self._all))

    def add(self, slots: Slots) -> None:
        self._all.add(slots)

    def remove(self, slots: Slots) -> None:
        self._all.discard(slots)

    def wipe_soon(self) -> None:
        """Begin to wipe what was given back on any connection."""
        for slots in self:
            slots.wipe_soon()

    async def wiped(self) -> None:
        """Return when nothing that was given back by now is left anywhere."""
        for slots in self:
            await slots.wiped()


def _wipe_all(staging: Staging, slots: list[StagingSlot]) -> None:
    for slot in slots:
        with staging.bytes_of(slot) as view:
            wipe(view)
