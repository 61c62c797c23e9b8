"""One save: hand out slots for the blocks that are not stored yet, seal each as it is filled.

Rules:
- Slots are given for the first blocks that are neither resident nor being saved by anybody, as
  many as staging has room for; what does not fit is counted as backpressure, and another `Save`
  may bring it. A block's children are not saved once the block itself failed: they could
  never match.
- `SaveDone` is sent once, when every slot is sealed or dropped, also when the engine fills
  none by the deadline.
- A slot returns to the free room when the engine has said `Filled`. One that it never answers
  for stays out, since the engine might still write into it, until the connection is closed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from sidecar.audit import Kind, Outcome
from sidecar.chain import Chain
from sidecar.clocks import NS
from sidecar.load import Send, block_context, namespace_keys, reason_of
from sidecar.reasons import Reason
from sidecar.request import ChainedBlock, Judged, Request
from sidecar.slots import Slots
from sidecar.transfer import Depot, Shard
from storage.block import BlockAddress
from storage.staging import StagingSlot
from strongroom.blocks import Grid
from strongroom.errors import (
    StrongroomError,
)
from strongroom.wire.frames import Filled, Save, SaveDone, Slot
from strongroom.wire.frames import Slots as SlotsFrame


class SavesInFlight:
    """Blocks that some connection holds a slot for: nobody else is asked to fill them."""

    def __init__(self) -> None:
        self._blocks: set[BlockAddress] = set()

    def __contains__(self, address: BlockAddress) -> bool:
        return address in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def begin(self, address: BlockAddress) -> None:
        self._blocks.add(address)

    def end(self, address: BlockAddress) -> None:
        self._blocks.discard(address)


@dataclass(frozen=True, slots=True)
class _Handed:
    """A slot that the engine was asked to fill."""

    slot: StagingSlot
    block: ChainedBlock


class SaveTransfer:
    """Runs as one task of its connection; `stop` and `filled` are called beside it."""

    kind = "save"

    def __init__(
        self,
        frame: Save,
        request: Request,
        judged: Judged,
        grid: Grid,
        shard: Shard,
        slots: Slots,
        depot: Depot,
        in_flight: SavesInFlight,
        send: Send,
    ) -> None:
        self.ended = asyncio.Event()
        self._frame = frame
        self._request = request
        self._judged = judged
        self._grid = grid
        self._shard = shard
        self._slots = slots
        self._depot = depot
        self._in_flight = in_flight
        self._send = send
        self._handed: dict[int, _Handed] = {}
        self._ready: list[_Handed] = []
        self._claimed: set[BlockAddress] = set()
        self._busy: StagingSlot | None = None
        self._news = asyncio.Event()
        self._stopped = False
        self._stored = 0
        self._bytes = 0
        self._reason = Reason.NONE

    async def run(self) -> bool:
        """To `SaveDone`. False when the engine left slots unanswered."""
        self._request.transfers.add(self)
        try:
            await self._hand_out()
            answered = await self._seal_all()
        finally:
            self.ended.set()
            self._request.transfers.discard(self)
            for address in self._claimed:
                self._in_flight.end(address)
        if self._stopped and self._reason is Reason.NONE:
            fenced = self._request.is_fenced_off
            self._reason = Reason.REVOKED if fenced else Reason.CANCELLED
        self._send(SaveDone(self._frame.save, self._stored))
        await self._note()
        return (answered and not self._handed) or await self._answered_late()

    def filled(self, frame: Filled) -> None:
        """The engine is done with a slot."""
        handed = self._handed.pop(frame.offset, None)
        if handed is None:
            return
        if frame.ok and not self._stopped and not self.ended.is_set():
            self._ready.append(handed)
        else:
            self._slots.give_back(handed.slot)
        self._news.set()

    def stop(self) -> None:
        """Zero every slot and end; what is being sealed is never published (the fence)."""
        self._stopped = True
        for handed in (*self._handed.values(), *self._ready):
            self._slots.blank(handed.slot)
        if self._busy is not None:
            self._slots.blank(self._busy)
        self._news.set()

    async def _hand_out(self) -> None:
        slots: list[Slot] = []
        try:
            await self._depot.leases.ensure(self._judged.prompt.grant, self._judged.grant)
            self._request.fence.check()
            self._depot.gate.require()
            for block in self._wanted():
                context = block_context(self._judged, block, self._shard)
                slot = await self._room(context.plaintext_bytes)
                if slot is None:
                    self._reason = Reason.BACKPRESSURE
                    break
                if context.address in self._in_flight:
                    self._slots.give_back(slot)  # somebody came first while room was made
                    continue
                self._in_flight.begin(context.address)
                self._claimed.add(context.address)
                self._handed[slot.offset] = _Handed(slot, block)
                slots.append(Slot(block.extent.start, block.extent.end, slot.offset))
        except StrongroomError as error:
            self._reason = reason_of(error)
        self._send(SlotsFrame(self._frame.save, tuple(slots)))

    async def _room(self, nbytes: int) -> StagingSlot | None:
        """A slot of zeros; used ones may have to be wiped for it."""
        slot = self._slots.take_zeroed(nbytes)
        if slot is None and self._slots.unwiped_bytes:
            await self._slots.wiped()
            self._request.fence.check()
            slot = self._slots.take_zeroed(nbytes)
        return slot

    def _wanted(self) -> list[ChainedBlock]:
        chain = Chain(
            self._grid,
            self._judged.grant.spans,
            self._judged.prompt,
            lambda namespace: self._depot.ring.keys(namespace, self._shard.format_digest),
        )
        wanted = []
        for block in chain.plan(self._frame.end):
            address = BlockAddress(block.block, self._shard.layout.rank)
            if self._depot.store.tier_of(address) is None and address not in self._in_flight:
                wanted.append(block)
        return wanted

    async def _seal_all(self) -> bool:
        until_ns = self._depot.clocks.boot() + self._depot.times.fill_deadline_ns
        while (self._handed or self._ready) and not self._stopped:
            if self._ready:
                await self._seal(self._ready.pop(0))
                continue
            now = self._depot.clocks.boot()
            if now >= until_ns:
                self._reason = Reason.EXPIRED
                return False
            self._news.clear()
            try:
                async with asyncio.timeout((until_ns - now) / NS + 0.001):
                    await self._news.wait()
            except TimeoutError:
                continue
        for handed in self._ready:
            self._slots.give_back(handed.slot)
        self._ready.clear()
        return True

    async def _seal(self, handed: _Handed) -> None:
        """Seal and publish one block; a refusal is counted, and is no harm to the engine."""
        self._busy = handed.slot
        try:
            if self._reason is Reason.NONE or self._reason is Reason.BACKPRESSURE:
                await self._store(handed)
        except StrongroomError as error:
            self._reason = reason_of(error)
        finally:
            self._busy = None
            self._slots.give_back(handed.slot)

    async def _store(self, handed: _Handed) -> None:
        self._depot.gate.require()
        self._request.fence.check()
        context = block_context(self._judged, handed.block, self._shard)
        keys = namespace_keys(self._depot, handed.block, self._shard)
        with self._slots.bytes_of(handed.slot) as staging:
            saved = await self._depot.store.save(context, keys, staging, self._request.fence)
        if saved.stored:
            self._stored += 1
            self._bytes += saved.bytes

    async def _answered_late(self) -> bool:
        """Give the engine as long again to answer for what it was handed."""
        until_ns = self._depot.clocks.boot() + self._depot.times.fill_deadline_ns
        for handed in self._handed.values():
            self._slots.blank(handed.slot)
        while self._handed:
            now = self._depot.clocks.boot()
            if now >= until_ns:
                return False
            self._news.clear()
            try:
                async with asyncio.timeout((until_ns - now) / NS + 0.001):
                    await self._news.wait()
            except TimeoutError:
                continue
        return True

    async def _note(self) -> None:
        if not self._stored and self._reason is Reason.NONE:
            return
        kinds: dict[Reason, Kind] = {Reason.QUOTA: "quota", Reason.REVOKED: "fenced"}
        outcome: Outcome = "stored" if self._reason is Reason.NONE else "failed"
        await self._depot.audit.note(
            kinds.get(self._reason, "save"),
            outcome,
            self._reason,
            engine=self._shard.engine,
            request=self._request.name,
            grant=self._judged.grant,
            namespaces=[span.namespace for span in self._judged.grant.spans],
            tokens=self._frame.end,
            nbytes=self._bytes,
        )
