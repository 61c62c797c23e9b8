"""One load: open the stored prefix into staging, block after block, and release each part.

Rules:
- Lease, key and fence are checked right before a part is released, with no `await` between
  check and release; the part carries the deadline of the lease under which it was released. The
  same goes for the first layers of a part, where the engine asked for them.
- While one block is opened the next is in the workers' queue, and those after it are on their way
  from NVMe into host memory.
- A block waits for its turn among the blocks of its connection, fair by tenant, and only then
  takes room in staging: what waits holds none, so that a tenant with a thousand loads stands
  before nobody else's one. Blocks that are read past host memory have turns of their own.
- `LoadDone` is sent once every part was copied, so that it never speaks of bytes that were
  zeroed meanwhile. A fenced load fails from its start: none of its parts may be used.
- One of `LoadDone` and `LoadFailed` is sent, once, whatever happens. A part whose layers were
  announced and that then failed is taken back by `LoadFailed`; its slot is blank by then.
- A slot is the load's from the step in which it is taken: it is blanked and given back also where
  the task that was to fill it never came to its first step.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from sidecar.clocks import NS
from sidecar.degrade.breaker import Crossed, Deleted, Halted
from sidecar.lookup.request import ChainedBlock, Judged, Request
from sidecar.prefetch.patience import Patience
from sidecar.record.reasons import Reason
from sidecar.transfers.depot import Depot, Shard
from sidecar.transfers.parts import Parts
from sidecar.transfers.slots import Slots
from storage.block import BlockAddress, BlockContext
from storage.fair import Fair
from storage.fence import Fenced
from storage.header import Header
from storage.onboard import Onboarding
from storage.staging import StagingSlot
from storage.tiers.protocol import TierName
from strongroom.derivation import NamespaceKeys
from strongroom.errors import (
    Corrupt,
    LeaseExpired,
    Missing,
    Overloaded,
    QuotaExceeded,
    Refused,
    StrongroomError,
    Unavailable,
)
from strongroom.identity import ComponentId, NamespaceId
from strongroom.wire.frames import Layers, Load, LoadDone, LoadFailed, Part, SidecarFrame

Send = Callable[[SidecarFrame], None]
_AT_ONCE: Final = 2


def block_context(judged: Judged, block: ChainedBlock, shard: Shard) -> BlockContext:
    """What the block's record must say to be this rank's part of this prompt."""
    return BlockContext(
        tenant=judged.grant.tenant,
        namespace=block.namespace,
        block=block.block,
        parent=block.parent,
        position=block.extent.start,
        tokens=block.extent.tokens,
        format_digest=shard.format_digest,
        layout_digest=shard.layout_digest,
        rank=shard.layout.rank,
        segment_bytes=shard.layout.segment_bytes(block.extent.tokens),
    )


def namespace_keys(depot: Depot, block: ChainedBlock, shard: Shard) -> NamespaceKeys:
    """The block's keys, if they are leased at this instant; `LeaseExpired` otherwise."""
    keys = depot.ring.keys(block.namespace, shard.format_digest)
    if keys is None:
        raise LeaseExpired("the namespace's key lease has run out")
    return keys


@dataclass(frozen=True, slots=True)
class Turns:
    """Of one connection's blocks: those in host memory, and those that are read past it, which
    hold their turn for as long as a disk takes.
    """

    host: Fair
    disk: Fair


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A block of the load."""

    block: ChainedBlock
    index: int


@dataclass(frozen=True, slots=True)
class _Turn:
    """A block whose turn it is, and its room in staging."""

    block: ChainedBlock
    slot: StagingSlot
    taken_s: float


@dataclass(frozen=True, slots=True)
class _Ended:
    """How a block's turn ended; `NONE` is released."""

    block: ChainedBlock
    reason: Reason


async def _brought(onboarding: Onboarding, index: int) -> TierName | None:
    """Where the block came from; None where it is to be read past the host tier."""
    try:
        return (await onboarding.ready(index)).tier
    except (Overloaded, QuotaExceeded):
        return None


