"""Layers of a block are released as they open, and taken back when the block fails.

The crypto threads open one segment at a time, as the test lets them. A block has two layers.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator

import pytest

from sidecar.lookup.request import Request
from sidecar.transfers.load import block_context
from storage import crypto
from storage.block import BlockContext
from storage.envelope import Opener
from storage.header import segment_spans
from strongroom.wire.frames import Copied, Layers, Load, LoadDone, LoadFailed, Part
from tests.sidecar.conftest import PROMPT, Stored
from tests.sidecar.harness import PAGE, PAGE_BYTES, Wire, World, page_content
from tests.sidecar.test_revocation import applied, by_component, by_subject, clean, of_somebody_else

BLOCK_PAGES = 64 // PAGE
LAYER_BYTES = BLOCK_PAGES * PAGE_BYTES


def layer_content(layer: int, start: int = 0) -> bytes:
    pages = range(start // PAGE, start // PAGE + BLOCK_PAGES)
    return b"".join(page_content(PROMPT, page, layer) for page in pages)


class OneByOne:
    """The real opening of segments, each when the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._turns = threading.Semaphore(0)
        self.begun = 0
        plain = Opener.segments

        def segments(
            opener: Opener,
            indexes: Iterable[int],
            record: memoryview,
            plaintext: memoryview,
            *opened: Callable[[int], None],
        ) -> None:
            self.begun += 1

            def in_turn() -> Iterator[int]:
                for index in indexes:
                    assert self._turns.acquire(timeout=20)
                    yield index

            plain(opener, in_turn(), record, plaintext, *opened)

        monkeypatch.setattr(Opener, "segments", segments)

    def let(self, segments: int) -> None:
        self._turns.release(segments)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[OneByOne]:
    # These blocks are far smaller than what is worth a word in between.
    monkeypatch.setattr(crypto, "_TELL_BYTES_MIN", 1)
    made = OneByOne(monkeypatch)
    yield made
    made.let(1000)


async def start(stored: Stored, *, layers: bool = True, end: int = 64) -> Wire:
    await stored.hits("r", stored.grant())
    await clean(stored.world)
    wire = stored.engine.workers[0]
    wire.send(Load("r", 1, 0, end, layers))
    return wire


def staging(wire: Wire) -> bytes:
    assert wire.staging is not None
    return wire.staging[:]


async def first_layer(wire: Wire, turns: OneByOne) -> Layers:
    turns.let(1)
    frame = await wire.expect(Layers)
    assert (frame.load, frame.start, frame.end, frame.layers) == (1, 0, 64, 1)
    return frame


async def damage(world: World, start: int, layer: int) -> None:
    """Flip a byte of one layer's ciphertext in the arena."""
    (joined,) = world.sidecar.sessions
    judged = joined.requests.get("r").readable()  # type: ignore[union-attr]
    assert judged is not None
    block = next(block for block in judged.hit if block.extent.start == start)
    context: BlockContext = block_context(judged, block, joined.workers[0]._shard)
    row = world.sidecar.store._host._index.get(context.address)
    assert row is not None
    at = list(segment_spans(context.segment_bytes))[layer][1]
    world.sidecar.store._host._arena.view[row.place.offset + at] ^= 1


async def test_a_layer_is_there_before_its_block_and_the_part_follows(
    stored: Stored, turns: OneByOne
) -> None:
    wire = await start(stored)
    frame = await first_layer(wire, turns)
    assert staging(wire)[frame.offset : frame.offset + LAYER_BYTES] == layer_content(0)
    assert layer_content(1) not in staging(wire)
    turns.let(1)
    part = await wire.expect(Part)
    assert (part.start, part.end, part.offset) == (0, 64, frame.offset)
    assert layer_content(0) + layer_content(1) in staging(wire)
    assert part.deadline_ns >= frame.deadline_ns
    wire.send(Copied(1, part.offset))
    assert (await wire.expect(LoadDone)).load == 1


async def test_who_does_not_ask_hears_of_no_layers(stored: Stored, turns: OneByOne) -> None:
    wire = await start(stored, layers=False)
    turns.let(2)
    part = await wire.expect(Part)
    wire.send(Copied(1, part.offset))
    await wire.expect(LoadDone)
    assert not any(isinstance(frame, Layers) for frame in wire.unread)


