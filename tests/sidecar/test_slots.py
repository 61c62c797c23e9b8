"""Staging between requests and between engines: what was used is wiped, and when."""

from __future__ import annotations

import asyncio
import mmap
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import cast

import pytest

from sidecar.transfers.slots import Rooms, Slots, wiping_workers
from storage.staging import Staging
from storage.workers import Workers

SIZE = 64 * 1024
BLOCK = 16 * 1024
SECRET = b"one request's plaintext "


class Room:
    """Slots over real staging, with time that tests move."""

    def __init__(self, workers: Workers) -> None:
        self.now_s = 100.0
        self.staging = Staging(SIZE)
        self.slots = Slots(self.staging, workers, wipe_after_s=3600.0, now=lambda: self.now_s)

    def use(self, nbytes: int = BLOCK) -> int:
        """Take a slot, fill it, give it back; its offset."""
        slot = self.slots.take(nbytes)
        assert slot is not None
        with self.slots.bytes_of(slot) as view:
            view[:] = (SECRET * (nbytes // len(SECRET) + 1))[:nbytes]
        self.slots.give_back(slot)
        return slot.offset

    @property
    def holds_secret(self) -> bool:
        return SECRET in bytes(self.staging.view)


def held(go_on: threading.Event) -> None:
    """A thread that is busy until it is told to go on."""
    assert go_on.wait(10)


@pytest.fixture
async def workers() -> AsyncIterator[Workers]:
    made = wiping_workers()
    yield made
    made.close()


@pytest.fixture
async def room(workers: Workers) -> AsyncIterator[Room]:
    made = Room(workers)
    yield made
    await made.slots.close()


async def test_a_slot_that_is_given_back_is_wiped_in_its_time_and_not_before(room: Room) -> None:
    room.use()
    room.now_s += 3599
    room.slots.age()
    assert room.slots.unwiped_bytes == BLOCK
    assert room.holds_secret
    room.now_s += 1
    room.slots.age()
    await asyncio.gather(*room.slots._wiping)
    assert room.slots.unwiped_bytes == 0
    assert not room.holds_secret


async def test_a_timer_sees_to_it_by_itself(workers: Workers) -> None:
    staging = Staging(SIZE)
    slots = Slots(staging, workers, wipe_after_s=0.001)
    slot = slots.take(BLOCK)
    assert slot is not None
    staging.view[:6] = b"secret"
    slots.give_back(slot)
    async with asyncio.timeout(10):
        while any(staging.view[:6]):
            await asyncio.sleep(0)
    await slots.close()


async def test_a_load_reuses_what_is_used_and_a_save_never_meets_another_requests_bytes(
    room: Room,
) -> None:
    at = room.use()
    reused = room.slots.take(BLOCK)
    assert reused is not None
    assert reused.offset == at, "a block is decrypted over all of it"
    room.slots.give_back(reused)
    zeroed = [room.slots.take_zeroed(BLOCK) for _ in range(SIZE // BLOCK)]
    assert zeroed.pop() is None, "the used slot is not for an engine to fill"
    for slot in zeroed:
        assert slot is not None
        with room.slots.bytes_of(slot) as view:
            assert not any(view)
    await room.slots.wiped()
    last = room.slots.take_zeroed(BLOCK)
    assert last is not None
    assert last.offset == at
    with room.slots.bytes_of(last) as view:
        assert not any(view)


async def test_room_of_other_sizes_is_wiped_for_whoever_waits(room: Room) -> None:
    for _ in range(4):
        slot = room.slots.take(BLOCK)
        assert slot is not None
    for offset in tuple(room.slots._out):
        room.slots.give_back(room.slots._out[offset])
    assert room.slots.take(2 * BLOCK) is None
    async with asyncio.timeout(10):
        slot = await room.slots.wait_take(2 * BLOCK)
    with room.slots.bytes_of(slot) as view:
        assert not any(view)


async def test_what_is_being_wiped_is_nobodys(room: Room, workers: Workers) -> None:
    go_on = threading.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(workers.run(partial(held, go_on)))
        at = room.use()
        room.slots.wipe_soon()
        await asyncio.sleep(0)
        assert room.holds_secret, "the thread is busy"
        offsets = set()
        while (slot := room.slots.take(BLOCK)) is not None:
            offsets.add(slot.offset)
        assert len(offsets) == 3
        assert at not in offsets
        go_on.set()
    await room.slots.wiped()
    slot = room.slots.take(BLOCK)
    assert slot is not None
    assert slot.offset == at


async def test_a_fence_wipes_every_connections_room_and_waits_for_it(workers: Workers) -> None:
    rooms, both = Rooms(), [Room(workers), Room(workers)]
    for room in both:
        room.use()
        rooms.add(room.slots)
    rooms.wipe_soon()
    for room in both:
        room.use()  # given back after the fence, before it is acknowledged
    await rooms.wiped()
    assert not any(room.holds_secret for room in both)
    for room in both:
        rooms.remove(room.slots)
        await room.slots.close()
    await rooms.wiped()


async def test_two_engines_never_share_staging_and_neither_sees_the_others_bytes(
    workers: Workers,
) -> None:
    one, other = Room(workers), Room(workers)
    one.use()
    assert one.staging.fd != other.staging.fd
    assert one.holds_secret
    assert not other.holds_secret
    slot = other.slots.take(BLOCK)
    assert slot is not None
    with other.slots.bytes_of(slot) as view:
        assert not any(view)
    await one.slots.close()
    await other.slots.close()


@pytest.mark.parametrize("cancels", [0, 1, 3])
async def test_closing_wipes_what_is_out_and_used_also_when_it_is_cancelled(
    workers: Workers, cancels: int
) -> None:

    room = Room(workers)
    engine = mmap.mmap(room.staging.fd, SIZE)
    room.use()
    slot = room.slots.take(2 * BLOCK)
    assert slot is not None
    with room.slots.bytes_of(slot) as view:
        view[:24] = SECRET
    go_on = threading.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(workers.run(partial(held, go_on)))
        closing = tasks.create_task(room.slots.close())
        await asyncio.sleep(0)
        for _ in range(cancels):
            closing.cancel()
            await asyncio.sleep(0)
        assert not closing.done()
        go_on.set()
    assert closing.cancelled() == bool(cancels)
    assert not any(engine[:])
    assert (room.slots.used_bytes, room.slots.unwiped_bytes) == (0, 0)
    assert room.slots.take(BLOCK) is None
    engine.close()


async def test_a_blanked_slot_that_was_written_again_is_wiped_as_soon_as_it_is_given_back(
    room: Room,
) -> None:
    slot = room.slots.take_zeroed(BLOCK)
    assert slot is not None
    room.slots.blank(slot)
    with room.slots.bytes_of(slot) as view:
        view[:24] = SECRET
    room.slots.give_back(slot)
    assert room.slots.unwiped_bytes == 0, "a thread has it already"
    await asyncio.gather(*room.slots._wiping)
    assert not room.holds_secret


async def test_a_slot_is_given_back_once_and_blanked_only_while_it_is_out(room: Room) -> None:
    slot = room.slots.take(BLOCK)
    assert slot is not None
    room.slots.give_back(slot)
    again = room.slots.take(BLOCK)
    assert again == slot
    with room.slots.bytes_of(slot) as view:
        view[:24] = SECRET
    room.slots.blank(slot)
    assert not room.holds_secret
    room.slots.give_back(slot)
    room.slots.give_back(slot)
    await room.slots.wiped()
    assert (room.slots.used_bytes, room.slots.unwiped_bytes) == (0, 0)


class Gated:
    """Wiping workers whose every run ends when the test says; the wiping is real."""

    def __init__(self) -> None:
        self.waiting: deque[asyncio.Event] = deque()

    async def run(self, job: Callable[[], None], *, always: bool = False) -> None:
        assert always, "what is wiped is never refused"
        let = asyncio.Event()
        self.waiting.append(let)
        await let.wait()
        job()


async def test_what_was_given_back_by_now_is_waited_for_and_not_what_comes_later() -> None:
    gated = Gated()
    staging = Staging(SIZE)
    slots = Slots(staging, cast("Workers", gated), wipe_after_s=3600.0)

    def use() -> None:
        slot = slots.take_zeroed(4096)
        assert slot is not None
        slots.blank(slot)
        slots.give_back(slot)  # blanked: its wiping begins at once

    async def settle() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    use()
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(slots.wiped())
        await settle()
        use()
        await settle()
        assert not waiting.done()
        gated.waiting.popleft().set()
        await settle()
        assert waiting.done()
        assert len(gated.waiting) == 1, "the later one still runs"
        tasks.create_task(slots.close())
        await settle()
        while gated.waiting:
            gated.waiting.popleft().set()
            await settle()