class LoadTransfer:
    """Runs as one task of its connection; `stop` and `copied` are called beside it."""

    kind = "load"

    def __init__(
        self,
        frame: Load,
        request: Request,
        judged: Judged,
        shard: Shard,
        slots: Slots,
        turns: Turns,
        depot: Depot,
        send: Send,
    ) -> None:
        self.ended = asyncio.Event()
        self._frame = frame
        self._request = request
        self._judged = judged
        self._shard = shard
        self._slots = slots
        self._turns = turns
        self._depot = depot
        self._send = send
        self._parts = Parts(slots, depot.clocks.boot, depot.times.grace_ns)
        self._busy: dict[int, StagingSlot] = {}
        self._made_ns = depot.clocks.boot()
        self._stopped = False
        self._patience: Patience | None = None
        self._waits: set[asyncio.Timeout] = set()
        """Of blocks that wait for a turn or for room."""
        self._bytes = 0
        self._tier = ""
        self._last_ended_s = 0.0

    async def run(self) -> None:
        """To its one final frame."""
        began_ns = self._depot.clocks.boot()
        self._request.transfers.add(self)
        try:
            failed_at, reason = await self._release_all()
            uncopied = await self._parts.all_copied(failed_at)
            if uncopied is not None:
                failed_at, reason = uncopied, Reason.EXPIRED
        finally:
            self.ended.set()
            self._request.transfers.discard(self)
            layout = self._shard.layout
            self._depot.appraiser.brought(
                self._shard.engine, self._request.name, layout.tp_size * layout.pp_size
            )
        if self._stopped:
            # What the second look caught has fenced the request itself: that stays the reason.
            caught = reason is Reason.BREAKER
            failed_at = self._frame.start
            reason = reason if caught else self._why_stopped()
        self._parts.blank()
        self._parts.give_up_half()
        self._depot.watch.load_ended(
            self._shard.engine,
            self._request.name,
            self._judged.grant.tenant,
            reason,
            tier=self._tier,
            tokens=max(0, failed_at - self._frame.start),
            nbytes=self._bytes,
            seconds=(self._depot.clocks.boot() - began_ns) / NS,
        )
        if reason is Reason.NONE:
            self._send(LoadDone(self._frame.load, self._depot.gate.deadline_ns))
            self._depot.watch.journal.accepted(
                self._shard.engine,
                self._request.name,
                self._judged.grant.tenant,
                max(0, failed_at - self._frame.start),
                self._bytes,
            )
        else:
            self._send(LoadFailed(self._frame.load, max(failed_at, self._frame.start)))
            await self._note_failure(failed_at, reason)
        await self._parts.all_returned()

    def copied(self, offset: int) -> None:
        """The engine has the part at `offset`, or has no more use for it."""
        self._parts.copied(offset)

    def stop(self) -> None:
        """Zero what is released and end. The slot being opened is wiped when that returns."""
        self._stopped = True
        if self._patience is not None:
            self._patience.give_up()
        for slot in self._busy.values():
            self._slots.blank(slot)
        self._parts.stop()
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(0)

    async def _release_all(self) -> tuple[int, Reason]:
        """Release part after part; where and why it ended early."""
        until_ns = self._depot.clocks.boot() + self._depot.times.load_deadline_ns
        blocks = [
            block
            for block in self._judged.hit
            if block.extent.end > self._frame.start and block.extent.start < self._frame.end
        ]
        try:
            await self._depot.leases.ensure(self._judged.prompt.grant, self._judged.grant)
        except StrongroomError as error:
            return self._frame.start, reason_of(error)
        try:
            await self._record(blocks)
        except Unavailable:
            return self._frame.start, Reason.AUDIT
        self._patience = self._depot.prefetcher.load_begins(
            self._judged.grant.jti, sum(block.extent.tokens for block in blocks), until_ns
        )
        addresses = [self._address(block) for block in blocks]
        # Before anything is read for this load: what is under way already is not read twice.
        for address in addresses:
            if self._stopped:
                return self._frame.start, self._why_stopped()
            await self._patience.until_here(address)
        if self._depot.store.slowest_tier(addresses) is not TierName.NVME:
            return await self._open_all(blocks, None, until_ns)
        async with self._depot.store.onboard(addresses, self._request.fence) as onboarding:
            return await self._open_all(blocks, onboarding, until_ns)

    async def _open_all(
        self,
        blocks: list[ChainedBlock],
        onboarding: Onboarding | None,
        until_ns: int,
    ) -> tuple[int, Reason]:
        """Two blocks at a time, begun in order; the first that fails ends the load there."""
        try:
            return await self._open_in_turn(blocks, onboarding, until_ns)
        finally:
            # Every task has ended. One that was cancelled before its first step has done nothing.
            for slot in tuple(self._busy.values()):
                self._give_up(slot)

    async def _open_in_turn(
        self,
        blocks: list[ChainedBlock],
        onboarding: Onboarding | None,
        until_ns: int,
    ) -> tuple[int, Reason]:
        running: deque[asyncio.Task[_Ended]] = deque()
        async with asyncio.TaskGroup() as tasks:
            for index, block in enumerate(blocks):
                if self._stopped:
                    break
                while len(running) >= _AT_ONCE:
                    ended = await running.popleft()
                    if ended.reason is not Reason.NONE:
                        return self._ended_early(ended, running)
                opening = self._open(_Wanted(block, index), onboarding, until_ns)
                running.append(tasks.create_task(opening, name="open"))
            while running:
                ended = await running.popleft()
                if ended.reason is not Reason.NONE:
                    return self._ended_early(ended, running)
        return self._frame.end, Reason.NONE

    def _ended_early(
        self, ended: _Ended, running: deque[asyncio.Task[_Ended]]
    ) -> tuple[int, Reason]:
        for task in running:
            task.cancel()
        return ended.block.extent.start, ended.reason

    async def _open(self, wanted: _Wanted, onboarding: Onboarding | None, until_ns: int) -> _Ended:
        """Bring, open and release one block. Its slot is blank or released when this ends."""
        block = wanted.block
        try:
            tier = None if onboarding is None else await _brought(onboarding, wanted.index)
            async with self._in_turn(block, until_ns) as slot:
                # What it waited for turn and room says nothing of the tier.
                await self._open_into(_Turn(block, slot, time.monotonic()), tier)
        except StrongroomError as error:
            return _Ended(block, reason_of(error))
        finally:
            if onboarding is not None:
                onboarding.release(wanted.index)
        return _Ended(block, Reason.NONE)

    async def _open_into(self, turn: _Turn, tier: TierName | None) -> None:
        slot = turn.slot
        self._busy[slot.offset] = slot
        try:
            await self._release(turn, tier)
        except BaseException:
            self._give_up(slot)
            raise

    def _give_up(self, slot: StagingSlot) -> None:
        """Nothing of the slot will be used; one that was said belongs to the parts."""
        if self._busy.pop(slot.offset, None) is not None:
            self._slots.blank(slot)
            self._parts.fail(slot)

    async def _release(self, turn: _Turn, brought_from: TierName | None) -> None:
        block, slot = turn.block, turn.slot
        context = block_context(self._judged, block, self._shard)
        began_s = time.monotonic()
        self._depot.gate.require()
        keys = namespace_keys(self._depot, block, self._shard)
        store, fence = self._depot.store, self._request.fence
        with self._slots.bytes_of(slot) as staging:
            if self._frame.layers:
                told = partial(self._release_layers, turn)
                loaded = await store.load(context, keys, staging, fence, told)
            else:
                loaded = await store.load(context, keys, staging, fence)
        tier = brought_from or loaded.tier
        self._depot.prefetcher.was_read(context.address, tier)
        self._depot.used(context.address)
        # From here to the frame nothing waits: what was invalidated before is seen here.
        deadline_ns = self._checked(loaded.tenant, loaded.namespace)
        del self._busy[slot.offset]
        self._bytes += loaded.bytes
        if self._tier != TierName.NVME:
            self._tier = tier.value
        self._parts.say(slot, block.extent.start, deadline_ns)
        self._send(
            Part(
                load=self._frame.load,
                start=block.extent.start,
                end=block.extent.end,
                offset=slot.offset,
                deadline_ns=deadline_ns,
            )
        )
        self._observe(turn, began_s, tier, loaded.bytes)

    def _release_layers(self, turn: _Turn, layers: int, header: Header) -> None:
        """The first layers of a block that is being opened are good. Nothing is awaited."""
        block, slot = turn.block, turn.slot
        if self._stopped or self._busy.get(slot.offset) is not slot:
            return
        try:
            deadline_ns = self._checked(header.context.tenant, header.context.namespace)
        except StrongroomError:
            return  # the load finds the same before it releases the part
        self._parts.half(slot, block.extent.start, deadline_ns)
        self._send(
            Layers(
                load=self._frame.load,
                start=block.extent.start,
                end=block.extent.end,
                offset=slot.offset,
                layers=layers,
                deadline_ns=deadline_ns,
            )
        )

    def _checked(self, tenant: ComponentId, namespace: NamespaceId) -> int:
        """Fence, lease, and once more from other sources, which never finds anything unless the
        first two fail. The deadline of the lease; raises what forbids the release.
        """
        self._request.fence.check()
        deadline_ns = self._depot.gate.require()
        self._depot.watch.sentry.look(self._judged.grant, tenant, namespace)
        return deadline_ns

    def _observe(self, turn: _Turn, began_s: float, tier: TierName, nbytes: int) -> None:
        """How long the block took, and how long it waited: two blocks share the workers."""
        ended_s = time.monotonic()
        served_from_s = max(began_s, self._last_ended_s)
        self._last_ended_s = ended_s
        appraiser, engine = self._depot.appraiser, self._shard.engine
        appraiser.observe_restore(
            tier, nbytes, served_from_s - turn.taken_s, ended_s - served_from_s
        )
        appraiser.moved(engine, self._request.name, tier, nbytes)

    def _block_bytes(self, block: ChainedBlock) -> int:
        return self._shard.layout.block_bytes(block.extent.tokens)

    @asynccontextmanager
    async def _in_turn(self, block: ChainedBlock, until_ns: int) -> AsyncIterator[StagingSlot]:
        """A turn and a slot, waiting for others and for `Copied`; late parts give theirs back.

        The waits are cut short by `stop`, and now and then to look for late parts: somebody else
        may wait for the room of ours.
        """
        entered: tuple[AsyncExitStack, StagingSlot] | None = None
        while entered is None:
            self._request.fence.check()
            now = self._depot.clocks.boot()
            if now >= until_ns:
                raise Overloaded("no staging in time")
            self._parts.reap(now)
            wait_ns = min(until_ns, self._parts.next_due() or until_ns) - now
            try:
                async with asyncio.timeout(max(wait_ns, 0) / NS + 0.001) as wait:
                    self._waits.add(wait)
                    try:
                        entered = await self._enter(block)
                    finally:
                        self._waits.discard(wait)
            except TimeoutError:
                continue
        turn, slot = entered
        async with turn:
            yield slot

    async def _enter(self, block: ChainedBlock) -> tuple[AsyncExitStack, StagingSlot]:
        nbytes = self._block_bytes(block)
        on_nvme = self._depot.store.tier_of(self._address(block)) is TierName.NVME
        turns = self._turns.disk if on_nvme else self._turns.host
        async with AsyncExitStack() as undo:
            await undo.enter_async_context(turns.turn(self._judged.grant.tenant, nbytes))
            slot = await self._slots.wait_take(nbytes)
            return undo.pop_all(), slot

    def _address(self, block: ChainedBlock) -> BlockAddress:
        return BlockAddress(block.block, self._shard.layout.rank)

    def _why_stopped(self) -> Reason:
        return Reason.REVOKED if self._request.is_fenced_off else Reason.CANCELLED

    async def _record(self, blocks: list[ChainedBlock]) -> None:
        """The access is on record before its first byte is released."""
        slowest = self._depot.store.slowest_tier(self._address(block) for block in blocks)
        tier = "" if slowest is None else slowest.value
        tokens = sum(block.extent.tokens for block in blocks)
        await self._depot.audit.record(
            "load",
            "hit",
            Reason.NONE,
            engine=self._shard.engine,
            request=self._request.name,
            grant=self._judged.grant,
            namespaces=[block.namespace for block in blocks],
            tokens=tokens,
            tier=tier,
            nbytes=sum(self._shard.layout.block_bytes(block.extent.tokens) for block in blocks),
        )
        self._depot.watch.journal.load_began(
            self._shard.engine,
            self._request.name,
            self._judged.grant.tenant,
            tier,
            tokens,
            (self._depot.clocks.boot() - self._made_ns) / NS,
        )

    async def _note_failure(self, failed_at: int, reason: Reason) -> None:
        await self._depot.audit.note(
            "fenced" if reason is Reason.REVOKED else "load",
            "failed",
            reason,
            engine=self._shard.engine,
            request=self._request.name,
            grant=self._judged.grant,
            namespaces=[block.namespace for block in self._judged.hit],
            tokens=max(0, failed_at - self._frame.start),
            tier=self._tier,
            nbytes=self._bytes,
        )


def reason_of(error: StrongroomError) -> Reason:
    match error:
        case Crossed() | Deleted() | Halted():
            return Reason.BREAKER
        case Fenced() | Refused():
            return Reason.REVOKED
        case Corrupt():
            return Reason.INTEGRITY
        case Missing():
            return Reason.ABSENT
        case QuotaExceeded():
            return Reason.QUOTA
        case Overloaded():
            return Reason.BACKPRESSURE
        case LeaseExpired() | Unavailable():
            return Reason.LEASE
        case _:
            return Reason.PROTOCOL