async def test_a_bad_last_layer_takes_back_the_first_and_its_slot_waits_for_the_engine(
    stored: Stored, turns: OneByOne
) -> None:
    wire = await start(stored)
    await damage(stored.world, 0, 1)
    frame = await first_layer(wire, turns)
    turns.let(1)
    failed = await wire.expect(LoadFailed)
    assert (failed.load, failed.start) == (1, 0)
    assert not any(isinstance(frame, Part) for frame in wire.unread)
    assert not any(staging(wire)), "wiped before the failure is told"
    assert stored.world.sidecar.statistics().staging_used_bytes > 0
    wire.send(Copied(1, frame.offset))
    async with asyncio.timeout(20):
        while stored.world.sidecar.statistics().staging_used_bytes:
            await asyncio.sleep(0)
    assert stored.world.sidecar.audit.counts["corrupt", "failed", "integrity"] == 1


async def test_a_bad_first_layer_is_announced_by_nothing(stored: Stored, turns: OneByOne) -> None:
    wire = await start(stored)
    await damage(stored.world, 0, 0)
    turns.let(2)
    await wire.expect(LoadFailed)
    assert not any(isinstance(frame, Layers | Part) for frame in wire.unread)
    assert not any(staging(wire))
    assert stored.world.sidecar.statistics().staging_used_bytes == 0


@pytest.mark.parametrize("revoke", [by_component, by_subject])
async def test_after_a_fence_no_layer_is_released_and_what_was_is_taken_back(
    stored: Stored, turns: OneByOne, revoke: Callable[[World], int]
) -> None:
    wire = await start(stored)
    await first_layer(wire, turns)
    assert layer_content(0) in staging(wire)
    await applied(stored.world, of_somebody_else(stored.world))
    assert layer_content(0) in staging(wire), "somebody else's revocation takes nothing"
    seq = revoke(stored.world)
    await applied(stored.world, seq)
    assert layer_content(0) not in staging(wire), "zeroed at once, while the load still hangs"
    assert not any(ack.seq >= seq for ack in stored.world.control.acks if ack.state == "fenced")
    turns.let(1)
    assert (await wire.expect(LoadFailed)).start == 0
    await stored.world.control.until_acked("fenced", seq)
    assert not any(isinstance(frame, Part) for frame in wire.unread)
    assert not any(staging(wire))


async def under_way(stored: Stored, turns: OneByOne) -> Request:
    """The load is inside the store, past its first checks."""
    (joined,) = stored.world.sidecar.sessions
    async with asyncio.timeout(20):
        while not turns.begun:
            await asyncio.sleep(0)
    request = joined.requests.get("r")
    assert request is not None
    return request


def by_revocation(world: World, request: Request) -> None:
    by_subject(world)


def by_fence_alone(world: World, request: Request) -> None:
    request.fence.cut()


def by_lease(world: World, request: Request) -> None:
    world.sidecar.gate.shut("a test")


@pytest.mark.parametrize("forbid", [by_revocation, by_fence_alone, by_lease])
async def test_a_layer_that_opens_when_it_may_not_be_served_is_not_announced(
    stored: Stored, turns: OneByOne, forbid: Callable[[World, Request], None]
) -> None:
    wire = await start(stored)
    request = await under_way(stored, turns)
    forbid(stored.world, request)
    if forbid is by_revocation:
        async with asyncio.timeout(20):
            while not request.fence.is_cut:
                await asyncio.sleep(0)
    turns.let(1)
    # The layer is open, and the loop has had its chance to announce it.
    async with asyncio.timeout(20):
        while forbid is not by_revocation and layer_content(0) not in staging(wire):
            await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
    turns.let(1)
    assert (await wire.expect(LoadFailed)).start == 0
    assert not any(isinstance(frame, Layers | Part) for frame in wire.unread)
    assert not any(staging(wire))


async def test_what_is_being_opened_and_known_to_nobody_is_zeroed_at_once(
    stored: Stored, turns: OneByOne
) -> None:
    wire = await start(stored, layers=False)
    await under_way(stored, turns)
    turns.let(1)
    async with asyncio.timeout(20):
        while layer_content(0) not in staging(wire):
            await asyncio.sleep(0)
    await applied(stored.world, by_subject(stored.world))
    assert layer_content(0) not in staging(wire), "while the load still hangs"
    turns.let(1)
    await wire.expect(LoadFailed)
    assert not any(staging(wire))


async def test_two_blocks_are_begun_in_order_and_the_first_that_fails_ends_the_load(
    stored: Stored, turns: OneByOne
) -> None:
    wire = await start(stored, end=256)
    await damage(stored.world, 64, 1)
    turns.let(100)
    part = await wire.expect(Part)
    assert part.start == 0
    wire.send(Copied(1, part.offset))
    for frame in [frame for frame in wire.unread if isinstance(frame, Part)]:
        wire.send(Copied(1, frame.offset))
    failed = await wire.expect(LoadFailed)
    assert failed.start == 64
    said = [frame for frame in wire.unread if isinstance(frame, Layers | Part)]
    assert all(frame.start <= 128 for frame in said)
