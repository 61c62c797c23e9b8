"""One save: hand out slots for the blocks that are not stored yet, seal each as it is filled.

Rules:
- Slots are given for the first blocks that are neither resident nor being saved by anybody, as
  many as staging has room for; what does not fit is counted as backpressure, and another `Save`
  may bring it.
- Sealing begins in chain order, several blocks at once, while the engine fills the next; a block
  is published after its parent, and not at all once the parent failed: it could never match.
- It may be stopped until each seal is published. Every block ends with its reason in the
  counts, and the save in the audit, also when its connection is gone.
- `SaveDone` is sent once, when every slot is sealed or dropped, also when the engine fills
  none by the deadline.
- A slot returns to the free room when the engine has said `Filled`. One that it never answers
  for stays out, since the engine might still write into it, until the connection is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from functools import partial

from sidecar.clocks import NS
from sidecar.lookup.chain import Chain
from sidecar.lookup.request import ChainedBlock, Judged, Request
from sidecar.record.audit import Kind, Outcome
from sidecar.record.reasons import Reason
from sidecar.transfers.depot import Depot, Shard
from sidecar.transfers.kinds import block_kind
from sidecar.transfers.load import Send, block_context, namespace_keys, reason_of
from sidecar.transfers.saves import (
    BlockSave,
    Copied,
    Dropped,
    Handed,
    Present,
    SaveEnd,
    SavesInFlight,
    Sealing,
    Stored,
)
from sidecar.transfers.slots import Slots
from storage.block import BlockAddress
from storage.fence import Fenced
from storage.retention import Retention
from storage.staging import StagingSlot
from strongroom.blocks import ROOT_PARENT, Grid
from strongroom.errors import Overloaded, StrongroomError
from strongroom.wire.frames import Filled, Save, SaveDone, Slot
from strongroom.wire.frames import Slots as SlotsFrame


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
        self._chain: list[BlockSave] = []
        """The blocks that the engine was asked for, parents first."""
        self._handed: dict[int, BlockSave] = {}
        """Those whose slots it has not answered for, by offset."""
        self._news = asyncio.Event()
        self._stopped = False
        self._reason = Reason.NONE
        """Why something was not stored; the first reason there was."""

    async def run(self) -> bool:
        """To `SaveDone`. False when the engine left slots unanswered."""
        self._request.transfers.add(self)
        try:
            answered = await self._transfer()
        except asyncio.CancelledError:
            await self._note()  # the connection is gone, and so is whoever would read `SaveDone`
            raise
        self._send(SaveDone(self._frame.save, len(self._stored())))
        self._depot.store.request_ended()
        await self._note()
        return (answered and not self._handed) or await self._answered_late()

    def filled(self, frame: Filled) -> None:
        """The engine is done with a slot."""
        save = self._handed.pop(frame.offset, None)
        if save is None:
            return
        slot = save.stage.slot
        if save.end is None and frame.ok:
            save.stage = Copied(slot)
        else:
            self._drop(save, Reason.CANCELLED)  # the engine has no use for it any more
            self._slots.give_back(slot)
        self._news.set()

    def stop(self) -> None:
        """Zero every slot and end; what is being sealed is never published."""
        self._stopped = True
        for save in self._chain:
            slot = save.stage.slot
            if save.end is None or self._handed.get(slot.offset) is save:
                self._slots.blank(slot)
            self._drop(save, self._why_stopped())
        self._news.set()

    def _why_stopped(self) -> Reason:
        return Reason.REVOKED if self._request.is_fenced_off else Reason.CANCELLED

    async def _transfer(self) -> bool:
        """Everything up to the last block's end. No thread works on a slot after it."""
        try:
            await self._hand_out()
            async with asyncio.TaskGroup() as seals:
                answered = await self._seal_all(seals)
        finally:
            for save in self._chain:
                self._drop(save, self._why_stopped())
            self.ended.set()
            self._request.transfers.discard(self)
        if self._stopped:
            self._because(self._why_stopped())
        return answered

    def _drop(self, save: BlockSave, reason: Reason) -> None:
        """Give a block up, and what comes after it; nothing happens when it has ended."""
        if save.end is None and not save.is_lost:
            self._lose(save, reason)
            self._drop_after(save)

    def _drop_after(self, lost: BlockSave) -> None:
        """Give up what comes after `lost`: all of it, unless somebody has done so already."""
        for later in itertools.islice(self._chain, lost.place + 1, None):
            if later.is_lost:
                break  # and with it all that come after it
            if later.end is None:
                self._lose(later, Reason.PARENT)

    def _lose(self, save: BlockSave, reason: Reason) -> None:
        """One block alone. Its slot is free where neither the engine nor a thread is at it."""
        self._because(reason)
        save.give_up(reason)
        match save.stage:
            case Copied(slot):
                self._slots.give_back(slot)
            case Handed() | Sealing():
                pass

    def _because(self, reason: Reason) -> None:
        if self._reason in {Reason.NONE, Reason.BACKPRESSURE}:
            self._reason = reason

    def _stored(self) -> list[int]:
        return [save.end.bytes for save in self._chain if isinstance(save.end, Stored)]

    async def _hand_out(self) -> None:
        slots: list[Slot] = []
        began_ns = self._depot.clocks.boot()
        try:
            await self._depot.leases.ensure(self._judged.prompt.grant, self._judged.grant)
            self._request.fence.check()
            self._depot.gate.require()
            if not self._depot.watch.may_swap_out(self._shard.engine, self._judged.grant.tenant):
                raise Overloaded("no new swap-outs now")
            for block in self._wanted():
                context = block_context(self._judged, block, self._shard)
                slot = await self._room(context.plaintext_bytes)
                if slot is None:
                    self._because(Reason.BACKPRESSURE)
                    break
                if context.address in self._in_flight:
                    self._slots.give_back(slot)  # somebody came first while room was made
                    continue
                save = self._in_flight.claim(block, context, slot, len(self._chain))
                self._chain.append(save)
                self._handed[slot.offset] = save
                slots.append(Slot(block.extent.start, block.extent.end, slot.offset))
        except StrongroomError as error:
            self._because(reason_of(error))
        self._send(SlotsFrame(self._frame.save, tuple(slots)))
        if slots:
            self._depot.watch.journal.save_began(
                self._shard.engine,
                self._request.name,
                self._judged.grant.tenant,
                len(slots),
                sum(save.context.plaintext_bytes for save in self._chain),
                (self._depot.clocks.boot() - began_ns) / NS,
            )

    async def _room(self, nbytes: int) -> StagingSlot | None:
        """A slot of zeros; used ones may have to be wiped for it."""
        tenant = self._judged.grant.tenant
        slot = self._slots.take_to_fill(tenant, nbytes)
        if slot is None and self._slots.unwiped_bytes:
            await self._slots.wiped()
            self._request.fence.check()
            slot = self._slots.take_to_fill(tenant, nbytes)
        return slot

    def _wanted(self) -> list[ChainedBlock]:
        chain = Chain(
            self._grid,
            self._judged.grant.spans,
            self._judged.prompt,
            lambda namespace: self._depot.ring.keys(namespace, self._shard.format_digest),
        )
        wanted = []
        for block in chain.plan(self._frame.end, self._judged.hit):
            address = BlockAddress(block.block, self._shard.layout.rank)
            if self._depot.store.tier_of(address) is None and address not in self._in_flight:
                wanted.append(block)
        return wanted

    async def _seal_all(self, seals: asyncio.TaskGroup) -> bool:
        """Begin to seal block after block; false when the engine did not fill them in time."""
        until_ns = self._depot.clocks.boot() + self._depot.times.fill_deadline_ns
        waiting = deque(self._chain)
        before: BlockSave | None = None
        while True:
            while waiting and (waiting[0].end is not None or isinstance(waiting[0].stage, Copied)):
                save = waiting.popleft()
                if save.end is None:
                    seals.create_task(self._seal(save, before), name="seal")
                    before = save
            if self._stopped or not (waiting or self._handed):
                return True
            now = self._depot.clocks.boot()
            if now >= until_ns:
                for save in waiting:
                    self._drop(save, Reason.EXPIRED)
                return False
            await self._news_until(until_ns - now)

    async def _news_until(self, left_ns: int) -> None:
        self._news.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_ns / NS + 0.001):
                await self._news.wait()

    async def _seal(self, save: BlockSave, before: BlockSave | None) -> None:
        """Seal and publish one block; a refusal is counted, and is no harm to the engine."""
        context = save.context
        async with self._in_flight.seals.turn(context.tenant, context.plaintext_bytes):
            if save.end is not None:
                return
            slot = save.stage.slot
            save.stage = Sealing(slot)
            end: SaveEnd = Dropped(self._why_stopped())
            try:
                end = await self._store(save, before)
            except StrongroomError as error:
                end = Dropped(save.given_up or reason_of(error))
            finally:
                self._slots.give_back(slot)
                save.finish(end)
                if isinstance(end, Dropped):
                    self._because(end.reason)
                    self._drop_after(save)
                self._news.set()

    async def _store(self, save: BlockSave, before: BlockSave | None) -> SaveEnd:
        self._depot.gate.require()
        self._request.fence.check()
        keys = namespace_keys(self._depot, save.block, self._shard)
        kind = block_kind(self._judged.grant.spans, save.block.extent.span)
        with self._slots.bytes_of(save.stage.slot) as staging:
            saved = await self._depot.store.save(
                save.context,
                keys,
                staging,
                self._request.fence,
                Retention.of(kind),
                partial(self._in_turn, save, before),
                self._in_flight.seals.lent,
            )
        return Stored(saved.bytes) if saved.stored else Present()

    async def _in_turn(self, save: BlockSave, before: BlockSave | None) -> None:
        """Sealed: wait for the parent, and publish only what can match."""
        if before is not None:
            await before.wait()
        parent = BlockAddress(save.block.parent, self._shard.layout.rank)
        orphan = (
            parent.block != ROOT_PARENT
            and parent not in self._in_flight
            and self._depot.store.tier_of(parent) is None
        )
        if orphan:
            save.give_up(Reason.PARENT)
        if save.given_up is not None:
            raise Fenced("given up before it was published")

    async def _answered_late(self) -> bool:
        """Give the engine as long again to answer for what it was handed."""
        until_ns = self._depot.clocks.boot() + self._depot.times.fill_deadline_ns
        for save in self._handed.values():
            self._slots.blank(save.stage.slot)
        while self._handed:
            now = self._depot.clocks.boot()
            if now >= until_ns:
                return False
            await self._news_until(until_ns - now)
        return True

    async def _note(self) -> None:
        """What was stored, and why the rest was not."""
        stored = self._stored()
        self._depot.watch.save_ended(
            self._shard.engine,
            self._request.name,
            self._judged.grant.tenant,
            self._reason,
            blocks=len(stored),
            nbytes=sum(stored),
        )
        if stored:
            await self._record("save", "stored", Reason.NONE, sum(stored))
        if self._reason is not Reason.NONE:
            kinds: dict[Reason, Kind] = {Reason.QUOTA: "quota", Reason.REVOKED: "fenced"}
            await self._record(kinds.get(self._reason, "save"), "failed", self._reason, 0)

    async def _record(self, kind: Kind, outcome: Outcome, reason: Reason, nbytes: int) -> None:
        await self._depot.audit.note(
            kind,
            outcome,
            reason,
            engine=self._shard.engine,
            request=self._request.name,
            grant=self._judged.grant,
            namespaces=[span.namespace for span in self._judged.grant.spans],
            tokens=self._frame.end,
            nbytes=nbytes,
        )
